"""Evaluations on every validation sample, and on several validation sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.config.data import DataConfig
from megatron.data.blend import JoinedDataset
from megatron.data.datasets import DataRequest
from megatron.data.gpt import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.errors import ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.training.batches import evaluation_position
from megatron.training.callbacks.scalars import Scalars
from megatron.training.evaluation import evaluate_all, final_evaluation
from megatron.training.pretrain import main
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe
from tests.data.corpus import write_corpus
from tests.data.test_toy_kind import MirrorRecipe, write_documents
from tests.distributed import run_distributed
from tests.training.toy import TOY, build_toy, train_toy

_EOD = 100  # the id of the end-of-document token, --vocab-size; these labels do not count


def _corpora(folder: Path) -> list[str]:
    """Write three datasets, and return flags that train on one and validate on the others."""
    prefixes = {
        name: str(write_corpus(folder / name, documents=documents, vocab_size=_EOD + 1, seed=seed))
        for seed, (name, documents) in enumerate({"train": 60, "wiki": 18, "code": 7}.items())
    }
    valid = ["--valid-data-path", prefixes["wiki"], prefixes["code"]]
    return ["--train-data-path", prefixes["train"], *valid, "--full-validation", "--eod-mask-loss"]


def _all_losses(layout: Layout, words: list[str]) -> dict[str, float] | None:
    run = build_toy(layout, words)
    assert run.datasets[1] is not None
    first = evaluate_all(run, run.datasets[1])
    assert evaluate_all(run, run.datasets[1]) == first  # it begins again
    return first


def _by_hand(run: Run) -> float:
    """Return the mean loss over all labels that count, one sample at a time."""
    total, labels, dataset = 0.0, 0, run.datasets[1]
    assert dataset is not None
    part = run.parts[0].eval()
    device = next(part.parameters()).device
    with torch.no_grad():
        for i in range(len(dataset)):
            batch = {"text": torch.as_tensor(dataset[i]["text"], device=device)[None]}
            losses = run.recipe.forward(part, batch, None, run.config, run.tokenizer, run.layout)
            counted = int((batch["text"][:, :-1] != _EOD).sum())
            total, labels = total + counted * float(losses["lm loss"]), labels + counted
    return total / labels


@pytest.mark.parametrize("batch", [(4, 1), (4, 4), (20, 5), (64, 16)])
def test_every_label_of_every_sample_counts_once(batch: tuple[int, int], tmp_path: Path) -> None:
    """The number of samples is a multiple of no batch; one batch is larger."""
    words = _corpora(tmp_path)
    sizes = dict(zip(("global", "micro"), batch, strict=True))
    words += [part for name, n in sizes.items() for part in (f"--eval-{name}-batch-size", str(n))]
    run = build_toy(Layout.single(), words)
    dataset = run.datasets[1]
    assert dataset is not None
    assert len(dataset) == 23
    rows = {tuple(dataset[i]["text"].tolist()) for i in range(len(dataset))}
    assert len(rows) == len(dataset)
    losses = evaluate_all(run, dataset)
    assert losses == {"lm loss": pytest.approx(_by_hand(run), rel=1e-6)}
    plain = [word for word in words if word != "--eod-mask-loss"]
    assert _all_losses(Layout.single(), plain) != losses


@pytest.mark.parametrize(
    ("sizes", "network", "words"),
    [
        ({}, "", "--eval-global-batch-size 12 --eval-micro-batch-size 3"),
        ({}, "", "--eval-global-batch-size 64 --eval-micro-batch-size 32"),
        ({}, "", "--zero-stage 3"),
        (
            {},
            "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32",
            "--expert-model-parallel-size 2 --eval-micro-batch-size 2",
        ),
        ({"tensor": 2}, "", "--tensor-model-parallel-size 2 --sequence-parallel"),
        (
            {"pipeline": 2},
            "",
            "--pipeline-model-parallel-size 2 --eval-global-batch-size 10 "
            "--eval-micro-batch-size 2",
        ),
        (
            {"pipeline": 2},
            "--num-layers 4",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        ),
        ({"context": 2}, "", "--context-parallel-size 2"),
    ],
)
def test_two_processes_compute_the_same_losses(
    sizes: dict[str, int], network: str, words: str, tmp_path: Path
) -> None:
    flags = [*_corpora(tmp_path), *network.split()]
    expected = _all_losses(Layout.single(), flags)
    assert expected is not None
    for losses in run_distributed(2, _all_losses, [*flags, *words.split()], **sizes):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_the_sample_order_of_training_does_not_matter(tmp_path: Path) -> None:
    words = _corpora(tmp_path)
    expected = _all_losses(Layout.single(), words)
    assert _all_losses(Layout.single(), [*words, "--dataloader-type", "cyclic"]) == expected


def test_a_part_of_a_corpus_is_read_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "x", vocab_size=_EOD)
    words = ["--data-path", str(corpus), "--split", "70,20,10", "--full-validation"]
    dataset = build_toy(Layout.single(), words).datasets[1]
    tokens = int(IndexedDataset(corpus).sequence_lengths[70:90].sum())
    assert dataset is not None
    assert len(dataset) == (tokens - 1) // 16


def test_an_evaluation_begins_with_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test at the end still has --eval-iters batches."""
    words = [*_corpora(tmp_path), "--test-data-path", str(tmp_path / "code")]
    words += "--train-iters 7 --eval-interval 2 --start-eval-at-iter 3 --eval-iters 2".split()
    whole, tested = [], []
    monkeypatch.setattr(
        "megatron.training.evaluation.evaluate_all",
        lambda run, dataset: whole.append((run.progress.iteration, len(dataset))),
    )
    monkeypatch.setattr(
        "megatron.training.evaluation.evaluate",
        lambda run, dataset, *, skip: tested.append((len(dataset), skip)),
    )
    _, run = train_toy(Layout.single(), words)
    final_evaluation(run, Scalars([]))
    assert whole == [(4, 23), (6, 23), (7, 23)]
    assert evaluation_position(run, 7) == 0
    (length, skip), *others = tested
    assert length >= 8
    assert skip == 0
    assert not others


def test_without_test_batches_validation_takes_place(tmp_path: Path) -> None:
    words = [*_corpora(tmp_path), "--eval-iters", "0"]
    recorder, run = train_toy(Layout.single(), words)
    assert [record["iteration"] for record in recorder.records if "lm loss validation" in record]
    assert run.datasets[2] is None


@pytest.mark.parametrize("names", [[], ["wiki", "code"]])
def test_sets_are_evaluated_separately(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    words = [word for word in TOY if word != "--mock-data"]
    words += [*_corpora(tmp_path), "--multiple-validation-sets", "--metrics-jsonl", str(metrics)]
    words += "--train-iters 3 --ema-decay 0.5 --eval-averaged-weights".split()
    words += ["--log-validation-ppl-to-tensorboard"]
    words += ["--validation-set-names", *names] if names else []
    assert main(GPTRecipe(), words) == 0
    log = capsys.readouterr().out
    records = list(map(json.loads, metrics.read_text().splitlines()))
    tags = []
    for name in names or ["0", "1"]:
        assert f" validation-{name} loss at iteration 3 | lm loss value: " in log
        assert f" validation-{name} loss at the end of training for val data | lm loss " in log
        tag = f"lm loss validation-{name}"
        tags.append(tag)
        own = [record for record in records if tag in record]
        assert [record.get("end of training", False) for record in own] == [False, True]
        for record in own:
            assert f"{tag} ppl" in record
            assert record[f"lm loss of averaged weights validation-{name}"] != record[tag]
    assert " validation loss " not in log
    assert not any(set(tags) <= record.keys() for record in records)


def test_the_losses_of_sets_make_up_the_loss_of_all(tmp_path: Path) -> None:
    run = build_toy(Layout.single(), _corpora(tmp_path))
    dataset = run.datasets[1]
    assert isinstance(dataset, JoinedDataset)
    total = labels = 0.0
    for each in dataset.datasets:
        losses = evaluate_all(run, each)
        assert losses is not None
        texts = [each[i]["text"][:-1] for i in range(len(each))]
        counted = sum(int((text != _EOD).sum()) for text in texts)
        total, labels = total + counted * losses["lm loss"], labels + counted
    assert evaluate_all(run, dataset) == {"lm loss": pytest.approx(total / labels, rel=1e-6)}


def test_a_set_without_a_sample_is_refused(tmp_path: Path) -> None:
    words = _corpora(tmp_path)
    small = str(write_corpus(tmp_path / "small", documents=2, longest=4))
    with pytest.raises(DataError, match=f"too few tokens for a sample .* in {small}: give more"):
        build_toy(Layout.single(), [*words, "--valid-data-path", str(tmp_path / "wiki"), small])


def test_a_split_that_leaves_a_dataset_without_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are evaluated. Without any, the flag is refused."""
    large = str(write_corpus(tmp_path / "large", documents=60, vocab_size=_EOD))
    small = str(write_corpus(tmp_path / "small", documents=10, longest=9, vocab_size=_EOD))
    words = ["--data-path", large, small, "--full-validation", "--split"]
    dataset = build_toy(Layout.single(), [*words, "80,20,0"]).datasets[1]
    tokens = int(IndexedDataset(large).sequence_lengths[48:].sum())
    assert dataset is not None
    assert len(dataset) == (tokens - 1) // 16
    assert (
        f"leaves too few validation tokens for a sample in {small}: not" in capsys.readouterr().err
    )
    with pytest.raises(DataError, match="--full-validation: --split '1,0,0' leaves too few tokens"):
        build_toy(Layout.single(), [*words, "1,0,0"])


def test_weights_that_no_rule_has_seen_are_refused(tmp_path: Path) -> None:
    """The program of the detoxify example has its own flag for validation data."""
    prefix = str(write_corpus(tmp_path / "x", vocab_size=_EOD))
    data = DataConfig(seq_length=16, valid_data_path=("0.5", prefix, "0.5", prefix))
    with pytest.raises(ConfigError, match=f"every sample of {prefix}, but it has the weight 0.5"):
        build_gpt_datasets(DataRequest(data, 1, (0, None, 0)), seq_length=16, vocab_size=_EOD)


def test_text_is_refused(tmp_path: Path) -> None:
    words, text = _corpora(tmp_path), tmp_path / "text.txt"
    text.write_text("1 2 3\n" * 40)
    with pytest.raises(ConfigError, match=r"--full-validation: .*text\.txt is text, whose number"):
        build_toy(Layout.single(), [*words, "--valid-data-path", str(text)])


def test_a_kind_of_sample_without_a_known_number_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(write_documents(tmp_path / "x"))
    words = [word for word in TOY if word != "--mock-data"]
    words += ["--data-path", prefix, "--train-iters", "1", "--full-validation"]
    assert main(MirrorRecipe(), words) == ConfigError.exit_code
    expected = "--full-validation: the number of validation samples in this kind of data is unknown"
    assert expected in capsys.readouterr().err
