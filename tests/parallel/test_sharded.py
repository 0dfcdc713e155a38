"""A sharded model: what each process holds, and that the shards make up the whole."""

import gc
import threading
import time

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.config.parallel import ParallelConfig
from megatron.parallel.build import BuildContext
from megatron.parallel.expert_linear import ExpertLinear
from megatron.parallel.layers import Linear, Projections
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import Init, spec_of
from megatron.parallel.replicas import shares_weights
from megatron.parallel.sharded import ShardedModel, _experts
from tests.distributed import run_distributed


class _Network(nn.Module):
    """Layers of [2, 64, 64] (a gate and up projection) and [64, 128], and a norm outside them."""

    def __init__(self, layout, device):
        super().__init__()
        context = BuildContext(layout, device)
        options = {"init": Init("normal", 0.1), "bias": False}
        stacked = Projections(("gate", "up"), (64, 64))
        self.layers = nn.ModuleList(
            nn.Sequential(
                Linear(64, 128, context, split="column", projections=stacked, **options),
                Linear(128, 64, context, split="row", **options),
            )
            for _ in range(4)
        )
        self.first = Linear(64, 64, context, split=None, **options)
        self.register_buffer("shift", torch.full((64,), 0.5), persistent=False)

    def forward(self, x):
        x = self.first(x) + self.shift.to(x.dtype)
        for layer in self.layers:
            x = x + layer(x)
        return x


def _build(layout, dtype):
    network = _Network(layout, torch.device("meta"))
    network.shift = torch.full((64,), 0.5)
    sharded = ShardedModel(
        [network],
        layout,
        device=torch.device("cpu"),
        compute_dtype=dtype,
        reduce_dtype=torch.float32,
    )
    return network, sharded


def _held_bytes():
    """Return the bytes of all tensors with memory, counting shared memory once."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            local = thing.to_local() if isinstance(thing, DTensor) else thing
            if not local.is_meta:
                held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(held.values())


@torch.no_grad()
def _bytes_a_parameter(layout, dtype):
    before = _held_bytes()
    network, sharded = _build(layout, dtype)
    for p in network.parameters():
        sharded.part(p).fill_(0.01)
    for _ in range(2):
        sharded.zero()
        with torch.enable_grad(), sharded.micro_batch(is_last=True):
            network(torch.ones(2, 1, 64, dtype=dtype)).float().sum().backward()
        sharded.reduce()
    assert all(sharded.gradient(p).all() for p in network.parameters())
    assert network.shift.tolist() == [0.5] * 64
    return (_held_bytes() - before) / sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_a_process_keeps_a_shard_of_weights_and_gradients(size, dtype):
    for measured in run_distributed(size, _bytes_a_parameter, dtype):
        assert measured == pytest.approx(8 / size, rel=0.02)


def _waits_seen(layout, sign):
    """Return what the watchdog can see of a forward and backward pass that rank 1 joins late.

    Rank 1 joins when `sign`, a file, says that rank 0 has been seen to wait.
    """
    network, sharded = _build(layout, torch.float32)
    seen, done = set(), threading.Event()

    def watch():
        while not done.wait(0.001):
            transfer = layout.journal.waits_for
            if transfer is not None:
                seen.add((transfer.kind, transfer.ranks))
                sign.touch()

    watcher = threading.Thread(target=watch)
    sharded.zero()
    if layout.world.rank == 0:
        watcher.start()
    deadline = time.monotonic() + 50  # before the other rank gives up
    while layout.world.rank == 1 and not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with sharded.micro_batch(is_last=True):
        network(torch.ones(2, 1, 64)).sum().backward()
    done.set()
    if layout.world.rank == 0:
        watcher.join()
    return seen, layout.journal.started, layout.journal.waits_for


def test_what_pytorch_waits_for_is_in_the_journal(tmp_path):
    """Forward gathers 4 layers and the rest, backward gathers 3 layers again; all are reduced."""
    (seen, *first), (_, *second) = run_distributed(2, _waits_seen, tmp_path / "sign")
    assert ("all-gather", (0, 1)) in seen
    assert first == second == [{(0, 1): 5 + 4 + 5}, None]


def _describe(layout):
    network, sharded = _build(layout, torch.float32)
    counted = sharded.views(lambda p: spec_of(p).split_dim is None)
    return {
        name: (sharded.owned(p), spec_of(p).shape, spec_of(p).global_shape, sharded.part(p).shape)
        for name, p in network.named_parameters()
    }, [view.numel() for view in counted]


def test_spans_tile_every_parameter_evenly():
    """On two tensor ranks and two replicas, both replicas share the two-part weight."""
    answers = run_distributed(4, _describe, tensor=2)
    for rank, (parameters, counted) in enumerate(answers):
        assert counted == [64 * 32]
        for name, (owned, shape, whole, held) in parameters.items():
            size = torch.Size(shape).numel()
            replica = rank // 2
            assert (owned.start, owned.end) == (replica * size // 2, (replica + 1) * size // 2)
            assert held == (size // 2,)
            if name.endswith("0.0.weight"):
                assert whole == (2, 64, 64)
                assert shape == (2, 32, 64)


@pytest.mark.parametrize(
    ("stage", "replicas", "expert_replicas", "shares"),
    [(3, 2, 1, True), (3, 1, 2, True), (3, 1, 1, False), (2, 2, 2, False), (0, 2, 2, False)],
)
def test_only_stage_3_with_several_replicas_shares_weights(
    stage, replicas, expert_replicas, shares
):
    layout = Layout(replica=Axis(replicas), expert_replica=Axis(expert_replicas))
    assert shares_weights(ParallelConfig(zero_stage=stage), layout) == shares


def test_the_outermost_modules_of_experts_only_are_sharded_over_their_own_replicas():
    context, init = BuildContext(Layout.single()), Init("normal", 0.1)

    def experts():
        return ExpertLinear((2, 4, 4), context, split_dim=1, init=init, bias=False)

    mixture = nn.ModuleDict({"up": experts(), "down": nn.Sequential(experts())})
    router = Linear(4, 2, context, split=None, init=init)
    layer = nn.ModuleList([nn.Sequential(router, nn.ReLU(), mixture), last := experts()])
    assert _experts(layer) == [mixture, last]
    assert _experts(nn.Sequential(router)) == []
