"""The server in separate processes, over a toy model."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.repository import ROOT, command_environment

TOOL = str(ROOT / "tools" / "run_text_generation_server.py")
SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64"
).split()


def write_checkpoint(folder: Path, tokenizer: Path, *more: str) -> str:
    """Write a model after one step or none, with a folder's tokenizer; return its checkpoints."""
    from megatron.parallel.layout import Layout
    from megatron.training.checkpointing import save_run
    from tests.training.toy import build_toy, train_toy

    checkpoints = str(folder / "checkpoints")
    files = ["--vocab-file", str(tokenizer / "vocab.json")]
    files += ["--merge-file", str(tokenizer / "merges.txt"), "--tokenizer-type", "GPT2BPETokenizer"]
    saving = ["--save", checkpoints, "--save-interval", "1"]
    words = [*SHAPE, *files, *saving, *more]
    if "--train-iters" in more:
        train_toy(Layout.single(), words)
    else:
        save_run(build_toy(Layout.single(), words))
    return checkpoints


@contextlib.contextmanager
def server_process(
    words: Sequence[str], folder: Path, cwd: Path = ROOT, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the server, and yield the process and its address."""
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*words, "--port", "0"],
            cwd=cwd,
            env=command_environment(**variables),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield process, _address(process, log)
    finally:
        _end(process)


class Terminal:
    """A process's output; text that was waited for is removed from it."""

    def __init__(self, number: int) -> None:
        self._number, self._seen = number, ""

    def expect(self, text: str, seconds: float = 60) -> str:
        """Wait for a text, and return what came before it."""
        end = time.monotonic() + seconds
        while text not in self._seen:
            left = max(0.0, end - time.monotonic())
            assert select.select([self._number], [], [], left)[0], self._seen
            self._seen += os.read(self._number, 4096).decode("utf-8", "replace")
        before, _, self._seen = self._seen.partition(text)
        return before

    def say(self, line: str) -> None:
        """Type a line at the next prompt; any earlier, it would end up inside the answer."""
        self.expect("> ")
        os.write(self._number, f"{line}\n".encode())

    def leave(self) -> None:
        """Press Ctrl-D at the next prompt."""
        self.expect("> ")
        os.write(self._number, b"\x04")


@contextlib.contextmanager
def on_terminal(
    words: Sequence[str], cache: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """Run a process on a terminal of its own, with its history in `cache`."""
    main, side = pty.openpty()
    variables = command_environment(MEGATRON_CACHE=str(cache))
    process = subprocess.Popen(
        [*words], cwd=ROOT, env=variables, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    try:
        yield process, Terminal(main)
    finally:
        process.terminate()
        process.wait()
        os.close(main)


def _end(process: subprocess.Popen[str]) -> None:
    """Stop a process with SIGTERM: torchrun's children would survive if it were killed."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    end = time.monotonic() + 120
    while not (found := re.search(r"page +(http://\S+)/", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return found.group(1)
