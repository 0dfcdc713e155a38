#!/usr/bin/env python3
"""Finetune a GPT on conversations: `pretrain_gpt.py --sft` with the defaults of finetuning.

python finetune.py --help                                             all flags
python finetune.py --load Qwen3-0.6B --data-path chats.jsonl ...      one process
torchrun --nproc-per-node 8 finetune.py --data-path chats.jsonl ...   eight processes

The defaults are --sft, --calculate-per-token-loss, and --finetune if --load names another folder
than --save, from which a run continues.
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

from megatron.config.finetuning import finetuning_words
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe


class FinetuningRecipe(GPTRecipe):
    """The recipe of `pretrain_gpt.py`, under this program's name."""

    program = "finetune.py"


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(FinetuningRecipe(), finetuning_words(sys.argv[1:])))
