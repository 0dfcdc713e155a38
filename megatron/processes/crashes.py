"""A log of a run's failures, used to end crash loops.

torchrun and SLURM restart a run after any failure. If it then fails in the same way at the same
iteration, further restarts are useless.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.durable import open_trusted, replace_file
from megatron.errors import CrashLoopError
from megatron.processes.watchdog import Verdict

FILE = "crashes.json"
_MAX_FAILURES = 20  # the number of failures that the file keeps
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class _Record:
    """The content of a crash log.

    Attributes:
        crashes: The latest failures since the run was started by hand, oldest first.
        skipped: The iterations whose samples are skipped because the run failed there, counted
            from 0.
    """

    crashes: list[Verdict]
    skipped: list[int]


class CrashLog:
    """The failures of a run, in a file next to its checkpoints.

    Args:
        folder: The folder of checkpoints.
    """

    def __init__(self, folder: Path | str) -> None:
        """Set the path of the file, which need not exist yet."""
        self.path = Path(folder).absolute() / FILE
        self._is_of_other_job = False

    def disown(self) -> None:
        """Record nothing from now on, because another job saves into the folder."""
        self._is_of_other_job = True

    def record(self, verdict: Verdict) -> None:
        """Add a failure to the log, unless the file cannot be written or is another job's.

        A `CrashLoopError` is not added, because it would hide the failures that caused it.
        """
        if self._is_of_other_job:
            return
        if verdict.code == CrashLoopError.exit_code:  # must not hide the failures that caused it
            return
        log = self._read()
        with suppress(OSError):
            self._write(_Record([*log.crashes, verdict][-_MAX_FAILURES:], log.skipped))

    def clear(self) -> None:
        """Forget the failures, but not the iterations to skip: the run was started by hand."""
        log = self._read()
        if log.crashes:
            self._write(_Record([], log.skipped))

    def loop(self) -> Verdict | None:
        """Return the failure that ended both of the last two attempts, if there is one."""
        crashes = self._read().crashes
        is_loop = len(crashes) > 1 and crashes[-1].is_same_failure(crashes[-2])
        return crashes[-1] if is_loop else None

    def skip(self, iteration: int) -> bool:
        """Mark an iteration (counted from 0) as skipped, and forget the failures.

        Returns:
            Whether the iteration was marked: it is not negative and was not skipped before.
        """
        log = self._read()
        if iteration < 0 or iteration in log.skipped:
            return False
        self._write(_Record([], [*log.skipped, iteration]))
        return True

    @property
    def skipped(self) -> list[int]:
        """The iterations to skip, counted from 0."""
        return self._read().skipped

    def _read(self) -> _Record:
        """Return the content of the file, or an empty record if there is none.

        A file that belongs to another user (except root) or is damaged counts as empty, because a
        run must not fail because of its log of failures.
        """
        try:
            with open_trusted(self.path) as file:
                content = json.loads(file.read(_MAX_BYTES))
            crashes = [Verdict(**crash) for crash in content["crashes"]]
            return _Record(crashes, [int(iteration) for iteration in content["skipped"]])
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return _Record([], [])

    def _write(self, record: _Record) -> None:
        replace_file(self.path, json.dumps(asdict(record), indent=1).encode() + b"\n")
