#!/usr/bin/env python3
"""Finetune a GPT on conversations or, with --preference-loss, on pairs of answers.

Without that flag, this is `pretrain_gpt.py --sft` with the defaults of finetuning.

python finetune.py --help-all                                         all flags
python finetune.py --load Qwen3-0.6B --data-path chats.jsonl ...      one process
torchrun --nproc-per-node 8 finetune.py --data-path chats.jsonl ...   eight processes

The defaults are --sft, --calculate-per-token-loss and, with --load, --finetune. If --load and
--save name the same folder, the run resumes from it, and --finetune is not set.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("finetune.py")
    gc.disable()  # as in pretrain_gpt.py

from megatron.config import RunConfig
from megatron.config.finetuning import finetuning_args
from megatron.finetuning.distillation import Distillation
from megatron.finetuning.kto import KTORecipe
from megatron.finetuning.preferences import PreferenceRecipe, RewardRecipe
from megatron.finetuning.reference import ReferenceLogProbs
from megatron.training.pretrain import Extras, main
from megatron.training.recipe import Recipe
from pretrain_gpt import GPTRecipe


class FinetuningRecipe(GPTRecipe):
    """The recipe of `pretrain_gpt.py`, under this program's name."""

    program = "finetune.py"


def choose(config: RunConfig) -> tuple[Recipe, Extras]:
    """Return the recipe that the flags select, and its additional steps around training."""
    if config.preferences.trains_reward_model:
        return RewardRecipe(), Extras()
    if config.preferences.trains_on_labels:
        return KTORecipe(), ReferenceLogProbs()
    if config.preferences.preference_loss is not None:
        return PreferenceRecipe(), ReferenceLogProbs()
    recipe = FinetuningRecipe()
    return recipe, Distillation(recipe)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(FinetuningRecipe(), finetuning_args(sys.argv[1:]), choose=choose))
