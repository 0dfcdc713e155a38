"""Options for restarts, and for faults that are injected on purpose."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.fields import SAVES, Requirement, flag, suggestion

POINTS = ("load", "step", "data", "forward", "backward", "optimizer", "save")
# The kinds of faults, and the points at which each can be triggered. `None` means all of them.
KINDS: dict[str, tuple[str, ...] | None] = {
    "kill": None,
    "stop": None,
    "exit": None,
    "exception": None,
    "hang": None,
    "slow": None,
    "nan": ("forward", "backward"),
    "spike": ("forward", "backward"),
    "flip": ("step", "backward"),
    "full": ("save",),
}
_DELAYED = ("kill", "stop", "exit")
_EVERY = "all"  # the word for every attempt
_FORM = "POINT:RANK:STEP:KIND"
_KIND = re.compile(r"([a-z]+)(?:=([0-9]*\.?[0-9]+)(x)?)?(?:@([0-9]{1,9}|all))?")
_SLOW_SECONDS = 1.0
HEALTH_FACTOR = 0.7  # a rank below this fraction of the others' speed is reported


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        point: Where it is triggered, one of `POINTS`.
        rank: The rank on which it is triggered.
        step: The iteration in which it is triggered, counted from 1; 0 while a checkpoint is
            loaded.
        kind: What happens, one of `KINDS`.
        seconds: The delay of a signal or an exit, or the time that a slow rank loses each time.
        factor: How many times as long a slow rank takes, instead of `seconds`; 0 if not given.
        attempt: The number of restarts after which it is triggered; `None` for every attempt.
    """

    point: str
    rank: int
    step: int
    kind: str
    seconds: float = 0.0
    attempt: int | None = 0
    factor: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read a value of --fault-inject.

        Raises:
            ValueError: The message says what is wrong with the text.
        """
        fields = text.split(":")
        if len(fields) != len(_FORM.split(":")):
            raise ValueError(f"expected {_FORM}, for example forward:1:20:kill, got {text!r}")
        point, rank, step, options = fields
        match = _KIND.fullmatch(options)
        kind = match[1] if match else options
        for unit, value, names in (("POINT", point, POINTS), ("KIND", kind, tuple(KINDS))):
            if value not in names:
                hint = suggestion(value, names)
                raise ValueError(f"expected {unit} {', '.join(names)}, got {value!r}{hint}")
        for unit, number in (("RANK", rank), ("STEP", step)):
            if not re.fullmatch("[0-9]{1,9}", number):
                raise ValueError(f"expected a whole number as {unit}, got {number!r}")
        assert match is not None
        points = KINDS[kind]
        if points is not None and point not in points:
            raise ValueError(f"{kind} works only at {' or '.join(points)}, not at {point}")
        if (point == "load") != (int(step) == 0):
            raise ValueError(f"STEP is 0 at load and counts from 1 elsewhere, got {text!r}")
        number, is_factor = match[2], match[3] is not None
        if number is not None and kind not in (*_DELAYED, "slow"):
            raise ValueError(f"{kind} does not take a duration: drop ={number}")
        if is_factor and (kind != "slow" or float(number) <= 1.0):
            raise ValueError(f"only slow takes a factor, which must be above 1, got {options!r}")
        attempt = None if match[4] == _EVERY else int(match[4] or 0)
        if is_factor:
            return cls(point, int(rank), int(step), kind, 0.0, attempt, float(number))
        seconds = float(number or (_SLOW_SECONDS if kind == "slow" else 0.0))
        return cls(point, int(rank), int(step), kind, seconds, attempt)

    def __str__(self) -> str:
        """Return the fault as in --fault-inject, without its seconds, factor and attempt."""
        return f"{self.point}:{self.rank}:{self.step}:{self.kind}"


def _checked(text: str) -> str:
    """Check and return a value of --fault-inject.

    Raises:
        ValueError: The text does not describe a fault.
    """
    Fault.parse(text)
    return text


_DUMPS = Requirement(
    lambda run: run.reliability.flight_recorder_dump_path, "--flight-recorder-dump-path"
)
_LIGHTHOUSE = Requirement(lambda run: run.reliability.torchft_lighthouse, "--torchft-lighthouse")


@dataclass(frozen=True, kw_only=True)
class ReliabilityConfig:
    """Tests of the machines, restarts and faults.

    Attributes:
        health_check: Test matrix products, memory, links, the disk of --save, clocks and versions
            of all ranks before training, print a table, and report ranks that stand out.
        gpu_sniff_test_interval: Iterations between repetitions of --health-check during training.
            Default: none.
        rerun_mode: validate_results computes an update a second time if its loss or gradients are
            not finite, or if it is a spike (--on-spike). Different results point to a faulty
            machine, equal results to faulty data. report_stats computes every update twice, and
            reports how much the losses differ.
        flight_recorder_dump_path: Folder to which a run that hangs writes every rank's state and
            stacks, for megatron health --hang. On GPUs, PyTorch's flight recorder adds the pending
            collectives. Default: the folder hang in --save, without the recorder.
        flight_recorder_trace_buffer_size: With --flight-recorder-dump-path, number of collectives
            that the flight recorder keeps.
        on_crash_loop: Action when torchrun or SLURM restarts a run that has failed twice in the
            same way at the same iteration: stop, or skip the samples of that iteration.
        fault_inject: Faults to inject, to test how a run survives them: POINT:RANK:STEP:KIND, for
            example forward:1:20:kill. Repeat the flag for several faults. Default: none.
        torchft_lighthouse: Address of torchft's lighthouse, for example http://10.0.0.1:29510. Jobs
            that give the same address train one model together, and continue without those that
            are lost.
        torchft_replica: Number of this job among them, from 0.
        torchft_min_replicas: With fewer jobs, updates wait.
        torchft_timeout: Time after which a job that does not answer counts as lost.
    """

    health_check: bool = False
    gpu_sniff_test_interval: int | None = flag(None, unit="iterations", at_least=1)
    rerun_mode: str = flag("disabled", choices=("disabled", "validate_results", "report_stats"))
    flight_recorder_dump_path: str | None = None
    flight_recorder_trace_buffer_size: int = flag(
        2000, unit="collectives", at_least=1, needs=_DUMPS
    )
    on_crash_loop: str = flag("stop", choices=("stop", "skip"), needs=SAVES)
    fault_inject: tuple[str, ...] = flag((), convert=_checked, adds=True)
    torchft_lighthouse: str | None = None
    torchft_replica: int = flag(0, at_least=0, requires=_LIGHTHOUSE)
    torchft_min_replicas: int = flag(1, unit="jobs", at_least=1, needs=_LIGHTHOUSE)
    torchft_timeout: float = flag(60.0, unit="seconds", above=0, needs=_LIGHTHOUSE)

    @property
    def faults(self) -> list[Fault]:
        """The faults to inject."""
        return [Fault.parse(text) for text in self.fault_inject]
