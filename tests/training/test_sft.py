"""Finetuning on conversations: TRL's losses, with and without packing, on several ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.config import RunConfig, parse_config
from megatron.config.data import TokenizerConfig
from megatron.config.finetuning import finetuning_args
from megatron.parallel.layout import Layout
from megatron.recipes.derive import derive_flags
from megatron.tokenizer import build_tokenizer
from megatron.tools.checkpoint.util import main as convert
from megatron.training.build import build_run
from megatron.training.loop import standard_callbacks, train
from pretrain_gpt import GPTRecipe
from tests.distributed import run_distributed, toy_device
from tests.training.toy import Recorder
from tests.training.trl import (
    FEW,
    LEARNING_RATE,
    LENGTH,
    LONG,
    MANY,
    RECORDED,
    RECORDINGS,
    STEPS,
    TEMPLATE,
    record,
    write_conversations,
    write_model,
    write_styled,
)

_FLAGS = f"""
    --seq-length {LENGTH} --micro-batch-size 1 --lr {LEARNING_RATE} --lr-decay-style constant
    --weight-decay 0 --adam-beta2 0.999 --clip-grad 1 --hidden-dropout 0 --attention-dropout 0
    --num-workers 0 --log-interval 1 --eval-iters 0 --no-exit-signal-handler
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_model(found)
    write_conversations(found / f"{FEW}.jsonl", FEW)
    return found


def _losses(layout: Layout, folder: Path, count: int, words: Sequence[str]) -> list[float]:
    return _records(layout, folder, count, words).values("lm loss")


def _records(layout: Layout, folder: Path, count: int, words: Sequence[str]) -> Recorder:
    """Return the records of a run, whose updates each train on every conversation by default."""
    given = [*derive_flags(folder)[1], *_FLAGS, "--load", str(folder), *words]
    given += ["--train-data-path", str(folder / f"{count}.jsonl")]

    def parse(*more: str) -> RunConfig:
        flags = finetuning_args([*given, *more])
        return parse_config(flags, world_size=layout.world.size).config

    config = parse()
    rows = GPTRecipe().epoch_samples(config, build_tokenizer(config.tokenizer), layout)
    if "--global-batch-size" not in words:
        config = parse("--global-batch-size", str(rows))
    run, recorder = (
        build_run(config, GPTRecipe(), toy_device(layout.world.rank), layout),
        Recorder(),
    )
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    _events[:] = [text for _, kind, text in recorder.events if kind == "sample"]
    return recorder


_events: list[str] = []  # the answers to --sample-prompts in the last run


@pytest.mark.parametrize("which", RECORDINGS)
def test_losses_are_those_of_trl(which: str, folder: Path, tmp_path: Path) -> None:
    name, _, packing = which.rpartition(", ")
    words = [] if packing == "packed" else ["--no-packing", "--micro-batch-size", "8"]
    if name == "few":
        losses = _losses(Layout(), folder, FEW, ["--train-epochs", str(STEPS), *words])
    else:
        write_styled(tmp_path, name)
        write_conversations(tmp_path / f"{MANY}.jsonl", MANY)
        words += ["--train-epochs", "1", "--seq-length", str(LONG)]
        losses = _losses(Layout(), tmp_path, MANY, words)
    assert losses == pytest.approx(json.loads(RECORDED.read_text())[which], rel=1e-5)


@pytest.mark.parametrize("which", RECORDINGS)
def test_the_record_is_what_trl_computes(which: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra [parity]")
    expected = json.loads(RECORDED.read_text())[which]
    assert record(which, tmp_path) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_two_processes_have_the_same_losses(axis: str, folder: Path) -> None:
    recorded = json.loads(RECORDED.read_text())["few, packed"][:4]
    losses = run_distributed(2, _split, folder, f"--{axis}-model-parallel-size", **{axis: 2})
    assert losses[-1] == pytest.approx(recorded, rel=1e-5)


@pytest.mark.parametrize("more", ["", "--eval-global-batch-size 10 --eval-micro-batch-size 5"])
def test_full_validation_evaluates_every_conversation(more: str, folder: Path) -> None:
    """The loss after an update equals the training loss of the next update on the same data."""
    words = "--train-epochs 4 --eval-interval 1 --full-validation".split()
    words += ["--valid-data-path", str(folder / f"{FEW}.jsonl"), *more.split()]
    records = _records(Layout(), folder, FEW, words)
    evaluated = records.values("lm loss validation")
    assert evaluated[:-1] == pytest.approx(records.values("lm loss")[1:], rel=1e-5)
    assert len(evaluated) == 4


def test_the_model_in_training_answers_prompts(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello world\nstop\n")
    words = ["--train-epochs", "4", "--sample-prompts", str(prompts), "--sample-interval", "2"]
    recorded = json.loads(RECORDED.read_text())["few, packed"][:4]
    assert _losses(Layout(), folder, FEW, [*words, "--sample-tokens", "6"]) == pytest.approx(
        recorded, rel=1e-5
    )
    alone = list(_events)
    assert [text.partition(" -> ")[0] for text in alone] == ["Hello world", "stop"] * 2
    assert alone[:2] != alone[2:], "the weights have changed"
    words += ["--sample-tokens", "6", "--tensor-model-parallel-size", "2"]
    for answers in run_distributed(2, _answers, folder, words, tensor=2):
        assert answers == alone


def _answers(layout: Layout, folder: Path, words: list[str]) -> list[str]:
    _losses(layout, folder, FEW, words)
    return _events


def _split(layout: Layout, folder: Path, flag: str) -> list[float]:
    flag = flag.replace("context-model", "context")
    return _losses(layout, folder, FEW, ["--train-epochs", "4", flag, "2"])


def test_the_export_has_the_template_and_the_end_of_turns(folder: Path, tmp_path: Path) -> None:
    template, saved, exported = (tmp_path / name for name in ("t.jinja", "saved", "exported"))
    text = TEMPLATE.replace("<|endoftext|>", "<|system|>")
    template.write_text(text)
    words = ["--train-iters", "1", "--chat-template", str(template), "--eval-iters", "0"]
    words += ["--save", str(saved), "--save-interval", "1"]
    _losses(Layout(), folder, FEW, words)
    where = ["--load-dir", str(saved), "--save-dir", str(exported)]
    assert convert(["--loader", "native", "--saver", "hf", "--model-type", "GPT", *where]) == 0
    assert (exported / "chat_template.jinja").read_text() == text
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(exported))
    )
    settings = json.loads((exported / "generation_config.json").read_text())
    assert [tokenizer.detokenize([end]) for end in settings["eos_token_id"]] == [
        "<|endoftext|>",
        "<|system|>",
    ]


LORA = ["--lora-rank", "4", "--lr", "1e-2"]


@pytest.mark.parametrize("words", [[], LORA, [*LORA, "--zero-stage", "3"]])
def test_two_replicas_train_as_one_process(words: list[str], folder: Path) -> None:
    """The replicas have different rows, with different numbers of trained tokens."""
    words = ["--train-epochs", "4", "--global-batch-size", "4", *words]
    (alone,) = run_distributed(1, _losses, folder, FEW, words)
    assert len(alone) == 7
    assert min(alone) < alone[0] - 0.1
    for losses in run_distributed(2, _losses, folder, FEW, words):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_adapters_resume_to_the_bit(folder: Path, tmp_path: Path) -> None:
    words = [*LORA, "--train-epochs", "4", "--lora-dropout", "0.1", "--save", str(tmp_path)]
    words += ["--save-interval", "2"]
    straight = _losses(Layout(), folder, FEW, words)
    again = ["--load", str(tmp_path), "--ckpt-step", "2", "--no-finetune"]
    assert _losses(Layout(), folder, FEW, [*words, *again]) == straight[2:]
