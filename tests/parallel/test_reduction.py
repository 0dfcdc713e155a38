"""Reducing gradients over processes: when buckets are sent, what is kept, and equal bits."""

import pytest
import torch
from torch import nn

from megatron.parallel import collectives
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import Init
from tests.distributed import run_distributed
from tests.parallel.buffers import new_buffer

BUCKET = 600  # bytes: several buckets of different sizes


class _Model(nn.Module):
    """A model with a weight used twice, an unused one, and indivisible sizes."""

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
    """Reduce the gradients of two updates; return what this process keeps of the second."""
    model = _Model(dtype)
    buffer = new_buffer(
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
    """Return the whole gradients, joined from every process's part."""
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
    """With several micro-batches, stage 2 adds in a different order, so use a single one."""
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
        # Two processes average over two, and each adds two of the four micro-batches.
        expected = torch.tensor(_sum_of(name, alone)) / 2
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-7)


def _sum_of(name, alone):
    """Return update 1, with the same seeds 1 to 4 as two processes of two micro-batches each."""
    return alone[name][1]


def _log_sends(layout, stage, micro_batches, tied=(), apart=(), idle=()):
    """Return the order of finished backward passes and sent buckets, and the number of buckets."""
    log = []
    name = "start_reduce_scatter" if stage else "start_all_reduce"
    start = getattr(collectives, name)

    def logged(*arguments, **named):
        log.append("send")
        return start(*arguments, **named)

    setattr(collectives, name, logged)  # only in this forked process
    model = _Model(torch.float32)
    buffer = new_buffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=False,
        bucket_bytes=BUCKET,
        zero_stage=stage,
        overlap=True,
        tied=tied,
        in_8_bits=apart,
        idle=idle,
    )
    assert len(buffer.flats) == 1 + bool(apart) + bool(idle)
    for i in range(micro_batches):
        with buffer.micro_batch(is_last=i == micro_batches - 1):
            _backward(model, i)
            log.append("backward")
    buffer.reduce()
    return log, len(buffer.plan.order)


def test_complete_buckets_are_sent_during_the_last_backward():
    for log, buckets in run_distributed(2, _log_sends, 0, 2):
        # The first parameter gets no gradient, so `reduce` sends its bucket, the last one.
        assert log == ["backward", *["send"] * (buckets - 1), "backward", "send"]


def test_buckets_of_several_buffers_are_sent_as_backward_completes_them():
    apart = ("layers.0.weight", "layers.2.weight")
    for stage in (0, 1, 2):
        for log, buckets in run_distributed(2, _log_sends, stage, 1, (), apart):
            assert log == [*["send"] * (buckets - 1), "backward", "send"]
            assert buckets > 3


def test_late_gradients_are_waited_for():
    for log, _ in run_distributed(2, _log_sends, 1, 1, ["layers.2.bias"]):  # in the first bucket
        assert log[0] == "backward"
    for log, buckets in run_distributed(2, _log_sends, 1, 1, ["layers.0.weight"]):
        sent = log.index("backward")
        assert 0 < sent < buckets - 1


def test_stage_2_sends_in_every_backward():
    for log, buckets in run_distributed(2, _log_sends, 2, 2):
        assert log == [*["send"] * (buckets - 1), "backward", "send"] * 2


def test_context_ranks_share_the_shards_too():
    reference = _joined(run_distributed(4, _reduce, torch.float32, 1, 0, False, context=2), False)
    ranks = run_distributed(4, _reduce, torch.float32, 1, 1, True, context=2)
    assert _joined(ranks, True) == reference


def test_a_parameter_without_a_gradient_holds_up_only_itself():
    """Waiting for it would delay the buckets behind it, unless the plan knows that it is idle."""
    for stage in (0, 1, 2):
        for log, buckets in run_distributed(2, _log_sends, stage, 1, (), (), ["unused"]):
            assert log == [*["send"] * (buckets - 1), "backward", "send"]


class _Experts(nn.Module):
    """Experts of which each process uses one; the others get no gradient in that iteration."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 9)
        self.experts = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.last = nn.Linear(9, 5)

    def forward(self, x, expert):
        return self.last(self.experts[expert](self.first(x)).tanh())


def _train_experts(layout, stage, overlap, is_known, in_fp32):
    """Return the gradients after three updates in which rank and update determine the experts."""
    model = _Experts().to(torch.bfloat16 if in_fp32 else torch.float32)
    names = [name for name, _ in model.named_parameters()]
    buffer = new_buffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=in_fp32,
        bucket_bytes=200,
        zero_stage=stage,
        overlap=overlap,
        idle=[name for name in names if name.startswith("experts")] if is_known else (),
    )
    for update in range(3):
        buffer.zero()
        for i in range(2):
            with buffer.micro_batch(is_last=i == 1):
                generator = torch.Generator().manual_seed(10 * update + i)
                x = torch.randn(4, 7, generator=generator).to(next(model.parameters()).dtype)
                # In the last micro-batch, all ranks use the same expert in one of the updates.
                expert = (update + i * layout.data.rank) % 3
                model(x, expert).float().square().mean().backward()
        buffer.reduce()
    kept = {}
    for name, parameter in model.named_parameters():
        values = buffer.gradient(parameter).flatten().float().tolist()
        kept[name] = (buffer.owned(parameter).start, values)
    return kept, 0.0


@pytest.mark.parametrize("in_fp32", [False, True])
def test_idle_experts_count_as_zero_and_stall_nothing(in_fp32):
    """Each process uses different experts, which change in each update."""
    options = (0, False, False, in_fp32)
    reference = _joined(run_distributed(2, _train_experts, *options), False)
    assert any(reference["experts.2.weight"])
    assert not any(reference["experts.1.weight"])  # nothing is left from an earlier update
    for stage in (0, 1, 2):
        for is_known in (False, True):
            ranks = run_distributed(2, _train_experts, stage, True, is_known, in_fp32)
            joined = _joined(ranks, stage > 0)
            for name, values in reference.items():
                if stage == 2:  # stage 2 adds micro-batches in another order
                    assert joined[name] == pytest.approx(values, rel=1e-2 if in_fp32 else 1e-5)
                else:
                    assert joined[name] == values, (name, stage, is_known)


def _idle_slots(layout, stage):
    """Return the slots' sums; a slot that an update leaves out must not keep the previous one."""
    options = {"split": None, "init": Init("normal", 1.0)}
    context = BuildContext(Layout.single())
    layers = [Linear(8, 8, context, **options) for _ in range(2)]
    model = nn.ModuleList(layers)
    for i, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, i + 1.0)
    buffer = new_buffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=True,
        bucket_bytes=1,
        zero_stage=stage,
        overlap=True,
    )
    context.registry.bind_slots(buffer)
    sums = []
    for update in range(2):
        buffer.zero()
        with buffer.micro_batch(is_last=True):
            # In update 0 each rank uses its own layer, then both use the first one.
            chosen = layers[layout.data.rank if update == 0 else 0]
            chosen(torch.ones(1, 1, 8)).sum().backward()
        buffer.reduce()
        sums.append([buffer.gradient(layer.weight).sum().item() for layer in layers])
    return sums


def test_idle_slots_count_as_zero_and_stall_nothing():
    for stage in (0, 1, 2):
        ranks = run_distributed(2, _idle_slots, stage)
        if stage:  # each rank holds half of each layer
            whole = [
                [sum(each) for each in zip(*update, strict=True)]
                for update in zip(*ranks, strict=True)
            ]
        else:
            assert ranks[0] == ranks[1]
            whole = ranks[0]
        assert whole == [[32.0, 32.0], [64.0, 0.0]]


def _partial(layout, stage, overlap):
    """Return gradients of which some are partial: tensor rank t contributes t + 1 times as much."""
    model = _Model(torch.float32)
    buffer = new_buffer(
        model.named_parameters(),
        layout,
        accumulate_in_fp32=False,
        bucket_bytes=BUCKET,
        zero_stage=stage,
        overlap=overlap,
        partial=["layers.0.bias", "table"],
    )
    for _ in range(2):
        buffer.zero()
        with buffer.micro_batch(is_last=True):
            tokens = torch.tensor([1, 2, 3])
            factor = layout.tensor.rank + 1.0
            (factor * model(tokens).square().mean()).backward()
        buffer.reduce()
    return {
        name: (buffer.owned(p).start, buffer.gradient(p).flatten().tolist())
        for name, p in model.named_parameters()
    }, 0.0


def test_partial_gradients_are_added_once_over_tensor_ranks():
    alone = _joined([_partial(Layout.single(), 0, False)], False)
    for stage, overlap in ((0, False), (0, True), (1, True), (2, False), (2, True)):
        ranks = run_distributed(4, _partial, stage, overlap, tensor=2)
        for rank, others in ((0, ranks[0::2]), (1, ranks[1::2])):
            joined = _joined(others, stage > 0)
            for name, values in alone.items():
                factor = 3 if name in ("layers.0.bias", "table") else rank + 1
                expected = [factor * value for value in values]
                assert joined[name] == pytest.approx(expected, rel=1e-5, abs=1e-9), name
    both = run_distributed(2, _partial, 0, True, tensor=2)  # no other replica to average with
    for kept, _ in both:
        assert kept["table"][1] == pytest.approx([3 * value for value in alone["table"]], rel=1e-5)
