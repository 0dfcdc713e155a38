"""Rows 18, 20 and 21: slow ranks, spikes, and bit flips."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from megatron.config.reliability import Fault
from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.processes.faults import FaultyJournal, attach_faults
from megatron.training.callbacks.base import Callback, EarlyExit
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

    def after_step(self, run: Run, outcome: StepOutcome, leave: EarlyExit | None) -> None:
        if outcome.found_spike:
            self.spikes[run.progress.iteration] = outcome.spike


def _spikes(iterations: int, *flags: str, spoiled: frozenset[int] = frozenset()) -> dict[int, str]:
    """Return the iterations that a toy run considers spikes."""
    original, outcomes = RECIPES["gpt"], _Outcomes()
    RECIPES["gpt"] = SpoiledRecipe(spoiled)
    try:
        base = ["--train-iters", str(iterations), "--eval-iters", "0", "--log-interval", "1000"]
        run = build_toy(Layout.single(), [*base, "--on-spike", "skip", *flags])
        train(run, [outcomes, *standard_callbacks(run, [])[0]])
    finally:
        RECIPES["gpt"] = original
    return outcomes.spikes


def spoiled_batches(folder: Path, count: int) -> Trials:
    """Try row 20: a batch with a sample whose loss is too large, and a run without one."""
    trials = Trials.with_seeds(count)
    for seed in range(count):
        rng = random.Random(seed)
        iteration = rng.randrange(_WINDOW + 1, 2 * _WINDOW)
        sample = 4 * (iteration - 1) + rng.randrange(4)
        dtype_flag = rng.choice(("--bf16", "--fp16"))
        with trials.trial(f"seed {seed}, sample {sample}, {dtype_flag}"):
            flags = (dtype_flag, "--initial-loss-scale", "64", "--seed", str(seed + 1))
            window = ("--spike-window", str(_WINDOW))
            spikes = _spikes(2 * _WINDOW, *flags, *window, spoiled=frozenset({sample}))
            expect(list(spikes) == [iteration], f"spikes at {spikes}, not at {iteration}")
    with trials.trial("a clean run"):
        spikes = _spikes(_CLEAN * count)
        expect(not spikes, f"spikes without a cause: {spikes}")
    trials.note("iterations of the clean run", _CLEAN * count)
    return trials


class _Flip(Callback):
    """Flips a bit of a weight on one rank before an update."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.iteration, self.rank = self._rng.randrange(1, 10), self._rng.randrange(_REPLICAS)
        self.name = ""

    def before_step(self, run: Run) -> None:
        if run.progress.iteration + 1 != self.iteration:
            return
        parameters, change = sorted(run.named_parameters()), 0.0
        while change < _LEAST:  # NaN also ends the loop
            self.name, weight = self._rng.choice(parameters)
            element = weight.data.view(-1)[self._rng.randrange(weight.numel()) :][:1]
            bits = element.view(torch.int32) ^ (1 << self._rng.randrange(31))
            flipped = bits.view(torch.float32)
            change = float((flipped - element).abs())
        if run.layout.world.rank == self.rank:
            element.copy_(flipped)  # through `data`, so autograd does not notice


def _flipped(layout: Layout, seed: int, interval: int) -> tuple[int, int, str, str]:
    """Return the rank, iteration and weight of a flipped bit, and the error about it."""
    flags = ["--check-weight-hash-across-dp-replicas-interval", str(interval), "--on-nonfinite"]
    size = ["--global-batch-size", str(_REPLICAS), "--eval-iters", "0", "--train-iters", "20"]
    flip, callbacks = _Flip(seed), list[Callback]()
    if seed % 2:  # --fault-inject flips a bit of the first weight
        fault = Fault.parse(f"step:{flip.rank}:{flip.iteration}:flip")
        journal = FaultyJournal(None, [fault] if flip.rank == layout.world.rank else [])
        layout = Layout.at(layout.world.rank, _REPLICAS).connect("cpu", journal)
    else:
        callbacks.append(flip)
    run = build_toy(layout, [*flags, "skip", *size])
    attach_faults(layout.journal, run.parts)
    message = ""
    try:
        train(run, [*callbacks, *standard_callbacks(run, [])[0]])
    except NumericsError as error:
        message = str(error)
    name = flip.name or next(name for name, _ in run.named_parameters())
    return flip.rank, flip.iteration, name, message


def flipped_bits(folder: Path, count: int) -> Trials:
    """Try row 21: a bit of a weight flips on one of three replicas.

    Half of the flips are made by --fault-inject.
    """
    trials = Trials.with_seeds(count)
    for seed in range(count):
        interval = random.Random(seed).randrange(1, 11)
        with trials.trial(f"seed {seed}, every {interval} iterations"):
            for rank, flipped, name, message in run_distributed(
                _REPLICAS, _flipped, seed, interval
            ):
                check_iteration = -(-flipped // interval) * interval
                prefix = f"iteration {check_iteration}: replicas differ: "
                expect(
                    message.startswith(prefix), f"after {flipped}: {message or 'nothing was found'}"
                )
                expect(
                    f"{name} of rank {rank}, unlike 2 others" in message,
                    f"{name}, {rank}: {message}",
                )
    return trials


def straggler_events(
    layout: Layout, flags: list[str], sizes: dict[str, int], fault: str
) -> list[tuple[int, str]]:
    """Return when a toy run names stragglers, and its messages; an empty fault means none."""
    faults = [Fault.parse(fault)] if fault else []
    local_faults = [item for item in faults if item.rank == layout.world.rank]
    journal = FaultyJournal(None, local_faults) if local_faults else None
    layout = Layout.at(layout.world.rank, layout.world.size, **sizes).connect("cpu", journal)
    flags = ["--log-straggler", "--eval-iters", "0", "--log-interval", "1000", *flags]
    run, recorder = build_toy(layout, flags), Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    return [(iteration, text) for iteration, kind, text in recorder.events if kind == "straggler"]


def slow_ranks(folder: Path, count: int) -> Trials:
    """Try row 18: a rank takes twice as long from some update on, or none does."""
    trials = Trials.with_seeds(count)
    for seed in range(count):
        rng = random.Random(seed)
        sizes, layout_flags = _LAYOUTS[seed % len(_LAYOUTS)]
        rank, onset = rng.randrange(4), rng.randrange(31, 50)
        flags = [*layout_flags.split(), "--train-iters", str(onset + _WITHIN)]
        with trials.trial(f"seed {seed}, rank {rank} from {onset} on, {layout_flags}"):
            fault = f"step:{rank}:{onset}:slow=2x"
            reports = run_distributed(4, straggler_events, flags, sizes, fault)[-1]
            expect(reports, "it was not named")
            names = [text for _, text in reports if text.startswith(f"slow: rank {rank} (on ")]
            expect(len(names) == len(reports), f"others were named: {reports}")
            expect(onset <= reports[0][0] <= onset + _WITHIN, f"at another time: {reports}")
    for sizes, layout_flags in _LAYOUTS:
        with trials.trial(f"no rank is slow, {layout_flags}"):
            length = _UNDISTURBED * count // 20 // len(_LAYOUTS)
            flags = [*layout_flags.split(), "--train-iters", str(max(length, 50))]
            reports = run_distributed(4, straggler_events, flags, sizes, "")[-1]
            expect(not reports, f"a false alarm: {reports}")
    trials.note("undisturbed updates", _UNDISTURBED * count // 20)
    return trials
