"""Report the measurements as tables and JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.bench.breakdown import Breakdown
from tools.bench.launch import RunMeasurements
from tools.bench.workloads import tokens_of_step

if TYPE_CHECKING:
    from megatron.config import RunConfig

_GIB = 2**30
_TERA = 1e12


@dataclasses.dataclass
class Result:
    """The runs of one checkout.

    Attributes:
        name: Name of the checkout.
        runs: Measurements of the runs so far.
        breakdown: Breakdown of a step of the profiled run, if any.
        unavailable: Why there is no breakdown.
    """

    name: str
    runs: list[RunMeasurements]
    breakdown: Breakdown | None = None
    unavailable: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The constants from which the other metrics follow, given the seconds per step.

    Attributes:
        tokens: Tokens per step per GPU.
        flops: Model FLOPs per token.
        precision: Name of the precision.
        gpus: Number of GPUs.
        ceilings: Fields of `tools.bench.ceilings.Ceilings`, and seconds per step at the rooflines.
        roofline: Seconds per step at the roofline of the precision, or `None` if unknown.
    """

    tokens: float
    flops: int
    precision: str
    gpus: int
    ceilings: Mapping[str, Any]
    roofline: float | None

    @classmethod
    def of(cls, config: RunConfig, precision: str, gpus: int, ceilings: Mapping[str, Any]) -> Facts:
        """Return the facts for runs of `config`."""
        from megatron.models.arithmetic import flops_per_token
        from megatron.models.plans import model_plan
        from megatron.tokenizer import padded_vocabulary

        assert config.data.seq_length is not None
        is_16bit = config.precision.bf16 or config.precision.fp16
        key = "roofline_step_16bit" if config.precision.fp8_format is None else "roofline_step_fp8"
        vocabulary = padded_vocabulary(config)
        return cls(
            tokens=tokens_of_step(config) / gpus,
            flops=flops_per_token(model_plan(config.model, vocabulary), config.data.seq_length),
            precision=precision,
            gpus=gpus,
            ceilings=ceilings,
            roofline=ceilings[key] if is_16bit else None,  # unknown for fp32
        )

    def derived(self, seconds: float) -> dict[str, float | None]:
        """Return the metrics derived from the seconds per step, by name."""
        speed = self.tokens / seconds
        model = speed * self.flops
        peak = self.ceilings["datasheet"]
        return {
            "tokens_per_second_per_gpu": speed,
            "model_tflops": model / _TERA,
            "mfu_datasheet": model / peak if peak else None,
            "mfu_measured_products": model / self.ceilings["products"],
            "share_of_roofline": self.roofline / seconds if self.roofline else None,
        }


def run_line(name: str, number: int, measured: RunMeasurements, tokens: float) -> str:
    """Describe a finished run in one line. `tokens` is the number of tokens per step per GPU."""
    return (
        f"{name} run {number}: tokens/s per GPU best {tokens / measured.best:,.0f}, "
        f"median {tokens / measured.median:,.0f}, by wall clock {tokens / measured.mean:,.0f}; "
        f"launch to iteration 1 {measured.first_iteration:.1f} s; "
        f"loss {measured.first_loss:.3f} to {measured.last_loss:.3f}"
    )


def summary(result: Result) -> dict[str, float]:
    """Summarize all runs: step times and start-up times in seconds, and memory peaks in bytes.

    Runs are ranked from best to worst by their median step time.
    """
    medians = [run.median for run in result.runs]
    return {
        "best_run": min(medians),
        "median_run": statistics.median(medians),
        "worst_run": max(medians),
        "best_iteration": min(run.best for run in result.runs),
        "clock": statistics.median(run.mean for run in result.runs),
        "first_iteration_best": min(run.first_iteration for run in result.runs),
        "first_iteration_first": result.runs[0].first_iteration,
        "peak_allocated": max(run.peak_allocated for run in result.runs),
        "peak_reserved": max(run.peak_reserved for run in result.runs),
    }


def describe(facts: Facts, results: Sequence[Result], flags: Sequence[str]) -> str:
    """Return the whole report as text."""
    blocks = [
        f"pretrain_gpt.py {shlex.join(flags)}",
        describe_ceilings(facts.ceilings, facts.tokens),
    ]
    for result in results:
        blocks += [_describe_result(facts, result), _describe_breakdown(result)]
    if len(results) == 2:
        blocks.append(_describe_difference(facts, *results))
    return "\n\n".join(["", *blocks])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows in columns, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def describe_ceilings(ceilings: Mapping[str, Any], tokens: float) -> str:
    """Describe the ceilings of the machine. `tokens` is the number of tokens per step per GPU."""
    peak = ceilings["datasheet"]
    rows = [(f"ceilings of {ceilings['device']}, {ceilings['seconds']:g} s each", "")]
    rows.append(("datasheet, dense 16-bit", _rate(peak)))
    for name, key in (
        ("bf16 products of a layer, forward and gradients", "products"),
        ("bf16 products of the output head", "head"),
        ("fp8 products of a layer (_scaled_mm, no casts)", "products_fp8"),
        ("causal attention forward", "attention_forward"),
        ("causal attention backward (2.5 x forward counted)", "attention_backward"),
    ):
        rows.append((name, _rate(ceilings[key])))
    rows.append(("copy on the device, read + write", f"{ceilings['copy'] / _TERA:.2f} TB/s"))
    for name, key in (("bf16", "roofline_step_16bit"), ("fp8, bf16 head", "roofline_step_fp8")):
        step = ceilings[key]
        value = f"{tokens / step:,.0f} tokens/s per GPU" if step else "n/a"
        rows.append((f"roofline, {name}", value))
    return table(rows)


def _rate(flops: float | None) -> str:
    return "n/a" if flops is None else f"{flops / _TERA:,.4g} TFLOP/s"


def _describe_result(facts: Facts, result: Result) -> str:
    totals = summary(result)
    columns = [
        ("best run", totals["best_run"]),
        ("median run", totals["median_run"]),
        ("best iteration", totals["best_iteration"]),
        ("by wall clock", totals["clock"]),
    ]
    derived = [facts.derived(seconds) for _, seconds in columns]
    runs = f"{len(result.runs)} run{'s' * (len(result.runs) > 1)}"
    rows = [(f"{result.name}, {runs}", *(name for name, _ in columns))]
    rows.append(("step, ms", *(f"{seconds * 1e3:.1f}" for _, seconds in columns)))
    for label, key, template in (
        ("tokens/s per GPU", "tokens_per_second_per_gpu", "{:,.0f}"),
        ("model TFLOP/s", "model_tflops", "{:.4g}"),
        ("MFU, datasheet 16-bit peak", "mfu_datasheet", "{:.1%}"),
        ("MFU, measured bf16 products", "mfu_measured_products", "{:.1%}"),
        ("share of the roofline", "share_of_roofline", "{:.1%}"),
    ):
        values = [totals[key] for totals in derived]
        rows.append(
            (label, *("n/a" if value is None else template.format(value) for value in values))
        )
    return (
        f"{table(rows)}\n"
        f"peak memory {totals['peak_allocated'] / _GIB:.2f} GiB allocated, "
        f"{totals['peak_reserved'] / _GIB:.2f} GiB reserved; launch to the end of iteration 1: "
        f"first run {totals['first_iteration_first']:.1f} s, "
        f"best {totals['first_iteration_best']:.1f} s"
    )


def _describe_breakdown(result: Result) -> str:
    breakdown = result.breakdown
    if breakdown is None:
        return f"breakdown of a step: not available ({result.unavailable})"
    timed = result.runs[-1].median
    rows = [("breakdown of a step", "ms", "share")]
    for part, seconds in breakdown.parts.items():
        rows.append((part, f"{seconds * 1e3:.2f}", f"{seconds / breakdown.step:.1%}"))
    rows.append(("sum = step under the profiler", f"{sum(breakdown.parts.values()) * 1e3:.2f}", ""))
    rows.append(("step without the profiler, same run", f"{timed * 1e3:.2f}", ""))
    for part, seconds in breakdown.hidden.items():
        rows.append((f"hidden behind other work: {part}", f"{seconds * 1e3:.2f}", ""))
    lines = [table(rows), "", "largest kernels: ms per step, launches per step, part, name"]
    for name, part, seconds, launches in breakdown.kernels:
        lines.append(f"{seconds * 1e3:9.2f} {launches:7.1f}  {part[:22]:22}  {name[:90]}")
    return "\n".join(lines)


def _describe_difference(facts: Facts, old: Result, new: Result) -> str:
    """Compare two checkouts. A difference within the spread of the runs is noise."""
    before, after = summary(old), summary(new)
    rows: list[tuple[str, ...]] = [("", old.name, new.name, "difference")]
    for label, key in (("median run", "median_run"), ("best run", "best_run")):
        speeds = [facts.tokens / totals[key] for totals in (before, after)]
        change = speeds[1] / speeds[0] - 1
        rows.append((f"tokens/s, {label}", *(f"{s:,.0f}" for s in speeds), f"{change:+.2%}"))
    spreads = [totals["worst_run"] / totals["best_run"] - 1 for totals in (before, after)]
    rows.append(("spread of the runs", *(f"{spread:.2%}" for spread in spreads), ""))
    if old.breakdown and new.breakdown:
        for part, seconds in new.breakdown.parts.items():
            old_seconds = old.breakdown.parts[part]
            cells = [
                f"{old_seconds * 1e3:.2f}",
                f"{seconds * 1e3:.2f}",
                f"{(seconds - old_seconds) * 1e3:+.2f}",
            ]
            rows.append((f"ms: {part}", *cells))
    text = table(rows)
    if len(old.runs) < 2:
        return f"{text}\nsingle runs: the spread is unknown"
    is_separate = after["worst_run"] < before["best_run"] or before["worst_run"] < after["best_run"]
    return text + ("" if is_separate else "\nthe runs overlap, so they show no difference")


def to_json(facts: Facts, results: Sequence[Result], flags: Sequence[str]) -> str:
    """Return the whole report as JSON."""
    record = {
        "flags": list(flags),
        "precision": facts.precision,
        "gpus": facts.gpus,
        "tokens_per_step_per_gpu": facts.tokens,
        "model_flops_per_token": facts.flops,
        "ceilings": dict(facts.ceilings),
        "results": [_result_record(facts, result) for result in results],
    }
    return json.dumps(record, indent=1) + "\n"


def _result_record(facts: Facts, result: Result) -> dict[str, Any]:
    totals = summary(result)
    breakdown = result.breakdown
    return {
        "name": result.name,
        "summary": totals,
        "best": facts.derived(totals["best_run"]),
        "median": facts.derived(totals["median_run"]),
        "runs": [dataclasses.asdict(run) for run in result.runs],
        "breakdown": result.unavailable if breakdown is None else dataclasses.asdict(breakdown),
    }
