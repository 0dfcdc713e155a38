r"""Compare training on packed documents that are kept apart with training on whole sequences.

    python tools/benchmark_documents.py --workload S
    python tools/benchmark_documents.py --workload L -- --num-layers 16
    python tools/benchmark_documents.py --workload L --gpus 2 \
        -- --context-parallel-size 2 --use-distributed-optimizer --num-layers 16

Both variants train on the same corpus, whose documents have a given mean length and are packed into
long sequences. In one, each token attends to its whole sequence. The other keeps documents apart
(`--reset-attention-mask --reset-position-ids`), which needs less arithmetic. Runs of the two
variants alternate. Flags after -- are passed to pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError
from tools.bench.launch import entry_command, measure, run_process
from tools.bench.workloads import (
    PRECISIONS,
    WORKLOADS,
    corpus_prefix,
    read_flags,
    tokens_of_step,
    training_flags,
)

ROOT = Path(__file__).resolve().parent.parent
_VARIANTS = {
    "whole sequences": (),
    "documents apart": ("--reset-attention-mask", "--reset-position-ids"),
}


def build_parser() -> ToolParser:
    """Build the parser of the arguments before `--`."""
    parser = ToolParser("benchmark_documents.py", __doc__)
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="S", help="Model and batch (default: S).")
    add("--precision", choices=PRECISIONS, default="bf16", help="Number format (default: bf16).")
    add("--gpus", type=int, default=1, help="Number of GPUs, one process each (default: 1).")
    add("--seq-length", type=int, default=8192, help="Tokens in a sequence (default: 8192).")
    add("--document-tokens", type=int, default=500, help="Mean document length (default: 500).")
    add("--iterations", type=int, default=20, help="Timed iterations per run (default: 20).")
    add("--warmup", type=int, default=5, help="Warm-up iterations, not timed (default: 5).")
    add("--repeat", type=int, default=3, help="Number of runs of each variant (default: 3).")
    add("--timeout", type=float, default=600, help="Time limit per run in seconds (default: 600).")
    text = "Folder for the results (default: runs/documents)."
    add("--output", type=Path, default=Path("runs/documents"), help=text)
    add("further", nargs="*", metavar="-- FLAG", help="Additional flags of pretrain_gpt.py.")
    return parser


def _flags(options: argparse.Namespace, corpus: Path) -> list[str]:
    """Return the flags that both variants share, with the workload's tokens per micro-batch."""
    workload, length = WORKLOADS[options.workload], options.seq_length
    flags = training_flags(workload, options.precision, options.gpus, corpus, [])
    workload_config = read_flags(flags, options.gpus)
    micro = max(
        1, workload_config.training.micro_batch_size * workload_config.data.seq_length // length
    )
    step = max(micro * options.gpus, tokens_of_step(workload_config) // length)
    sizes = f"--seq-length {length} --max-position-embeddings {length}"
    sizes += f" --micro-batch-size {micro} --global-batch-size {step}"
    return [*flags, *sizes.split(), *options.further]


def run(options: argparse.Namespace) -> None:
    """Measure both variants, and print a line for each run and one that compares their medians.

    Raises:
        ConfigError: A number is below 1, or a flag is invalid.
    """
    names = ("gpus", "seq_length", "document_tokens", "iterations", "warmup", "repeat")
    if problems := minimum_problems(options, **dict.fromkeys(names, 1)):
        raise ConfigError(problems)
    # Report mistakes before writing the corpus.
    read_flags(_flags(options, Path("none")), options.gpus)
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = corpus_prefix(
        folder, WORKLOADS[options.workload], document_tokens=options.document_tokens
    )
    flags = _flags(options, corpus)
    tokens = tokens_of_step(read_flags(flags, options.gpus)) / options.gpus
    last = options.warmup + options.iterations
    flags += ["--train-iters", str(last), "--log-interval", "1"]
    rates: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    for number in range(1, options.repeat + 1):  # alternate, so that drift affects both
        for variant, variant_flags in _VARIANTS.items():
            log = folder / f"{options.workload}-{variant.replace(' ', '-')}-{number}.txt"
            command = entry_command(ROOT, options.gpus, [*flags, *variant_flags])
            lines = run_process(command, root=ROOT, log=log, timeout=options.timeout)
            measured = measure(lines, warmup=options.warmup, last=last)
            rates[variant].append(tokens / measured.median)
            print(
                f"{options.workload} run {number}, {variant}: "
                f"{rates[variant][-1]:,.0f} tokens/s per GPU, "
                f"{1e3 * measured.median:.1f} ms per update, "
                f"{measured.peak_allocated / 2**30:.1f} GiB allocated",
                flush=True,
            )
    whole_rate, apart_rate = (statistics.median(rates[variant]) for variant in _VARIANTS)
    print(
        f"{options.workload}: documents apart train at {apart_rate / whole_rate:.3f} times the "
        f"tokens/s of whole sequences (medians of {options.repeat}: "
        f"{apart_rate:,.0f} and {whole_rate:,.0f})"
    )


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
