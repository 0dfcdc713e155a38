"""Weights in flat buffers: who waits for which of them, and when."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.config.stages import ModelPart
from megatron.kernels.fp8 import E4M3, Fp8Casts
from megatron.models.gpt import GPTModel
from megatron.models.plans import model_plan
from megatron.parallel import weights
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import Pending
from megatron.parallel.fp8 import AmaxHistory, DelayedScaling, Fp8Format, Fp8Products
from megatron.parallel.layout import Layout
from megatron.parallel.weights import Fp8Weights, WeightBuffer, first_users
from tests.models.small import config
from tests.parallel.buffers import new_buffer

CPU = torch.device("cpu")


class _Table(nn.Module):
    """A weight whose module is never called, like an output matrix."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))


class _Model(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.log = log
        self.first = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        self.blocks = nn.ModuleDict(
            {"0": nn.Linear(8, 8, bias=False), "1": nn.Linear(8, 8, bias=False)}
        )
        self.output = _Table(8)

    def forward(self, x):
        for name, module in (("first", self.first), *self.blocks.items()):
            x = module(x)
            self.log.append(name)
        return x @ self.output.weight


def test_the_outermost_called_module_waits():
    model = _Model([])
    users = {id(parameter): user for user, parameter in first_users(model)}
    assert users.keys() == {id(p) for p in model.parameters()}
    assert all(users[id(p)] is model.first for p in model.first.parameters())
    assert all(users[id(p)] is model.blocks["1"] for p in model.blocks["1"].parameters())
    assert users[id(model.output.weight)] is model


def test_a_copy_of_tied_words_is_waited_for_by_the_model_itself():
    """No module calls the copy: the output layer reads its weight."""
    model = config()
    part = ModelPart(range(2, 3), embedding=False, head=True)
    network = GPTModel(
        model_plan(model, 8),
        BuildContext(Layout.single()),
        part,
    )
    users = {id(parameter): user for user, parameter in first_users(network)}
    parameters = dict(network.named_parameters())
    assert users[id(parameters["embedding.word.weight"])] is network
    assert users[id(parameters["layers.2.mlp.up.weight"])] is network.layers["2"]


def _gathering(monkeypatch, log, *, overlap):
    """Return a model with one bucket per weight."""
    model = _Model(log)
    gradients = new_buffer(
        model.named_parameters(), Layout.single(), accumulate_in_fp32=False, bucket_bytes=256
    )
    starts = [bucket.span.start for flat in gradients.plan.flats for bucket in flat.buckets]

    class Work:
        def __init__(self, whole):
            self.name = starts.index(whole.storage_offset())

        def wait(self):
            log.append(self.name)

    monkeypatch.setattr(weights, "start_all_gather", lambda shard, axis, into: Work(into))
    buffer = WeightBuffer(gradients.flats, overlap_in=[model] if overlap else None)
    return model, buffer, len(starts)


def test_forward_waits_for_what_it_uses_next(monkeypatch):
    log: list[object] = []
    model, buffer, count = _gathering(monkeypatch, log, overlap=True)
    expected = model(torch.ones(2, 8))
    log.clear()
    buffer.gather()
    assert log == []
    assert torch.equal(model(torch.ones(2, 8)), expected)
    waits = [entry for entry in log if isinstance(entry, int)]
    assert sorted(waits) == list(range(count))  # each once
    assert log[0] == 0  # the output weight, by the model itself
    assert log.index("first") > log.index(count - 1)
    assert log.index(1) > log.index("0")  # block 1's weight is not waited for until block 0 is done
    log.clear()
    model(torch.ones(2, 8))
    assert log == ["first", "0", "1"]


def test_without_overlap_and_on_demand_everything_is_waited_for(monkeypatch):
    log: list[object] = []
    _, buffer, count = _gathering(monkeypatch, log, overlap=False)
    buffer.gather()
    assert sorted(log) == list(range(count))
    log.clear()
    _, buffer, count = _gathering(monkeypatch, log, overlap=True)
    buffer.gather()
    buffer.wait()
    buffer.wait()
    assert sorted(log) == list(range(count))


def test_buckets_of_several_buffers_are_gathered_as_forward_needs_them(monkeypatch):
    model = _Model([])
    names = {parameter: name for name, parameter in model.named_parameters()}
    gradients = new_buffer(
        model.named_parameters(),
        Layout.at(0, 2),
        accumulate_in_fp32=False,
        bucket_bytes=256,
        zero_stage=1,
        in_8_bits=("first.1.weight", "blocks.1.weight"),
    )
    assert len(gradients.flats) == 2
    order = []

    def start(shard, axis, into):
        order.extend(n for p, n in names.items() if p.data_ptr() == into.data_ptr())
        return Pending(into)

    monkeypatch.setattr(weights, "start_all_gather", start)
    WeightBuffer(gradients.flats, overlap_in=[model]).gather()
    layers = ["first.0", "first.1", "blocks.0", "blocks.1"]
    assert order == ["output.weight", *(f"{layer}.weight" for layer in layers)]


def test_moved_parameters_keep_values_and_identity():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    gradients = new_buffer(model.named_parameters(), Layout.single(), accumulate_in_fp32=False)
    WeightBuffer(gradients.flats)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    model(torch.ones(2, 6)).sum().backward()
    assert all(gradients.gradient(p).count_nonzero() for p in model[1].parameters())


@pytest.mark.parametrize("delayed", [False, True])
def test_weights_are_cast_in_shards_with_the_amax_of_the_whole(monkeypatch, delayed):
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (16, 32), "b": (2, 24, 16), "c": (16, 16)}
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        for name, shape in shapes.items()
    }
    amaxes = torch.stack([p.detach().abs().max() for p in parameters.values()]).float().flip(0)
    if delayed:
        amaxes.copy_(torch.tensor([3.0, 2.0, 5.0]))
    found, whole = torch.zeros(3), None

    def all_reduce(local, axis, op):
        assert (axis.size, op) == (2, dist.ReduceOp.MAX)
        torch.maximum(found, local, out=found)
        return amaxes.clone()

    monkeypatch.setattr(weights, "all_reduce", all_reduce)
    for rank in range(2):
        products = {p: Fp8Products(Fp8Format(), Fp8Casts()) for p in parameters.values()}
        if delayed:
            history = AmaxHistory("cba", [448.0] * 3, DelayedScaling(), Layout.single(), CPU)
            for name, amax in zip("cba", amaxes, strict=True):
                products[parameters[name]].scale_by(history.slots(name))
                history.slots(name)["weight"].running_amax.fill_(amax)
            history.update(1)
        (flat,) = new_buffer(
            parameters.items(),
            Layout.at(rank, 2),
            accumulate_in_fp32=True,
            zero_stage=1,
            in_8_bits=tuple(parameters),
        ).flats
        storage = torch.zeros(flat.plan.elements, dtype=torch.bfloat16)
        for parameter, slot in flat.members:
            slot.of(storage).copy_(parameter.detach().flatten())
        ours = Fp8Weights(flat, storage, products)
        starts = [inverse.data_ptr() for inverse in ours._inverses]
        assert all((start - starts[0]) % 256 == 0 for start in starts)
        assert starts[0] % 64 == 0  # as PyTorch aligns a tensor of its own on a CPU
        for made in products.values():
            assert not made.arriving.has_arrived()
        ours.cast()
        whole = ours.bytes if whole is None else whole | ours.bytes  # each has zeros elsewhere
        assert ours.bytes.count_nonzero() < whole.numel() * 0.6
        for (parameter, slot), amax in zip(flat.members, amaxes, strict=True):
            made = products[parameter]
            assert made.arriving.has_arrived()
            matrix = parameter.detach().flatten(0, -2)
            expected = Fp8Casts().cast(matrix, amax, E4M3)
            assert torch.equal(made.arriving.fp8.inverse, expected.inverse)
            assert made.arriving.fp8.values.shape == matrix.shape
            if rank == 1:
                cast = slot.of(whole).view(E4M3).view_as(matrix)
                assert torch.equal(cast.view(torch.uint8), expected.values.view(torch.uint8))
        ours.forget()
        assert not any(made.arriving.has_arrived() for made in products.values())
    assert delayed or torch.equal(found, amaxes)
