"""Kill a save at a chosen system call, and check what must hold afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import TRACKER, list_checkpoints, read_tracker
from megatron.checkpoint.reader import NativeReader
from tests.checkpoint.states import assert_loads, save_state

# Every way in which a save touches the disk. Opening a file for writing counts as its first write.
_CALLS = ("mkdir", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir")


def run_forked(function: Callable[[], object]) -> int:
    """Call a function in a forked process; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(boundary: int) -> None:
    """Die at the given system call, counted from 0 from now on; a write is half done by then."""
    seen = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > boundary:
                if call.__name__ == "pwrite":
                    descriptor, data, position = args
                    call(descriptor, data[: len(data) // 2], position)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in _CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def assert_recovers(root: Path, iterations: list[int], following: int = 30) -> int:
    """Check that one whole checkpoint loads, the tracker is right, and the next save cleans up.

    Returns:
        The iteration that was loaded.
    """
    named, complaint = read_tracker(root)
    assert complaint is None, complaint
    assert named is not None
    NativeReader(list_checkpoints(root)[0].path).verify()
    tracked = [one for one in list_checkpoints(root) if one.path.name.startswith(named)]
    assert tracked, "the tracker names a checkpoint that is not there"
    loaded = assert_loads(root, iterations)
    save_state(root, following)
    assert assert_loads(root, [following]) == following
    expected = {TRACKER} | {f"iter_{i:07d}" for i in (*iterations, following)}
    assert {path.name for path in root.iterdir()} <= expected
    return loaded
