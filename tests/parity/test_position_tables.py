"""T5's tables of relative positions, of which many stages hold copies, equal one process's.

Their gradients are too small to show in a loss or norm, so the tables themselves are compared.
"""

from __future__ import annotations

import pytest
import torch

from megatron.models.position_bias import POSITION_TABLES
from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.training.toy import train_toy

FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --micro-batch-size 2
    --global-batch-size 8 --eval-iters 0 --position-embedding-type relative
    --relative-attention-num-buckets 8 --relative-attention-max-distance 9
""".split()

STAGE_2 = "--zero-stage 2 --overlap-grad-reduce"


def _tables(layout: Layout, words: list[str]) -> dict[str, torch.Tensor]:
    """Return the tables that this process holds after training, for its own heads."""
    _, run = train_toy(layout, [*FLAGS, *words], "t5")
    held = dict(run.named_parameters())
    return {name: held[name].detach().cpu().clone() for name in POSITION_TABLES if name in held}


@pytest.mark.parametrize(
    ("processes", "sizes", "flags", "holders"),
    [
        (2, {"pipeline": 2}, "--num-layers-per-virtual-pipeline-stage 1", (2, 2)),
        (3, {"pipeline": 3}, "--pipeline-model-parallel-layout Et|ttttt|ttL", (2, 2)),
        (4, {"pipeline": 2, "tensor": 2}, "--num-layers-per-virtual-pipeline-stage 2", (4, 4)),
        # Both parts of a stage use the tables, so each wave of backward contributes.
        (4, {"pipeline": 2}, f"{STAGE_2} --num-layers-per-virtual-pipeline-stage 1", (4, 4)),
        # One stage has no copy, but takes part in the sum with the shards of those that have.
        (4, {"pipeline": 2}, f"{STAGE_2} --pipeline-model-parallel-split-rank 1", (2, 2)),
    ],
)
def test_all_copies_are_those_of_one_process(processes, sizes, flags, holders):
    words = [*flags.split(), "--pipeline-model-parallel-size", str(sizes["pipeline"])]
    words += ["--tensor-model-parallel-size", str(sizes.get("tensor", 1))]
    expected = _tables(Layout.single(), [])
    by_rank = run_sharing_memory(processes, _tables, words, **sizes)
    for name, count in zip(POSITION_TABLES, holders, strict=True):
        held = {rank: tables[name] for rank, tables in enumerate(by_rank) if name in tables}
        assert len(held) == count
        for rank, table in held.items():
            first = rank % sizes.get("tensor", 1) * table.shape[1]
            whole = expected[name][:, first : first + table.shape[1]]
            torch.testing.assert_close(table, whole, rtol=0, atol=2e-4)
        same = [table for rank, table in held.items() if rank % sizes.get("tensor", 1) == 0]
        assert all(torch.equal(table, same[0]) for table in same)
