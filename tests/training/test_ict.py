"""Training a bi-encoder: every layout matches one process, from a BERT, and after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.errors import CheckpointError
from megatron.parallel.layout import Layout
from megatron.training.from_bert import StartFromBert
from tests.data.corpus import write_vocabulary
from tests.data.test_ict import write
from tests.distributed import run_distributed, run_sharing_memory
from tests.training.toy import TOY, build_toy, train_toy

QUIET = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0".split()
PROJECTED = "--biencoder-projection-dim 8"
SHARED = "--biencoder-shared-query-context-model"
TOPS = "--retriever-report-topk-accuracies 1 3 --retriever-score-scaling"


def curves(layout: Layout, words: list[str]) -> list[float]:
    recorder, run = train_toy(layout, [*QUIET, *words], "ict")
    names = run.recipe.loss_names(run.config)
    values = [value for name in names for value in recorder.values(name)]
    return [*values, *recorder.values("grad-norm")]


def single(*words: str) -> list[float]:
    return curves(Layout.single(), [*words, "--micro-batch-size", "4"])


@pytest.mark.parametrize(
    ("processes", "tensor", "words"),
    [
        (2, 1, "--micro-batch-size 2"),
        (2, 1, f"--micro-batch-size 2 {SHARED} {PROJECTED} {TOPS}"),
        (2, 1, "--micro-batch-size 2 --zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
        (2, 1, "--micro-batch-size 2 --zero-stage 3"),
        (2, 1, "--micro-batch-size 2 --DDP-impl torch"),
        (2, 2, f"--micro-batch-size 4 {PROJECTED}"),
        (2, 2, f"--micro-batch-size 4 --sequence-parallel {SHARED}"),
        (4, 2, "--micro-batch-size 2 --sequence-parallel --zero-stage 1"),
        (4, 1, "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform"),
    ],
)
def test_every_layout_trains_as_one_process(processes, tensor, words):
    network = [part for part in (PROJECTED, SHARED, TOPS) if part in words]
    run = run_distributed if processes == 2 else run_sharing_memory
    expected = single(*" ".join(network).split())
    for got in run(processes, curves, words.split(), tensor=tensor):
        assert got == pytest.approx(expected, rel=1e-4)


def test_queries_find_their_blocks(tmp_path, monkeypatch):
    """Each document has its own words, so sentences of a block are soon recognized."""
    random = np.random.RandomState(1)
    texts = [
        [random.randint(20 + 5 * d, 25 + 5 * d, 4).tolist() for _ in range(6)] for d in range(16)
    ]
    words = ["--data-path", write(tmp_path / "text", texts), "--split", "1"]
    words += ["--titles-data-path", write(tmp_path / "title", [[[5]]] * 16), "--train-iters", "60"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--global-batch-size", "8"]
    words += ["--vocab-file", str(write_vocabulary(tmp_path / "vocab.txt")), "--eval-iters", "0"]
    words += ["--micro-batch-size", "8", "--retriever-report-topk-accuracies", "1", "2"]
    words += [*SHARED.split(), "--retriever-score-scaling", "--lr", "5e-3"]
    words += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    own = [word for word in TOY if word != "--mock-data"]
    monkeypatch.setattr("tests.training.toy.TOY", own)
    recorder, _ = train_toy(Layout.single(), words, "ict")
    losses, first = recorder.values("loss"), recorder.values("top1_acc")
    assert losses[0] == pytest.approx(2.08, abs=0.3)  # log 8: all blocks are equally likely
    assert sum(losses[-10:]) / 10 < 1
    assert sum(first[-10:]) / 10 > 60
    assert all(one <= two for one, two in zip(first, recorder.values("top2_acc"), strict=True))


def test_training_continues_in_another_layout(tmp_path):
    folder = str(tmp_path)
    words = [*PROJECTED.split(), "--save", folder, "--save-interval", "3", "--exit-interval", "3"]
    first = run_distributed(2, curves, [*words, "--micro-batch-size", "4"], tensor=2)[0]
    words = [*PROJECTED.split(), "--load", folder, "--micro-batch-size", "2", "--zero-stage", "1"]
    second = run_distributed(2, curves, words)[0]
    expected = single(*PROJECTED.split())
    assert [*first[:3], *second[:3]] == pytest.approx(expected[:6], rel=1e-5)


def bert(folder: Path, *words: str) -> str:
    train_toy(
        Layout.single(),
        [*words, "--train-iters", "1", "--save", str(folder), "--save-interval", "1"],
        "bert",
    )
    return str(folder)


@pytest.mark.parametrize("more", ["", "--bert-no-binary-head"])
def test_both_towers_start_from_a_bert(tmp_path, more):
    pretrained = bert(tmp_path / "bert", *more.split())
    words = [*more.split(), "--load", pretrained, "--finetune"]
    source = build_toy(Layout.single(), words, "bert")
    weights = dict(source.named_parameters())
    flags = [*QUIET, "--bert-load", pretrained, "--biencoder-projection-dim", "8"]
    run = build_toy(Layout.single(), flags, "ict")
    StartFromBert().begin(run)
    towers = dict(run.named_parameters())
    assert run.pretrained is not None
    for name, parameter in towers.items():
        tower, _, rest = name.partition(".")
        if rest.startswith("projection") or rest not in weights:
            assert rest.startswith("projection") or (more and rest == "embedding.token_type.weight")
        else:
            assert torch.equal(parameter, weights[rest]), name
        if rest.startswith("projection"):
            assert torch.equal(parameter, towers[f"query_model.{rest}"])


def test_a_restart_does_not_load_the_bert_again(tmp_path):
    pretrained, folder = bert(tmp_path / "bert"), str(tmp_path / "ict")
    train_toy(
        Layout.single(),
        [*QUIET, "--exit-interval", "2", "--save", folder, "--save-interval", "2"],
        "ict",
    )
    run = build_toy(Layout.single(), [*QUIET, "--load", folder, "--bert-load", pretrained], "ict")
    before = {name: one.clone() for name, one in run.named_parameters()}
    StartFromBert().begin(run)
    assert run.pretrained is None
    assert all(torch.equal(one, before[name]) for name, one in run.named_parameters())


def test_what_is_no_fitting_bert_is_refused(tmp_path):
    pretrained = bert(tmp_path / "bert")
    wide = build_toy(Layout.single(), ["--bert-load", pretrained, "--ffn-hidden-size", "48"], "ict")
    with pytest.raises(CheckpointError, match="--ffn-hidden-size is 48 here and 128"):
        StartFromBert().begin(wide)
    absent = build_toy(Layout.single(), ["--bert-load", str(tmp_path / "none")], "ict")
    with pytest.raises(CheckpointError, match="--bert-load .*: there is no checkpoint"):
        StartFromBert().begin(absent)
    folder = str(tmp_path / "gpt")
    words = ["--train-iters", "1", "--save", folder, "--save-interval", "1"]
    train_toy(Layout.single(), words)
    other = build_toy(Layout.single(), ["--bert-load", folder], "ict")
    with pytest.raises(CheckpointError, match="holds a gpt, but a bert is needed"):
        StartFromBert().begin(other)
