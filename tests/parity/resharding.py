"""Every layout's checkpoint loaded into every layout, for the tests and the scoreboard.

One process trains two iterations and saves. Each layout loads that and saves it as its own; then
each layout loads each of these. Every element of every parameter and moment, on every rank, must
equal the single process's, bit for bit, and so must the position. The next loss of each layout must
match the single process's up to summation order. It is computed once, as equal bits give equal
losses.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.entries import flatten
from megatron.checkpoint.loading import open_checkpoint
from megatron.parallel.layout import Layout
from megatron.training.batches import batches_from
from megatron.training.checkpointing import optimizer_state, save_run, state_of
from megatron.training.loop import standard_callbacks, train
from megatron.training.restoring import restore_run
from megatron.training.run import Run
from megatron.training.step import Updates
from tests.checkpoint.states import read_whole
from tests.distributed import run_distributed
from tests.training.toy import build_toy

LOSS_TOLERANCE = 1e-5  # relative
_SAVED_AT = 2  # iterations
_FLAGS = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --save-interval 100".split()


@dataclass(frozen=True)
class Grid:
    """A layout of the toy: the sizes of its axes, its ZeRO stage, and flags for any layout."""

    tensor: int
    pipeline: int
    data: int
    stage: int
    network: str = ""

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}-zero{self.stage}"

    def words(self, root: Path) -> list[str]:
        """Return its command line, which saves under its name."""
        return [
            *_FLAGS,
            *self.network.split(),
            *("--tensor-model-parallel-size", str(self.tensor)),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--zero-stage", str(self.stage)),
            *("--save", str(root / self.name)),
        ]


GRIDS: tuple[Grid, ...] = tuple(
    Grid(*sizes) for sizes in itertools.product((1, 2), (1, 2), (1, 2, 4), (0, 1, 3))
)
# Together these have every size, and every stage where it shards.
FEW = (Grid(1, 1, 1, 0), Grid(2, 1, 2, 1), Grid(1, 2, 2, 3), Grid(2, 2, 1, 0))
_ONE = "one"  # the single process's folder


@dataclass(frozen=True)
class Loaded:
    """What a layout found in a checkpoint: the number of differing bytes and its next loss."""

    differing: int
    loss: float


def all_pairs(grids: tuple[Grid, ...], root: Path) -> tuple[float, dict[tuple[Grid, Grid], Loaded]]:
    """Return a single process's next loss, and what each layout found in each one's checkpoint."""
    expected = _one_process(root, grids[0].network)
    for grid in grids:
        _in_processes(grid, _take_over, root)
    return expected, {
        (source, target): loaded
        for target in grids
        for source, loaded in zip(grids, _in_processes(target, _load_all, root, grids), strict=True)
    }


def _in_processes(grid: Grid, function: object, root: Path, *more: object) -> list[Loaded]:
    """Run the function on a grid's ranks; return all differing bytes and the last rank's losses."""
    sizes = {"tensor": grid.tensor, "pipeline": grid.pipeline}
    answers = run_distributed(grid.processes, function, grid, root, *more, **sizes)  # type: ignore[arg-type]
    return [
        Loaded(sum(one.differing for one in ranks), ranks[-1].loss)
        for ranks in zip(*answers, strict=True)
    ]


def _one_process(root: Path, network: str) -> float:
    words = [
        *_FLAGS,
        *network.split(),
        "--save",
        str(root / _ONE),
        "--exit-interval",
        str(_SAVED_AT),
    ]
    run = build_toy(Layout.single(), words)
    train(run, standard_callbacks(run, [])[0])
    return _next_loss(run)


def _next_loss(run: Run) -> float:
    """Make the update that follows the current position, and return its loss."""
    dataset = run.datasets[0]
    assert dataset is not None
    run.train_batches = batches_from(run, dataset, consumed=run.progress.consumed_samples)
    return Updates(run).make(look_ahead=False).losses["lm loss"]


def _take_over(layout: Layout, grid: Grid, root: Path) -> list[Loaded]:
    save_run(build_toy(layout, [*grid.words(root), "--load", str(root / _ONE)]))
    return []


def _load_all(layout: Layout, grid: Grid, root: Path, grids: tuple[Grid, ...]) -> list[Loaded]:
    run = build_toy(layout, grid.words(root))
    reference = open_checkpoint(root / _ONE)
    assert reference is not None
    whole = {name: read_whole(reference, name) for name in reference.names()}
    found = [_load(run, root / source.name, whole) for source in grids]
    loss = _next_loss(run)
    return [Loaded(differing, loss) for differing in found]


def _load(run: Run, folder: Path, whole: dict[str, torch.Tensor]) -> int:
    """Load the checkpoint, and return the number of bytes that differ."""
    reader = open_checkpoint(folder, layout=run.layout)
    assert reader is not None
    restore_run(run, reader)
    differing = 0
    for name, entry in flatten(state_of(run) | optimizer_state(run)):  # with tied copies' states
        place = tuple(
            slice(start, start + size)
            for start, size in zip(entry.offset, entry.tensor.shape, strict=True)
        )
        mine, theirs = (_bits(tensor) for tensor in (entry.tensor, whole[name][place]))
        differing += int((mine != theirs).sum())
    assert run.progress.iteration == _SAVED_AT
    return differing


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def relative_difference(loss: float, expected: float) -> float:
    """Return the relative difference, or infinity if the loss is not finite."""
    return abs(loss - expected) / abs(expected) if math.isfinite(loss) else math.inf
