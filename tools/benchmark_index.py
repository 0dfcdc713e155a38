"""Time the construction of sample indices, which happens before training starts.

python tools/benchmark_index.py                                         GPT's three indices
python tools/benchmark_index.py --sentences 1e7 --documents 5e5         BERT's and T5's sentence map
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError


def main() -> None:
    """Print the time of each index in seconds, as the best of several runs.

    Raises:
        ConfigError: A number is too small.
    """
    parser = ToolParser("benchmark_index.py", __doc__)
    parser.add_argument("--tokens", type=float, default=1e9, help="Tokens in the corpus.")
    parser.add_argument("--documents", type=float, default=1e6, help="Documents in the corpus.")
    parser.add_argument(
        "--sentences",
        type=float,
        help="Sentences in the corpus. If given, time the sentence map.",
    )
    parser.add_argument("--seq-length", type=int, default=1024, help="Sequence length in tokens.")
    parser.add_argument(
        "--repeat", type=int, default=5, help="Number of runs; the best one counts."
    )
    args = parser.read()
    minimums = {"documents": 1, "sentences": 1, "seq_length": 1, "repeat": 1}
    if problems := minimum_problems(args, tokens=2, **minimums):
        raise ConfigError(problems)
    if args.sentences and args.sentences < 2 * args.documents:
        raise ConfigError(
            f"--sentences {args.sentences:g}: give at least twice --documents {args.documents:g}, "
            "because a document with a single sentence yields no sample"
        )
    if args.sentences:
        time_sentence_map(int(args.sentences), int(args.documents), args.seq_length, args.repeat)
    else:
        time_gpt(int(args.tokens), int(args.documents), args.seq_length, args.repeat)


def time_gpt(tokens: int, documents: int, seq_length: int, repeat: int) -> None:
    """Time the construction of GPT's indices for one epoch of documents of random lengths."""
    from megatron.data.gpt import build_gpt_index, build_sample_index, plan_gpt_index

    rng = np.random.RandomState(0)
    lengths = _random_parts(rng, tokens, documents).astype(np.int32)
    order = rng.permutation(documents).astype(np.int32)
    plan = plan_gpt_index(documents, tokens, (tokens - 1) // seq_length, seq_length)
    print(f"{tokens} tokens, {documents} documents, sequence length {seq_length}")
    sample = best(lambda: build_sample_index(lengths, order, plan.samples, seq_length), repeat)
    print(f"sample index: {plan.samples} samples in {sample:.4f} s")
    everything = best(lambda: build_gpt_index(plan, lengths, 0, 1234), repeat)
    print(f"document, sample and shuffle index: {everything:.4f} s")


def time_sentence_map(sentences: int, documents: int, seq_length: int, repeat: int) -> None:
    """Time the construction of the sentence map for documents of random lengths.

    Sentences have 25 tokens on average.
    """
    from megatron.data.sentence_map import DocumentSentences, SentenceMapPlan, build_sentence_map

    rng = np.random.RandomState(0)
    bounds = np.cumsum([0, *_random_parts(rng, sentences, documents)])
    lengths = np.minimum(rng.geometric(1 / 25, sentences), 512).astype(np.int32)
    plan = SentenceMapPlan(
        num_samples=1,  # one pass over the documents
        max_length=seq_length - 3,
        short_seq_prob=0.1,
        seed=1234,
        min_sentences=2,
    )
    print(f"{sentences} sentences, {documents} documents, sequence length {seq_length}")
    text = DocumentSentences(bounds, lengths)
    samples = len(build_sentence_map(plan, text))
    seconds = best(lambda: build_sentence_map(plan, text), repeat)
    print(f"sentence map: {samples} samples in {seconds:.2f} s")


def _random_parts(rng: np.random.RandomState, total: int, parts: int) -> NDArray[np.int64]:
    """Divide `total` into `parts` parts of random size and return their sizes."""
    cuts = np.sort(rng.randint(0, total + 1, parts - 1))
    return np.diff(cuts, prepend=0, append=total)


def best(build: Callable[[], Any], repeat: int) -> float:
    """Return the seconds of the fastest of `repeat` calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        build()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    sys.exit(run_command(main))
