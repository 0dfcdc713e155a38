#!/usr/bin/env python3
"""Time decoding and prefill, and compare decoding with `transformers` and with memory bandwidth.

    python tools/benchmark_generation.py --model L   # shape of an 8B Llama, one GPU
    python tools/benchmark_generation.py --model demo --prompt 16 --new 8 --batch 1 4  # on a CPU

The weights are random, because only the shape matters. A decoding step cannot be faster than its
floor: the time to read every weight except the word embeddings, and every key and value of the
batch, once at the speed of a large copy on the same device.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.durable import check_writable, expect_no_file, writing_to
from megatron.errors import ConfigError
from tools.bench.workloads import FOR_CPU, WORKLOADS, read_flags, training_flags

WARM_UP = 8  # number of untimed steps, during which CUDA graphs are recorded
_COPY_SECONDS = 0.5  # duration of the copy whose speed sets the floor


def run(options: argparse.Namespace) -> None:
    """Measure once and print the results.

    Raises:
        ConfigError: A flag is invalid, the output exists, the model is too large for a CPU, or its
            context window is too short for the requested lengths.
        StorageError: The output cannot be written.
    """
    minimums = {"batch": 1, "prompt": 1, "new": 1, "prefill_length": 1, "prefill_tokens": 1}
    if problems := minimum_problems(options, adapters=0, adapter_rank=1, **minimums):
        raise ConfigError(problems)
    if options.out is not None:
        expect_no_file("--out", [options.out], overwrite=options.overwrite)
        check_writable("--out", options.out)
    import torch

    from megatron.device import Device
    from megatron.inference.build import EngineOptions
    from tools.bench.ceilings import copy_rate
    from tools.generation_benchmark.measure import EngineBenchmark
    from tools.generation_benchmark.report import Result, line, table

    device = Device.pick()
    if device.type == "cpu" and options.model not in FOR_CPU:
        raise ConfigError(
            f"--model {options.model} would take hours on a CPU, and this machine has no GPU: use "
            f"--model {' or '.join(FOR_CPU)}"
        )
    device.activate()
    config = read_flags(
        training_flags(WORKLOADS[options.model], options.precision, 1, Path("none"), ()), 1
    )
    window = config.model.max_position_embeddings or 0
    max_length = options.prompt + options.new + WARM_UP + 1
    if max_length > window:
        raise ConfigError(
            f"--prompt {options.prompt}, --new {options.new} and {WARM_UP + 1} tokens for warming "
            f"up do not fit in the {window} positions of --model {options.model}: lower --prompt "
            "or --new"
        )
    bandwidth = copy_rate(device, _COPY_SECONDS)
    benchmark = EngineBenchmark(
        config,
        device,
        bandwidth,
        EngineOptions(graphs=not options.no_graphs),
        adapters=options.adapters,
        rank=options.adapter_rank,
    )
    decoding = []
    for batch in options.batch:
        decoding.append(benchmark.decode(batch, options.prompt, options.new, WARM_UP))
        print(line(decoding[-1]), flush=True)
    length = min(options.prefill_length, window - 1)
    speed = benchmark.prefill(length, options.prefill_tokens)
    if options.transformers:
        from tools.generation_benchmark.baseline import TransformersBaseline

        benchmark.release()
        baseline = TransformersBaseline(config, device, compiles=options.transformers == "compiled")
        decoding = [
            baseline.with_transformers(row, options.prompt, options.new) for row in decoding
        ]
    result = Result(
        device=device.name,
        torch=str(torch.__version__),
        model=options.model
        + f" with {options.adapters} adapters of rank {options.adapter_rank}"
        * (options.adapters > 0),
        precision=options.precision,
        parameters=benchmark.parameters,
        bandwidth=bandwidth,
        decoding=tuple(decoding),
        prompt_tokens_per_second=speed,
        prompt_length=length,
    )
    print(table(result))
    if options.out is not None:
        with writing_to("--out", options.out):
            options.out.write_text(json.dumps(asdict(result), indent=2) + "\n")


def _parser() -> ToolParser:
    parser = ToolParser("benchmark_generation.py", "Time text generation.", shows_defaults=True)
    parser.add_argument(
        "--model",
        choices=("S", "L", "D", *FOR_CPU),
        default="L",
        help="model shape; L is Llama 3.1 8B, and D is four layers of DeepSeek-V3",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="bf16", help="number format of the weights"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=128, help="length of each prompt, in tokens")
    parser.add_argument("--new", type=int, default=128, help="number of timed steps")
    parser.add_argument(
        "--prefill-length", type=int, default=2048, help="length of each long prompt, in tokens"
    )
    parser.add_argument(
        "--prefill-tokens",
        type=int,
        default=32768,
        help="total number of tokens in all long prompts",
    )
    parser.add_argument("--no-graphs", action="store_true", help="run without CUDA graphs")
    parser.add_argument(
        "--adapters", type=int, default=0, help="number of adapters; sequences use them in turn"
    )
    parser.add_argument("--adapter-rank", type=int, default=16, help="rank of each adapter")
    parser.add_argument(
        "--transformers",
        nargs="?",
        choices=("compiled", "uncompiled"),
        const="compiled",
        help="also time `transformers` with a static cache (compiled if no value is given)",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


main = tool_main(_parser, run)

if __name__ == "__main__":
    sys.exit(main())
