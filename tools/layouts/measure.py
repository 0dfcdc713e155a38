"""Run `pretrain_gpt.py` in one layout and measure it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron.config import RunConfig
from megatron.config.parser import parse_config
from megatron.errors import UserError
from megatron.models.plans import model_plan
from megatron.planner.memory import largest_process
from megatron.tokenizer import padded_vocabulary
from tools.bench.launch import entry_command, run_to_end
from tools.layouts.models import BenchmarkLayout
from tools.layouts.table import Measurement, Row

_ROOT = Path(__file__).resolve().parents[2]
_GIB = 1024.0**3
_MIB_PER_GIB = 1024.0


class RunFailedError(UserError):
    """A run failed or took too long. The message says why."""


def measure(
    layout: BenchmarkLayout,
    flags: Sequence[str],
    *,
    available: int,
    iterations: int,
    timeout: float,
    bubble: bool,
) -> Row:
    """Train in one layout and return its row, even if the run fails.

    Args:
        layout: The layout to train in.
        flags: All flags of the run: of the model, the data, the layout and the user.
        available: Number of available GPUs, or of processes on a CPU.
        iterations: Iterations of the run, unless the layout allows fewer.
        timeout: Seconds after which the run is ended. The run is skipped if this is not positive.
        bubble: Whether to also measure the pipeline bubble.
    """
    row = Row(
        layout.name,
        layout.processes,
        layout.flags,
        predicted_milliseconds=layout.predicted_milliseconds,
    )
    if timeout <= 0:
        return replace(row, problem="skipped: no time left")
    if layout.processes > available:
        return replace(row, problem=f"skipped: {layout.processes} needed, {available} present")
    iterations = min(iterations, layout.max_iterations or iterations)
    args = [*flags, "--train-iters", str(iterations)]
    args += ["--log-interval", str(max(1, min(2, iterations)))]
    args += ["--log-timers-to-tensorboard", "--no-exit-signal-handler"]
    try:
        config = parse_config(args, world_size=layout.processes).config
        if bubble and config.parallel.pipeline_model_parallel_size > 1:
            args.append("--log-pipeline-bubble")
        log, records = launch(args, layout.processes, timeout)
        measured = read_measurement(config, layout.processes, log, records)
    except UserError as error:
        return replace(row, problem=str(error), failed=True)
    sequence, batch = config.data.seq_length, config.training.global_batch_size
    return replace(row, batch=f"{batch} x {sequence}", measured=measured)


def launch(args: Sequence[str], processes: int, timeout: float) -> tuple[str, list[dict[str, Any]]]:
    """Train with these flags, and return the output and the records of the metrics file.

    Raises:
        RunFailedError: The run failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = entry_command(_ROOT, processes, [*args, "--metrics-jsonl", str(metrics)])
        lines, code = run_to_end(command, timeout=timeout, OMP_NUM_THREADS="1")
        log = "\n".join(line for _, line in lines)
        if code is None:
            raise RunFailedError(f"did not end within its {timeout:.3g} s")
        if code:
            raise RunFailedError(error_line(log, code))
        records = metrics.read_text(encoding="utf-8").splitlines()
        return log, [json.loads(record) for record in records]


def error_line(log: str, code: int) -> str:
    """Return our own error message from a log, otherwise Python's, otherwise the exit code."""
    for pattern in (r"^(?:\[rank \d+\] )?error: .*", r"^(?:\[rank\d+\]: )?[\w.]*Error: .*"):
        error_lines = [
            line
            for line in re.findall(pattern, log, re.MULTILINE)
            if "ChildFailed" not in line and "this is a bug" not in line
        ]
        if error_lines:
            return str(error_lines[0])[:300]
    return f"exit code {code}"


def read_measurement(
    config: RunConfig, processes: int, log: str, records: Sequence[dict[str, Any]]
) -> Measurement:
    """Return the measurements of a finished run, from its output and its metrics file."""
    steps = [record for record in records if "lm loss" in record]
    num_warmup = len(steps) // 3
    seconds = median(record["iteration-time"] for record in steps[num_warmup:])
    tokens = config.training.global_batch_size * config.data.seq_length
    utilization = re.findall(r"MFU: ([\d.]+)%", log)  # one per iteration
    slowdown = steps[-1]["iteration-time"] / seconds
    memory = [float(text) for text in re.findall(r"max allocated: ([\d.]+)", log)]
    largest = largest_process(
        config, model_plan(config.model, padded_vocabulary(config)), processes
    )
    return Measurement(
        losses=tuple(record["lm loss"] for record in steps),
        norms=tuple(record["grad-norm"] for record in steps),
        milliseconds=1000.0 * seconds,
        tokens_per_second=tokens / seconds / processes,
        mfu=slowdown * float(utilization[-1]) if utilization else None,
        peak_gib=max(memory) / _MIB_PER_GIB if memory else None,
        predicted_gib=largest.total / _GIB,
        bubble=_mean_of(records, "pipeline-bubble", num_warmup),
        predicted_bubble=_mean_of(records, "pipeline-bubble predicted", num_warmup),
    )


def _mean_of(records: Sequence[dict[str, Any]], name: str, num_warmup: int) -> float | None:
    values = [record[name] for record in records if name in record][num_warmup:]
    return mean(values) if values else None
