r"""Evaluate a trained model on a downstream task, or finetune it for one.

python tasks/main.py --task LAMBADA --valid-data lambada_test.jsonl --load CHECKPOINTS
torchrun --nproc-per-node 8 tasks/main.py --task WIKITEXT103 --valid-data wiki.test.tokens \
    --load CHECKPOINTS --tensor-model-parallel-size 4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.command import run_command
from megatron.processes.launch import Launch
from megatron.tasks.table import OPTIONS, PROGRAM, TASKS, find_task


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run this process's share of the task that `--task` names, and return the exit code.

    Args:
        argv: The command-line arguments. The default is `sys.argv[1:]`.
        program: The name of the program, for the help text.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help", "--help-all"} & set(arguments):
        return run_command(lambda: _help(program, "--help-all" in arguments))
    from megatron.processes.process import run_process

    def work(launch: Launch) -> int:
        task = find_task(arguments)
        match TASKS[task].kind:
            case "language model":
                from megatron.tasks.language_model import run
            case "harness":
                from megatron.tasks.harness import run
            case "dialogue":
                from megatron.tasks.dialogue import run
            case "finetuning":
                from megatron.tasks.finetune_command import run
            case "towers":
                from megatron.tasks.towers import run
            case "retrieval":
                from megatron.tasks.retrieval import run
        return run(task, arguments, launch)

    return run_process(arguments, work)


def _help(program: str, everything: bool) -> None:
    from megatron.config.parser import show_help

    show_help(program, OPTIONS, trains=False, everything=everything)
    print("\ntasks:")
    for name, task in TASKS.items():
        print(f"  {name.ljust(12)} {task.help}")
