"""Optimizer states shared by processes: memory, norms, and ranks without a share."""

import gc

import pytest
import torch
from torch import nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import ZEROS
from tests.distributed import run_distributed
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer, new_parameter

PRECISIONS = {
    "fp32": (torch.float32, PrecisionConfig()),
    "bf16": (torch.bfloat16, PrecisionConfig(bf16=True)),
    "fp16": (torch.float16, PrecisionConfig(fp16=True, initial_loss_scale=4.0)),
}


def _build(named, layout, stage, precision, bucket_bytes=2**16, config=None, **options):
    gradients = new_buffer(
        named,
        layout,
        accumulate_in_fp32=precision.bf16,
        bucket_bytes=bucket_bytes,
        zero_stage=stage,
    )
    config = config or OptimizerConfig()
    return gradients, new_optimizer(named, gradients, config, precision, layout, **options)


def _held_bytes():
    """Return the bytes of all tensors that Python holds, counting shared memory once."""
    gc.collect()
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if isinstance(thing, torch.Tensor)
    }
    return sum(storages.values())


def _bytes_a_parameter(layout, stage, kind):
    """Return the bytes per parameter that a model and its optimizer hold between two updates."""
    dtype, precision = PRECISIONS[kind]
    before = _held_bytes()
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(dtype)
    gradients, optimizer = _build(list(model.named_parameters()), layout, stage, precision)
    for _ in range(2):
        optimizer.gradients.zero()
        with gradients.micro_batch(is_last=True):
            model(torch.ones(1, 256, dtype=dtype)).float().mean().backward()
        gradients.reduce()
        assert step(optimizer, 1e-3, 0.1).applied
    return (_held_bytes() - before) / sum(p.numel() for p in model.parameters())


# Bytes per parameter for d processes: (held by each, shared). For fp16 the update briefly adds an
# fp32 copy of the shard's gradients, 4 / d.
TABLE = {
    (0, "fp32"): (16, 0),
    (0, "bf16"): (18, 0),
    (0, "fp16"): (16, 0),
    (1, "fp32"): (8, 8),
    (1, "bf16"): (6, 12),
    (1, "fp16"): (4, 12),
    (2, "fp32"): (4, 12),
    (2, "bf16"): (2, 16),
    (2, "fp16"): (2, 14),
}


@pytest.mark.parametrize(("stage", "kind"), TABLE)
@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_what_the_table_says(stage, kind, size):
    whole, shared = TABLE[stage, kind]
    for measured in run_distributed(size, _bytes_a_parameter, stage, kind):
        assert measured == pytest.approx(whole + shared / size, rel=0.01)


def _split_model(layout, stage):
    """Update a column-split weight [8, 9] and a replicated bias [9]."""
    generator = torch.Generator().manual_seed(0)
    weight = new_parameter((8, 9), init=ZEROS, axis=layout.tensor, split_dim=0)
    bias = new_parameter((9,), init=ZEROS)
    first, rows = layout.tensor.rank * weight.shape[0], weight.shape[0]
    whole = torch.randn(8, 9, generator=generator)
    whole[:, 1] = 0.0
    with torch.no_grad():
        weight.copy_(whole[first : first + rows])
        bias.fill_(2.0)
    gradients, optimizer = _build(
        [("weight", weight), ("bias", bias)],
        layout,
        stage,
        PrecisionConfig(),
        bucket_bytes=64,
        count_zeros=True,
    )
    with gradients.micro_batch(is_last=True):
        (weight.square().sum() + (bias * torch.arange(9.0)).sum()).backward()
    gradients.reduce()
    result = step(optimizer, 1e-2, 0.1)
    elements = sum(gradients.owned(p).size for p in (weight, bias))
    return result.grad_norm, result.zeros, bias.tolist(), elements


@pytest.mark.parametrize("stage", [1, 2])
def test_norm_and_zeros_count_every_element_once(stage):
    """Buckets hold at least 64 elements, weights 36: some processes own nothing in a bucket."""
    alone = _split_model(Layout.single(), 0)
    assert alone[1] == 9
    for size, sizes in ((2, {}), (4, {}), (4, {"tensor": 2}), (4, {"context": 2})):
        ranks = run_distributed(size, _split_model, stage, **sizes)
        assert min(elements for *_, elements in ranks) < alone[3] // 2
        for norm, zeros, bias, _ in ranks:
            assert norm == pytest.approx(alone[0], rel=1e-6)
            assert zeros == 9
            assert bias == pytest.approx(alone[2], rel=1e-6)


def _one_bad_element(layout, stage):
    """Put a nan into one process's gradient; return every process's weights before and after."""
    weight = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    named = [("weight", weight)]
    gradients, optimizer = _build(named, layout, stage, PRECISIONS["bf16"][1])
    factor = float("nan") if layout.world.rank == 1 else 1.0
    with gradients.micro_batch(is_last=True):
        (weight[-1].float() * factor).sum().backward()
    gradients.reduce()
    result = step(optimizer, 1e-2, 0.1)
    state = {name: tensor.tolist() for name, (tensor, _) in optimizer.named_tensors().items()}
    untouched = bool((weight == 1).all()) and set(sum(state.values(), [])) <= {0.0, 1.0}
    return result.applied, result.found_nonfinite, untouched


@pytest.mark.parametrize("stage", [1, 2])
def test_a_shard_that_is_not_finite_stops_all(stage):
    assert run_distributed(2, _one_bad_element, stage) == [(False, True, True)] * 2


def _reloaded(layout):
    weight = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    gradients, optimizer = _build([("weight", weight)], layout, 1, PRECISIONS["bf16"][1])
    with torch.no_grad():
        weight.fill_(0.5)
    optimizer.reload_masters()
    with gradients.micro_batch(is_last=True):
        (weight.sum() * 0).backward()
    gradients.reduce()
    step(optimizer, 1e-2, 0.0)
    return weight.float().unique().tolist()


def test_masters_of_shards_follow_loaded_weights():
    assert run_distributed(2, _reloaded) == [[0.5]] * 2
