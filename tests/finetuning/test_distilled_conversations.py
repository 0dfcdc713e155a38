"""Distillation on packed conversations: from a teacher or files of its logits, in three layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune import FinetuningRecipe
from megatron.config.finetuning import finetuning_args
from megatron.config.parser import parse_config
from megatron.finetuning.distillation import LOSS_NAMES, Distillation
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.loop import standard_callbacks, train
from tests.distributed import run_distributed, toy_device
from tests.inference.server.live import write_tokenizer
from tests.training.toy import Recorder

_FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --tokenizer-type HuggingFaceTokenizer --num-workers 0 --log-interval 1 --eval-iters 0
    --hidden-dropout 0 --attention-dropout 0 --train-epochs 2 --no-exit-signal-handler""".split()
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _words(folder: Path, *words: str) -> list[str]:
    own = f"--train-data-path {folder}/chats.jsonl --chat-template {folder}/chat.jinja"
    return [*_FLAGS, *own.split(), "--tokenizer-model", f"{folder}/tokenizer.json", *words]


def _finetune(layout: Layout, folder: Path, words: list[str]) -> list[list[float]]:
    """Finetune, or write logits; return both losses of every iteration."""
    config = parse_config(
        finetuning_args(_words(folder, *words)),
        world_size=layout.world.size,
        architecture="gpt",
    ).config
    recipe, device = FinetuningRecipe(), toy_device(layout.world.rank)
    extras = Distillation(recipe)
    if extras.replace_training(config, device, layout):
        return []
    run, recorder = build_run(config, recipe, device, layout), Recorder()
    extras.begin(run)
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    return [recorder.values(name) for name in LOSS_NAMES]


def test_conversations_are_distilled(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat.jinja").write_text(_TEMPLATE)
    lines = []
    for i in range(40):
        turns = [("user", f"What is {i} + 1?"), ("assistant", f"It is {i + 1}" + "!" * (i % 9))]
        lines.append(json.dumps({"messages": [{"role": r, "content": t} for r, t in turns]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    teacher, logits = str(tmp_path / "teacher"), str(tmp_path / "logits")
    bigger = ["--num-layers", "2", "--save", teacher, "--save-interval", "2"]
    _finetune(Layout.single(), tmp_path, bigger)
    write = f"--logits-save-dir {logits} --logits-save-top-k 1000 --logits-save-dtype fp32"
    _finetune(Layout.single(), tmp_path, ["--teacher-load", teacher, *write.split()])

    live = _finetune(Layout.single(), tmp_path, ["--teacher-load", teacher])
    assert len(live[0]) > 4
    assert live[1][-1] < live[1][0]
    from_files = ["--logits-load-dir", logits]
    context = run_distributed(
        2, _finetune, tmp_path, [*from_files, "--context-parallel-size", "2"], context=2
    )
    for found in (_finetune(Layout.single(), tmp_path, from_files), context[-1]):
        for ours, wanted in zip(found, live, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6)

    deep = ["--num-layers", "2", "--pipeline-model-parallel-size"]
    for source in (["--teacher-load", teacher], from_files):
        expected = _finetune(Layout.single(), tmp_path, [*source, *deep, "1"])
        stages = run_distributed(2, _finetune, tmp_path, [*source, *deep, "2"], pipeline=2)
        for ours, wanted in zip(stages[-1], expected, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6)

    lora = ["--teacher-load", teacher, "--lora-rank", "4"]
    alone = _finetune(Layout.single(), tmp_path, lora)
    assert alone[1][-1] < alone[1][0]
    for words, sizes in (("--zero-stage 2", {}), ("--tensor-model-parallel-size 2", {"tensor": 2})):
        split = run_distributed(2, _finetune, tmp_path, [*lora, *words.split()], **sizes)
        for ours, wanted in zip(split[-1], alone, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6)
