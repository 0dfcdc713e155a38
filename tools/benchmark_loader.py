r"""Measure the number of tokens per second that the loader processes of a GPT run supply.

    python tools/benchmark_loader.py --data-path corpus.jsonl --seq-length 4096 \
        --vocab-file vocab.json --merge-file merges.txt --workers 0 1 2

--data-path names text, which is tokenized during loading, or an indexed dataset. The first 20
micro-batches, during which every text stream tokenizes its first piece, are also timed separately.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError

_FIRST = 20


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_loader.py", __doc__)
    parser.add_argument("--data-path", required=True, help="Text files or a dataset's prefix.")
    parser.add_argument("--vocab-file", required=True, help="GPT-2's vocabulary (vocab.json).")
    parser.add_argument("--merge-file", required=True, help="GPT-2's merges (merges.txt).")
    parser.add_argument("--seq-length", type=int, default=4096, help="Tokens in a sample.")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="Samples in a batch.")
    parser.add_argument("--batches", type=int, default=300, help="Micro-batches to load.")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 2], help="Numbers of loading processes."
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure and print the speed for each number of processes.

    Raises:
        UserError: A number is too small, or the data or the tokenizer cannot be read.
    """
    minimums = {"seq_length": 1, "micro_batch_size": 1, "batches": 1, "workers": 0}
    if problems := minimum_problems(options, **minimums):
        raise ConfigError(problems)
    from megatron.config.data import DataConfig, TokenizerConfig
    from megatron.data.datasets import DataRequest
    from megatron.data.gpt import build_gpt_datasets
    from megatron.data.loader import SingleSampler, build_loader
    from megatron.tokenizer import build_tokenizer

    flags = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
    )
    tokenizer = build_tokenizer(flags)
    data = DataConfig(data_path=(options.data_path,), split="1,0,0", seq_length=options.seq_length)
    samples = options.micro_batch_size * (options.batches + 1)
    for workers in options.workers:
        train = build_gpt_datasets(
            DataRequest(data, 1234, (samples, 0, 0)),
            seq_length=options.seq_length,
            vocab_size=tokenizer.vocab_size,
            tokenizer=(flags, tokenizer),
        ).train
        assert train is not None, "--split gives everything to training"
        sampler = SingleSampler(len(train), 0, options.micro_batch_size)
        start, marks = time.perf_counter(), [0.0]
        batches = build_loader(train, sampler, num_workers=workers, seed=1234)
        for _ in itertools.islice(batches, options.batches):
            marks.append(time.perf_counter() - start)
        tokens = options.micro_batch_size * options.seq_length
        first = min(_FIRST, len(marks) - 1)
        print(
            f"{workers} loading processes: {tokens * (len(marks) - 1) / marks[-1]:,.0f} tokens/s, "
            f"in the first {first} micro-batches {tokens * first / marks[first]:,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_command(lambda: run(build_parser().read())))
