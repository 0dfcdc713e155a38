"""Suspicious updates are computed again, to distinguish faulty machines from bad data."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.config.reliability import Fault
from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.processes.faults import FaultyJournal, attach_faults
from megatron.training import rerun
from megatron.training.callbacks.suspicious_updates import FILE, largest_difference
from megatron.training.loop import standard_callbacks, train
from megatron.training.rerun import Rerun, first_to_differ, is_close
from tests.config.command import problems
from tests.distributed import run_distributed
from tests.training import toy
from tests.training.toy import Recorder, SpoiledRecipe, build_toy, fingerprint, train_toy

_ON = "--rerun-mode validate_results --eval-iters 0 --train-iters 8".split()
_SPIKES = "--on-spike skip --spike-window 4".split()
_NO_PART = rerun._NO_PART
_MIXTURE = """
    --swiglu --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.05
"""
# The loss of a micro-batch depends on earlier ones of its update.
_GLOBAL = """
    --num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1
"""


@pytest.mark.parametrize(
    ("first", "second", "tolerance", "same"),
    [
        (2.0, 2.0, 0.0, True),
        (2.0, 2.0000001, 0.0, False),
        (2.0, 2.01, 0.01, True),
        (2.0, 2.03, 0.01, False),
        (-2.0, 4.0, 1.5, True),  # relative to the larger value, and equal to the tolerance
        (math.nan, math.inf, 0.0, True),
        (math.nan, 2.0, 0.5, False),
        (0.0, 0.0, 0.0, True),
    ],
)
def test_numbers_that_are_the_same(
    first: float, second: float, tolerance: float, same: bool
) -> None:
    assert is_close(first, second, tolerance) is same


@pytest.mark.parametrize(
    ("forward", "backward", "ranks"),
    [
        ([_NO_PART] * 4, [False] * 4, []),
        ([0, _NO_PART, 2, _NO_PART], [True, False, True, False], [0]),  # later parts follow from it
        ([_NO_PART, _NO_PART, 2, 2], [True, True, True, True], [2, 3]),
        ([_NO_PART] * 4, [True, False, True, False], [2]),  # earlier stages follow from it
        ([_NO_PART] * 4, [False, True, False, False], [1]),
    ],
)
def test_where_two_computations_part(
    forward: list[int], backward: list[bool], ranks: list[int]
) -> None:
    assert first_to_differ(forward, backward, [0, 0, 1, 1]) == ranks


def _faulty(
    layout: Layout, words: list[str], sizes: dict[str, int], fault: str
) -> tuple[str, int, list[str], str]:
    """Return what ends a toy run with a fault, the exit code, the events, and the final state."""
    planned = Fault.parse(fault)
    if layout.world.size > 1 or planned.rank == 0:
        faults = [planned] if planned.rank == layout.world.rank else []
        journal = FaultyJournal(None, faults)
        rank, size = layout.world.rank, layout.world.size
        layout = Layout.at(rank, size, **sizes).connect("cpu", journal)
    run, recorder = build_toy(layout, [*_ON, *words]), Recorder()
    attach_faults(layout.journal, run.parts)
    told, code = "", 0
    try:
        train(run, standard_callbacks(run, [recorder])[0])
    except NumericsError as error:
        told, code = str(error), error.exit_code
    events = [text for _, kind, text in recorder.events if kind == "rerun"]
    return told, code, events, fingerprint(run)


_LAYOUTS = [
    ({}, "forward:1:6:nan", "rank 1"),
    ({}, "backward:2:6:nan", "rank 2"),
    ({}, "backward:3:6:spike", "rank 3"),
    ({"tensor": 2}, "forward:2:6:nan", "rank 2"),
    ({"pipeline": 2}, "forward:1:6:nan", "rank 1"),
    ({"pipeline": 2}, "backward:3:6:nan", "rank 3"),
]


@pytest.mark.parametrize(("sizes", "fault", "who"), _LAYOUTS)
def test_a_transient_error_is_that_of_a_rank(
    sizes: dict[str, int], fault: str, who: str, tmp_path: Path
) -> None:
    flags = [f"--{axis}-model-parallel-size {size}" for axis, size in sizes.items()]
    save = ["--save", str(tmp_path), "--save-interval", "100"]
    words = [*" ".join(flags).split(), *_SPIKES, *save]
    for told, code, events, _ in run_distributed(4, _faulty, words, sizes, fault):
        assert code == 17, told
        assert told.startswith("iteration 6: lm loss ")
        assert "when it was computed again from the same samples and weights" in told
        assert f"a transient error of {who} (on " in told
        assert "the checkpoint of iteration 5 is saved" in told
        assert len(events) == 1


@pytest.mark.parametrize("words", ["--hidden-dropout 0.1", _MIXTURE], ids=["dropout", "mixture"])
def test_a_run_continues_from_before_the_error(words: str, tmp_path: Path) -> None:
    """The state before the update is saved, so the next start loses nothing."""
    flags = ["--save", str(tmp_path), "--save-interval", "100", *words.split()]
    straight = train_toy(Layout.single(), [*_ON, *words.split()])[1]
    told, code, *_ = _faulty(Layout.single(), flags, {}, "forward:0:5:nan")
    assert code == 17
    assert "the checkpoint of iteration 4 is saved" in told
    resumed = train_toy(Layout.single(), [*_ON, *flags, "--load", str(tmp_path)])[1]
    assert fingerprint(resumed) == fingerprint(straight)
    assert not (tmp_path / FILE).exists()


class _NanRecipe(SpoiledRecipe):
    def forward(self, part: Any, batch: Any, *rest: Any) -> Any:
        result = super().forward(part, batch, *rest)
        if self._samples.isdisjoint(batch["id"].tolist()):
            return result
        return {name: value * math.nan for name, value in result.items()}


def _bad_data(
    monkeypatch: pytest.MonkeyPatch, *flags: str, samples: frozenset[int] = frozenset({17})
) -> tuple[str, int, list[str]]:
    """Run with sample 17, in iteration 5, whose loss is not finite."""
    monkeypatch.setitem(toy.RECIPES, "gpt", _NanRecipe(samples))
    return _faulty(Layout.single(), list(flags), {}, "forward:1:1:nan")[:3]


# With PyTorch's DDP, there are no gradients of this rank alone to compare.
@pytest.mark.parametrize("flags", ["", "--DDP-impl torch"])
def test_bad_data_are_told_from_machines(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, code, events = _bad_data(monkeypatch, *flags.split())
    assert code == 7  # without --save, no other machine can be asked
    assert "training sample ids 17" in told
    assert events == [
        "iteration 5: the second computation also gives lm loss nan, grad norm nan: the data or a "
        "machine is at fault"
    ]
    _, code, events = _bad_data(monkeypatch, "--on-nonfinite", "skip", *flags.split())
    assert code == 0
    assert len(events) == 1


def test_other_machines_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--save", str(tmp_path), "--save-interval", "100", "--load", str(tmp_path)]
    told, code, events = _bad_data(monkeypatch, *flags)
    assert code == 16
    assert "the checkpoint of iteration 4 is saved. Start again, on other machines if" in told
    assert len(events) == 1
    assert told.startswith(f"{events[0]}: the data or a machine is at fault. The parameters are")
    kept = (tmp_path / FILE).read_bytes()
    assert json.loads(kept)["iteration"] == 5
    here = rerun.platform.node()
    earlier = kept.replace(b'"values"', b'"told"')  # the key in files of earlier versions
    for host, content, said in (
        (here, kept, "but on the same machines"),
        ("gpu-09", kept, "also gives lm loss nan, grad norm nan on other machines: the data is"),
        ("gpu-09", earlier, "on other machines: the data is at fault"),
    ):
        (tmp_path / FILE).write_bytes(content)
        monkeypatch.setattr(rerun.platform, "node", partial(str, host))
        told, code, events = _bad_data(monkeypatch, *flags)
        assert code == 7, told
        assert said in events[0]
        assert not (tmp_path / FILE).exists()
    (tmp_path / FILE).write_bytes(kept)
    _, code, events = _bad_data(monkeypatch, *flags, samples=frozenset())
    assert code == 0
    assert "is no longer suspicious: one of these machines computes wrong results" in events[0]


@pytest.mark.parametrize("flags", ["", _MIXTURE, _GLOBAL])
def test_a_spike_of_the_data_is_skipped(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without recomputation, the run ends with the same bits."""
    monkeypatch.setitem(toy.RECIPES, "gpt", SpoiledRecipe(frozenset({21})))
    words = [*flags.split(), *_SPIKES, "--eval-iters", "0", "--train-iters", "8"]
    plain = train_toy(Layout.single(), words)[1]
    recorder, checked = train_toy(Layout.single(), [*_ON, *words])
    assert fingerprint(checked) == fingerprint(plain)
    kinds = [kind for _, kind, _ in recorder.events]
    assert kinds.count("rerun") == 1


def test_statistics_of_every_update(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--eval-iters", "0", "--train-iters", "4", "--log-interval", "4"]
    plain = train_toy(Layout.single(), words)[1]
    twice = train_toy(Layout.single(), [*words, "--rerun-mode", "report_stats"])[1]
    assert fingerprint(twice) == fingerprint(plain)
    line = (
        " computed twice | updates: 4 | with different losses: 0 | largest relative difference: 0 |"
    )
    assert line in capsys.readouterr().out
    rerun = Rerun({"lm loss": 2.0}, {"lm loss": 2.5}, False, [], [])
    assert largest_difference(rerun) == 0.2


def test_delayed_scales_are_refused() -> None:
    words = ["--rerun-mode", "validate_results", "--fp8-format", "hybrid"]
    text = "\n".join(problems(*words, "--fp8-recipe", "delayed"))
    assert "--rerun-mode validate_results cannot be combined with --fp8-recipe delayed" in text
