#!/usr/bin/env python3
"""Finetune a GPT on selected texts, and validate on the data that it was pretrained on.

This is `pretrain_gpt.py` with one additional flag: --data-path2 names the validation data, in the
format of --data-path. As in Megatron-LM, only the last 2% of that data is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("finetune_gpt.py")

from megatron.config import RunConfig
from megatron.config.arguments import split
from megatron.data.datasets import Datasets
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import SampleCounts
from pretrain_gpt import GPTRecipe

_SPLIT = "98,2,0"  # Megatron-LM's split of --data-path2
_OWN = "--data-path2"
_WITHOUT_EFFECT = ("--eval-ppl", "--stored_params")  # flags that Megatron-LM's script also ignores


class FinetuneRecipe(GPTRecipe):
    """Next-token prediction, validated on different data from the training data."""

    program = "finetune_gpt.py"

    def __init__(self, validation: Sequence[str]) -> None:
        """Store the values of --data-path2. If there are none, --data-path is used instead."""
        self._validation = tuple(validation)

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build the samples of both datasets. Collective."""
        if not self._validation:
            return super().build_datasets(config, tokenizer, samples, layout)
        train, valid, test = samples
        data = replace(
            config.data,
            data_path=self._validation,
            split=_SPLIT,
            train_data_path=None,
            valid_data_path=None,
            test_data_path=None,
            blend_schedule=None,
        )
        other = replace(config, data=data)
        trained, _, tested = super().build_datasets(config, tokenizer, (train, 0, test), layout)
        _, validated, _ = super().build_datasets(other, tokenizer, (0, valid, 0), layout)
        return Datasets(trained, validated, tested)


def run(arguments: Sequence[str]) -> int:
    """Run one process, and return the exit code."""
    flags = split(arguments)
    validation = [word for flag in flags if flag.name == _OWN for word in flag.values]
    rest = [flag for flag in flags if flag.name not in (_OWN, *_WITHOUT_EFFECT)]
    arguments = [part for flag in rest for part in (flag.name, *flag.values) if part]
    return main(FinetuneRecipe(validation), arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
