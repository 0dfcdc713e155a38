"""The recorded runs of Megatron Core 0.16.1, continued from its own checkpoints.

Their recorded command line is reused: paths are filled in, and --load and flags that a test needs
are added.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parser import parse_config
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.checkpointing import save_run
from megatron.training.loop import standard_callbacks, train
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe
from tests.distributed import as_given, run_distributed, toy_device
from tests.training.toy import Recorder

LOSS, GRAD_NORM = 1e-5, 1e-3  # relative tolerances
RUNS = ("core_dense", "core_mtp", "core_moe", "core_moe_ep2", "core_moe_sigmoid")
# The recording on two processes has the last rank's own z-loss, not the mean over data ranks.
_NOT_THE_BATCH_S = {"core_moe_ep2": {"z_loss"}}


def continue_core(
    layout: Layout, golden: Path, name: str, cache: Path, flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Load iteration 10 of a recorded run, train to its end and return our records."""
    run, recorder = _load(layout, golden, name, cache, flags), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    return recorder.records


def _load(layout: Layout, golden: Path, name: str, cache: Path, flags: Sequence[str]) -> Run:
    recorded = (golden / name / "flags.txt").read_text().replace("DATA", str(golden / "data"))
    words = [
        *shlex.split(recorded),
        *("--load", str(golden / name / "ckpt"), "--data-cache-path", str(cache)),
        *("--num-workers", "0", "--no-exit-signal-handler"),
        *flags,
    ]
    config = parse_config(words, world_size=layout.world.size, architecture="gpt").config
    layout = as_given(layout, config)
    return build_run(config, GPTRecipe(), toy_device(layout.world.rank), layout)


def compare(records: list[dict[str, Any]], golden: Path, name: str) -> None:
    """Compare iterations 11 to 20 and the final evaluation."""
    recording = json.loads((golden / name / "run.json").read_text())
    ours = {r["iteration"]: r for r in records if "lm loss" in r}
    assert sorted(ours) == list(range(11, 21))
    for theirs in recording["train"][10:]:
        mine = ours[theirs["iteration"]]
        losses = {key for key in theirs if key.endswith(("_loss", "lm loss")) or "mtp_" in key}
        for key in losses - _NOT_THE_BATCH_S.get(name, set()):
            assert mine[key] == pytest.approx(theirs[key], rel=LOSS), key
        assert mine["grad-norm"] == pytest.approx(theirs["grad norm"], rel=GRAD_NORM)
        assert mine["consumed samples"] == theirs["consumed samples"]
        assert f"{mine['learning-rate']:.3E}" == f"{theirs['learning rate']:.3E}"
    (evaluated,) = [r["lm loss validation"] for r in records if "lm loss validation" in r]
    expected = recording["validation"][0][1].split("lm loss value: ")[1].split()[0]
    assert evaluated == pytest.approx(float(expected), rel=LOSS)


@pytest.mark.parametrize("name", RUNS)
def test_one_process_continues_like_the_original(golden, tmp_path, name):
    # The recording on two processes used this flag.
    flags = ("--expert-model-parallel-size", "1")
    (records,) = run_distributed(1, continue_core, golden, name, tmp_path, flags)
    compare(records, golden, name)


_EXPERTS, _TENSOR = "--expert-model-parallel-size 2", "--tensor-model-parallel-size 2"
_STAGES = "--pipeline-model-parallel-size 2"
_LAYOUTS = {
    "core_moe_ep2, EP 2 as recorded": (2, {"expert": 2}, ""),
    "core_moe, EP 2": (2, {"expert": 2}, f"{_EXPERTS} --use-distributed-optimizer"),
    "core_moe, EP 4": (4, {"expert": 4}, "--expert-model-parallel-size 4"),
    "core_moe, TP 2 x EP 2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
        f"{_TENSOR} --sequence-parallel {_EXPERTS} --expert-tensor-parallel-size 1",
    ),
    "core_moe, PP 2 x EP 2": (4, {"pipeline": 2, "expert": 2}, f"{_STAGES} {_EXPERTS}"),
    "core_moe_sigmoid, PP 2 x EP 2": (4, {"pipeline": 2, "expert": 2}, f"{_STAGES} {_EXPERTS}"),
    "core_dense, TP 2": (2, {"tensor": 2}, _TENSOR),
    "core_mtp, TP 2": (2, {"tensor": 2}, f"{_TENSOR} --sequence-parallel"),
    "core_mtp, PP 2": (2, {"pipeline": 2}, _STAGES),
}


@pytest.mark.parametrize("case", _LAYOUTS)
def test_every_layout_continues_like_the_original(golden, tmp_path, case):
    name = case.partition(",")[0]
    processes, sizes, flags = _LAYOUTS[case]
    found = run_distributed(
        processes, continue_core, golden, name, tmp_path, flags.split(), **sizes
    )
    compare(found[-1], golden, name)


def _save_again(
    layout: Layout, golden: Path, name: str, cache: Path, flags: Sequence[str] = ()
) -> None:
    save_run(_load(layout, golden, name, cache, flags))


@pytest.mark.parametrize("name", ["core_dense", "core_mtp", "core_moe_sigmoid"])
def test_what_is_saved_for_megatron_core_continues_like_the_original(golden, tmp_path, name):
    target = str(tmp_path / "saved")
    saves = ("--save", target, "--save-interval", "10", "--ckpt-format", "torch_dist")
    is_mixture = "moe" in name
    sizes = {"expert": 2} if is_mixture else {"tensor": 2}
    flags = (*(_EXPERTS if is_mixture else _TENSOR).split(), *saves)
    run_distributed(2, _save_again, golden, name, tmp_path, flags, **sizes)
    flags = ("--expert-model-parallel-size", "1", "--load", target)
    (records,) = run_distributed(1, continue_core, golden, name, tmp_path, flags)
    compare(records, golden, name)
