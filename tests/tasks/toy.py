"""A toy checkpoint and the evaluation of it, in this process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import save_run
from tasks import language_model
from tests.training.toy import build_toy

SAVING = ["--save-interval", "1", "--eval-iters", "0"]


def save_toy(folder: str, words: Sequence[str] = ()) -> str:
    """An untrained toy model under `folder`."""
    save_run(build_toy(Layout.single(), [*SAVING, "--save", folder, *words]))
    return folder


def evaluate(layout: Layout, task: str, words: Sequence[str]) -> Any:
    """The numbers that a task's command line gives."""
    parsed = language_model.parse(task, list(words), layout.world.size)
    return language_model.evaluate(task, parsed, Device.cpu(), layout)
