"""Megatron-LM 23.08's GPT runs, continued from iteration 20, match the originals."""

import json
from functools import cache

import pytest

from tests.distributed import run_distributed, run_sharing_memory
from tests.parity.golden import continue_run

LOSS, GRAD_NORM = 1e-4, 2e-3  # relative tolerances


def compare_gpt(records, recording):
    """Compare iterations 21 to 40 and both final evaluations, line by line."""
    ours = {r["iteration"]: r for r in records if "lm loss" in r}
    assert sorted(ours) == list(range(21, 41))
    for theirs in recording["train"][20:]:
        mine = ours[theirs["iteration"]]
        assert mine["lm loss"] == pytest.approx(theirs["lm loss"], rel=LOSS)
        assert mine["grad-norm"] == pytest.approx(theirs["grad norm"], rel=GRAD_NORM)
        assert mine["consumed samples"] == theirs["consumed samples"]
        assert f"{mine['learning-rate']:.3E}" == f"{theirs['learning rate']:.3E}"
    ours = [r["lm loss validation"] for r in records if "lm loss validation" in r]
    theirs = [v["lm loss"] for v in recording["validation"] if v["iteration"] == 40]
    assert ours == pytest.approx(theirs, rel=LOSS)


@pytest.fixture(scope="module")
def one_process(golden, tmp_path_factory):
    """Return a function from a run's name to its single-process records and index cache."""

    @cache
    def run(run_name):
        folder = tmp_path_factory.mktemp(run_name)
        (records,) = run_distributed(1, continue_run, golden, run_name, folder)
        return records, folder

    return run


@pytest.mark.parametrize("run_name", ["gpt_fp32", "gpt_tp2pp2_fp32"])
def test_one_process_continues_like_the_original(golden, one_process, run_name):
    recording = json.loads((golden / run_name / "run.json").read_text())
    records, _ = one_process(run_name)
    compare_gpt(records, recording)


TP2PP2 = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
""".split()


@pytest.mark.parametrize(
    ("run_name", "run"), [("gpt_fp32", run_sharing_memory), ("gpt_tp2pp2_fp32", run_distributed)]
)
def test_four_processes_continue_like_the_original(golden, tmp_path, run_name, run):
    """The run recorded on four processes uses gloo, the other one shared memory."""
    recording = json.loads((golden / run_name / "run.json").read_text())
    for records in run(4, continue_run, golden, run_name, tmp_path, TP2PP2, tensor=2, pipeline=2):
        compare_gpt(records, recording)


def test_index_cache_is_the_original_byte_for_byte(golden, one_process):
    """File names hash the data path as written in the recorded run, so .dsc texts pair up."""
    _, folder = one_process("gpt_fp32")
    ours = {path.read_text(): path for path in folder.glob("*.dsc")}
    recorded = sorted((golden / "gpt_fp32" / "index-cache").glob("*.dsc"))
    assert len(recorded) == 2
    for theirs in recorded:
        mine = ours[theirs.read_text()]
        for kind in ("doc_idx", "sample_idx", "shuffle_idx"):
            name = f"{{}}_{kind}.npy"
            original = theirs.with_name(name.format(theirs.stem)).read_bytes()
            assert mine.with_name(name.format(mine.stem)).read_bytes() == original
