r"""Train one model in many layouts for a few iterations each, and write a table of the results.

    python tools/benchmark_layouts.py --model 350m --data-path novels_text_document \
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --out table.md

Every row is a run of `torchrun pretrain_gpt.py` with the flags in the table. Layouts that need more
GPUs than are available are skipped, and their rows say so. The row of a failed run shows its error.
Each row is written as soon as its run ends. Flags after `--` are added to every run and override
the run's own flags.

To check the planner, measure the layouts that it wrote. The last lines of the output then say how
much slower the planner's best layout is than the fastest one:

    megatron plan --gpus 2xH200 --global-batch 16 --top 20 --jsonl plan.jsonl -- FLAGS
    python tools/benchmark_layouts.py --plan plan.jsonl --budget 280 --out table.md
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the packages next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.durable import check_writable, expect_no_file
from megatron.errors import ConfigError
from tools.layouts.models import BenchmarkLayout, BenchmarkModel, models
from tools.layouts.planned import read_plans
from tools.layouts.table import Row, as_markdown, verdict


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_layouts.py", __doc__)
    add = parser.add_argument
    add("--model", choices=sorted(models()), help="Model to train.")
    add("--plan", nargs="+", type=Path, metavar="FILE.jsonl",
        help="Files of megatron plan --jsonl with layouts, instead of --model.")  # fmt: skip
    add("--layouts", nargs="+", metavar="NAME", help="Layouts to run (default: all that fit).")
    add("--list", action="store_true", help="Print the layouts (default: those of all models).")
    add("--processes", type=int, help="Maximum processes per run (default: number of GPUs).")
    add("--train-iters", type=int, default=12, help="Iterations per run (default: 12).")
    add("--timeout", type=float, default=300.0, help="Seconds for one run (default: 300).")
    add("--budget", type=float, help="Seconds for all runs together (default: no limit).")
    add("--pipeline-bubble", action="store_true", help="Also measure and predict the bubble.")
    add("--data-path", help="Prefix of a GPT-2 BPE dataset (default: generated tokens).")
    add("--vocab-file", help="GPT-2 vocabulary, with --data-path.")
    add("--merge-file", help="GPT-2 merges, with --data-path.")
    add("--out", type=Path, help="Markdown table to write.")
    add("--overwrite", action="store_true", help="Replace an existing table.")
    add("--jsonl", type=Path, help="File to append to: one object per run, with its loss curve.")
    add("further", nargs="*", metavar="-- FLAG", help="Additional flags for every run.")
    return parser


def data_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags that select the data of all runs.

    Raises:
        ConfigError: A dataset is given without its vocabulary, or together with --plan.
    """
    given = (options.data_path, options.vocab_file, options.merge_file)
    if options.plan:
        if any(given):
            raise ConfigError(
                "--data-path, --vocab-file and --merge-file are for --model: give a planned run's "
                "data to megatron plan, after --"
            )
        return []
    if not any(given):
        return ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50257"]
    if not all(given):
        raise ConfigError("--data-path, --vocab-file and --merge-file go together: give all three")
    return [
        *("--data-path", options.data_path, "--split", "98,2,0"),
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", options.vocab_file, "--merge-file", options.merge_file),
    ]


def find_model(options: argparse.Namespace) -> BenchmarkModel:
    """Return the model of --model or --plan with its layouts.

    Raises:
        UserError: Both flags or neither are given, or a plan is invalid.
    """
    if options.model and options.plan:
        raise ConfigError("--model and --plan cannot be combined: drop one of the two")
    if options.plan:
        return read_plans(options.plan)
    if options.model is None:
        names = ", ".join(sorted(models()))
        raise ConfigError(f"--model is required: give one of {names}, or a --plan")
    return models()[options.model]


def choose(options: argparse.Namespace) -> list[BenchmarkLayout]:
    """Return the layouts to run, in the order in which the model lists them.

    Raises:
        UserError: There is no such model, or it has no layout of a requested name.
    """
    layouts = find_model(options).layouts
    names = [layout.name for layout in layouts]
    unknown = [name for name in options.layouts or () if name not in names]
    if unknown:
        raise ConfigError(f"--layouts {' '.join(unknown)}: choose from {', '.join(names)}")
    return [layout for layout in layouts if layout.name in (options.layouts or names)]


def list_layouts(options: argparse.Namespace) -> None:
    """Print a line for each layout, with its number of processes and its flags."""
    if options.model or options.plan:
        name = f"--model {options.model}" if options.model else shlex.join(map(str, options.plan))
        models_by_name = {name: find_model(options)}
    else:
        models_by_name = {f"--model {name}": model for name, model in sorted(models().items())}
    for name, model in models_by_name.items():
        print(name)
        for layout in model.layouts:
            print(f"  {layout.name} ({layout.processes} processes): {layout.flags}")


def run(options: argparse.Namespace) -> list[Row]:
    """Run the layouts one after another, and return a row for each.

    Raises:
        UserError: A flag is invalid, or there is no GPU.
    """
    from megatron.device import gpu_count
    from tools.layouts.measure import measure

    layouts, common = (
        choose(options),
        [*shlex.split(find_model(options).flags), *data_flags(options)],
    )
    if problems := minimum_problems(options, processes=1, train_iters=1, timeout=0, budget=0):
        raise ConfigError(problems)
    if options.out is not None:
        expect_no_file("--out", [options.out], overwrite=options.overwrite)
        check_writable("--out", options.out)
    if options.jsonl is not None:
        check_writable("--jsonl", options.jsonl)
    available = options.processes or gpu_count()
    if available < 1:
        raise ConfigError("no GPU is present: give --processes to run on the CPU")
    budget = float("inf") if options.budget is None else options.budget
    deadline = time.monotonic() + budget
    rows: list[Row] = []
    last_seconds = 0.0
    print(as_markdown([]), end="", flush=True)
    for layout in layouts:
        start = time.monotonic()
        remaining = deadline - start
        row = measure(
            layout,
            [*common, *shlex.split(layout.flags), *options.further],
            available=available,
            iterations=options.train_iters,
            # Skip a run that would not end in time, judging by the previous one.
            timeout=min(options.timeout, remaining) if remaining > last_seconds else 0.0,
            bubble=options.pipeline_bubble,
        )
        last_seconds = time.monotonic() - start
        rows.append(row)
        print(as_markdown(rows).splitlines()[-1], flush=True)
        if options.out is not None:
            options.out.write_text(as_markdown(rows), encoding="utf-8")
        if options.jsonl is not None:
            with options.jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"model": options.model, **asdict(row)}) + "\n")
    summary = verdict(rows)
    if summary:
        print(f"\n{summary}", end="", flush=True)
        if options.out is not None:
            options.out.write_text(f"{as_markdown(rows)}\n{summary}", encoding="utf-8")
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code, which is 1 if a run failed."""
    options = build_parser().read(arguments)

    def work() -> int:
        if options.list:
            list_layouts(options)
            return 0
        return int(any(row.failed for row in run(options)))

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
