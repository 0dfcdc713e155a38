#!/usr/bin/env python3
r"""Evaluate a trained model on a downstream task, or finetune it for one.

python tasks/main.py --task LAMBADA --valid-data lambada_test.jsonl --load CHECKPOINTS
torchrun --nproc-per-node 8 tasks/main.py --task WIKITEXT103 --valid-data wiki.test.tokens \
    --load CHECKPOINTS --tensor-model-parallel-size 4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # the tasks are not part of the installed package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from megatron.command import guard_imports, run_command
from megatron.processes.launch import Launch
from tasks.table import OPTIONS, PROGRAM, TASKS, find_task


def main(argv: Sequence[str] | None = None) -> int:
    """Run one process of a task, and return its exit code, as `pretrain_gpt.py` does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "--help-all"} & set(arguments):
        return run_command(lambda: _help("--help-all" in arguments))
    from megatron.processes.process import run_process

    def work(launch: Launch) -> int:
        task = find_task(arguments)
        match TASKS[task].kind:
            case "language model":
                from tasks.language_model import run
            case "harness":
                from tasks.harness import run
            case "finetuning":
                from tasks.finetune_command import run
        return run(task, arguments, launch)

    return run_process(arguments, work)


def _help(everything: bool) -> None:
    from megatron.config.parser import show_help

    show_help(PROGRAM, OPTIONS, trains=False, everything=everything)
    print("\ntasks:")
    for name, task in TASKS.items():
        print(f"  {name.ljust(12)} {task.help}")


if __name__ == "__main__":
    guard_imports()
    sys.exit(main())
