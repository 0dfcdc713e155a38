"""Finetuning on toy texts that a two-layer BERT can learn, and on the real samples."""

import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.checkpoint.entries import Box
from megatron.checkpoint.loading import open_checkpoint
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.tasks import finetune_command, target
from megatron.tasks.classify import read_glue, read_race
from megatron.tasks.finetune import EpochEvaluation, Finetuning, _best_score
from megatron.tasks.main import main
from megatron.tasks.target import Predictions
from megatron.training.build import build_run
from megatron.training.loop import standard_callbacks, train
from megatron.training.panel import start_panel
from tests.distributed import run_distributed
from tests.tasks.toy import WORDS, finetune, save_bert, save_toy


def _sentence(chance, first):
    return " ".join([first, *chance.sample(WORDS[2:], chance.randint(3, 6))])


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return a toy BERT, and texts whose first word determines the class."""
    folder = tmp_path_factory.mktemp("finetune")
    flags = save_bert(folder)
    chance = random.Random(0)
    for name, count in (("train", 67), ("dev", 23)):
        labels = [i % 2 for i in range(count)]
        lines = [f"{_sentence(chance, WORDS[label])}\t{label}" for label in labels]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
        pairs = [[*"0123456", _sentence(chance, WORDS[i % 11]), "w0 w1", i % 11 / 2]
                 for i in range(count)]  # fmt: skip
        text = "\n".join("\t".join(map(str, cells)) for cells in pairs)
        (folder / f"{name}.sts").write_text(text + "\n")
        articles = [
            {
                "article": _sentence(chance, WORDS[i % 4]),
                "questions": ["the first _ is it", "what is it"],
                "options": [WORDS[:4], WORDS[:4]],
                "answers": ["ABCD"[i % 4]] * 2,
            }
            for i in range(count // 3)
        ]
        (folder / name).mkdir()
        text = "\n".join(json.dumps(article) for article in articles)
        (folder / name / "1.txt").write_text(text)
    return folder, flags


PLAIN = ["--no-exit-signal-handler", "--num-workers", "0", "--log-interval", "100"]


def _sst(toy, *more):
    folder, flags = toy
    data = ["--train-data", str(folder / "train.tsv"), "--valid-data", str(folder / "dev.tsv")]
    sizes = ["--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-2"]
    return [*flags, *data, *sizes, *more]


def test_it_learns_and_keeps_the_best(toy, tmp_path):
    words = _sst(toy, "--epochs", "4", "--save", str(tmp_path))
    losses, last = finetune(Layout.single(), "SST-2", words)
    assert len(losses) == 4 * (67 // 8)
    assert losses[-1] < losses[0] / 2
    assert _counts(last) == [[12, 0], [0, 11]]
    written = json.loads((tmp_path / "evaluation" / "sst-2-iter_0000032.json").read_text())
    (file,) = written["files"].values()
    assert file["counts"] == _counts(last)
    best = open_checkpoint(tmp_path / "best")
    assert written["best"] == {"iteration": best.iteration, "score": 1.0, "of": ["accuracy"]}
    assert not any(name.startswith("optimizer.") for name in best.names())

    # The best weights alone give the same predictions without training.
    for flag in ("--load", "--pretrained-checkpoint"):
        again = [flag, str(tmp_path / "best"), "--epochs", "0"]
        words = [*again, "--valid-data", str(toy[0] / "dev.tsv")]
        assert finetune_command.parse("SST-2", words, 1).notices == ()  # this is a trained model
        losses, evaluated = finetune(Layout.single(), "SST-2", words)
        assert losses == []
        assert evaluated.all_files == last.all_files
        assert evaluated.iteration == best.iteration > 0
        for task, head in (("RACE", "multichoice_head with 1"), ("MNLI", ".* with 3")):
            found = f"{flag} .*: this model was finetuned for another task: it has "
            found += "classification_head with 2"
            with pytest.raises(CheckpointError, match=f"{found} .*--task {task} needs {head}"):
                finetune_command.parse(task, words, 1)


def test_numbers_are_learned_by_squared_error(toy, tmp_path, capsys):
    words = [word.replace(".tsv", ".sts") for word in _sst(toy, "--epochs", "8")]
    words += ["--save", str(tmp_path)]
    losses, last = finetune(Layout.single(), "STS-B", words)
    assert sum(losses[-8:]) < sum(losses[:8]) / 4
    (found,) = last.by_file.values()
    assert found.labels == tuple(i % 11 / 2 for i in range(23))
    written = json.loads((tmp_path / "evaluation" / "sts-b-iter_0000064.json").read_text())
    numbers = written["results"]
    assert numbers["total_examples"] == 23
    assert numbers["pearson"] == pytest.approx(np.corrcoef(found.labels, found.predictions)[0, 1])
    assert numbers["pearson"] > 0.9
    assert written["score"] == (numbers["pearson"] + numbers["spearman"]) / 2
    error = np.subtract(found.labels, found.predictions)
    assert numbers["mean_squared_error"] == pytest.approx(np.mean(error**2))
    assert "4 to 5" in (shown := capsys.readouterr().out)
    assert "mean of pearson and spearman" in shown
    assert "> batch 12 of 12\n" in shown  # 23 samples, two at a time
    assert "all files" not in shown  # a single one

    # The best weights alone have the score for which they were kept, and the same predictions.
    results = tmp_path / "best.json"
    again = ["--load", str(tmp_path / "best"), "--epochs", "0", "--results", str(results)]
    data = ["--valid-data", str(toy[0] / "dev.sts"), "--micro-batch-size", "5"]
    finetune(Layout.single(), "STS-B", [*again, *data])
    best = written["best"]
    assert best["of"] == ["pearson", "spearman"]
    assert json.loads(results.read_text())["score"] == pytest.approx(best["score"], rel=1e-5)
    assert best["score"] >= written["score"]


def test_a_number_is_not_rounded_to_16_bits_and_its_loss_has_no_perplexity(toy, capsys):
    words = [word.replace(".tsv", ".sts") for word in _sst(toy, "--epochs", "1", "--bf16")]
    _, last = finetune(
        Layout.single(), "STS-B", [*words, "--eval-iters", "1", "--eval-interval", "4"]
    )
    predictions = torch.tensor(last.all_files.predictions)
    rounded = predictions.bfloat16().float()
    assert (predictions != rounded).sum() > len(predictions) / 2
    said = capsys.readouterr().out
    assert "validation loss at iteration 4 | lm loss value:" in said
    assert "PPL" not in said


def test_the_panel_counts_only_samples_and_parameters_that_there_are(toy):
    config, recipe, _ = finetune_command.prepare(
        "SST-2", finetune_command.parse("SST-2", _sst(toy, "--epochs", "2"), 1), 1
    )
    run = build_run(config, recipe, Device.cpu(), Layout.single())
    panel = start_panel(run, 0.0)
    parameters = sum(map(torch.numel, run.parameters()))
    assert re.search(r"parameters +([0-9,]+)", panel)[1] == f"{parameters:,}"
    (row,) = (line for line in panel.splitlines() if line.startswith("  data "))
    assert row.endswith(" tokens: training 128")  # twice 8 batches of 8; validation is not a split


def test_a_dry_run_tells_sizes_and_trains_nothing(toy, tmp_path, capsys):
    words = [*_sst(toy, "--epochs", "1", "--save", str(tmp_path / "run")), "--dry-run"]
    words += ["--dry-run-world-size", "4"]
    words = [word.replace(".tsv", "") for word in words]
    assert main(["--task", "RACE", *words]) == 0
    panel = capsys.readouterr().out
    assert "Dry run: the configuration is valid" in panel
    assert re.search(r"tokens per iteration +768\n", panel)
    assert "x DP 4 x" in panel
    assert not (tmp_path / "run").exists()


def test_evaluation_between_epochs_does_not_touch_the_training(toy):
    """Nor does it affect dropout in any micro-batch of the next update."""
    words = _sst(toy, "--epochs", "3", "--hidden-dropout", "0.2")
    losses, _ = finetune(Layout.single(), "SST-2", words)
    without = words.index("--valid-data")
    alone, _ = finetune(Layout.single(), "SST-2", words[:without] + words[without + 2 :])
    assert losses == alone


@pytest.mark.parametrize("task", ["SST-2", "LAMBADA"])
def test_results_that_cannot_be_written_are_refused_before_the_work(toy, tmp_path, capsys, task):
    (tmp_path / "file").touch()
    if task == "SST-2":
        words = _sst(toy, "--epochs", "1")
    else:
        words = ["--load", save_toy(str(tmp_path / "toy")), "--valid-data", str(tmp_path / "file")]
    for place in (tmp_path / "file" / "out.json", tmp_path):
        assert main(["--task", task, *words, "--results", str(place)]) == 8
        said = capsys.readouterr()
        assert said.err.startswith(f"error: --results {place} cannot be written (")
        assert "iteration" not in said.out.replace("successfully saved checkpoint at iteration", "")
    data = Path(words[words.index("--valid-data") + 1])
    before = data.read_bytes()
    assert main(["--task", task, *words, "--results", str(data)]) == 9
    assert f"--results {data}: this file is also read as data" in capsys.readouterr().err
    assert data.read_bytes() == before


@pytest.mark.parametrize("task", ["SST-2", "LAMBADA"])
def test_existing_results_are_refused_before_the_work(toy, tmp_path, capsys, task):
    if task == "SST-2":
        words = [*_sst(toy, "--epochs", "1"), *PLAIN]
    else:
        lines = [json.dumps({"text": f"{i} {i + 1} {i + 2}"}) for i in range(4)]
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        words = ["--valid-data", str(tmp_path / "data.jsonl")]
        words += ["--load", save_toy(str(tmp_path / "toy"))]
    results = tmp_path / "out.json"
    results.write_text("mine")
    words = ["--task", task, *words, "--results", str(results)]
    capsys.readouterr()
    assert main(words) == 9
    said = capsys.readouterr()
    assert said.err == (
        f"error: --results: {results} already exists: choose another name, or give --overwrite to "
        "replace it\n"
    )
    assert said.out == ""  # neither a model nor a panel
    assert results.read_text() == "mine"
    assert main([*words, "--overwrite"]) == 0
    assert f"results written to {results}, replacing earlier ones" in capsys.readouterr().out
    assert json.loads(results.read_text())["task"] == task


def test_a_resumed_run_replaces_its_own_results_alone(toy, tmp_path, capsys):
    """They name its --save folder, and it continues from a checkpoint there."""
    run, other, results = (tmp_path / name for name in ("run", "other", "out.json"))
    words = ["--task", "SST-2", *_sst(toy, "--results", str(results)), *PLAIN]

    def train(save, *more, epochs="1"):
        return main([*words, "--save", str(save), "--epochs", epochs, *more])

    def score():
        return json.loads(results.read_text())["iteration"]

    assert train(run, "--load", str(run)) == 0
    assert score() == 8
    assert train(run, "--load", str(run)) == 0  # restarted with nothing left to do
    longer = ["--load", str(run), "--override-opt_param-scheduler"]
    assert train(run, *longer, epochs="2") == 0  # with another epoch
    assert score() == 16
    capsys.readouterr()
    given = ["--valid-data", str(toy[0] / "dev.tsv"), "--results", str(results)]
    refused = [
        train(run),  # a new training
        train(run, "--load", str(run), "--finetune"),
        train(other, "--load", str(run)),
        train(other, "--load", str(other)),
        main(["--task", "SST-2", "--load", str(run), "--epochs", "0", "--save", str(run), *given]),
    ]
    assert refused == [9] * 5
    assert capsys.readouterr().err.count(f"--results: {results} already exists") == 5
    assert score() == 16
    assert train(other, "--load", str(other), "--overwrite") == 0
    assert score() == 8
    assert train(run, "--load", str(run), epochs="2") == 9  # the file now belongs to another run


def test_throughput_counts_all_texts_of_a_sample(toy, capsys, monkeypatch):
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    words = [word.replace(".tsv", "") for word in _sst(toy, "--epochs", "1")]
    config, recipe, extras = finetune_command.prepare(
        "RACE", finetune_command.parse("RACE", [*words, "--log-interval", "1"], 1), 1
    )
    run = build_run(config, recipe, Device.cpu(), Layout.single())
    extras.begin(run)
    train(run, standard_callbacks(run, [])[0])
    line = r"per iteration \(ms\): ([0-9.]+) .* tokens/s per GPU: ([0-9.]+)"
    found = re.findall(line, capsys.readouterr().out)
    # 8 samples of 4 texts of 24 tokens.
    assert [float(ms) / 1000 * float(speed) for ms, speed in found] == [768.0] * (44 // 8)


def test_it_continues_where_it_stopped(toy, tmp_path):
    words = _sst(toy, "--epochs", "2", "--save-interval", "5", "--save", str(tmp_path))
    expected, _ = finetune(Layout.single(), "SST-2", _sst(toy, "--epochs", "2"))
    first, _ = finetune(Layout.single(), "SST-2", [*words, "--exit-interval", "5"])
    second, _ = finetune(Layout.single(), "SST-2", [*words, "--load", str(tmp_path)])
    assert [*first, *second] == expected
    again, _ = finetune(
        Layout.single(), "SST-2", [*words, "--load", str(tmp_path), "--ckpt-step", "5"]
    )
    assert again == second
    only_evaluates = [*words[words.index("--valid-data") :][:2], "--epochs", "0"]
    for step, is_there in ((5, True), (6, False)):
        named = [*only_evaluates, "--load", str(tmp_path), "--ckpt-step", str(step)]
        if is_there:
            assert finetune_command.parse("SST-2", named, 1).config.checkpoint.ckpt_step == step
            continue
        with pytest.raises(
            CheckpointError, match="^--ckpt-step 6: .* available iterations: .*5: give one"
        ):
            finetune_command.parse("SST-2", named, 1)


def test_a_new_run_in_the_folder_of_another_keeps_its_own_best(toy, tmp_path):
    words = _sst(toy, "--save", str(tmp_path), "--epochs")
    finetune(Layout.single(), "SST-2", [*words, "4"])
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text())["score"] == 1
    finetune(Layout.single(), "SST-2", [*words, "1", "--lr", "1e-9"])
    record = json.loads((tmp_path / "best" / "evaluation.json").read_text())
    assert record["iteration"] == open_checkpoint(tmp_path / "best").iteration == 8
    assert record["score"] < 1


def test_an_epoch_whose_evaluation_failed_is_evaluated_when_the_run_resumes(
    toy, tmp_path, capsys, monkeypatch
):
    words = _sst(toy, "--save", str(tmp_path), "--epochs", "3")

    def fail(self, run):
        raise DataError("no evaluation")

    with monkeypatch.context() as patch:
        patch.setattr(Finetuning, "evaluate", fail)
        with pytest.raises(DataError):
            finetune(Layout.single(), "SST-2", words)
    losses, _ = finetune(Layout.single(), "SST-2", [*words, "--load", str(tmp_path)])
    assert len(losses) == 16
    evaluated = re.findall(r"SST-2 at iteration (\d+)", capsys.readouterr().out)
    assert evaluated == ["8", "16", "24"]


def test_heads_of_pretraining_are_not_said_to_be_drawn(toy, tmp_path, capsys):
    finetune(Layout.single(), "SST-2", _sst(toy, "--epochs", "1", "--save", str(tmp_path)))
    words = _sst(toy, "--epochs", "1", "--load", str(tmp_path), "--finetune")
    finetune(Layout.single(), "SST-2", words)
    said = capsys.readouterr().out
    assert "successfully loaded checkpoint" in said
    assert "new weights" not in said


def _counts(last):
    return target.count_classes(last.all_files.labels, last.all_files.predictions, 2)


LAYOUTS = [
    (2, {}, []),
    (2, {"tensor": 2}, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    (2, {"pipeline": 2}, ["--pipeline-model-parallel-size", "2"]),
    (2, {}, ["--use-distributed-optimizer"]),
]


def _finetune_each(layout, tasks):
    return [finetune(layout, task, words) for task, words in tasks.items()]


@pytest.mark.parametrize(("processes", "sizes", "flags"), LAYOUTS)
def test_every_layout_learns_as_one_process(toy, processes, sizes, flags):
    words = _sst(toy, "--epochs", "1")
    tasks = {
        "SST-2": words,
        "RACE": [word.replace(".tsv", "") for word in words],
        "STS-B": [word.replace(".tsv", ".sts") for word in words],
    }
    expected = _finetune_each(Layout.single(), tasks)
    assert [len(last.all_files.labels) for _, last in expected] == [23, 14, 23]
    split = {task: [*words, *flags] for task, words in tasks.items()}
    for got in run_distributed(processes, _finetune_each, split, **sizes):
        for (losses, last), (expected_losses, at_end) in zip(got, expected, strict=True):
            assert losses == pytest.approx(expected_losses, rel=1e-4)
            assert last.all_files.labels == at_end.all_files.labels
            assert last.all_files.predictions == pytest.approx(
                at_end.all_files.predictions, rel=1e-4
            )


def test_an_evaluation_has_no_dropout(toy, tmp_path):
    words = [word.replace(".tsv", ".sts") for word in _sst(toy, "--epochs", "1")]
    words += ["--hidden-dropout", "0.5", "--attention-dropout", "0.5", "--save", str(tmp_path)]
    _, trained = finetune(Layout.single(), "STS-B", words)
    again = ["--load", str(tmp_path), "--epochs", "0", "--valid-data", str(toy[0] / "dev.sts")]
    _, evaluated = finetune(Layout.single(), "STS-B", again)
    expected = pytest.approx(trained.all_files.predictions, rel=1e-4)
    assert evaluated.all_files.predictions == expected


def test_several_files_are_told_apart(toy, tmp_path, capsys):
    folder, _ = toy
    lines = (folder / "dev.tsv").read_text().splitlines()[1:]
    (tmp_path / "one.tsv").write_text("\n".join(lines[:5]))
    files = ["--valid-data", str(folder / "dev.tsv"), str(tmp_path / "one.tsv")]
    words = [*_sst(toy, "--epochs", "1"), *files, "--results", str(tmp_path / "out.json")]
    _, last = finetune(Layout.single(), "SST-2", words)
    assert [len(found.labels) for found in last.by_file.values()] == [23, 5]
    assert "all files: number correct" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["results"]["total_examples"] == 28


@pytest.mark.parametrize("task", ["MNLI", "QQP", "RACE"])
def test_the_real_samples_run_from_start_to_end(toy, shared_data, tmp_path, task):
    folder = shared_data / "eval"
    train, valid = {
        "MNLI": (folder / "mnli" / "train.tsv", folder / "mnli" / "dev_matched.tsv"),
        "QQP": (folder / "qqp" / "train.tsv", folder / "qqp" / "dev.tsv"),
        "RACE": (
            folder / "race" / "RACE-originals" / "train",
            folder / "race" / "RACE-originals" / "dev",
        ),
    }[task]
    counts = {"MNLI": (700, 300), "QQP": (10_000, 10_000), "RACE": (None, None)}[task]
    read = read_race if task == "RACE" else lambda path: read_glue(task, path)
    examples = [len(read(str(path))) for path in (train, valid)]
    assert counts == (None, None) or tuple(examples) == counts
    if task == "QQP":  # to save time
        for path in (train, valid):
            (tmp_path / path.name).write_text("".join(path.read_text().splitlines(True)[:200]))
        train, valid = tmp_path / "train.tsv", tmp_path / "dev.tsv"
        examples = [199, 199]
    batch = "8" if task == "RACE" else "64"
    words = [*toy[1], "--train-data", str(train), "--valid-data", str(valid), "--lr", "1e-3"]
    words += ["--epochs", "1", "--micro-batch-size", batch, "--keep-last"]
    losses, last = finetune(Layout.single(), task, words)
    assert len(losses) == -(-examples[0] // int(batch))
    assert len(last.all_files.labels) == examples[1]


def test_an_epoch_is_saved_and_evaluated_when_its_last_sample_was_trained_on(toy, tmp_path, capsys):
    assert finetune_command.epoch_ends(3, 64, 8) == {8, 16, 24}
    words = _sst(toy, "--epochs", "3", "--keep-last", "--save", str(tmp_path))
    losses, _ = finetune(Layout.single(), "SST-2", words)
    assert len(losses) == 26  # 3 x 67 samples in batches of 8
    said = capsys.readouterr().out
    assert re.findall(r"SST-2 at iteration (\d+)", said) == ["9", "17", "26"]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000009",
        "iter_0000017",
        "iter_0000026",
    ]


@pytest.mark.parametrize(
    ("task", "better", "worse"),
    [
        # The same prediction for all samples is right more often, but has no correlation.
        ("CoLA", (0, 0, 1, 0, 0, 0), (1, 1, 1, 1, 1, 1)),
        # Equally often right, but F1 is 0.8 and 0.67.
        ("MRPC", (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 1, 1)),
        ("QQP", (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 1, 1)),
        ("MNLI", (1, 1, 1, 1, 1, 1), (0, 2, 2, 2, 2, 2)),
    ],
)
def test_the_best_is_by_the_metric_of_glue(task, better, worse):
    target, _ = finetune_command.find_target(task)
    labels = (0, 0, 1, 1, 1, 1)
    scores = [target.score(target.metrics(Predictions(labels, found))) for found in (better, worse)]
    assert scores[0] > scores[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--task MNLI needs --epochs"),
        (["--epochs", "1"], "--task MNLI needs --train-data"),
        (["--epochs", "0"], "--epochs 0 without --valid-data"),
        (["--epochs", "1"], "--pretrained-checkpoint is required"),
        (["--epochs", "1", "--train-data", "/no"], "--train-data /no: no such file"),
        (
            ["--valid-data", "/no", "/other", "/other/../no"],
            "/other/../no: this file is given twice",
        ),
        (["--epochs", "1", "--results", "x"], "--results x without --valid-data: nothing is"),
        (["--epochs", "1", "--overwrite"], "--overwrite without --results: there is no file"),
        (["--train-iters", "5"], "--train-iters: --epochs sets the length of training"),
        (["--dataloader-type", "cyclic"], "a task always shuffles each epoch"),
        (["--lora-rank", "4"], "a task trains all weights, because its head is new"),
        (["--rampup-batch-size", "4", "4", "8"], "--rampup-batch-size: epochs need batches of"),
        (["--step-batch-size-schedule", "0:4 9:8"], "--step-batch-size-schedule: epochs need"),
        (["--mock-data"], "--mock-data: give labeled texts as --train-data"),
        (["--iterations-to-skip", "3"], "this could skip the end of an epoch"),
        (["--ckpt-format", "torch"], "--ckpt-format torch: Megatron Core has no heads for tasks"),
        (["--log-validation-ppl-to-tensorboard"], "a task's loss is not a token loss"),
        (["--strict-lambada"], "--strict-lambada belongs to WIKITEXT103, LAMBADA and PERPLEXITY"),
    ],
)
def test_mistakes_are_found_at_the_start(flags, message):
    with pytest.raises(ConfigError) as caught:
        finetune_command.parse("MNLI", flags, 1)
    assert message in str(caught.value)
    assert "--tokenizer-type" not in str(caught.value)  # the checkpoint would name it


def test_what_a_training_needs_is_asked_for(toy):
    folder, flags = toy
    words = [*flags, "--epochs", "1", "--train-data", str(folder / "train.tsv")]
    with pytest.raises(ConfigError) as caught:
        finetune_command.parse("SST-2", words, 1)
    lines = ["--micro-batch-size is required", "--lr is required"]
    assert [line.split(":")[0] for line in caught.value.problems] == lines


def test_losses_on_no_data_are_said_to_be_none(toy):
    words = _sst(toy, "--epochs", "1", "--eval-iters", "2", "--eval-interval", "4")
    assert finetune_command.parse("SST-2", words, 1).notices == ()
    at = words.index("--valid-data")
    without = words[:at] + words[at + 2 :]
    (line,) = finetune_command.parse("SST-2", without, 1).notices
    assert line == "--eval-iters 2 has no effect without --valid-data"
    (line,) = finetune_command.parse("SST-2", [*words, "--eval-iters", "0"], 1).notices
    assert line == "--eval-interval 4 has no effect without --eval-iters above 0"


def test_an_evaluation_takes_a_training_s_flags_and_says_so(toy, tmp_path):
    """All flags without effect, and only those, are named in one line."""
    words = _sst(toy, "--epochs", "1", "--save", str(tmp_path))
    finetune(Layout.single(), "SST-2", words)
    data, model = words[words.index("--valid-data") :][:2], ["--load", str(tmp_path)]
    plain = [*model, *data, "--epochs", "0", "--micro-batch-size", "5"]
    training = """--lr 1e-2 --lr-warmup-fraction 0.1 --min-lr 1e-5 --hidden-dropout 0.3
        --clip-grad 2 --weight-decay 0.1 --recompute-activations --save-interval 5
        --initial-loss-scale 4 --exit-interval 3 --profile --overlap-grad-reduce
        --calculate-per-token-loss""".split()
    parsed = finetune_command.parse("SST-2", [*plain, *training], 1)
    (line,) = parsed.notices
    start, flags = line.split(": ")
    assert start == "these flags have no effect here"
    assert set(flags.split(", ")) == {word for word in training if word.startswith("--")}
    assert parsed.config == finetune_command.parse("SST-2", plain, 1).config
    of_the_task = ["--train-data", str(toy[0] / "dev.sts"), "--keep-last"]  # for another task
    parsed = finetune_command.parse("SST-2", [*plain, *of_the_task], 1)
    assert parsed.notices == tuple(
        f"{flag} has no effect with --epochs 0" for flag in ("--train-data", "--keep-last")
    )
    _, one = finetune(Layout.single(), "SST-2", plain)
    _, other = finetune(Layout.single(), "SST-2", [*plain, *training, *of_the_task])
    assert one == other
    with pytest.raises(ConfigError, match="--skip-train cannot be combined with --epochs 1"):
        finetune_command.parse("SST-2", [*words, "--skip-train"], 1)


def test_every_sample_counts(toy):
    words = _sst(toy, "--epochs", "1", "--eval-iters", "1")
    weighted = [*words, "--calculate-per-token-loss"]
    (line,) = finetune_command.parse("SST-2", weighted, 1).notices
    reason = "because the loss is counted per sample"
    assert line == f"--calculate-per-token-loss has no effect, {reason}"
    layout = Layout.single()
    assert finetune(layout, "SST-2", weighted) == finetune(layout, "SST-2", words)


def test_less_than_a_batch_is_refused(toy):
    words = _sst(toy, "--epochs", "1", "--global-batch-size", "80")
    with pytest.raises(ConfigError, match="67 examples, fewer than a batch of 80"):
        finetune(Layout.single(), "SST-2", words)


def test_a_model_without_a_head_is_not_evaluated(toy):
    folder, flags = toy
    words = [*flags, "--epochs", "0", "--valid-data", str(folder / "dev.tsv")]
    with pytest.raises(CheckpointError, match="has no head .*, and --epochs 0 trains none"):
        finetune_command.parse("SST-2", words, 1)
    words = _sst(toy, "--epochs", "1", "--load", str(folder / "bert"))[2:]
    with pytest.raises(
        CheckpointError, match="--load .*: this model has no head .* --pretrained-checkpoint"
    ):
        finetune_command.parse("SST-2", words, 1)


def test_a_model_without_a_binary_head_gets_what_it_lacks(toy, tmp_path):
    """It gets a pooler and token types; other networks are refused, naming the flag."""
    flags = save_bert(tmp_path, "--bert-no-binary-head")
    words = [*_sst(toy, "--epochs", "1"), *flags]
    losses, last = finetune(Layout.single(), "SST-2", words)
    assert len(losses) == 8
    assert len(last.all_files.labels) == 23
    with pytest.raises(
        CheckpointError, match=r"--pretrained-checkpoint .* different network"
    ) as no:
        finetune(Layout.single(), "SST-2", [*words, "--num-attention-heads", "4"])
    assert "--num-attention-heads is 4 here and 2 in the checkpoint" in str(no.value)


def test_another_kind_of_network_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds a gpt, but a bert is needed"):
        finetune_command.parse(
            "MNLI", ["--pretrained-checkpoint", save_toy(str(tmp_path)), "--epochs", "1"], 1
        )


def test_pretrained_weights_are_taken_and_only_the_head_is_new(toy):
    folder, flags = toy
    reader = open_checkpoint(folder / "bert")
    held = {name for name in reader.names() if name.startswith("model.")}
    # With another seed, so that new weights differ from the saved ones, which are untrained.
    parsed = finetune_command.parse("SST-2", _sst(toy, "--epochs", "1", "--seed", "7"), 1)
    config, recipe, extras = finetune_command.prepare("SST-2", parsed, 1)
    run = build_run(config, recipe, Device.cpu(), Layout.single())
    extras.begin(run)
    new = set()
    for name, parameter in run.named_parameters():
        if f"model.{name}" not in held:
            new.add(name)
            continue
        shape = tuple(parameter.shape)
        saved = reader.read(f"model.{name}", Box.whole(shape), global_shape=shape)
        assert torch.equal(parameter.detach(), saved), name
    assert new == {"classification_head.weight", "classification_head.bias"}


@pytest.mark.parametrize(
    "record",
    [
        *("[" * 100_000, "", "5", '{"iteration": 8, "score": NaN, "of": ["accuracy"]}'),
        *('{"iteration": 8, "of": ["accuracy"]}', '{"score": 0.5, "of": ["accuracy"]}'),
        '{"iteration": 8, "score": 1e999, "of": ["accuracy"]}',
        '{"iteration": 8, "score": "1", "of": ["accuracy"]}',
    ],
    ids=["deep", "empty", "a number", "NaN", "none", "no iteration", "infinity", "text"],
)
def test_a_damaged_record_of_the_best_weights_is_no_score(tmp_path, record):
    """No score beats NaN or infinity, so the best weights would never be saved again."""
    (tmp_path / "evaluation.json").write_text(record)
    assert _best_score(tmp_path, ("accuracy",), resumed=8) == -2.0


def test_a_record_of_the_best_weights_counts_for_the_run_that_continues_from_them(tmp_path):
    (tmp_path / "evaluation.json").write_text('{"iteration": 8, "score": 0.5, "of": ["accuracy"]}')
    found = [_best_score(tmp_path, ("accuracy",), resumed) for resumed in (0, 7, 8, 9)]
    assert found == [-2.0, -2.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("early_exit", "evaluated"),
    [(None, [2, 3]), ("checkpointed", [2, 3]), ("immediate", [])],
)
def test_an_epoch_s_end_is_evaluated_unless_the_run_must_end_immediately(early_exit, evaluated):
    found, run = [], SimpleNamespace(progress=SimpleNamespace(iteration=0))
    callback = EpochEvaluation({2, 3}, lambda run: found.append(run.progress.iteration))
    exit_ = early_exit and SimpleNamespace(is_immediate=early_exit == "immediate")
    interrupted = []
    for _ in range(4):
        interrupted.append(callback.interrupts(run))
        run.progress.iteration += 1
        callback.after_step(run, None, exit_)
    assert found == evaluated
    assert interrupted == [False, True, True, False]


@pytest.mark.parametrize(
    ("iteration", "finished", "catches_up", "evaluated"),
    [
        (2, False, True, True),
        (2, False, False, False),
        (2, True, True, False),
        (4, False, True, False),
    ],
)
def test_a_run_that_resumes_at_an_epoch_s_end_evaluates_it(
    iteration, finished, catches_up, evaluated
):
    found = []
    run = SimpleNamespace(progress=SimpleNamespace(iteration=iteration), finished=finished)
    EpochEvaluation({2, 3}, found.append, catches_up=catches_up).on_start(run)
    assert found == [run] * evaluated


@pytest.mark.parametrize(("rank", "written"), [(0, True), (1, False)])
@pytest.mark.parametrize(("last", "again"), [(None, True), (5, True), (6, False)])
def test_the_end_evaluates_what_has_not_been_evaluated(rank, written, last, again, monkeypatch):
    extras = Finetuning(None, pretrained=None, valid={"a": []}, epoch_ends={3}, options=None)
    extras.last = last and SimpleNamespace(iteration=last)
    evaluated, results = [], []

    def evaluate(run):
        evaluated.append(run)
        extras.last = SimpleNamespace(iteration=run.progress.iteration)

    monkeypatch.setattr(extras, "evaluate", evaluate)
    monkeypatch.setattr(extras, "_write", lambda _, last: results.append(last.iteration))
    run = SimpleNamespace(
        progress=SimpleNamespace(iteration=6),
        layout=SimpleNamespace(world=SimpleNamespace(rank=rank)),
    )
    extras.end(run)
    assert len(evaluated) == again
    assert results == [6] * written
