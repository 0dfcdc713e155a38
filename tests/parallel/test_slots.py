"""Gradients that products write directly into the buffer equal autograd's."""

import pytest
import torch
from torch import nn

from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear, VocabularyEmbedding
from megatron.parallel.layout import Layout
from megatron.parallel.linear import parallel_linear
from megatron.parallel.parameter import Init
from megatron.parallel.products import LinearCall
from tests.distributed import run_distributed
from tests.parallel.buffers import new_buffer
from tests.training.toy import train_toy

VOCAB, WIDTH = 13, 8


class _Tied(nn.Module):
    """An embedding used twice, a layer, and an unused weight."""

    def __init__(self, context):
        super().__init__()
        torch.manual_seed(0)
        init = Init("normal", 1.0)
        self.unused = Linear(WIDTH, WIDTH, context, split=None, init=init)
        self.word = VocabularyEmbedding(VOCAB, WIDTH, context, init=init)
        self.layer = Linear(WIDTH, WIDTH, context, split=None, init=init)
        self.output = context.registry.reserve_slot(self.word.weight)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, tokens):
        x = torch.tanh(self.layer(self.word(tokens)))
        return parallel_linear(LinearCall(x, self.word.weight), slot=self.output.slot)


def _gradients(layout, dtype, slots, options, micro_batches=2):
    """Return what this process keeps after each of two updates."""
    context = BuildContext(Layout.single(), dtype=dtype)
    model = _Tied(context)
    buffer = new_buffer(
        model.named_parameters(), layout, accumulate_in_fp32=True, bucket_bytes=300, **options
    )
    if slots:
        context.registry.bind_slots(buffer)
    kept = []
    for update in range(2):
        buffer.zero()
        for i in range(micro_batches):
            with buffer.micro_batch(is_last=i == micro_batches - 1):
                seed = 100 * update + 10 * layout.data.rank + i
                generator = torch.Generator().manual_seed(seed)
                tokens = torch.randint(VOCAB, (6, 2), generator=generator)
                model(tokens).float().square().mean().backward()
        buffer.reduce()
        kept.append({n: buffer.gradient(p).flatten().clone() for n, p in model.named_parameters()})
    return kept


def _close(ours, theirs, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for found, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            error = (found[name] - value).norm()
            assert error <= tolerance * value.norm().clamp(min=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_autograd(dtype):
    plain = _gradients(Layout.single(), dtype, False, {})
    fused = _gradients(Layout.single(), dtype, True, {})
    _close(fused, plain, dtype)
    for kept in fused:
        assert not kept["unused.weight"].any()  # nothing is left from the update before
        assert kept["word.weight"].any()


OPTIONS = [
    {"overlap": True},
    {"zero_stage": 1},
    {"zero_stage": 1, "overlap": True},
    {"zero_stage": 2},
    {"zero_stage": 2, "overlap": True},
]


def _all_options(layout, dtype):
    return [
        [_gradients(layout, dtype, slots, options) for slots in (False, True)]
        for options in OPTIONS
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_autograd_however_gradients_are_shared(dtype):
    for results in run_distributed(2, _all_options, dtype):
        for plain, fused in results:
            _close(fused, plain, dtype)


def _sent_in_backward(layout):
    """Return the buckets sent by the end of the last backward pass, and the number of buckets."""
    context = BuildContext(Layout.single(), dtype=torch.bfloat16)
    model = _Tied(context)
    model.unused.weight.requires_grad_(False)
    model.unused.bias.requires_grad_(False)
    buffer = new_buffer(
        model.named_parameters(), layout, accumulate_in_fp32=True, bucket_bytes=1, overlap=True
    )
    context.registry.bind_slots(buffer)
    buffer.zero()
    with buffer.micro_batch(is_last=True):
        model(torch.zeros(2, 1, dtype=torch.long)).float().sum().backward()
    sent = len(buffer._reducer._sent)
    buffer.reduce()
    return sent, len(buffer.plan.order)


def test_buckets_leave_during_backward():
    for sent, buckets in run_distributed(2, _sent_in_backward):
        assert sent == buckets == 3


def test_all_parameters_may_have_slots():
    """This is the case on a first stage that has only the embedding."""
    context = BuildContext(Layout.single())
    word = VocabularyEmbedding(VOCAB, WIDTH, context, init=Init("normal", 1.0))
    nn.init.ones_(word.weight)
    buffer = new_buffer(word.named_parameters(), Layout.single(), accumulate_in_fp32=True)
    context.registry.bind_slots(buffer)
    for _ in range(2):
        buffer.zero()
        with buffer.micro_batch(is_last=True):
            word(torch.tensor([[3, 3]])).sum().backward()
        buffer.reduce()
        assert buffer.gradient(word.weight).sum() == 2 * WIDTH
        assert buffer.gradient(word.weight)[3].tolist() == [2] * WIDTH


def test_only_fp32_gradients_have_slots():
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    named = [("weight", weight), ("frozen", frozen)]
    buffer = new_buffer(named, Layout.single(), accumulate_in_fp32=False)
    assert buffer.slot(weight) is None
    assert buffer.slot(frozen) is None


def test_autograd_may_not_add_to_a_slots_parameter():
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    buffer = new_buffer([("weight", weight)], Layout.single(), accumulate_in_fp32=True)
    buffer.slot(weight)
    with pytest.raises(AssertionError, match="outside autograd"):
        weight.sum().backward()


@pytest.mark.parametrize("more", ["", "--bf16", "--bf16 --untie-embeddings-and-output-weights"])
def test_a_run_with_and_without_fusion(more):
    def losses(*flags):
        recorder, _ = train_toy(Layout.single(), [*more.split(), *flags])
        return recorder.values("lm loss"), recorder.values("grad-norm")

    fused, plain = losses(), losses("--no-gradient-accumulation-fusion")
    tolerance = 2e-2 if more else 1e-5
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)


def test_a_run_with_the_chunked_loss():
    def losses(*flags):
        recorder, _ = train_toy(Layout.single(), flags)
        return recorder.values("lm loss"), recorder.values("grad-norm")

    chunked = losses("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear")
    for ours, theirs in zip(chunked, losses(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
