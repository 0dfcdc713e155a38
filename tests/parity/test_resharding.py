"""A run saved in one layout continues in another as if nothing had happened."""

import pytest
import torch

from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory, start_method
from tests.parity import resharding
from tests.parity.layouts import HYBRID
from tests.training.toy import train_toy

FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size 8 --eval-iters 0
""".split()
NAMES = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
}
ONE = (1, {}, [])
SPLIT = (4, {"tensor": 2, "pipeline": 2}, ["--sequence-parallel"])
SHARDED = (4, {"pipeline": 2}, ["--use-distributed-optimizer"])
VIRTUAL = (2, {"pipeline": 2}, ["--num-layers-per-virtual-pipeline-stage", "1"])
RELATIVE = ["--position-embedding-type", "relative", "--geglu", "--disable-output-bias"]
CONTEXT = (4, {"tensor": 2, "context": 2}, ["--zero-stage", "1"])


def _train(layout, flags, kind="gpt"):
    recorder, _ = train_toy(layout, flags, kind)
    return recorder.values("lm loss")


def _run(layout, *flags, kind="gpt"):
    processes, sizes, more = layout
    words = [*FLAGS, *more, *flags]
    for axis, size in sizes.items():
        words += [NAMES[axis], str(size)]
    return run_sharing_memory(processes, _train, words, kind, **sizes)[-1]


@pytest.fixture(scope="module")
def uninterrupted():
    return _train(Layout.single(), FLAGS)


@pytest.mark.parametrize(
    ("before", "after"),
    [(SPLIT, ONE), (ONE, SPLIT), (SHARDED, SPLIT), (SPLIT, VIRTUAL), (VIRTUAL, CONTEXT),
     (CONTEXT, SHARDED)],
    ids=["split-one", "one-split", "sharded-split", "split-virtual", "virtual-context",
         "context-sharded"],
)  # fmt: skip
def test_losses_continue(tmp_path, uninterrupted, before, after):
    folder = str(tmp_path)
    first = _run(before, "--save", folder, "--save-interval", "3", "--exit-interval", "3")
    second = _run(after, "--load", folder)
    assert [*first, *second] == pytest.approx(uninterrupted, rel=1e-5)


def test_losses_of_a_hybrid_continue(tmp_path):
    folder, network = str(tmp_path), HYBRID.split()
    saving = ["--save", folder, "--save-interval", "3", "--exit-interval", "3"]
    first = _run(SPLIT, *saving, *network)
    second = _run(CONTEXT, "--load", folder, *network)
    expected = _train(Layout.single(), [*FLAGS, *network])
    assert [*first, *second] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "more"), [("bert", []), ("t5", []), ("t5", RELATIVE)])
def test_losses_of_bert_and_t5_continue(tmp_path, kind, more):
    folder = str(tmp_path)
    saving = ["--save", folder, "--save-interval", "3", "--exit-interval", "3"]
    first = _run(SPLIT, *saving, *more, kind=kind)
    second = _run(VIRTUAL, "--load", folder, *more, kind=kind)
    expected = _train(Layout.single(), [*FLAGS, *more], kind)
    assert [*first, *second] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("gpt", ["--num-layers-per-virtual-pipeline-stage", "1"]), ("bert", []), ("t5", RELATIVE)],
)
def test_tied_copies_that_are_cut_elsewhere_are_saved_once(tmp_path, kind, flags):
    """The embedding is most of the model, so shards end inside it on both stages."""
    processes, sizes, more = SHARDED
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    words = ["--vocab-size", "1000", "--save-interval", "2"]
    if kind != "gpt":
        words, flags = [*words, *flags], []
    first = _run(ONE, *words, "--save", there, "--exit-interval", "2", kind=kind)
    more = [*more, *flags, "--load", there, "--save", back, "--exit-interval", "4"]
    second = _run((processes, sizes, more), *words, kind=kind)
    third = _run(ONE, *words, "--load", back, kind=kind)
    expected = _train(Layout.single(), [*FLAGS, *words[:2], *words[4:]], kind)
    assert [*first, *second, *third] == pytest.approx(expected, rel=1e-5)


def test_a_difference_would_be_seen(tmp_path, monkeypatch):
    """The scoreboard compares all pairs of layouts; check that it would notice one wrong number."""
    if start_method().get_start_method() != "fork":
        pytest.skip("only a fork takes over what is patched here")
    restore = resharding.restore_run

    def restore_wrongly(run, reader):
        restore(run, reader)
        with torch.no_grad():
            next(run.parameters()).view(-1)[0] += 1.0

    monkeypatch.setattr(resharding, "restore_run", restore_wrongly)
    grid = resharding.Grid(tensor=1, pipeline=1, data=1, stage=0)
    expected, results = resharding.all_pairs((grid,), tmp_path)
    (loaded,) = results.values()
    assert 0 < loaded.differing <= 4
    assert loaded.loss != expected
