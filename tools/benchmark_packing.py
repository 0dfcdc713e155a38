r"""Measure how many tokens of packed documents a loader process supplies per second.

    python tools/benchmark_packing.py
    python tools/benchmark_packing.py --document-tokens 100 --workers 0 1 2

The tool generates documents of random ids with exponentially distributed lengths, packs them, and
times micro-batches of three kinds: a stream of documents that are kept apart
(--reset-attention-mask), conversations (--sft) and pairs of answers (--preference-loss), each of
which is two documents.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError
from tools.bench.workloads import write_corpus

if TYPE_CHECKING:
    from megatron.data.conversations import TokenizedExamples
    from megatron.data.sample import SampleDataset

_SEED = 1234
_MINIMUMS = {
    "seq_length": 4,
    "document_tokens": 1,
    "documents": 2,
    "vocab_size": 2,
    "micro_batch_size": 1,
    "batches": 1,
    "workers": 0,
}


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_packing.py", __doc__)
    add = parser.add_argument
    add("--seq-length", type=int, default=8192, help="Tokens per row (default: 8192).")
    add("--document-tokens", type=int, default=500, help="Mean document length (default: 500).")
    add("--documents", type=int, default=100_000, help="Number of documents (default: 100000).")
    add(
        "--vocab-size", type=int, default=50_257, help="Entries of the vocabulary (default: 50257)."
    )
    add("--micro-batch-size", type=int, default=1, help="Rows per batch (default: 1).")
    add("--batches", type=int, default=2000, help="Micro-batches to load (default: 2000).")
    add("--workers", type=int, nargs="+", default=[1], help="Numbers of processes (default: 1).")
    text = "Folder for the generated data (default: runs/packing)."
    add("--output", type=Path, default=Path("runs/packing"), help=text)
    return parser


def make_examples(options: argparse.Namespace) -> TokenizedExamples:
    """Write documents in the format of a cache of tokenized examples, and memory-map the cache."""
    import numpy as np

    from megatron.data.conversations import TokenizedExamples

    rng = np.random.default_rng(_SEED)
    mean = options.document_tokens
    max_length = options.seq_length // 2  # two answers fit into a row
    lengths = np.clip(rng.exponential(mean, options.documents).astype(np.int64), 2, max_length)
    total = int(lengths.sum())
    arrays = {
        "tokens": rng.integers(options.vocab_size, size=total, dtype=np.int32),
        "trained": rng.random(total) < 0.5,
    }
    for name, array in arrays.items():
        np.save(options.output / f"{name}.npy", array)
    tokens, trained = (np.load(options.output / f"{name}.npy", mmap_mode="r") for name in arrays)
    starts = lengths.cumsum() - lengths
    return TokenizedExamples("random", tokens, trained, lengths, starts, Counter())


def make_datasets(options: argparse.Namespace, samples: int) -> dict[str, SampleDataset]:
    """Return a dataset of each kind with `samples` rows, by its description in the output."""
    from megatron.config.data import DataConfig, TokenizerConfig
    from megatron.data.chat import PackedDataset
    from megatron.data.datasets import DataRequest
    from megatron.data.gpt import build_gpt_datasets
    from megatron.data.packing import pack
    from megatron.data.preferences import FittedPairs, PreferenceDataset
    from megatron.tokenizer import build_tokenizer

    length, vocabulary = options.seq_length, options.vocab_size
    corpus, tokens = options.output / "corpus", options.documents * options.document_tokens
    write_corpus(corpus, vocabulary, tokens, options.document_tokens)
    flags = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocabulary - 1)
    data = DataConfig(
        data_path=(str(corpus),), split="1,0,0", seq_length=length, reset_attention_mask=True
    )
    stream = build_gpt_datasets(
        DataRequest(data, _SEED, (samples, 0, 0)),
        seq_length=length,
        vocab_size=vocabulary,
        tokenizer=(flags, build_tokenizer(flags)),
    ).train
    assert stream is not None, "--split gives everything to training"
    examples = make_examples(options)
    pairs = FittedPairs(examples, length, "error")
    start = time.perf_counter()
    packings = pack(examples.lengths, length), pack(pairs.limits.sum(axis=1), length)
    print(f"both packings planned in {time.perf_counter() - start:.2f} s", flush=True)
    full = [f"{packing.fullness:.1%} full" for packing in packings]
    return {
        "stream of documents, 100% full": stream,
        f"conversations, {full[0]}": PackedDataset(examples, 0, packings[0], samples, _SEED, 0),
        f"pairs, {full[1]}": PreferenceDataset(pairs, 0, packings[1], samples, _SEED, 0),
    }


def run(options: argparse.Namespace) -> None:
    """Measure, and print a line for each kind of dataset and number of processes.

    Raises:
        ConfigError: A number is too small.
    """
    from megatron.data.loader import SingleSampler, build_loader

    if problems := minimum_problems(options, **_MINIMUMS):
        raise ConfigError(problems)
    options.output.mkdir(parents=True, exist_ok=True)
    options.documents -= options.documents % 2  # two per pair
    micro_batch = options.micro_batch_size
    datasets = make_datasets(options, micro_batch * (options.batches + 1))
    for workers in options.workers:
        for kind, dataset in datasets.items():
            sampler = SingleSampler(len(dataset), 0, micro_batch)
            batches = build_loader(dataset, sampler, num_workers=workers, seed=_SEED)
            next(batches)  # do not time the start of the process and the plan of the epoch
            start = time.perf_counter()
            count = sum(1 for _ in itertools.islice(batches, options.batches))
            seconds = time.perf_counter() - start
            rate = micro_batch * options.seq_length * count / seconds
            print(
                f"{workers} loading processes, {kind}: {rate / 1e6:.2f} million tokens/s, "
                f"{1e3 * seconds / count:.2f} ms per micro-batch",
                flush=True,
            )


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
