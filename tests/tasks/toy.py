"""A toy checkpoint and its evaluation, in this process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import parse_config
from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.tasks import finetune_command, language_model
from megatron.training.build import build_run
from megatron.training.checkpointing import save_run
from megatron.training.loop import standard_callbacks, train
from pretrain_bert import BertRecipe
from tests.distributed import as_given
from tests.training.toy import Recorder, build_toy

SAVING = ["--save-interval", "1", "--eval-iters", "0"]


def save_toy(folder: str, words: Sequence[str] = ()) -> str:
    """Save an untrained toy model in `folder`, and return the folder."""
    save_run(build_toy(Layout.single(), [*SAVING, "--save", folder, *words]))
    return folder


def evaluate(layout: Layout, task: str, words: Sequence[str]) -> Any:
    """Return the numbers for a task's command line."""
    parsed = language_model.parse(task, list(words), layout.world.size)
    layout = as_given(layout, parsed.config)
    return language_model.evaluate(task, parsed, Device.cpu(), layout)


WORDS = [f"w{i}" for i in range(40)]
BERT = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 24
    --max-position-embeddings 24 --micro-batch-size 2 --lr 1e-2 --train-iters 1
    --hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 8 --mock-data
    --num-workers 0 --eval-iters 0 --no-exit-signal-handler --init-method-std 0.2
    --tokenizer-type BertWordPieceLowerCase
""".split()


def save_bert(folder: Path, *more: str) -> list[str]:
    """Save an untrained toy BERT in `folder`; return the flag that names it."""
    vocabulary = folder / "vocab.txt"
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "a", "b", "c", "d"]
    vocabulary.write_text("\n".join(entries) + "\n")
    words = [*BERT, *SAVING, "--save", str(folder / "bert"), "--vocab-file", str(vocabulary)]
    words += more
    parsed = parse_config(words, world_size=1, architecture="bert")
    layout = Layout.single()
    save_run(build_run(parsed.config, BertRecipe(), Device.cpu(), layout))
    return ["--pretrained-checkpoint", str(folder / "bert")]


def finetune(layout: Layout, task: str, words: Sequence[str]) -> tuple[list[float], Any]:
    """Finetune as a command line says; return the losses, and the last evaluation by file."""
    size = layout.world.size
    given = [*words, "--no-exit-signal-handler", "--num-workers", "0", "--log-interval", "100"]
    parsed = finetune_command.parse(task, given, size)
    config, recipe, extras = finetune_command.prepare(task, parsed, size)
    run = build_run(config, recipe, Device.cpu(), as_given(layout, config))
    extras.begin(run)
    recorder = Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    if not config.training.skip_train:
        train(run, [*callbacks, *extras.callbacks(run)])
    extras.end(run)
    return recorder.values("lm loss"), extras.last
