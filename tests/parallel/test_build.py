"""What a build context gives to layers: shards of parameters, formats of products, attention."""

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.errors import ConfigError
from megatron.kernels.attention import fused_attention
from megatron.kernels.batch_invariant import batch_invariant_attention, batch_invariant_product
from megatron.kernels.fp8 import E4M3, E5M2, Fp8Casts
from megatron.parallel.build import BuildContext, Kernels, attention_over, choose_kernels
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import Init, spec_of
from megatron.parallel.products import PLAIN, InFp32, Products, RowByRow
from tests.config.command import parse

CPU, INIT = torch.device("cpu"), Init("normal", 0.1)


def test_parameters_are_shards_along_one_dimension():
    layout = Layout.at(5, 8, tensor=2, expert=4, expert_tensor=2)
    context = BuildContext(layout, dtype=torch.bfloat16)
    part = context.new_parameter((6, 4), init=INIT, split_dim=0, is_vocabulary=True)
    assert (part.shape, part.dtype) == ((3, 4), torch.bfloat16)
    spec = spec_of(part)
    assert (spec.global_shape, spec.shape, spec.offset) == ((6, 4), (3, 4), (3, 0))
    assert (spec.split_dim, spec.is_vocabulary, spec.is_expert) == (0, True, False)
    whole = context.new_parameter((5, 4), init=INIT, partial_gradient=True)
    spec = spec_of(whole)
    assert (whole.shape, spec.offset, spec.split_dim) == ((5, 4), (0, 0), None)
    assert spec.partial_gradient
    experts = context.new_parameter((8, 6, 4), init=INIT, split_dim=1, is_expert=True)
    assert spec_of(experts).offset == (4, 3, 0)  # of the third expert rank
    assert experts.shape == (2, 3, 4)
    assert spec_of(context.new_parameter((8,), init=INIT, is_expert=True)).offset == (4,)
    with pytest.raises(ValueError, match=r"dimension 1 of \(8, 5\) does not divide evenly over 2"):
        context.new_parameter((8, 5), init=INIT, split_dim=1)


def test_weights_that_are_gathered_have_no_memory_yet():
    precision = PrecisionConfig(bf16=True)
    plain = BuildContext(Layout.single(), dtype=torch.float16, precision=precision)
    sharded = BuildContext(
        Layout.single(), parameter_device=torch.device("meta"), precision=precision
    )
    assert (plain.gathers_weights, plain.compute_dtype) == (False, torch.float16)
    assert (sharded.gathers_weights, sharded.compute_dtype) == (True, torch.bfloat16)
    parameter = sharded.new_parameter((2,), init=INIT)
    assert (parameter.device.type, parameter.dtype) == ("meta", torch.float32)


def test_a_context_has_plain_defaults():
    context = BuildContext(Layout.single())
    assert (context.overlap, context.halves_experts, context.layer) == (True, False, 0)
    assert (context.dtype, context.device, context.recomputed) == (torch.float32, CPU, frozenset())


def test_only_some_layers_multiply_in_8_bits():
    kernels = Kernels(new_products=InFp32, expert_casts=Fp8Casts())
    context = BuildContext(Layout.single(), kernels=kernels, fp8_layers=range(1, 3))
    kinds = {}
    for number in (1, 2, 3, 4):
        made = context.for_layer(number)
        assert made.layer == number
        kinds[number] = (made.kernels.new_products, made.kernels.expert_casts is not None)
    outside, inside = (Products, False), (InFp32, True)
    assert kinds == {1: outside, 2: inside, 3: inside, 4: outside}
    every = BuildContext(Layout.single(), kernels=kernels).for_layer(1)
    assert every.kernels.new_products is InFp32
    own = context.within_rank().kernels
    assert own.attention is kernels.own_attention
    changed = context.multiplying_by(Products).kernels
    assert (changed.new_products, changed.output_products) == (Products, PLAIN)
    output = InFp32()
    assert context.multiplying_by(Products, for_output=output).kernels.output_products is output


def _kernels(flags, **options):
    config = parse(flags).config
    return choose_kernels(config.model, config.precision, Layout.single(), CPU, **options)


@pytest.mark.parametrize(
    ("flags", "gradients", "by_row", "keeps_input", "has_zeros"),
    [
        ("--fp8-format hybrid", E5M2, False, False, True),
        ("--fp8-format hybrid --fp8-recipe delayed", E5M2, False, False, False),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", E4M3, False, False, True),
        ("--fp8-format hybrid --fp8-recipe rowwise", E5M2, True, False, False),
        ("--fp8-format e4m3 --no-fp8-wgrad", E4M3, False, True, True),
    ],
)
def test_flags_choose_the_8_bit_formats(flags, gradients, by_row, keeps_input, has_zeros):
    kernels = _kernels(f"--bf16 {flags}")
    products = kernels.new_products()
    assert isinstance(products, Fp8Products)
    assert products is not kernels.new_products()
    assert products.largest == [torch.finfo(fp8).max for fp8 in (E4M3, E4M3, gradients)]
    assert products.weight_format == (None if by_row else E4M3)
    assert products.keeps_input == keeps_input
    assert (products.fused_amaxes[0] is not None) == has_zeros
    assert kernels.expert_casts is products.casts
    assert kernels.output_products is PLAIN


def test_without_8_bits_products_are_plain_or_batch_invariant():
    plain = _kernels("")
    assert (plain.new_products, plain.expert_casts, plain.library) == (Products, None, None)
    invariant = _kernels("--batch-invariant-mode")
    products = invariant.new_products()
    assert isinstance(products, RowByRow)
    assert products is invariant.output_products
    assert products._product is batch_invariant_product
    assert invariant.attention.function is batch_invariant_attention


@pytest.mark.parametrize(
    ("size", "kind", "flags", "name", "reason"),
    [
        (1, "p2p", "", "fused", None),
        (2, "a2a", "", "fused", "; all-to-all over 2 context ranks"),
        (2, "p2p", "", "plain", "; ring of 2 context ranks"),
        (2, "p2p", "--no-masked-softmax-fusion", "plain", "--no-masked-softmax-fusion; ring of 2"),
        (2, "p2p", "--window-size 4,0", "plain", "; ring of 2 context ranks"),
        (4, "p2p", "--batch-invariant-mode", None, "--batch-invariant-mode"),
    ],
)
def test_context_ranks_attend_in_a_ring_or_after_an_exchange(size, kind, flags, name, reason):
    config = parse(flags).config
    axis = Axis(size, 0, tuple(range(size)))
    choice = attention_over(axis, kind, config.model, config.precision, CPU)
    assert name is None or choice.name == name
    if reason is None:
        assert choice.function is fused_attention
    else:
        assert reason in choice.reason
    if name == "plain":
        assert "plain in layers" not in choice.reason  # all are


def test_a_kernel_that_cannot_run_is_refused():
    config = parse("--use-flash-attn --bf16").config
    with pytest.raises(ConfigError, match="^--use-flash-attn: .*: drop the flag$"):
        attention_over(Axis(2, 0, (0, 1)), "p2p", config.model, config.precision, CPU)
