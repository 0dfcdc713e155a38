"""Megatron-LM 23.08's BERT run, continued from iteration 20, matches the original."""

import json

import pytest

from tests.distributed import run_distributed, run_sharing_memory
from tests.parity.golden import continue_run

LOSS, GRAD_NORM = 1e-4, 2e-3  # relative tolerances
NAMES = ("lm loss", "sop loss")
RUN = "bert_fp32"

TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"


def compare_bert(records, recording):
    """Compare iterations 21 to 40 and both final evaluations, line by line."""
    ours = {r["iteration"]: r for r in records if "lm loss" in r}
    assert sorted(ours) == list(range(21, 41))
    for theirs in recording["train"][20:]:
        mine = ours[theirs["iteration"]]
        for name in NAMES:
            assert mine[name] == pytest.approx(theirs[name], rel=LOSS)
        assert mine["grad-norm"] == pytest.approx(theirs["grad norm"], rel=GRAD_NORM)
        assert mine["consumed samples"] == theirs["consumed samples"]
        assert f"{mine['learning-rate']:.3E}" == f"{theirs['learning rate']:.3E}"
    for name in NAMES:
        ours = [r[f"{name} validation"] for r in records if f"{name} validation" in r]
        theirs = [v[name] for v in recording["validation"] if v["iteration"] == 40]
        assert ours == pytest.approx(theirs, rel=LOSS)


@pytest.mark.parametrize(
    ("sizes", "flags", "run"),
    [
        ({}, "", run_distributed),
        ({"tensor": 2}, TENSOR, run_distributed),
        ({"tensor": 2}, f"{TENSOR} --sequence-parallel", run_sharing_memory),
        ({"pipeline": 2}, PIPELINE, run_distributed),
    ],
    ids=["one process", "tensor 2", "tensor 2, sequences split", "pipeline 2"],
)
def test_it_continues_like_the_original(golden, tmp_path, sizes, flags, run):
    recording = json.loads((golden / RUN / "run.json").read_text())
    processes = 2 if sizes else 1
    for records in run(processes, continue_run, golden, RUN, tmp_path, flags.split(), **sizes):
        compare_bert(records, recording)
