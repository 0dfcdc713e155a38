"""Time the GPT indices: `python tools/benchmark_index.py [--tokens 1e9 --documents 1e6]`."""

from __future__ import annotations

import argparse
import time


def main() -> None:
    """Print the seconds that each index takes; the best of a few runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, default=1e9, help="Tokens in the corpus.")
    parser.add_argument("--documents", type=float, default=1e6, help="Documents in the corpus.")
    parser.add_argument("--seq-length", type=int, default=1024, help="Sequence length in tokens.")
    parser.add_argument("--repeat", type=int, default=5, help="Runs of which the best counts.")
    args = parser.parse_args()

    import numpy as np

    from megatron.data.gpt_index import build_gpt_index, build_sample_index, plan_gpt_index

    random = np.random.RandomState(0)
    documents, tokens = int(args.documents), int(args.tokens)
    cuts = np.sort(random.randint(0, tokens + 1, documents - 1))
    lengths = np.diff(cuts, prepend=0, append=tokens).astype(np.int32)
    order = random.permutation(documents).astype(np.int32)
    plan = plan_gpt_index(documents, tokens, (tokens - 1) // args.seq_length, args.seq_length)

    def best(build: object) -> float:
        assert callable(build)
        times = []
        for _ in range(args.repeat):
            start = time.perf_counter()
            build()
            times.append(time.perf_counter() - start)
        return min(times)

    print(f"{tokens} tokens, {documents} documents, sequence length {args.seq_length}")
    sample = best(lambda: build_sample_index(lengths, order, plan.samples, args.seq_length))
    print(f"sample index: {plan.samples} samples in {sample:.4f} s")
    everything = best(lambda: build_gpt_index(plan, lengths, 0, 1234))
    print(f"document, sample and shuffle index: {everything:.4f} s")


if __name__ == "__main__":
    main()
