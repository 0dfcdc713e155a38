r"""Build a training corpus from crawl files: clean, deduplicate, decontaminate, tokenize.

    python tools/build_corpus.py --input crawl/ --output corpus --language en \
        --tasks lambada_test.jsonl --tokenizer-type GPT2BPETokenizer \
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt

This writes corpus/text/*.jsonl, corpus/corpus_text_document.bin and .idx, and a report of what was
removed and why. To continue an interrupted run, give the same command again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, add_flags, from_values
from megatron.config.data import TokenizerConfig
from megatron.environment import usable_cores
from megatron.errors import ConfigError


def build_parser() -> ToolParser:
    """Build the command-line parser, with its flags in groups."""
    parser = ToolParser("build_corpus.py", __doc__)
    group = parser.add_argument_group("Input")
    group.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="Files, glob patterns or folders: .warc and .wet (also .gz); .jsonl or .json, one "
        "JSON object per line (also .gz, .bz2, .zst); .parquet; .txt, one document per file.",
    )
    group.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="Key of a document's text (default: text).",
    )
    group.add_argument(
        "--id-key", default="id", metavar="KEY", help="Key of a document's id (default: id)."
    )
    group.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "skip"),
        help="What to do with a bad line: stop, or skip and count it (default: stop).",
    )
    _add_step_flags(parser.add_argument_group("Steps"))
    add_flags(parser, TokenizerConfig)
    group = parser.add_argument_group("Output")
    group.add_argument(
        "--output",
        metavar="DIR",
        help="Folder of the corpus: a new one, or that of an interrupted run.",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace a corpus built with other settings.",
    )
    _add_running_flags(parser.add_argument_group("Running"))
    return parser


def _add_step_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--plan",
        metavar="FILE",
        help="YAML file with the steps and all of their settings. It replaces all flags for input, "
        "steps and tokenizer. --print-plan prints one to start from.",
    )
    group.add_argument(
        "--print-plan", action="store_true", help="Print the plan for the other flags, and exit."
    )
    group.add_argument(
        "--language",
        nargs="+",
        default=["en"],
        metavar="CODE",
        help="Languages to keep, as ISO 639 codes (default: en).",
    )
    group.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Files of evaluation tasks (JSON lines, TSV, text), whose text is removed from "
        "documents.",
    )
    group.add_argument(
        "--task-keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help="Keys or columns of --tasks to read (default: all text).",
    )
    group.add_argument(
        "--skip-steps",
        nargs="+",
        default=[],
        choices=("urls", "extract", "fix", "language", "quality", "duplicates"),
        help="Steps to skip.",
    )
    group.add_argument(
        "--seed", type=int, default=1234, metavar="N", help="Seed of MinHash (default: 1234)."
    )


def _add_running_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="Number of tasks to run at a time. The output does not depend on it (default: one per "
        "core).",
    )
    group.add_argument(
        "--executor",
        default="local",
        choices=("local", "slurm", "ray"),
        help="Where tasks run: processes on this machine, SLURM jobs, or Ray (default: local).",
    )
    group.add_argument("--slurm-partition", metavar="NAME", help="Partition for SLURM jobs.")
    group.add_argument(
        "--slurm-time", default="24:00:00", metavar="TIME", help="Time limit of a SLURM job."
    )
    group.add_argument(
        "--memory-gb", type=int, default=4, metavar="N", help="Memory of a SLURM or Ray task in GB."
    )


def plan_from_options(options: argparse.Namespace) -> Any:
    """Return the plan described by the flags or a YAML file.

    Raises:
        ConfigError: A flag or the YAML file is invalid.
    """
    from megatron.config.yaml_file import load
    from megatron.corpora.plan import (
        CorpusPlan,
        TasksStep,
        TokenizeStep,
        default_steps,
        plan_from_dict,
    )

    if options.plan:
        return plan_from_dict(load("--plan", Path(options.plan)), f"--plan {options.plan}")
    if not options.input:
        raise ConfigError("--input: give files or folders, or a --plan")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give at least 0")
    steps = default_steps(tuple(options.language), options.seed)
    steps = {name: step for name, step in steps.items() if name not in options.skip_steps}
    if options.tasks:
        steps["tasks"] = TasksStep(tuple(options.tasks), tuple(options.task_keys))
    tokenizer = from_values(TokenizerConfig, vars(options))
    if tokenizer != TokenizerConfig():
        steps["tokenize"] = TokenizeStep(tokenizer)
    return CorpusPlan(
        tuple(options.input), steps, options.json_key, options.id_key, options.on_error
    )


def run(options: argparse.Namespace) -> None:
    """Build the corpus and print the report, or only print the plan with --print-plan.

    With SLURM, only submit the jobs that build the corpus.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    plan = plan_from_options(options)
    if options.print_plan:
        import yaml

        print(yaml.safe_dump(plan.to_dict(), sort_keys=False, allow_unicode=True), end="")
        return
    if not options.output:
        raise ConfigError("--output: give the folder of the corpus")
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: give at least 1")
    if options.executor == "slurm" and not options.slurm_partition:
        raise ConfigError("--slurm-partition: name the partition for --executor slurm")
    from megatron.corpora.run import DATASET, Cluster, build_corpus, input_bytes

    cluster = Cluster(
        options.executor,
        options.workers or usable_cores(),
        options.slurm_partition or "",
        options.slurm_time,
        options.memory_gb,
    )
    folder, started = Path(options.output), time.monotonic()
    build_corpus(plan, folder, cluster, overwrite=options.overwrite)
    if cluster.executor == "slurm":
        print(f"jobs are submitted; when the last one has finished, see {folder}/report.json")
        return
    _print_report(folder, input_bytes(folder) / 1e6, time.monotonic() - started)
    if "tokenize" in plan.steps:
        print(f"{folder / DATASET}: pass this path to --data-path")


def _print_report(folder: Path, megabytes: float, seconds: float) -> None:
    import json

    from megatron.corpora.report import as_text, measured_seconds

    print(as_text(json.loads((folder / "report.json").read_bytes())))
    rate = megabytes / max(seconds, 1e-9)
    print(f"{megabytes:.1f} MB in {seconds:.1f} s ({rate:.1f} MB/s); by step:")
    for name, spent in measured_seconds(folder / "logs").items():
        print(f"  {name:<12}{spent:9.2f} s  {megabytes / max(spent, 1e-9):10.1f} MB/s per core")
    print(f"samples of what was removed: {folder / 'report.json'}; picture: report.png")


main = tool_main(build_parser, run)
