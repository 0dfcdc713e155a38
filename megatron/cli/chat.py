"""`megatron chat`: talk to a server, or to a checkpoint, for which it starts a server."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron.command import run_command, say
from megatron.environment import module_command
from megatron.errors import CheckpointError, ConfigError
from megatron.tools.text_generation_cli import build_parser, run

_PATIENCE = 0.2  # seconds between two looks at a server that starts
_LINES = 20  # of a server that failed


def chat(words: Sequence[str]) -> int:
    """Talk to the server or checkpoint that the first word names, and return the exit code."""
    parser = build_parser()
    parser.prog = "megatron chat"
    parser.description = (
        "Talk to a model. Instead of HOST:PORT, name a folder of checkpoints: a server for it runs "
        "on this machine until you leave."
    )
    parser.add_argument(
        "--serve-adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="with a folder of checkpoints: an adapter of its model, which --model NAME chooses; "
        "may be given several times",
    )
    options = parser.read(words)

    def work() -> None:
        folder = Path(options.server)
        if not folder.is_dir():
            if "/" in options.server and "//" not in options.server:
                raise ConfigError(
                    f"{folder}: there is no such folder: name a folder of checkpoints, or a server "
                    "as HOST:PORT"
                )
            if options.serve_adapter:
                raise ConfigError(
                    f"--serve-adapter is for a folder of checkpoints, and {options.server} is a "
                    "server: choose one of its adapters with --model"
                )
            run(options)
            return
        with serving(folder, options.serve_adapter) as options.server:
            run(options)

    return run_command(work)


@contextmanager
def serving(checkpoints: Path, adapters: Sequence[str] = ()) -> Iterator[str]:
    """Serve a checkpoint on this machine alone, and yield the address of the server.

    Args:
        checkpoints: The folder of checkpoints.
        adapters: Adapters of the model, each NAME=FOLDER.

    Raises:
        CheckpointError: The server ended before it answered. The message has its last lines.
    """
    say(f"loading {checkpoints} ...")
    with tempfile.TemporaryFile("w+b") as log:
        words = ["serve", "--load", str(checkpoints), "--port", "0"]
        words += [word for each in adapters for word in ("--serve-adapter", each)]
        command = [*module_command("megatron.cli.main"), *words]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Wait until a server has loaded its model, and return the address that it prints then."""
    while True:
        has_ended = server.poll() is not None
        log.seek(0)
        text = log.read().decode(errors="replace")
        if found := re.search(r"http://\S+:\d+", text):
            return found.group()
        if has_ended:
            raise CheckpointError("\n".join(text.splitlines()[-_LINES:]).removeprefix("error: "))
        time.sleep(_PATIENCE)
