"""Files that record what every rank was doing when a run hung, shown by `megatron health --hang`.

When a run ends because of a hang, one process writes the last state of every rank, and every
process that is still running writes its own stacks. A stopped process writes nothing, but the files
of the others show that it is missing.
"""

from __future__ import annotations

import json
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from megatron.durable import open_trusted, replace_file
from megatron.errors import DataError
from megatron.processes.watchdog import State, absent_ranks, ranks_text, waiting_states

REPORT = "report.json"
_MAX_BYTES = 2**26
_WATCHDOG = ("_exchange", "_watch")  # the watchdog's threads, whose stacks are left out
_SHOWN = 5  # maximum number of unfinished collectives to list for a device


@dataclass(frozen=True)
class HangFiles:
    """The files in which a process records a hang.

    Attributes:
        folder: The folder that all ranks write to. It need not exist.
        rank: This process's rank.
    """

    folder: Path
    rank: int

    def write_report(
        self, report: str, states: Mapping[int, State | None], silent: frozenset[int]
    ) -> None:
        """Write the hang report and the state of every rank. Write errors are ignored.

        Args:
            report: The printed report.
            states: The last state of each rank, or `None` for a rank that never published one.
            silent: The ranks that no longer publish their state.
        """
        texts = {rank: None if s is None else s.to_text() for rank, s in states.items()}
        content = {"time": time.time(), "report": report, "states": texts, "silent": list(silent)}
        self._write(REPORT, content)

    def write_stacks(self, reason: str) -> None:
        """Write the stacks of this process's threads, except the watchdog's. Ignore write errors.

        Args:
            reason: The first line of the report, which distinguishes this hang from earlier ones.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
        # Autograd's threads for GPUs have no names.
        stacks = {
            name: stack_of(frame)
            for ident, frame in frames
            if (name := names.get(ident, str(ident))) not in _WATCHDOG
        }
        content = {"reason": reason, "host": platform.node(), "stacks": stacks}
        self._write(f"rank_{self.rank:05d}.json", content | {"device": _unfinished_collectives()})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, json.dumps(content).encode() + b"\n")


def stack_of(frame: FrameType) -> list[str]:
    """Return a thread's call stack, innermost call first. This reads no source files."""
    return [
        f"{Path(call.f_code.co_filename).name}:{line} in {call.f_code.co_name}"
        for call, line in walk_stack(frame)
    ]


def _unfinished_collectives() -> list[str]:
    """Return the collectives that the device has not finished, from PyTorch's flight recorder.

    The recorder exists only on GPUs, and records only if --flight-recorder-dump-path is given.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    try:
        entries = json.loads(dump()).get("entries", [])
        pending = [entry for entry in entries if entry["state"] != "completed"]
        return [
            f"{entry['profiling_name']} {entry['collective_seq_id']} of group "
            f"{entry['process_group'][-1]} ({entry['state']})"
            for entry in pending[:_SHOWN]
        ]
    except Exception:  # a report without collectives is better than none, and the format may change
        return []


def hang_view(folder: Path, *, stacks: bool = False) -> str:
    """Return a hang as a table: the state of each rank, and the ranks that it waits for.

    Args:
        folder: The folder of the files, or a checkpoint folder that has them in its subfolder
            `hang`.
        stacks: Whether to add the stacks of all threads.

    Raises:
        DataError: The folder contains no hang files.
    """
    hang_folder = folder / "hang" if not (folder / REPORT).exists() else folder
    report = _read(hang_folder / REPORT)
    if report is None:
        raise DataError(
            f"--hang {folder}: there is no {REPORT}: a run that ends with exit code 5 writes one "
            "to the folder hang in its --save folder, or to --flight-recorder-dump-path"
        )
    states = {
        int(rank): None if text is None else State.from_text(text.encode())
        for rank, text in report["states"].items()
    }
    silent = frozenset(map(int, report["silent"]))
    reason = report["report"].splitlines()[0]
    rank_files = {rank: _read(hang_folder / f"rank_{rank:05d}.json") or {} for rank in states}
    rank_files = {
        rank: content if content.get("reason") == reason else {}
        for rank, content in rank_files.items()
    }
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["time"]))
    lines = [f"{time_text}: {reason}", *_table(states, silent, rank_files)]
    if stacks:
        lines += _stacks(rank_files)
    return "\n".join(lines)


def _table(
    states: Mapping[int, State | None],
    silent: frozenset[int],
    rank_files: Mapping[int, dict[str, Any]],
) -> list[str]:
    rows = [["rank", "host", "state", "iteration", "operation", "waits for", "missing", "at"]]
    waiting = waiting_states(states, silent)
    for rank, state in sorted(states.items()):
        host = rank_files[rank].get("host", "?")
        if state is None:
            rows.append([str(rank), host, "never seen", "", "", "", "", ""])
            continue
        waits, missing, device = "", "", rank_files[rank].get("device", [])
        if rank in silent:
            status = "silent"
        elif rank in waiting:
            status = "waits"
            waits = state.wait.kind if state.wait else "; ".join(device) or "its device"
            if state.wait is not None:
                peers = [peer for peer in state.wait.ranks if peer != rank]
                waits += f" with {ranks_text(peers)}"
            absent = absent_ranks(state, rank, states, silent) - {rank}
            absent = absent - waiting.keys() or absent  # ranks that also wait are not the cause
            missing = ranks_text(absent) if absent else "none"
        else:
            status = "runs"
        position = [str(state.iteration), state.operation, waits, missing, state.source]
        rows.append([str(rank), host, status, *position])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _stacks(rank_files: Mapping[int, dict[str, Any]]) -> list[str]:
    """Return the stacks of all ranks as lines. Identical stacks are listed once."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, content in rank_files.items():
        threads: Mapping[str, Sequence[str]] = content.get("stacks", {})
        text = "\n".join(
            line
            for name, stack in threads.items()
            for line in (f"  thread {name}", *(f"    {call}" for call in stack))
        )
        ranks_by_text.setdefault(text or "  no stacks were written", []).append(rank)
    return [
        line
        for text, ranks in ranks_by_text.items()
        for line in ("", f"{ranks_text(ranks)}:", text)
    ]


def _read(path: Path) -> dict[str, Any] | None:
    """Return a file's content, or `None` if it is missing, damaged or not to be trusted."""
    try:
        with open_trusted(path) as file:
            content = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
