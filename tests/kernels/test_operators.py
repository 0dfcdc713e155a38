"""Kernels as PyTorch operators: schemas, fake versions, gradients, and tracing."""

import importlib
import pkgutil
from functools import partial

import pytest
import torch
from torch.library import opcheck

import megatron.kernels
from megatron.kernels import activation, rope
from megatron.kernels.cross_entropy import choose_cross_entropy
from megatron.kernels.dropout import fused_bias_dropout_add
from megatron.kernels.fp8 import E4M3, E5M2, choose_fp8_casts
from megatron.kernels.library import Operator
from megatron.kernels.norm import fused_add_norm
from tests.kernels.compare import BF16, FP16, FP32, fresh, run

S, B, H = 3, 2, 64
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def draw(*shape, dtype=BF16, grad=False):
    return torch.randn(*shape, generator=fresh()).to(dtype).requires_grad_(grad)


def _norm(x_dtype, w_dtype, *, delta, bias, grad):
    return (
        draw(S, B, H, dtype=x_dtype, grad=grad),
        draw(S, B, H, dtype=w_dtype, grad=grad) if delta else None,
        draw(H, dtype=w_dtype, grad=grad),
        draw(H, dtype=w_dtype, grad=grad) if bias else None,
    )


def _norm_backward(*, rms, rounds, grad_total=True):
    residual = FP32 if rounds else BF16
    return (
        draw(S, B, H),
        draw(S, B, H, dtype=residual) if grad_total else None,
        draw(S, B, H, dtype=residual),
        draw(H),
        draw(1 if rms else 2, S * B, dtype=FP32),
        rounds,
    )


def _rotation(rotary=16):
    return rope.rotation_table(S, rotary)[:, :, None, None].unbind()


def _heads():
    """Return gradients in attention's layout: [b, n, s, d] in memory."""
    return [draw(B, n, S, 32).permute(2, 0, 1, 3) for n in (4, 2, 2)]


def _rows(dtype=FP32):
    return draw(5, dtype=dtype)


def cases():
    """Return (operator, arguments after the library)."""
    for x_dtype, w_dtype in ((BF16, BF16), (FP32, FP16)):
        for delta, bias in ((True, True), (False, True), (True, False), (False, False)):
            inputs = _norm(x_dtype, w_dtype, delta=delta, bias=bias, grad=True)
            yield "add_norm_forward", (*inputs, 1e-5)
    for rms, rounds in ((True, True), (False, False)):
        yield "add_norm_backward", _norm_backward(rms=rms, rounds=rounds)
    yield "add_norm_backward", _norm_backward(rms=True, rounds=False, grad_total=False)
    for name, kind in activation.KINDS.items():
        width = 2 * H if name == "swiglu" else H
        for bias in (draw(width, grad=True), None):
            yield "activation_forward", (draw(S, B, width, grad=True), bias, kind)
            plain = None if bias is None else bias.detach()
            yield "activation_backward", (draw(S, B, H), draw(S, B, width), plain, kind)
    for residual, bias in ((FP32, draw(H, grad=True)), (BF16, None)):
        x, stream = draw(S, B, H, grad=True), draw(S, B, H, dtype=residual, grad=True)
        yield "bias_dropout_add_forward", (x, bias, stream, torch.tensor([7]), 6554)
        arguments = (torch.tensor([7]), 6554, BF16, bias is not None)
        yield "bias_dropout_add_backward", (draw(S, B, H, dtype=residual), *arguments)
    for rotation in (_rotation(), (None, None)):
        yield "split_rotate_forward", (draw(S, B, 8 * 32, grad=True), *rotation, 2, 32)
        yield "split_rotate_backward", (*_heads(), *rotation)
    for backward in (False, True):
        yield "rotate_heads", (draw(S, B, 3, 32, grad=not backward), *_rotation(), backward)
    place, order = torch.tensor([[2, 0], [-1, 1]]), torch.tensor([1, 3, 0, 2])
    for weights in (draw(2, 2, dtype=FP32), None):
        yield "combine_rows", (draw(4, 16), place, weights)
    rows = (draw(2, 16), draw(4, 16), order, place, draw(2, 2, dtype=FP32))
    yield "combine_rows_backward", rows
    for accumulate in (False, True):
        yield "take_gradient", (draw(4, 16), draw(4, 16, dtype=FP32), accumulate)
    labels = torch.tensor([0, 63, -1, 64, 5])
    yield "cross_entropy_statistics", (draw(5, 64), labels)
    rows = (_rows(), _rows(), _rows(BF16))
    yield "cross_entropy_gradient", (draw(5, 64), labels, *rows, draw(5, 64))
    yield "embedding_gradient", (torch.tensor([3, 9, -1, 3]), draw(4, 16), draw(8, 16, dtype=FP32))
    one, zero = torch.ones([]), torch.zeros([])
    yield "fp8_amax", (draw(32, 48), zero)
    yield "fp8_amax_both", (draw(32, 48), torch.zeros(32, 1), torch.zeros(48, 1))
    for found in (zero, None):
        values = torch.zeros(5, 48, dtype=E4M3)
        yield "fp8_cast", (draw(5, 48), one, values, found)
        yield "fp8_cast_transpose", (draw(32, 48), one, None, E5M2, found)
    scales = (torch.ones(32, 1), torch.ones(48, 1))
    yield "fp8_cast_transpose", (draw(32, 48), *scales, E4M3, None)
    stack = (torch.ones(2, 32, 1), torch.ones(2, 48, 1))
    yield "fp8_amax_both", (draw(2, 32, 48), *stack)
    yield "fp8_cast_transpose", (draw(2, 32, 48), *stack, E4M3, None)
    yield "fp8_cast_rows", (draw(5, 48), E4M3)
    codes = torch.arange(2 * 64).to(torch.uint8).view(2, 64)
    yield "unpack_weight", (codes, draw(2, 2), draw(16))
    yield "unpack_weight", (codes, draw(2, 1), None)
    yield "fp8_transpose", (draw(32, 48).to(E4M3),)
    tables, lengths = torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([3, 10]).int()
    vectors = (draw(2, 4, 24, dtype=BF16), draw(32, 1, 24, dtype=BF16))
    yield "latent_attention", (*vectors, 16, tables, lengths, 10, 8)
    for dtype in (BF16, FP32):
        cache = (draw(32, 2, 16, dtype=dtype), draw(32, 2, 16, dtype=dtype))
        yield "paged_attention", (draw(2, 4, 16, dtype=dtype), *cache, tables, lengths, 10, 8)
        new = (draw(3, 2, 16, dtype=dtype), draw(3, 2, 16, dtype=dtype))
        yield "append_to_cache", (*new, *cache, torch.tensor([4, 0, 31]))


def operators():
    modules = (
        importlib.import_module(f"megatron.kernels.{info.name}")
        for info in pkgutil.iter_modules(megatron.kernels.__path__)
    )
    found = {x for module in modules for x in vars(module).values() if isinstance(x, Operator)}
    return {x.name.removeprefix("megatron::"): x for x in found}


def test_every_operator_is_checked():
    assert {name for name, _ in cases()} == set(operators())


@pytest.mark.parametrize("name", sorted(operators()))
def test_schema_fake_version_and_gradients(emulated, name):
    for case, arguments in cases():
        if case == name:
            # PyTorch's schema check computes with the arguments, which is impossible in 8 bits.
            in_8_bits = any(isinstance(x, torch.Tensor) and x.dtype == E4M3 for x in arguments)
            checks = CHECKS if in_8_bits else (*CHECKS, "test_schema")
            opcheck(operators()[name].overload, (emulated.path, *arguments), test_utils=checks)


def _functions(library):
    """Return (function, its inputs)."""
    for delta in (True, False):
        inputs = _norm(FP32, BF16, delta=delta, bias=True, grad=False)
        yield lambda *x: fused_add_norm(library, *x, 1e-5), inputs
    gelu = partial(activation.fused_activation, library, activation.gelu)
    yield gelu, (draw(S, B, H), draw(H))
    for rotation in (_rotation(), None):
        split = partial(rope.fused_split_rotate, library, groups=2, head_size=32, rotation=rotation)
        yield split, (draw(S, B, 8 * 32),)

    def drop(x, bias, residual):
        return fused_bias_dropout_add(library, x, bias, residual, 0.0)

    yield drop, (draw(S, B, H), draw(H), draw(S, B, H))


def test_compiled_functions_give_the_same_results(emulated):
    for function, inputs in _functions(emulated):
        outputs = function(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        grads = [draw(*x.shape, dtype=x.dtype) for x in outputs]
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for ours, eager in zip(
            run(compiled, inputs, grads), run(function, inputs, grads), strict=True
        ):
            torch.testing.assert_close(ours, eager, rtol=1e-2, atol=1e-3)


def test_compiled_kernels_write_in_place(emulated):
    """What an operator's schema marks as mutated is mutated, whatever the compiler moves."""
    loss, casts = choose_cross_entropy(emulated, in_16_bits=False), choose_fp8_casts(emulated)
    labels, upstream = torch.tensor([1, 5, 9]), draw(3, dtype=FP32)

    def gradient(logits):
        maxima, sums, _ = loss.statistics(logits, labels)
        loss.gradient(logits, labels, maxima, sums, upstream, logits)

    def cast(x, found):
        whole, turned = casts.cast_transpose(x, casts.amax(x), E4M3, running_amax=found)
        return whole.values.float(), turned.values.float(), whole.inverse, turned.inverse

    logits, x = draw(3, 16), draw(16, 32)
    eager, ours = logits.clone(), logits.clone()
    gradient(eager)
    torch.compile(gradient, fullgraph=True, backend="aot_eager")(ours)
    assert torch.equal(ours, eager)
    found = torch.zeros(2)
    eager = cast(x, found[0])
    ours = torch.compile(cast, fullgraph=True, backend="aot_eager")(x, found[1])
    assert all(map(torch.equal, ours, eager))
    assert found[0] == found[1] == x.abs().max()


def test_memory_that_is_not_aligned_is_copied(emulated):
    """Compiled code may pass views of its buffers."""
    x = draw(17)[1:]
    assert x.data_ptr() % 16
    kind = activation.KINDS["gelu"]
    out = torch.ops.megatron.activation_forward(emulated.path, x.view(2, 8), None, kind)
    assert torch.equal(
        out, torch.ops.megatron.activation_forward(emulated.path, x.clone().view(2, 8), None, kind)
    )
