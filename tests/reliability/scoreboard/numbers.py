"""Rows 18, 20 and 21: slow ranks, spikes, and bit flips."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from megatron.config.reliability import Fault
from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.processes.faults import FaultyJournal, attach_faults
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.loop import standard_callbacks, train
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from tests.distributed import run_distributed
from tests.reliability.scoreboard.score import Trials, expect
from tests.training.toy import RECIPES, Recorder, SpoiledRecipe, build_toy

_WINDOW = 16  # updates
_CLEAN = 50  # iterations of the clean run for each trial
_REPLICAS = 3
_LEAST = 1e-6  # a smaller change to a weight may vanish in the rounding of the next update
_WITHIN = 50  # updates from the onset of a slowdown to its report
_UNDISTURBED = 1000  # updates in which no rank is slow
# Layouts of 4 ranks in which each rank has peers with equal work, or has none.
_LAYOUTS: tuple[tuple[dict[str, int], str], ...] = (
    ({}, ""),
    ({"tensor": 2}, "--tensor-model-parallel-size 2"),
    ({"pipeline": 2}, "--pipeline-model-parallel-size 2"),
    ({"pipeline": 4}, "--pipeline-model-parallel-size 4 --num-layers 4"),
    ({}, "--zero-stage 3"),
)


class _Outcomes(Callback):
    """Records which iterations had a spike."""

    def __init__(self) -> None:
        self.spikes: dict[int, str] = {}

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        if outcome.found_spike:
            self.spikes[run.progress.iteration] = outcome.spike


def _spikes(iterations: int, *flags: str, spoiled: frozenset[int] = frozenset()) -> dict[int, str]:
    """Return the iterations that a toy run considers spikes."""
    before, outcomes = RECIPES["gpt"], _Outcomes()
    RECIPES["gpt"] = SpoiledRecipe(spoiled)
    try:
        words = ["--train-iters", str(iterations), "--eval-iters", "0", "--log-interval", "1000"]
        run = build_toy(Layout.single(), [*words, "--on-spike", "skip", *flags])
        train(run, [outcomes, *standard_callbacks(run, [])[0]])
    finally:
        RECIPES["gpt"] = before
    return outcomes.spikes


def spoiled_batches(folder: Path, count: int) -> Trials:
    """Try row 20: a batch with a sample whose loss is too large, and a run without one."""
    trials = Trials.with_seeds(count)
    for seed in range(count):
        draw = random.Random(seed)
        iteration = draw.randrange(_WINDOW + 1, 2 * _WINDOW)
        sample, form = 4 * (iteration - 1) + draw.randrange(4), draw.choice(("--bf16", "--fp16"))
        with trials.trial(f"seed {seed}, sample {sample}, {form}"):
            flags = (form, "--initial-loss-scale", "64", "--seed", str(seed + 1))
            window = ("--spike-window", str(_WINDOW))
            found = _spikes(2 * _WINDOW, *flags, *window, spoiled=frozenset({sample}))
            expect(list(found) == [iteration], f"spikes at {found}, not at {iteration}")
    with trials.trial("a clean run"):
        found = _spikes(_CLEAN * count)
        expect(not found, f"spikes without a cause: {found}")
    trials.note("iterations of the clean run", _CLEAN * count)
    return trials


class _Flip(Callback):
    """Flips a bit of a weight on one rank before an update."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.iteration, self.rank = self._draw.randrange(1, 10), self._draw.randrange(_REPLICAS)
        self.name = ""

    def before_step(self, run: Run) -> None:
        if run.progress.iteration + 1 != self.iteration:
            return
        named, change = sorted(run.named_parameters()), 0.0
        while change < _LEAST:  # NaN also ends the loop
            self.name, weight = self._draw.choice(named)
            one = weight.data.view(-1)[self._draw.randrange(weight.numel()) :][:1]
            flipped = (one.view(torch.int32) ^ (1 << self._draw.randrange(31))).view(torch.float32)
            change = float((flipped - one).abs())
        if run.layout.world.rank == self.rank:
            one.copy_(flipped)  # through `data`, so autograd does not notice


def _flipped(layout: Layout, seed: int, interval: int) -> tuple[int, int, str, str]:
    """Return the rank, iteration and weight of a flipped bit, and the error about it."""
    words = ["--check-weight-hash-across-dp-replicas-interval", str(interval), "--on-nonfinite"]
    size = ["--global-batch-size", str(_REPLICAS), "--eval-iters", "0", "--train-iters", "20"]
    flip, callbacks = _Flip(seed), list[Callback]()
    if seed % 2:  # --fault-inject flips a bit of the first weight
        fault = Fault.parse(f"step:{flip.rank}:{flip.iteration}:flip")
        mine = FaultyJournal(None, [fault] if flip.rank == layout.world.rank else [])
        layout = Layout.at(layout.world.rank, _REPLICAS).connect("cpu", mine)
    else:
        callbacks.append(flip)
    run = build_toy(layout, [*words, "skip", *size])
    attach_faults(layout.journal, run.parts)
    told = ""
    try:
        train(run, [*callbacks, *standard_callbacks(run, [])[0]])
    except NumericsError as error:
        told = str(error)
    name = flip.name or next(name for name, _ in run.named_parameters())
    return flip.rank, flip.iteration, name, told


def flipped_bits(folder: Path, count: int) -> Trials:
    """Try row 21: a bit of a weight flips on one of three replicas.

    Half of the flips are made by --fault-inject.
    """
    trials = Trials.with_seeds(count)
    for seed in range(count):
        interval = random.Random(seed).randrange(1, 11)
        with trials.trial(f"seed {seed}, every {interval} iterations"):
            for rank, flipped, name, told in run_distributed(_REPLICAS, _flipped, seed, interval):
                due = -(-flipped // interval) * interval
                begins = f"iteration {due}: replicas differ: "
                expect(told.startswith(begins), f"after {flipped}: {told or 'nothing was found'}")
                expect(f"{name} of rank {rank}, unlike 2 others" in told, f"{name}, {rank}: {told}")
    return trials


def slowed(
    layout: Layout, words: list[str], sizes: dict[str, int], fault: str
) -> list[tuple[int, str]]:
    """Return when a toy run names stragglers, and its messages; an empty fault means none."""
    faults = [Fault.parse(fault)] if fault else []
    mine = [each for each in faults if each.rank == layout.world.rank]
    journal = FaultyJournal(None, mine) if mine else None
    layout = Layout.at(layout.world.rank, layout.world.size, **sizes).connect("cpu", journal)
    flags = ["--log-straggler", "--eval-iters", "0", "--log-interval", "1000", *words]
    run, recorder = build_toy(layout, flags), Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    return [(iteration, text) for iteration, kind, text in recorder.events if kind == "straggler"]


def slow_ranks(folder: Path, count: int) -> Trials:
    """Try row 18: a rank takes twice as long from some update on, or none does."""
    trials = Trials.with_seeds(count)
    for seed in range(count):
        draw = random.Random(seed)
        sizes, words = _LAYOUTS[seed % len(_LAYOUTS)]
        rank, onset = draw.randrange(4), draw.randrange(31, 50)
        flags = [*words.split(), "--train-iters", str(onset + _WITHIN)]
        with trials.trial(f"seed {seed}, rank {rank} from {onset} on, {words}"):
            fault = f"step:{rank}:{onset}:slow=2x"
            told = run_distributed(4, slowed, flags, sizes, fault)[-1]
            expect(told, "it was not named")
            names = [text for _, text in told if text.startswith(f"slow: rank {rank} (on ")]
            expect(len(names) == len(told), f"others were named: {told}")
            expect(onset <= told[0][0] <= onset + _WITHIN, f"at another time: {told}")
    for sizes, words in _LAYOUTS:
        with trials.trial(f"no rank is slow, {words}"):
            length = _UNDISTURBED * count // 20 // len(_LAYOUTS)
            flags = [*words.split(), "--train-iters", str(max(length, 50))]
            told = run_distributed(4, slowed, flags, sizes, "")[-1]
            expect(not told, f"a false alarm: {told}")
    trials.note("undisturbed updates", _UNDISTURBED * count // 20)
    return trials
