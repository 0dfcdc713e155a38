"""Reducing gradients over processes: when buckets are sent, what is kept, and equal bits."""

import pytest
import torch
from torch import nn

from megatron.parallel import reducer
from megatron.parallel.gradients import GradientBuffer
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed

BUCKET = 600  # bytes: several buckets, none of them of one size


class _Model(nn.Module):
    """One weight used twice, one not at all, and sizes that divide by nothing."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.ones(31))
        self.table = nn.Parameter(torch.randn(13, 7))
        self.layers = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 7))
        self.to(dtype)

    def forward(self, tokens):
        return self.layers(self.table[tokens]) @ self.table.t()


def _backward(model, seed):
    tokens = torch.randint(13, (5,), generator=torch.Generator().manual_seed(seed))
    model(tokens).float().square().mean().backward()


def _reduce(layout, dtype, micro_batches, zero_stage, overlap):
    """Two updates' worth of gradients; what this process keeps of the second."""
    model = _Model(dtype)
    buffer = GradientBuffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=dtype == torch.bfloat16,
        bucket_bytes=BUCKET,
        zero_stage=zero_stage,
        overlap=overlap,
    )
    for update in range(2):
        buffer.zero()
        for i in range(micro_batches):
            with buffer.micro_batch(is_last=i == micro_batches - 1):
                _backward(model, update + i * layout.data.size + layout.data.rank)
        buffer.reduce()
    kept = {}
    for name, parameter in model.named_parameters():
        own = buffer.owned(parameter)
        values = buffer.gradient(parameter)
        assert values.numel() == own.size
        kept[name] = (own.start, values.flatten().float().tolist())
    norm = sum(view.double().square().sum().item() for view in buffer.views(lambda p: True))
    return kept, norm


def _joined(ranks, is_sharded):
    """The whole gradients, from every process's part."""
    if not is_sharded:
        assert all(rank == ranks[0] for rank in ranks)
        return {name: values for name, (_, values) in ranks[0][0].items()}
    whole = {}
    for name in ranks[0][0]:
        parts = sorted(rank[0][name] for rank in ranks if rank[0][name][1])
        whole[name] = []
        for start, values in parts:
            assert start == len(whole[name])
            whole[name] += values
    return whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_stages_give_the_same_bits(size, dtype):
    """With one micro-batch: with several, stage 2 adds in another order."""
    reference = _joined(run_distributed(size, _reduce, dtype, 1, 0, False), False)
    assert all(len(values) for values in reference.values())
    norm = sum(value * value for values in reference.values() for value in values)
    for stage, overlap in ((0, True), (1, False), (1, True), (2, False), (2, True)):
        ranks = run_distributed(size, _reduce, dtype, 1, stage, overlap)
        assert _joined(ranks, stage > 0) == reference, (stage, overlap)
        squares = [square for _, square in ranks]
        total = sum(squares) if stage else squares[0]
        assert total == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_micro_batches_add_up(stage):
    alone, _ = _reduce(Layout.single(), torch.float32, 4, 0, False)
    ranks = run_distributed(2, _reduce, torch.float32, 2, stage, True)
    for name, values in _joined(ranks, stage > 0).items():
        # Two processes average over two; each adds two of the four micro-batches.
        expected = torch.tensor(_sum_of(name, alone)) / 2
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-7)


def _sum_of(name, alone):
    """Update 1 alone draws seeds 1 to 4; two processes with two micro-batches do so too."""
    return alone[name][1]


def _log_sends(layout, stage, micro_batches, late=None, apart=()):
    """What happens in which order: backwards that end, and buckets that are sent."""
    log = []
    name = "start_reduce_scatter" if stage else "start_all_reduce"
    start = getattr(reducer, name)

    def logged(*arguments, **named):
        log.append("send")
        return start(*arguments, **named)

    setattr(reducer, name, logged)  # in this forked process only
    model = _Model(torch.float32)
    buffer = GradientBuffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=False,
        bucket_bytes=BUCKET,
        zero_stage=stage,
        overlap=True,
        late=None if late is None else lambda p: p is model.get_parameter(late),
        apart=lambda p: any(p is model.get_parameter(name) for name in apart),
    )
    assert len(buffer.flats) == 1 + bool(apart)
    for i in range(micro_batches):
        with buffer.micro_batch(is_last=i == micro_batches - 1):
            _backward(model, i)
            log.append("backward")
    buffer.reduce()
    return log, sum(len(flat.buckets) for flat in buffer.flats)


def test_complete_buckets_are_sent_during_the_last_backward():
    for log, buckets in run_distributed(2, _log_sends, 0, 2):
        # The first parameter gets no gradient: its bucket, the last one, is sent by `reduce`.
        assert log == ["backward", *["send"] * (buckets - 1), "backward", "send"]


def test_buckets_of_several_buffers_are_sent_as_backward_completes_them():
    apart = ("layers.0.weight", "layers.2.weight")
    for stage in (0, 1, 2):
        for log, buckets in run_distributed(2, _log_sends, stage, 1, None, apart):
            assert log == [*["send"] * (buckets - 1), "backward", "send"]
            assert buckets > 3


def test_late_gradients_are_waited_for():
    for log, _ in run_distributed(2, _log_sends, 1, 1, "layers.2.bias"):  # of the first bucket
        assert log[0] == "backward"
    for log, buckets in run_distributed(2, _log_sends, 1, 1, "layers.0.weight"):
        sent = log.index("backward")
        assert 0 < sent < buckets - 1


def test_stage_2_sends_in_every_backward():
    for log, buckets in run_distributed(2, _log_sends, 2, 2):
        assert log == [*["send"] * (buckets - 1), "backward", "send"] * 2


def test_context_ranks_share_the_shards_too():
    reference = _joined(run_distributed(4, _reduce, torch.float32, 1, 0, False, context=2), False)
    ranks = run_distributed(4, _reduce, torch.float32, 1, 1, True, context=2)
    assert _joined(ranks, True) == reference


def _doubled(layout, stage, overlap):
    """Gradients that are doubled before they are sent, and what was called with what."""
    model, calls = _Model(torch.float32), []

    def double(parameters):
        calls.append(len(parameters))
        for parameter in parameters:
            parameter.main_grad.mul_(2)

    buffer = GradientBuffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=False,
        bucket_bytes=BUCKET,
        zero_stage=stage,
        overlap=overlap,
        before_send=double,
    )
    with buffer.micro_batch(is_last=True):
        _backward(model, 1)
    buffer.reduce()
    assert sum(calls) == len(list(model.parameters()))
    return sum(view.double().sum().item() for view in buffer.views(lambda p: True))


def test_what_must_happen_before_sending_happens_once():
    alone = _doubled(Layout.single(), 0, False)
    model = _Model(torch.float32)
    _backward(model, 1)
    expected = 2 * sum(
        p.grad.double().sum().item() for p in model.parameters() if p is not model.unused
    )
    assert alone == pytest.approx(expected, rel=1e-5)
    for stage, overlap in ((0, False), (0, True), (1, True), (2, False), (2, True)):
        sums = run_distributed(2, _doubled, stage, overlap)
        assert (sum(sums) if stage else sums[0]) == pytest.approx(expected, rel=1e-5)
