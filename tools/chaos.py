r"""Run a training command under random faults, and judge from its outputs whether it survived.

    python tools/chaos.py --mtbf 60s --hours 1 --against calm/metrics.jsonl -- \
        torchrun --nproc-per-node 4 --max-restarts 1000 pretrain_gpt.py --config run.yaml \
        --save runs/a --load runs/a --metrics-jsonl runs/a/metrics.jsonl

The command must name --save, --load and --metrics-jsonl. Like a scheduler, this tool restarts the
command until it exits with 0 or fails without a new fault. Each fault hits a random rank at a
random time, until --hours have passed:

    kill      SIGKILL
    stop      SIGSTOP without SIGCONT: other ranks must notice, so the last running rank is spared
    pause     SIGSTOP and, two seconds later, SIGCONT: nothing may fail
    term      SIGTERM: all ranks save and exit
    launcher  SIGKILL to the launcher instead of a rank
    memory    the rank can allocate no more memory (RLIMIT_AS)
    files     the rank can open no more files (RLIMIT_NOFILE)
    disk      the rank's files cannot grow, as on a full disk (RLIMIT_FSIZE)
    damage    one bit of the newest checkpoint is flipped and the rank is killed, if there is an
              older intact checkpoint

The verdict uses only the command's exit codes, checkpoints and metrics. --seed determines every
fault and its time, but the effect of a fault also depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.durable import TEMPORARY
from megatron.errors import CheckpointError, ConfigError

MARK = "MEGATRON_CHAOS"
_FORK_SERVER = b"multiprocessing.forkserver"
_LAUNCHER = re.compile(r"torchrun(\.py)?$|^torch\.distributed\.run$|(^|/)(mpirun|deepspeed)$")
_PAUSE_SECONDS = 2.0
_EXIT_SECONDS = 60.0  # seconds within which the ranks end after their launcher
_FULL_BYTES = 4096
_SPARE_MEMORY = 1 << 20
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_UNSUPPORTED = {
    "clock": "only root can set the clock, for all programs at once: scoreboard row 27 moves it "
    "inside a run",
    "partition": "network namespaces need root: tests/reliability/test_machines.py cuts a cable",
    "eio": "a failing disk needs root: scoreboard row 9 makes every call of a writer fail",
}


@dataclass
class Fault:
    """A fault that was injected: its kind, the process id, and the Unix time in seconds."""

    kind: str
    pid: int
    time: float


@dataclass
class Outcome:
    """The outcome of a command under faults.

    Attributes:
        codes: The exit code of each start, in order. It is negative if a signal ended the command.
        faults: The faults that were injected.
        seconds: The time from the first start to the last end.
        orphans: The number of processes still running a minute after their launcher ended.
    """

    codes: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0
    orphans: int = 0


@dataclass(frozen=True)
class Plan:
    """The command to run, and the faults to inject.

    Attributes:
        command: The training command.
        kinds: The faults to draw from.
        mtbf: The mean time between two faults in seconds.
        seconds: The time after which no more faults are injected.
        save: The command's folder of checkpoints.
        log: The file for the command's output.
        starts: The maximum number of times to start the command.
    """

    command: Sequence[str]
    kinds: Sequence[str]
    mtbf: float
    seconds: float
    save: Path
    log: Path
    starts: int = 1000


class JobProcess(NamedTuple):
    """A process of a job.

    Attributes:
        parent: The id of the parent process.
        has_rank: Whether a launcher assigned a rank to the process.
        is_forked: Whether the process is the fork server of our launcher, or was forked from it.
        is_stopped: Whether a signal has stopped the process.
    """

    parent: int
    has_rank: bool
    is_forked: bool
    is_stopped: bool


class Job:
    """A started command, with all of its processes."""

    def __init__(self, plan: Plan) -> None:
        """Start the command."""
        self._mark = uuid.uuid4().hex
        self._is_launched = any(_LAUNCHER.search(word) for word in plan.command)
        with plan.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(plan.command),
                env={**os.environ, MARK: self._mark},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> dict[int, JobProcess]:
        """Return the running processes of the job by process id."""
        processes = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if f"{MARK}={self._mark}".encode() in variables and state != "Z":
                    has_rank = any(variable.startswith(b"RANK=") for variable in variables)
                    is_forked = _FORK_SERVER in (folder / "cmdline").read_bytes()
                    process = JobProcess(int(parent), has_rank, is_forked, is_stopped=state == "T")
                    processes[int(folder.name)] = process
        return processes

    def ranks(self) -> list[int]:
        """Return the ids of the training processes, without their data-loading children."""
        processes = self.processes()
        servers = {
            pid
            for pid, process in processes.items()
            if process.is_forked
            and not (process.parent in processes and processes[process.parent].is_forked)
        }
        with_rank = {
            pid
            for pid, process in processes.items()
            if process.has_rank or process.parent in servers
        } - servers
        if not self._is_launched:
            return [self.process.pid] if self.process.pid in processes else []
        return sorted(pid for pid in with_rank if processes[pid].parent not in with_rank)

    def end(self) -> tuple[int, int]:
        """Wait for the launcher and its processes to end, and kill those that do not.

        Returns:
            The launcher's exit code, and the number of processes that had to be killed.
        """
        code = self.process.wait()
        deadline = time.monotonic() + _EXIT_SECONDS
        while (survivors := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for pid in survivors:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return code, len(survivors)


def _limit(pid: int, kind: int, limit: int) -> None:
    resource.prlimit(pid, kind, (limit, resource.prlimit(pid, kind)[1]))


def _no_memory(pid: int) -> None:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    _limit(pid, resource.RLIMIT_AS, pages * resource.getpagesize() + _SPARE_MEMORY)


def _pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_PAUSE_SECONDS)
    os.kill(pid, signal.SIGCONT)


def damage_newest(save: Path, rng: random.Random) -> bool:
    """Flip a bit in the newest checkpoint's largest file, if an older checkpoint is also intact.

    Returns:
        Whether a bit was flipped.
    """
    from megatron.checkpoint.find import scan  # imports torch, which --help does not need
    from megatron.checkpoint.loading import open_folder

    intact = []
    for checkpoint in scan(save)[0]:
        with suppress(CheckpointError):
            open_folder(checkpoint)
            intact.append(checkpoint.path)
    if len(intact) < 2:
        return False
    path = max(intact[0].iterdir(), key=lambda file: file.stat().st_size)
    with path.open("r+b") as file:
        offset = rng.randrange(path.stat().st_size)
        file.seek(offset)
        byte = file.read(1)[0] ^ (1 << rng.randrange(8))
        file.seek(offset)
        file.write(bytes([byte]))
    return True


INJECTORS: dict[str, Callable[[int], None]] = {
    "kill": lambda pid: os.kill(pid, signal.SIGKILL),
    "stop": lambda pid: os.kill(pid, signal.SIGSTOP),
    "pause": _pause,
    "term": lambda pid: os.kill(pid, signal.SIGTERM),
    "memory": _no_memory,
    "files": lambda pid: _limit(
        pid, resource.RLIMIT_NOFILE, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    ),
    "disk": lambda pid: _limit(pid, resource.RLIMIT_FSIZE, _FULL_BYTES),
}
KINDS = (*INJECTORS, "launcher", "damage")


def inject_fault(kind: str, job: Job, save: Path, rng: random.Random) -> Fault | None:
    """Inject a fault into a random rank, or into the launcher if `kind` is "launcher".

    Returns:
        The fault, or `None` if none was injected.
    """
    ranks = job.ranks()
    if kind == "stop":
        processes = job.processes()
        ranks = [pid for pid in ranks if pid in processes and not processes[pid].is_stopped]
        ranks = ranks if len(ranks) > 1 else []
    if not ranks:
        return None
    pid = job.process.pid if kind == "launcher" else rng.choice(ranks)
    fault = Fault(kind, pid, time.time())
    try:
        if kind == "damage" and not damage_newest(save, rng):
            return None
        INJECTORS["kill" if kind in ("launcher", "damage") else kind](pid)
    except (ProcessLookupError, FileNotFoundError):  # the process has just ended
        return None
    return fault


def run_under_faults(plan: Plan, seed: int) -> Outcome:
    """Run the command under faults until it exits with 0, or fails without a new fault."""
    rng, outcome, started = random.Random(seed), Outcome(), time.monotonic()
    next_fault = started + rng.expovariate(1.0 / plan.mtbf)
    while len(outcome.codes) < plan.starts:
        job, num_faults = Job(plan), len(outcome.faults)
        try:
            while job.process.poll() is None:
                time.sleep(0.05)
                now = time.monotonic()
                if now < next_fault or now - started > plan.seconds:
                    continue
                fault = inject_fault(rng.choice(list(plan.kinds)), job, plan.save, rng)
                if fault is not None:
                    outcome.faults.append(fault)
                next_fault = time.monotonic() + rng.expovariate(1.0 / plan.mtbf)
        finally:
            if job.process.poll() is None:  # interrupted
                os.killpg(job.process.pid, signal.SIGKILL)
            code, survivors = job.end()
        outcome.codes.append(code)
        outcome.orphans += survivors
        # After a failure without a fault, the command would only fail again.
        if code == 0 or len(outcome.faults) == num_faults:
            break
    outcome.seconds = time.monotonic() - started
    return outcome


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a --metrics-jsonl file, without an incomplete line at its end."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def steps_of(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Yield the iteration of each step, its losses and gradient norm, and its time in seconds."""
    last: float | None = None
    for line in lines:
        if "grad-norm" in line:
            values = {name: line[name] for name in line if "loss" in name or name == "grad-norm"}
            yield line["iteration"], values, 0.0 if last is None else line["time"] - last
        last = line["time"]


def goodput(lines: Sequence[dict[str, Any]], seconds: float) -> float:
    """Return the share of the time spent in steps whose results were not lost.

    If a step was repeated after a restart, only the last repetition counts.
    """
    step_seconds = {iteration: step_time for iteration, _, step_time in steps_of(lines)}
    return sum(step_seconds.values()) / max(seconds, 1e-9)


def recoveries(lines: Sequence[dict[str, Any]], faults: Sequence[Fault]) -> list[float]:
    """Return the seconds from each fault that ended an attempt to the next attempt's first step."""
    starts = [line["time"] for line in lines if line.get("event") == "start"]
    steps = [line["time"] for line in lines if "grad-norm" in line]
    seconds = []
    for start in starts[1:]:
        earlier = [fault.time for fault in faults if fault.time < start]
        first = next((step for step in steps if step > start), None)
        if earlier and first is not None:
            seconds.append(first - max(earlier))
    return seconds


def lost_steps(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of steps that each restart repeated."""
    repeated, done = [], 0
    for line in lines:
        if line.get("event") == "start":
            repeated.append(done - line["iteration"])
        elif "grad-norm" in line:
            done = line["iteration"]
    return repeated[1:]


def judge(
    save: Path, metrics: Path, outcome: Outcome, against: Path | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Judge a run by its outputs.

    Args:
        save: The run's folder of checkpoints.
        metrics: The run's --metrics-jsonl file.
        outcome: The outcome of the command.
        against: The metrics of an uninterrupted run.

    Returns:
        A message for each failed check, and numbers about the run.
    """
    lines, problems = read_metrics(metrics), []
    steps = list(steps_of(lines))
    results: dict[int, dict[str, Any]] = {}
    for iteration, values, _ in steps:
        if results.setdefault(iteration, values) != values:
            problems.append(f"iteration {iteration} was repeated with a different result")
    last = max(results, default=0)
    if outcome.codes[-1:] != [0]:
        problems.append(f"the command ended with {outcome.codes[-1:]}, not 0")
    if outcome.orphans:
        problems.append(f"{outcome.orphans} processes kept running")
    if against is not None:
        reference = {iteration: values for iteration, values, _ in steps_of(read_metrics(against))}
        different = sorted(
            number for number in reference if reference[number] != results.get(number)
        )
        if different or not reference or set(reference) != set(results):
            first_difference = different[0] if different else "none"
            problems.append(
                f"the losses differ from {against}, first at iteration {first_difference}"
            )
    from megatron.checkpoint.find import scan  # imports torch, which --help does not need
    from megatron.checkpoint.loading import open_folder

    checkpoints = scan(save)[0]
    try:
        newest = open_folder(checkpoints[0]) if checkpoints else None
    except CheckpointError as error:
        problems.append(f"the newest checkpoint is damaged: {error}")
    else:
        if newest is None or newest.iteration != last:
            problems.append(f"the newest checkpoint is not from the last iteration, {last}")
    temporary_files = [path.name for path in save.glob(f"*{TEMPORARY}*")]
    if temporary_files:
        problems.append(f"temporary files remain: {', '.join(temporary_files)}")
    recovery_times, repeated = recoveries(lines, outcome.faults), lost_steps(lines)
    return problems, {
        "faults": len(outcome.faults),
        "starts": len(outcome.codes),
        "restarts": len(repeated),
        "goodput": goodput(lines, outcome.seconds),
        "most steps lost": max(repeated, default=0),
        "longest recovery (s)": max(recovery_times, default=0.0),
        "seconds": outcome.seconds,
    }


def duration(text: str) -> float:
    """Convert a duration such as `90`, `60s`, `5m` or `1h` to seconds."""
    match = re.fullmatch(r"(\d+\.?\d*)([smh]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a time such as 60s, 5m or 1h, got {text!r}")
    return float(match[1]) * _UNITS[match[2] or "s"]


def flag_value(args: Sequence[str], flag: str) -> str:
    """Return the value of a flag of the command.

    Raises:
        ConfigError: The command does not have the flag.
    """
    for arg, value in zip(args, [*args[1:], ""], strict=True):
        if arg == flag or arg.startswith(f"{flag}="):
            return arg.partition("=")[2] or value
    raise ConfigError(f"the command has no {flag}: add it, because the run is judged by it")


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("chaos.py", __doc__)
    add = parser.add_argument
    add("--faults", nargs="+", default=["kill"], metavar="KIND", help="Faults to draw from.")
    add("--mtbf", type=duration, default=60.0, metavar="TIME", help="Mean time between faults.")
    add("--hours", type=float, default=1.0, metavar="H", help="No faults after this time.")
    add("--seed", type=int, default=0, help="Seed of all choices.")
    add("--against", type=Path, metavar="FILE", help="Metrics of an uninterrupted run.")
    add(
        "--log",
        type=Path,
        default=Path("chaos.log"),
        metavar="FILE",
        help="File for the command's output.",
    )
    text = "Fail if the goodput is below this share."
    add("--least-goodput", type=float, default=0.0, metavar="SHARE", help=text)
    add("command", nargs=argparse.REMAINDER, help="The training command, after --.")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command under faults and print the verdict. Return 1 if a check failed.

    Raises:
        ConfigError: A fault is unknown or not possible here, or the command lacks a flag or does
            not load from its --save folder.
    """
    for kind in options.faults:
        if kind in _UNSUPPORTED:
            raise ConfigError(f"--faults {kind}: {_UNSUPPORTED[kind]}")
        if kind not in KINDS:
            raise ConfigError(f"--faults {kind}: choose from {', '.join(KINDS)}")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    save = Path(flag_value(command, "--save"))
    if flag_value(command, "--load") != str(save):
        raise ConfigError(f"--load must name the --save folder, {save}, from which the run resumes")
    metrics = Path(flag_value(command, "--metrics-jsonl"))
    plan = Plan(command, options.faults, options.mtbf, 3600 * options.hours, save, options.log)
    outcome = run_under_faults(plan, options.seed)
    problems, numbers = judge(save, metrics, outcome, options.against)
    if numbers["goodput"] < options.least_goodput:
        problems.append(f"goodput {numbers['goodput']:.1%} is below {options.least_goodput:.1%}")
    faults = [asdict(fault) for fault in outcome.faults]
    print(json.dumps({**numbers, "codes": outcome.codes, "strikes": faults, "failed": problems}))
    return int(bool(problems))


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
