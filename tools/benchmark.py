r"""Measure pretraining: the real entry script with data loading, optimizer and logging.

    python tools/benchmark.py --workload S --precision bf16
    python tools/benchmark.py --workload L --gpus 8 --layout "--use-distributed-optimizer" \
        -- --overlap-grad-reduce --overlap-param-gather
    python tools/benchmark.py --workload S --compare HEAD~1

The tool prints speed, memory, start-up time, a breakdown of a step, and the limits of the machine
at the workload's shapes, and writes the same numbers as JSON to --output. Flags after -- are passed
to pretrain_gpt.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import run_command
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.durable import expect_no_file
from megatron.errors import ConfigError, DataError
from tools.bench import report
from tools.bench.breakdown import read_breakdown
from tools.bench.launch import RunMeasurements, entry_command, measure, run_process
from tools.bench.report import Result
from tools.bench.workloads import (
    FOR_CPU,
    PRECISIONS,
    WORKLOADS,
    Workload,
    corpus_prefix,
    read_flags,
    tokens_of_step,
    training_flags,
)

if TYPE_CHECKING:
    from megatron.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
_PROFILED = 4  # profiled iterations; the inner ones are broken down
_QUICK_DEFAULTS = {"warmup": 5, "iterations": 15, "repeat": 1, "ceiling_seconds": 0.5}
# Flags of pretrain_gpt.py that this tool sets itself.
_OWN_FLAGS = {
    *("--train-iters", "--train-samples", "--exit-interval", "--exit-duration-in-mins"),
    *("--log-interval", "--metrics-jsonl", "--skip-train", "--dry-run"),
    *("--profile", "--profile-step-start", "--profile-step-end", "--profile-dir"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings that all runs of one invocation share.

    Attributes:
        workload: The model and its batch.
        precision: A key of PRECISIONS.
        gpus: Number of GPUs.
        flags: Flags of pretrain_gpt.py, except those for length and output of a run.
        config: The configuration that the flags describe.
        folder: Folder for logs, traces and results.
        warmup: Iterations before the timed ones.
        iterations: Timed iterations.
        timeout: Time limit per run in seconds.
    """

    workload: Workload
    precision: str
    gpus: int
    flags: list[str]
    config: RunConfig
    folder: Path
    warmup: int
    iterations: int
    timeout: float


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A checkout to measure, and its name in the output."""

    name: str
    root: Path


def build_parser() -> ToolParser:
    """Build the parser of the arguments before `--`."""
    parser = ToolParser("benchmark.py", __doc__)
    parser.usage = "%(prog)s --workload NAME [options] [-- flags of pretrain_gpt.py]"
    add = parser.add_argument
    shown = "S: 1.7B, L: Llama-3-8B, demo: a toy for a CPU (default: S)."
    add("--workload", choices=WORKLOADS, default="S", help=shown)
    add("--precision", choices=PRECISIONS, default="bf16", help="Number format (default: bf16).")
    add("--gpus", type=int, default=1, help="Number of GPUs, one process each (default: 1).")
    add("--layout", default="", metavar="FLAGS", help="Flags of pretrain_gpt.py, in quotes.")
    add("--iterations", type=int, default=30, help="Timed iterations per run (default: 30).")
    add("--warmup", type=int, default=10, help="Warm-up iterations, not timed (default: 10).")
    add("--repeat", type=int, default=3, help="Number of runs (default: 3).")
    add(
        "--quick",
        action="store_true",
        help="Change the defaults to 5 + 15 iterations, one run, and 0.5 s per ceiling.",
    )
    add("--no-profile", action="store_true", help="Do not break down a step.")
    add(
        "--compare",
        metavar="COMMIT",
        help="Also measure this commit, or the checkout in this folder.",
    )
    add("--ceilings", action="store_true", help="Only measure the limits of the machine.")
    add("--ceiling-seconds", type=float, default=2.0, help="Time per ceiling (default: 2).")
    add("--label", help="Name of this checkout in the output (default: its commit).")
    text = "Folder for the results (default: runs/benchmark)."
    add("--output", type=Path, default=Path("runs/benchmark"), help=text)
    add("--overwrite", action="store_true", help="Replace the result of an earlier call.")
    add("--timeout", type=float, default=600, help="Time limit per run in seconds (default: 600).")
    return parser


def make_plan(options: argparse.Namespace, extra_flags: Sequence[str]) -> Plan:
    """Check the flags, write the corpus, and return the plan for all runs.

    Raises:
        ConfigError: A flag or its value is invalid.
    """
    if problems := minimum_problems(options, gpus=1, iterations=1, warmup=1, repeat=1):
        raise ConfigError(problems)
    for name in ("ceiling_seconds", "timeout"):
        if not getattr(options, name) > 0:  # also refuses NaN
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(options, name):g}: give more than 0")
    if options.ceilings and options.compare is not None:
        raise ConfigError("--ceilings measures no checkout: drop --ceilings or --compare")
    workload, output = WORKLOADS[options.workload], options.output.resolve()
    extra_flags = _extra_flags(options.layout, extra_flags)
    _expect_gpus(options)
    flags = training_flags(
        workload, options.precision, options.gpus, output / "corpus", extra_flags
    )
    read_flags(flags, options.gpus)  # report mistakes before the corpus is written
    prefix = corpus_prefix(output / "corpus", workload)
    flags = training_flags(workload, options.precision, options.gpus, prefix, extra_flags)
    folder = output / f"{options.workload}-{options.precision}-{options.gpus}gpu"
    folder.mkdir(parents=True, exist_ok=True)
    return Plan(
        workload=workload,
        precision=options.precision,
        gpus=options.gpus,
        flags=flags,
        config=read_flags(flags, options.gpus),
        folder=folder,
        warmup=options.warmup,
        iterations=options.iterations,
        timeout=options.timeout,
    )


def _extra_flags(layout: str, extra_flags: Sequence[str]) -> list[str]:
    """Return the flags for pretrain_gpt.py in --layout and after `--`."""
    try:
        flags = [*shlex.split(layout), *extra_flags]
    except ValueError as error:
        raise ConfigError(f"--layout {layout}: {error}") from None
    for name in (flag.partition("=")[0] for flag in flags):
        if name in _OWN_FLAGS:
            raise ConfigError(
                f"{name}: this tool sets the length and output of its runs: use --iterations, "
                "--warmup and --no-profile"
            )
    return flags


def _expect_gpus(options: argparse.Namespace) -> None:
    """Check that the GPUs exist. Only small workloads may run without any."""
    from megatron.device import gpu_count

    num_gpus = gpu_count()
    if options.workload not in FOR_CPU and num_gpus < options.gpus:
        small = f"--workload {' or '.join(FOR_CPU)} runs without a GPU"
        raise ConfigError(
            f"--workload {options.workload} --gpus {options.gpus}: this machine has {num_gpus} "
            f"GPUs: {'use at most that many' if num_gpus else small}"
        )


def run_once(plan: Plan, checkout: Checkout, number: int, result: Result, *, profile: bool) -> None:
    """Launch the entry script once and add its numbers to `result`.

    The profile covers additional iterations, so it does not slow down the timed ones.
    """
    folder = plan.folder / checkout.name / f"run{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.json"), *folder.glob("*.jsonl")):
        old.unlink()
    last = plan.warmup + plan.iterations
    metrics = folder / "metrics.jsonl"
    train_iters, args = last, [*plan.flags, "--log-interval", "1"]
    if profile:
        # One iteration separates the timed iterations from the profiled ones.
        train_iters, start = last + 1 + _PROFILED, last + 2
        args += ["--profile", "--profile-dir", str(folder), "--profile-step-start", str(start)]
        args += ["--profile-step-end", str(start + _PROFILED)]
    args += ["--train-iters", str(train_iters)]
    args += ["--metrics-jsonl", str(metrics), "--log-memory-to-tensorboard"]
    command = entry_command(checkout.root, plan.gpus, args)
    lines = run_process(command, root=checkout.root, log=folder / "log.txt", timeout=plan.timeout)
    measured = measure(lines, warmup=plan.warmup, last=last)
    result.runs.append(_with_peak_memory(metrics, measured))
    print(report.run_line(checkout.name, number, measured, _tokens_per_gpu(plan)), flush=True)
    if profile:
        traces = sorted(folder.glob("*.pt.trace.json"))
        try:
            if not traces:
                raise DataError(f"{folder} contains no trace")
            result.breakdown = read_breakdown(traces[0])
        except DataError as error:
            result.unavailable = str(error)


def _with_peak_memory(metrics: Path, measured: RunMeasurements) -> RunMeasurements:
    """Replace the memory peaks with those of the whole run.

    The log reports memory only once, after the first logged iterations.
    """
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]

    def peak(tag: str, logged: int) -> int:
        return max([logged, *(record.get(tag, 0) for record in records)])

    return dataclasses.replace(
        measured,
        peak_allocated=peak("mem-max-allocated-bytes", measured.peak_allocated),
        peak_reserved=peak("mem-reserved-bytes", measured.peak_reserved),
    )


def _tokens_per_gpu(plan: Plan) -> float:
    return tokens_of_step(plan.config) / plan.gpus


def benchmark(options: argparse.Namespace, extra_flags: Sequence[str]) -> None:
    """Measure, then print and write the report."""
    plan = make_plan(options, extra_flags)
    if options.ceilings:
        path = _ceilings_file(plan, options)
        _write_ceilings(plan, path, options.ceiling_seconds)
        ceilings = _for_run(_read_ceilings(path), plan)
        print(report.describe_ceilings(ceilings, _tokens_per_gpu(plan)))
        return
    target = plan.folder / "result.json"
    expect_no_file("--output", [target], overwrite=options.overwrite)
    this_checkout = Checkout(options.label or commit_of(ROOT), ROOT)
    with _other_checkout(options.compare) as other:
        ceilings = _known_ceilings(plan, options, extra_flags)
        checkouts = [this_checkout]
        if other is not None:
            is_same_name = other.name == this_checkout.name
            checkouts.insert(0, Checkout("other" if is_same_name else other.name, other.root))
        unavailable = "--no-profile" if options.no_profile else ""
        results = [Result(checkout.name, [], unavailable=unavailable) for checkout in checkouts]
        profiled = None if options.no_profile else options.repeat
        for number in range(1, options.repeat + 1):  # alternate, so that drift affects both
            for checkout, result in zip(checkouts, results, strict=True):
                run_once(plan, checkout, number, result, profile=number == profiled)
    facts = report.Facts.of(plan.config, plan.precision, plan.gpus, ceilings)
    print(report.describe(facts, results, plan.flags))
    target.write_text(report.to_json(facts, results, plan.flags), encoding="utf-8")
    print(f"\nwritten: {target}")


def _ceilings_file(plan: Plan, options: argparse.Namespace) -> Path:
    parallel, micro = plan.config.parallel, plan.config.training.micro_batch_size
    split = f"tp{parallel.tensor_model_parallel_size}-cp{parallel.context_parallel_size}"
    return options.output.resolve() / f"ceilings-{options.workload}-m{micro}-{split}.json"


def _known_ceilings(
    plan: Plan, options: argparse.Namespace, extra_flags: Sequence[str]
) -> dict[str, Any]:
    """Return the machine's ceilings.

    Ceilings from an earlier call are reused if they were measured on this machine at these shapes,
    for at least as long. Otherwise, a separate process measures them, so that no memory stays in
    use.
    """
    from tools.bench.ceilings import shapes_of

    path, min_seconds = _ceilings_file(plan, options), options.ceiling_seconds
    record = _read_ceilings(path)
    shapes = shapes_of(plan.config, plan.workload.vocabulary)
    if record.get("shapes") != shapes or record["seconds"] < min_seconds:
        args = ["--ceilings", "--workload", options.workload, "--precision", options.precision]
        args += ["--gpus", str(plan.gpus), "--output", str(options.output.resolve())]
        args += ["--ceiling-seconds", str(min_seconds)]
        args += [f"--layout={options.layout}", "--", *extra_flags]
        command = [sys.executable, str(Path(__file__).resolve()), *args]
        run_process(command, root=ROOT, log=plan.folder / "ceilings.txt", timeout=options.timeout)
        record = _read_ceilings(path)
    return _for_run(record, plan)


def _for_run(record: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return recorded ceilings together with the rooflines of the planned runs."""
    from tools.bench.ceilings import Ceilings, rooflines

    measured = Ceilings(**{field.name: record[field.name] for field in fields(Ceilings)})
    return {**record, **rooflines(measured, plan.config, plan.gpus, plan.workload.vocabulary)}


def _read_ceilings(path: Path) -> dict[str, Any]:
    """Read recorded ceilings. The result is empty if the file is missing or incomplete."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}


def _write_ceilings(plan: Plan, path: Path, seconds: float) -> None:
    from megatron.device import Device
    from tools.bench.ceilings import measure_ceilings, shapes_of

    device = Device.pick()
    device.activate()
    size = plan.workload.vocabulary
    ceilings = measure_ceilings(plan.config, device, size, seconds=seconds)
    record = {"shapes": shapes_of(plan.config, size), **dataclasses.asdict(ceilings)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}\n")


def commit_of(root: Path) -> str:
    """Return a checkout's commit hash, plus "-changed" if files differ, or "here" without git."""
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head is None:
        return "here"
    return head + ("-changed" if _git(root, "status", "--porcelain", "-uno") else "")


def _git(root: Path, *args: str) -> str | None:
    """Return the output of a git command, or `None` if it fails."""
    done = subprocess.run(
        ["git", *args], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode else done.stdout.strip()


@contextmanager
def _other_checkout(commit_or_folder: str | None) -> Iterator[Checkout | None]:
    """Yield the checkout that --compare names: a folder, or a commit in a temporary worktree.

    Raises:
        ConfigError: --compare names neither a folder with a checkout nor a commit.
    """
    if commit_or_folder is None:
        yield None
        return
    if (Path(commit_or_folder) / "pretrain_gpt.py").is_file():
        yield Checkout(Path(commit_or_folder).resolve().name, Path(commit_or_folder).resolve())
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "checkout"
        if _git(ROOT, "worktree", "add", "--detach", str(tree), commit_or_folder) is None:
            raise ConfigError(
                f"--compare {commit_or_folder}: neither a commit of this checkout nor a folder "
                "with pretrain_gpt.py; without git, unpack the other commit and name its folder"
            )
        try:
            yield Checkout(commit_of(tree), tree)
        finally:
            _git(ROOT, "worktree", "remove", "--force", str(tree))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    separator = args.index("--") if "--" in args else len(args)
    own_args = args[:separator]
    if "--layout" in own_args[:-1]:  # argparse would mistake a value that looks like a flag for one
        index = own_args.index("--layout")
        own_args[index : index + 2] = [f"--layout={own_args[index + 1]}"]
    options = build_parser().read(own_args)
    if options.quick:
        parser = build_parser()
        parser.set_defaults(**_QUICK_DEFAULTS)
        options = parser.read(own_args)  # explicit flags take precedence
    return run_command(lambda: benchmark(options, args[separator + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
