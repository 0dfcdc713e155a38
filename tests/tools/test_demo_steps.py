"""The steps of `make demo`, without running them: commands, folders, statistics, the report."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from megatron.data.indexed import IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from megatron.tools import demo
from megatron.tools.demo_kinds import _MASKED_LINES, KINDS, mask_a_word, small_kind


@pytest.mark.parametrize(
    ("documents", "split", "first"),
    [(2, "1,1,0", 1), (39, "38,1,0", 38), (40, "38,2,0", 38), (1000, "950,50,0", 950)],
)
def test_a_twentieth_of_the_documents_is_held_out(documents: int, split: str, first: int) -> None:
    assert demo.split_of(documents) == (split, first)


def test_one_document_is_too_few() -> None:
    with pytest.raises(DataError, match=r"the input has 1 document; give at least 2"):
        demo.split_of(1)


def test_commands_are_broken_at_flags() -> None:
    command = ["python", "-m", "x y", "--" + "a" * 70, "1", "--b", "2 3", "--c"]
    assert demo.format_command(command).split(" \\\n") == [
        "python -m 'x y' --" + "a" * 70 + " 1",
        "    --b '2 3' --c",
    ]
    for length, lines in ((68, 1), (69, 2)):  # a line of 70 characters takes another flag
        command = ["p", "a" * length, "--b"]
        assert len(demo.format_command(command).splitlines()) == lines


def test_the_masked_word_is_near_the_middle() -> None:
    assert mask_a_word("one two three four five") == "one two [MASK] four five"
    assert mask_a_word("one two = 4 five") == "one [MASK] = 4 five"
    assert mask_a_word("1 2 3") == "1 [MASK] 3"
    long = mask_a_word(" ".join(["w"] * 40)).split()
    assert (len(long), long.index("[MASK]")) == (30, 15)


def _words(path: Path, *words: str) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def _write_dataset(prefix: Path, documents: Sequence[Sequence[int]]) -> None:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for tokens in documents:
            builder.add_documents(tokens, [len(tokens)], [1])


def test_statistics_are_those_of_the_documents_held_out(tmp_path: Path) -> None:
    _words(tmp_path / "t.json", "a", "bb", "c")
    short, long = [0, 1, 1, 0], [1] * 8
    _write_dataset(tmp_path / "d", [[2] * 9, short, long, *[[0] * 9] * 6])
    from megatron.data.indexed import IndexedDataset

    data = IndexedDataset(tmp_path / "d")
    found = demo.describe_validation(data, 1, tmp_path / "t.json")
    share = 10 / 66  # of the tokens are "bb"
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert found.entropy == pytest.approx(entropy)
    assert found.bytes_per_token == pytest.approx((66 + 10 + 65) / 66)
    assert found.texts == ["bb bb bb bb bb bb bb bb", *["a a a a a a a a a"] * 4]
    _write_dataset(tmp_path / "e", [[2] * 9, short, [1] * 7])
    found = demo.describe_validation(IndexedDataset(tmp_path / "e"), 1, tmp_path / "t.json")
    assert found.texts == ["a bb bb a", "bb bb bb bb bb bb bb"]


def test_the_last_validation_loss_is_reported(tmp_path: Path) -> None:
    records = [{"lm loss validation": 3}, {"lm loss": 1}, {"lm loss validation": 2.5}, {"x": 0}]
    (tmp_path / "m.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    assert demo.last_validation_loss(tmp_path / "m.jsonl") == 2.5


def test_a_folder_is_moved_replaced_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, settings = tmp_path / "deep" / "out", {"model": "gpt"}
    demo.open_folder(out, settings, overwrite=False)
    assert demo.read_settings(out) == settings
    (out / "loss.png").touch()
    capsys.readouterr()
    for number in (1, 2):
        demo.open_folder(out, settings, overwrite=False)
        moved = f"An earlier run with the same settings in {out} was moved to {out}.{number}.\n\n"
        assert capsys.readouterr().out == moved
    assert (tmp_path / "deep" / "out.1" / "loss.png").exists()
    assert [path.name for path in out.iterdir()] == [demo.MARKER]
    (out / "tokenizer").mkdir()
    (out / "tokenizer" / "vocab.txt").touch()
    for name in ("loss.png", "notes.txt", "corpus_text_document.bin"):
        (out / name).touch()
    with pytest.raises(ConfigError, match="corpus_text_document.bin already exists and is not"):
        demo.open_folder(out, {"model": "bert"}, overwrite=False)
    demo.open_folder(out, {"model": "bert"}, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [demo.MARKER, "notes.txt"]
    assert demo.read_settings(out) == {"model": "bert"}
    (out / demo.MARKER).unlink()
    with pytest.raises(ConfigError, match="notes.txt already exists"):
        demo.open_folder(out, settings, overwrite=False)


@pytest.fixture(name="steps")
def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Record the steps of a demo, and write what later steps read."""
    steps: list[tuple[str, list[str]]] = []

    def run_step(title: str, command: list[str]) -> None:
        steps.append((title, list(command)))

        def given(flag: str) -> Path:
            return Path(command[command.index(flag) + 1])

        if "tokenizer" in command:
            _words(given("--output-dir") / "tokenizer.json", "a", "bb", "c")
        elif "preprocess" in command:
            ending = "sentence" if "--split-sentences" in command else "document"
            prefix = f"{given('--output-prefix')}_text_{ending}"
            _write_dataset(Path(prefix), [[0, 1, 0, 1, 0, 1, 0, 1]] * 40)
        elif "--metrics-jsonl" in command:
            given("--metrics-jsonl").write_text('{"lm loss validation": 0.5}\n')

    monkeypatch.setattr(demo, "run_step", run_step)
    return steps


def test_the_steps_of_a_gpt_from_the_standard_library(
    steps: list[tuple[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    written = []
    monkeypatch.setattr(
        demo, "write_standard_library", lambda *args, **more: written.append((args, more))
    )
    monkeypatch.setattr(demo, "processes", lambda: (2, False))
    monkeypatch.setattr(demo, "share_cores", lambda count: None)
    demo.run(demo.build_parser().read(["--out", str(out), "--iters", "40"]))
    assert written == [((out / "corpus.jsonl",), {"in_lines": False})]
    assert demo.read_settings(out) == {"model": "gpt", "input": None, "iterations": 40}
    t = f"{out}/tokenizer"
    gpt2 = ["--tokenizer-type", "GPT2BPETokenizer"]
    gpt2 += ["--vocab-file", f"{t}/vocab.json", "--merge-file", f"{t}/merges.txt"]
    launch = "python -m megatron.processes.torchrun --standalone --nproc-per-node 2"
    sizes = "--micro-batch-size 4 --global-batch-size 8 --train-iters 40"
    every = "--eval-interval 10 --eval-iters 40"
    titles, commands = zip(*steps, strict=True)
    assert list(titles) == [
        "Train a byte-level BPE tokenizer",
        "Turn the text into token ids",
        "Pretrain a small GPT on 2 processes on the CPU",
        "Draw the loss curve",
        "Generate text",
    ]
    assert commands[0] == [
        *["megatron", "data", "tokenizer", "--input", f"{out}/corpus.jsonl"],
        *["--vocab-size", "2048", "--output-dir", t],
    ]
    assert commands[1] == [
        *["megatron", "data", "preprocess", "--input", f"{out}/corpus.jsonl"],
        *["--output-prefix", f"{out}/corpus", *gpt2, "--append-eod", "--workers", "2"],
    ]
    assert commands[2] == [
        *f"{launch} pretrain_gpt.py".split(),
        *KINDS["gpt"].training_flags,
        *sizes.split(),
        *["--data-path", f"{out}/corpus_text_document", "--split", "38,2,0", "--num-workers", "0"],
        *gpt2,
        *every.split(),
        *["--save", f"{out}/checkpoints", "--save-interval", "40"],
        *["--tensorboard-dir", f"{out}/tensorboard", "--metrics-jsonl", f"{out}/metrics.jsonl"],
        *["--log-interval", "2"],
    ]
    assert commands[3] == [
        *["megatron", "plot", "--metrics", f"{out}/metrics.jsonl", "--output", f"{out}/loss.png"],
        *["--entropy", "0.6931"],
    ]
    assert commands[4] == [
        *["megatron", "generate", "--load", f"{out}/checkpoints"],
        *["--prompt", "    def __init__(self", "--out-seq-length", "100"],
        *"--num-samples 2 --temperature 0.7 --top_k 40 --seed 1".split(),
    ]
    said = capsys.readouterr().out
    bits = 1 / (math.log(2) * (16 * 1 + 8 + 15) / 16)  # documents are joined by spaces
    assert f"validation loss  0.500 nats per token, {0.5 * bits:.3f} bits per byte\n" in said
    assert f"unigram entropy  0.693 nats per token, {math.log(2) * bits:.3f} bits per" in said
    assert f"    make serve OUT={out}\n" in said
    assert re.search(r"^time +\d s$", said, re.MULTILINE)


def test_the_steps_of_a_bert_from_a_text_on_gpus(
    steps: list[tuple[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = tmp_path / "my.jsonl", tmp_path / "out"
    source.write_text('{"text": "a"}\n{"text": "b"}\n')
    monkeypatch.setattr(demo, "processes", lambda: (3, True))
    monkeypatch.setattr(demo, "share_cores", lambda count: None)
    words = ["--model", "bert", "--input", str(source), "--iters", "7", "--out", str(out)]
    demo.run(demo.build_parser().read(words))
    (_, first), (_, second), (title, training), _, (_, last) = steps
    assert first[3:7] == ["--input", str(source), "--kind", "wordpiece"]
    assert second[-3:] == ["--split-sentences", "--workers", "2"]
    assert "--append-eod" not in second
    assert title == "Pretrain a small BERT on 3 GPUs"
    flags = " ".join(training)
    assert " --nproc-per-node 3 pretrain_bert.py " in flags
    assert "--micro-batch-size 5 --global-batch-size 15 --train-iters 7 --bf16 " in flags
    assert "--eval-interval 1 --eval-iters 7 " in flags
    assert flags.endswith("--log-interval 1")
    assert f"--data-path {out}/corpus_text_sentence --split 38,2,0" in flags
    assert last == [
        *["megatron", "fill-in", "--load", f"{out}/checkpoints", "--text"],
        *["a bb a bb [MASK] bb a bb"] * 2,
    ]
    said = capsys.readouterr().out
    assert "validation loss  0.500 nats per masked token\n" in said
    assert "make demo MODEL=bert INPUT=my.jsonl" in said
    assert f"    .venv/bin/megatron fill-in --load {out}/checkpoints --text 'while [MASK]:'" in said


def test_source_code_has_lines_instead_of_sentences(
    steps: list[tuple[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(
        demo, "write_standard_library", lambda *args, **more: written.append((args, more))
    )
    monkeypatch.setattr(demo, "processes", lambda: (2, False))
    monkeypatch.setattr(demo, "share_cores", lambda count: None)
    demo.run(demo.build_parser().read(["--model", "t5", "--out", str(tmp_path / "out")]))
    assert written == [((tmp_path / "out" / "corpus.jsonl",), {"in_lines": True})]
    preprocessing, training, filling = steps[1][1], steps[2][1], steps[4][1]
    assert not {"--split-sentences", "--append-eod"} & set(preprocessing)
    assert str(tmp_path / "out" / "corpus_text_document") in training
    assert training[training.index("--train-iters") + 1] == "2000"
    assert filling[4:] == ["--text", *_MASKED_LINES]


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ("--model retro --input in.jsonl", ConfigError, "--input: the demo of Retro generates its"),
        ("--input none.jsonl", DataError, "--input none.jsonl: no such file: give the path"),
        ("--iters 0", ConfigError, "--iters 0: give at least 1"),
        ("--input in.jsonl --out .", ConfigError, "in.jsonl: is inside --out .*: choose another"),
        ("--input bad.jsonl --out out", DataError, "bad.jsonl:3: no key 'text'; fix or remove the"),
        ("--input one.jsonl --out out", DataError, r"the input has 1 document; give at leas"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(
    words: str,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    Path("bad.jsonl").write_text('{"text": "a"}\n\n{"x": "b"}\n')
    Path("one.jsonl").write_text('{"text": "a"}\n\n')
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind, match=message):
        demo.run(demo.build_parser().read(words.split()))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("code", [0, 3])
def test_a_step_that_fails_ends_the_demo(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []

    def run(argv: list[str], **options: Any) -> SimpleNamespace:
        ran.append((argv, options["cwd"]))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["tools/demo.py"])
    if code:
        with pytest.raises(SystemExit) as ended:
            demo.run_step("Draw", ["megatron", "plot"])
        assert ended.value.code == 3
        assert "\ndemo: the step above failed (Draw); see its message" in capsys.readouterr().err
    else:
        demo.run_step("Draw", ["megatron", "plot"])
        demo.run_step("Other", ["python", "x.py"])
        assert "\n=== Draw\n$ megatron plot\n\n[0 s]\n" in capsys.readouterr().out
        assert ran[1][0] == ["python", "x.py"]
    assert ran[0] == (["python", "-m", "megatron", "plot"], demo.ROOT)


def test_a_recipe_s_network_at_the_size_of_a_demo() -> None:
    model = {"swiglu": True, "normalization": "RMSNorm", "num_query_groups": 8, "hidden_size": 99}
    kind = small_kind("gpt", model)
    assert (kind.name, kind.iterations) == ("GPT", 333)
    assert kind.blocks.split() == [
        *("--normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2".split())
    ]
    assert small_kind("gpt", {"num_experts": 4}).name == "MoE"
    assert small_kind("gpt", {}).blocks == ""
    with pytest.raises(ConfigError, match=r"--small: there is no demo for this kind .*\(mamba\)"):
        small_kind("mamba", {})
