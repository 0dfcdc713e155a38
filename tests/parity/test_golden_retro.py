"""Megatron-LM 23.08's Retro run, continued from iteration 20 in every layout."""

import json

import pytest

from tests.distributed import run_distributed, run_sharing_memory
from tests.parity.golden import continue_run
from tests.parity.test_golden_gpt import compare_gpt

TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4


@pytest.fixture(scope="module")
def recording(golden):
    return json.loads((golden / "retro_fp32/run.json").read_text())


def largest_differences(records, recording):
    """Return the largest relative differences of losses and gradient norms over all iterations."""
    theirs = {one["iteration"]: one for one in recording["train"]}
    ours = [one for one in records if "lm loss" in one]
    assert ours
    assert ours[0]["iteration"] == 21
    pairs = [(one, theirs[one["iteration"]]) for one in ours]
    loss = max(abs(a["lm loss"] / b["lm loss"] - 1) for a, b in pairs)
    return loss, max(abs(a["grad-norm"] / b["grad norm"] - 1) for a, b in pairs)


def test_one_process_continues_like_the_original(golden, tmp_path, recording):
    (records,) = run_distributed(1, continue_run, golden, "retro_fp32", tmp_path)
    # This run also has a final evaluation on test data.
    valid = [one for one in recording["validation"] if one["set"] != "test"]
    compare_gpt(records, {**recording, "validation": valid})
    (test,) = (one["lm loss"] for one in recording["validation"] if one["set"] == "test")
    assert records[-1]["lm loss test"] == pytest.approx(test, rel=TOLERANCE)
    loss, norm = largest_differences(records, recording)
    assert loss < TOLERANCE
    assert norm < NORM_TOLERANCE


_PART = "--exit-interval 23 --eval-iters 0"
LAYOUTS = {
    "tensor": ("--sequence-parallel", {"tensor": 2}),
    "pipeline": ("--num-layers-per-virtual-pipeline-stage 1", {"pipeline": 3}),
    "data": ("--zero-stage 3 --recompute-granularity full --recompute-method uniform", {}),
    "context": ("--recompute-granularity full --recompute-method uniform", {"context": 2}),
    "all": ("--sequence-parallel --use-distributed-optimizer", {"tensor": 2, "pipeline": 3}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_continue_like_the_original(golden, tmp_path, recording, layout):
    flags, sizes = LAYOUTS[layout]
    words = [*flags.split(), *_PART.split()]
    for axis, size in sizes.items():
        name = axis if axis == "context" else f"{axis}-model"
        words += [f"--{name}-parallel-size", str(size)]
    processes = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("context", 1)
    processes = 2 if layout == "data" else processes
    run = run_sharing_memory if processes > 2 else run_distributed
    for records in run(processes, continue_run, golden, "retro_fp32", tmp_path, words, **sizes):
        loss, norm = largest_differences(records, recording)
        assert loss < TOLERANCE
        assert norm < NORM_TOLERANCE
