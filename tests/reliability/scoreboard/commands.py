"""Run the toy in a forked process as a user would, and return its exit code and output."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.training.toy import TOY

_LIMIT = 200.0  # seconds


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: exit code (negative for a signal) and all output."""

    code: int
    output: str


class Command:
    """A forked process that runs `function`, with its output in a file, until the block ends."""

    def __init__(self, function: Callable[[], int | None], output: Path) -> None:
        self.output = output
        self._result: CommandResult | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                for stream in (1, 2):
                    os.dup2(descriptor, stream)
                sys.stdout = os.fdopen(1, "w", closefd=False)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                code = function() or 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self._result is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def wait_for_output(self, text: str) -> None:
        """Wait until the command prints `text`; raise AssertionError if it ends or hangs first."""
        deadline = time.monotonic() + _LIMIT
        while not self.output.exists() or text not in self.output.read_text():
            exited = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is not None or time.monotonic() > deadline:
                raise AssertionError(f"did not print {text!r}: {self.output.read_text()[-500:]}")
            time.sleep(0.005)

    def end(self) -> CommandResult:
        """Wait until the command ends; raise AssertionError if it hangs."""
        deadline = time.monotonic() + _LIMIT
        while self._result is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._result = CommandResult(code, self.output.read_text())
            elif time.monotonic() > deadline:
                raise AssertionError(f"hangs: {self.output.read_text()[-500:]}")
            else:
                time.sleep(0.005)
        return self._result


def train_command(
    output: Path, *flags: str, preexec: Callable[[], object] | None = None
) -> Command:
    """Start `pretrain_gpt.py` with the toy's flags; its process calls `preexec` first."""

    def function() -> int:
        if preexec is not None:
            preexec()
        return main(GPTRecipe(), [*TOY, "--eval-iters", "0", "--train-iters", "6", *flags])

    return Command(function, output)


def run_training(
    output: Path, *flags: str, preexec: Callable[[], object] | None = None
) -> CommandResult:
    """Run `pretrain_gpt.py` with the toy's flags to its end."""
    with train_command(output, *flags, preexec=preexec) as command:
        return command.end()


def run_tool(
    output: Path, tool: Callable[[Sequence[str]], int | None], *args: str
) -> CommandResult:
    """Run a tool's `main` with its command line to its end."""
    with Command(lambda: tool(list(args)), output) as command:
        return command.end()
