#!/usr/bin/env python3
r"""Measure Retro's training step compared with a GPT that has the same layers.

    python tools/benchmark_retro_training.py                       # workload S in bf16, on a GPU
    python tools/benchmark_retro_training.py --workload demo --layers 9 --precision fp32 \
        --iterations 3 --warmup 1

The tool creates a working folder with the chunks of a random corpus and random neighbors. Both
networks train on the same samples. If both used the GPU equally well, their speeds would be
inversely proportional to their operations per token; "of expected" is the speed relative to this
expectation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import print_line, tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.durable import check_writable, writing_to
from megatron.errors import ConfigError
from tools.bench.launch import entry_command, measure, run_process
from tools.bench.workloads import PRECISIONS, WORKLOADS, corpus_prefix, training_flags

ROOT = Path(__file__).resolve().parent.parent
_CHUNK, _NEIGHBORS, _SAVED = 64, 2, 4
_SEED = 1234


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_retro_training.py", __doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS], default="S", help="Network and batch.")
    parser.add_argument("--precision", choices=[*PRECISIONS], default="bf16", help="Precision.")
    parser.add_argument("--layers", type=int, default=None, help="Layers. Default: the workload's.")
    parser.add_argument("--micro-batch-size", type=int, default=None, help="Samples per pass.")
    parser.add_argument("--iterations", type=int, default=20, help="Iterations to time.")
    parser.add_argument("--warmup", type=int, default=5, help="Warm-up iterations, not timed.")
    parser.add_argument(
        "--timeout", type=float, default=400.0, help="Time limit per run in seconds."
    )
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the numbers.")
    return parser


def make_folder(
    workdir: Path,
    corpus: Path,
    flags: Sequence[str],
    iterations: int,
    vocabulary: int,
    chunk: int = _CHUNK,
) -> None:
    """Create a working folder for a training run with the given flags.

    Args:
        workdir: The folder to create.
        corpus: Prefix of the corpus. Each document ends with an end-of-document token.
        flags: The flags of the run, except those for length and evaluation.
        iterations: The number of iterations.
        vocabulary: The vocabulary size of the tokenizer.
        chunk: The number of tokens in a chunk.
    """
    import h5py
    import numpy as np

    from megatron.config import parse_config
    from megatron.data.datasets import DataRequest
    from megatron.data.indexed import IndexedDataset
    from megatron.retro.blocks import new_hdf5, plan_blocks, write_block
    from megatron.retro.database import CorpusChunks, corpora_file, merged_file
    from megatron.retro.neighbors import neighbors_folder, query_datasets

    del h5py  # imported first, so that a missing package ends the command before any work
    config = parse_config(["--train-iters", str(iterations), *flags], world_size=1).config
    length = config.data.seq_length
    data = IndexedDataset(corpus)
    rows = [
        (0, document, start, min(start + chunk, size - 1), chunk)
        for document, size in enumerate(data.sequence_lengths.tolist())
        for start in range(0, size - 1, chunk)
    ]
    chunks = np.array(rows, np.uint32)
    for name in ("train", "valid", "sampled"):
        with new_hdf5(merged_file(workdir, name)) as file:
            table = chunks if name == "train" else chunks[:0]
            file.create_dataset("chunks", data=table)
            file.create_dataset("n_written", data=np.array([len(table)], np.uint64))
    counts = (len(data), len(data), len(chunks), len(chunks), 0, 0)
    corpus_info = CorpusChunks(1.0, str(corpus), f"{corpus}.bin", corpus.name, "", *counts)
    corpora_file(workdir).write_text(json.dumps([corpus_info._asdict()]))
    samples = (iterations * config.training.global_batch_size, 0, 0)
    request = DataRequest(config.data, _SEED, samples)
    train = query_datasets(request, seq_length=length, vocab_size=vocabulary)[0]
    assert train is not None, "training requests samples"
    rng = np.random.default_rng(_SEED)
    count = len(train) * (length // chunk)
    for block in plan_blocks(neighbors_folder(workdir, "train", train), count, count):
        neighbors = rng.integers(0, len(chunks), (count, _SAVED))
        write_block(block, {"neighbors": neighbors.astype(np.int64)})
    arguments: dict[str, Any] = {
        "retro_gpt_chunk_length": chunk,
        "retro_gpt_seq_length": length,
        "retro_gpt_data_path": list(config.data.data_path or ()),
        "retro_gpt_split": config.data.split,
        "retro_gpt_seed": _SEED,
        "retro_block_size": count,
    }
    (workdir / "args.json").write_text(json.dumps(arguments))


def run(options: argparse.Namespace) -> None:
    """Measure both networks and print a table.

    Raises:
        UserError: A number is too small, the output cannot be written, or a run fails.
    """
    if problems := minimum_problems(options, iterations=1, warmup=1):
        raise ConfigError(problems)
    if options.output is not None:
        check_writable("--output", options.output)
    from megatron.config import parse_config
    from megatron.models.arithmetic import count_parameters, flops_per_token
    from megatron.models.plans import model_plan

    workload = WORKLOADS[options.workload]
    iterations = options.warmup + options.iterations
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, workdir = Path(name), Path(name) / "workdir"
        corpus = corpus_prefix(folder, workload)
        flags = training_flags(workload, options.precision, 1, corpus, ["--seed", str(_SEED)])
        if options.layers is not None:
            flags += ["--num-layers", str(options.layers)]
        if options.micro_batch_size is not None:
            flags += ["--micro-batch-size", str(options.micro_batch_size)]
        make_folder(workdir, corpus, flags, iterations, workload.vocabulary)
        flags_by_kind = {
            "gpt": [],
            "retro": [
                *["--retro-workdir", str(workdir), "--retro-num-neighbors", str(_NEIGHBORS)],
                *["--retro-encoder-hidden-dropout", "0", "--retro-encoder-attention-dropout", "0"],
            ],
        }
        for kind, kind_flags in flags_by_kind.items():
            args = [*flags, *kind_flags, "--train-iters", str(iterations), "--log-interval", "1"]
            config = parse_config(args, world_size=1, architecture=kind).config
            plan = model_plan(config.model, workload.vocabulary)
            length = config.data.seq_length
            command = entry_command(ROOT, 1, args, script=f"pretrain_{kind}.py")
            lines = run_process(
                command, root=ROOT, log=folder / f"{kind}.log", timeout=options.timeout
            )
            measured = measure(lines, warmup=options.warmup, last=iterations)
            tokens = config.training.global_batch_size * length / measured.median
            results[kind] = {
                "parameters": count_parameters(plan),
                "gigaflops per token": flops_per_token(plan, length) / 1e9,
                "milliseconds": 1e3 * measured.median,
                "tokens/s": tokens,
                "TFLOP/s": tokens * flops_per_token(plan, length) / 1e12,
                "GiB": measured.peak_allocated / 2**30,
            }
    gpt, retro = results["gpt"], results["retro"]
    names = list(gpt)
    print_line(f"{'':6}" + "".join(f"{name:>21}" for name in names) + f"{'of expected':>13}")
    for kind, values in results.items():
        relative_speed = values["TFLOP/s"] / gpt["TFLOP/s"]
        cells = "".join(f"{values[name]:>21,.1f}" for name in names)
        print_line(f"{kind:6}{cells}{relative_speed:>13.1%}")
    if options.output is not None:
        with writing_to("--output", options.output):
            options.output.write_text(json.dumps({"gpt": gpt, "retro": retro}, indent=2) + "\n")


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
