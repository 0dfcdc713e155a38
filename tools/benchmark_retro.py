#!/usr/bin/env python3
"""Measure Retro's preprocessing: chunks embedded and neighbors found per second.

    python tools/benchmark_retro.py                              # BERT-large's shape, on a GPU
    python tools/benchmark_retro.py --layers 2 --hidden-size 64 --heads 4 --chunks 2000 --vectors 0

Weights and texts are random, because only shapes matter. The embedding time includes WordPiece,
which runs at the same time as the device. Operations are counted in the encoder's layers for the
tokens of the texts, without padding, so the share of the peak counts only useful work. The search
for neighbors needs faiss, and is not measured without it or with --vectors 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError

_VOCABULARY = 30522  # entries of BERT's own vocabulary
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MAX_TRAINING = 40_000  # maximum number of vectors for training the index
_CHUNKS_PER_SAMPLE = 32


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_retro.py", __doc__)
    group = parser.add_argument_group("BERT")
    group.add_argument("--layers", type=int, default=24, help="Layers.")
    group.add_argument("--hidden-size", type=int, default=1024, help="Width of the vectors.")
    group.add_argument("--heads", type=int, default=16, help="Attention heads.")
    group.add_argument(
        "--dtype", nargs="+", default=["bf16"], help="fp32, bf16 or fp16; one or more."
    )
    group = parser.add_argument_group("Texts")
    group.add_argument("--chunks", type=int, default=60_000, help="Texts to embed.")
    group.add_argument(
        "--tokens", type=int, default=70, help="Mean length (standard deviation 12%%)."
    )
    group.add_argument("--max-length", type=int, default=256, help="Maximum tokens per text.")
    group.add_argument(
        "--batch-size", type=int, nargs="+", default=[128], help="Texts per batch; one or more."
    )
    group = parser.add_argument_group("Index")
    group.add_argument("--vectors", type=int, default=100_000, help="Vectors in the index.")
    group.add_argument(
        "--index-str", default="IVF1024_HNSW32,Flat", help="Description of the index for faiss."
    )
    group.add_argument("--queries", type=int, default=10_000, help="Queries.")
    group.add_argument(
        "--nprobe", type=int, nargs="+", default=[16, 128], help="Lists to search; one or more."
    )
    group.add_argument("--threads", type=int, default=None, help="Threads. Default: every core.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure and print the speeds.

    Raises:
        ConfigError: A number is too small.
    """
    minimums = {"layers": 1, "hidden_size": 1, "heads": 1, "chunks": 1, "tokens": 1}
    minimums |= {"max_length": 3, "batch_size": 1, "vectors": 0, "queries": 1, "nprobe": 1}
    if problems := minimum_problems(options, threads=1, **minimums):
        raise ConfigError(problems)
    from megatron.device import Device

    device = Device.pick()
    print(device.description, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _measure_embedding(options, device, Path(folder) / "vocab.txt")
    if not options.vectors:
        return
    try:
        import faiss  # noqa: F401
    except ModuleNotFoundError:
        print("neighbors: not measured, because faiss is missing")
        return
    _measure_search(options, device)


def _measure_embedding(options: argparse.Namespace, device: Any, vocabulary: Path) -> None:
    import numpy as np

    from megatron.config.data import TokenizerConfig
    from megatron.models.arithmetic import count_parameters, flops_per_token
    from megatron.retro.embedding import EmbedderOptions, MegatronEmbedder
    from megatron.tokenizer import build_tokenizer

    words = [f"w{number}" for number in range(_VOCABULARY - len(_SPECIAL))]
    vocabulary.write_text("\n".join([*_SPECIAL, *words]) + "\n")
    kind = "BertWordPieceLowerCase"
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=str(vocabulary)))
    rng = np.random.default_rng(1)
    max_tokens = options.max_length - 2
    samples = rng.normal(options.tokens, 0.12 * options.tokens, options.chunks)
    lengths = np.clip(samples.round().astype(int), 1, max_tokens)
    texts = [" ".join(words[i] for i in rng.integers(0, len(words), length)) for length in lengths]
    start = time.perf_counter()
    tokenizer.tokenize_batch(texts[:10_000])
    seconds = time.perf_counter() - start
    print(f"WordPiece alone: {len(texts[:10_000]) / seconds:,.0f} chunks/s", flush=True)
    for dtype in options.dtype:
        model = _random_bert(options, device, tokenizer.vocab_size, dtype)
        by_length, plan = np.bincount(lengths + 2), model.plan
        work = sum(
            int(count) * length * flops_per_token(plan, length) / 3  # forward only
            for length, count in enumerate(by_length)
            if count
        )
        for batch_size in options.batch_size:
            embedder_options = EmbedderOptions(
                "megatron", "random", batch_size=batch_size, max_length=options.max_length
            )
            embedder = MegatronEmbedder(model, tokenizer, device, embedder_options)
            embedder.embed(texts[: max(1, min(8192, len(texts) // 4))])  # warms up
            start = time.perf_counter()
            vectors = embedder.embed(texts)
            seconds = time.perf_counter() - start
            assert np.isfinite(vectors).all(), "a vector is not finite"
            utilization = work / seconds / (device.peak_flops or float("nan"))
            print(
                f"embedding: {count_parameters(plan) / 1e6:.0f} million parameters, {dtype}, batch "
                f"{batch_size} x {options.max_length}, {lengths.mean():.1f} tokens per chunk: "
                f"{len(texts) / seconds:,.0f} chunks/s, {work / seconds / 1e12:.1f} TFLOP/s"
                + (f", {utilization:.1%} of the peak" if device.peak_flops else "")
                + f", {device.memory().peak_allocated / 1e9:.1f} GB",
                flush=True,
            )


def _random_bert(options: argparse.Namespace, device: Any, vocabulary: int, dtype: str) -> Any:
    """Return a BERT without heads, with random weights."""
    from dataclasses import replace

    from megatron.config import parse_config
    from megatron.models.bert import BertModel
    from megatron.models.build import run_context
    from megatron.models.plans import model_plan
    from megatron.parallel.layout import Layout
    from megatron.parallel.parameter import initialize

    flags = {
        "--num-layers": options.layers,
        "--hidden-size": options.hidden_size,
        "--num-attention-heads": options.heads,
        "--max-position-embeddings": options.max_length,
        "--seq-length": options.max_length,
        "--vocab-size": vocabulary,
        "--tokenizer-type": "NullTokenizer",
        "--micro-batch-size": 1,
        "--train-iters": 1,
        "--lr": 1,
    }
    args = [str(arg) for pair in flags.items() for arg in pair]
    args += ["--mock-data", *([] if dtype == "fp32" else [f"--{dtype}"])]
    config = parse_config(args, world_size=1, architecture="bert").config
    plan = replace(model_plan(config.model, -(-vocabulary // 8) * 8), heads=())
    model = BertModel(plan, run_context(config, Layout.single(), device))
    initialize(model.named_parameters(), seed=1)
    return model.eval()


class _Database:
    """A database in which every document has ten chunks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def tokens(self, chunk_ids: Any) -> Any:
        raise NotImplementedError

    def documents(self, chunk_ids: Any) -> Any:
        import numpy as np

        return np.stack([np.zeros_like(chunk_ids), chunk_ids // 10], axis=1)


class _Queries:
    """Samples that each contain text from three documents."""

    chunks_per_sample = _CHUNKS_PER_SAMPLE

    def documents(self, sample: int) -> tuple[int, Any]:
        import numpy as np

        return 0, np.arange(3) + sample


def _measure_search(options: argparse.Namespace, device: Any) -> None:
    """Fill an index with clustered vectors and find their neighbors."""
    import numpy as np

    from megatron.retro.index import codec_of, faiss_threads, on_device
    from megatron.retro.neighbors import QueryOptions, Searcher

    rng, width = np.random.default_rng(2), options.hidden_size
    centers = rng.standard_normal((256, width), np.float32)

    def draw(count: int) -> Any:
        noise = rng.standard_normal((count, width), np.float32)
        return centers[rng.integers(0, len(centers), count)] + 0.5 * noise

    with faiss_threads(options.threads) as faiss:
        index = faiss.index_factory(width, options.index_str)
        start = time.perf_counter()
        index.train(draw(min(_MAX_TRAINING, options.vectors)))
        train_seconds = time.perf_counter() - start
        codec = codec_of(index)
        vectors = draw(options.vectors)
        start = time.perf_counter()
        codec.add(codec.encode(vectors), np.arange(options.vectors))
        fill_seconds = time.perf_counter() - start
        threads = faiss.omp_get_max_threads()
        print(
            f"index {options.index_str}: {threads} threads, trained in {train_seconds:.1f} s, "
            f"{options.vectors / fill_seconds:,.0f} chunks added per second",
            flush=True,
        )
        queries: Any = _Queries()
        vectors = draw(options.queries)
        for nprobe in options.nprobe:
            query = QueryOptions(nprobe=nprobe)
            with suppress(RuntimeError):  # raised by an index without lists
                faiss.ParameterSpace().set_index_parameter(index, "nprobe", nprobe)
            searchable = on_device(index, device, query.queried)
            searcher = Searcher(searchable, _Database(options.vectors), query, options.threads)
            start = time.perf_counter()
            searcher.neighbors(vectors, queries, 0)
            seconds = time.perf_counter() - start
            print(
                f"neighbors: {options.vectors:,} vectors of {width}, nprobe {nprobe}, "
                f"{query.queried} requested, {query.saved} stored: "
                f"{options.queries / seconds:,.0f} queries/s "
                f"on the {'CPU' if searchable is index else 'GPU'}",
                flush=True,
            )


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
