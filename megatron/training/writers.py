"""Where scalars go: TensorBoard, Weights & Biases, a JSON lines file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.config import RunConfig
from megatron.config.run import flatten
from megatron.durable import writing_to
from megatron.errors import ConfigError


class Writer(Protocol):
    """Takes the scalars of one iteration.

    `write` and `close` raise StorageError where the disk does not take them; a later `write` may.
    """

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files in `--tensorboard-dir`; every tag also against consumed samples."""

    def __init__(self, folder: str, queue_size: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing_to("--tensorboard-dir", folder):
            self._writer = SummaryWriter(log_dir=folder, max_queue=queue_size)

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        # Its thread ends at a first failure, and later calls raise that one again.
        with writing_to("--tensorboard-dir", self._folder):
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, iteration)
                self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        with writing_to("--tensorboard-dir", self._folder):
            self._writer.close()


class WandbWriter:
    """A Weights & Biases run, resumed where `--wandb-id` is given. Its files go where Megatron's
    do.

    Raises:
        ConfigError: the package is missing, nobody is logged in, or the server refuses the run.
        StorageError: its folder cannot be made.
    """

    def __init__(self, config: RunConfig) -> None:
        options = config.logging
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"--wandb-project {options.wandb_project}: the package wandb is not installed: "
                "pip install wandb, or drop the flag"
            ) from None
        folder = options.wandb_save_dir
        if folder is None and config.checkpoint.save is not None:
            folder = os.path.join(config.checkpoint.save, "wandb")
        if folder is not None:  # wandb would take a temporary one for it
            with writing_to("--wandb-save-dir", folder):
                Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=options.wandb_project,
                entity=options.wandb_entity,
                name=options.wandb_name,
                id=options.wandb_id,
                dir=folder,
                resume="allow" if options.wandb_id else None,
                config=flatten(config),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb-project {options.wandb_project}: {error} (without a server: set "
                "WANDB_MODE=offline, or drop the flag)"
            ) from None

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        self._run.log({**scalars, "consumed-samples": samples}, step=iteration)

    def close(self) -> None:
        self._run.finish()


class JsonLinesWriter:
    """One object an iteration, floats in full; appended to, so that a resumed run goes on."""

    def __init__(self, path: str) -> None:
        self._path = path
        with writing_to("--metrics-jsonl", path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: no part of a line that failed is written with a later one.
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - held for the run

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int) -> None:
        record = {"iteration": iteration, "consumed samples": samples, **scalars}
        line = json.dumps(record).encode() + b"\n"
        with writing_to("--metrics-jsonl", self._path):
            written = self._file.write(line)
            if written < len(line):  # as much as there was room for
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


def open_writers(config: RunConfig, *, is_log_rank: bool) -> list[Writer]:
    """The writers that were asked for; none on ranks that do not log."""
    if not is_log_rank:
        return []
    options = config.logging
    writers: list[Writer] = []
    if options.tensorboard_dir:
        writers.append(TensorBoardWriter(options.tensorboard_dir, options.tensorboard_queue_size))
    if options.wandb_project:
        writers.append(WandbWriter(config))
    if options.metrics_jsonl:
        writers.append(JsonLinesWriter(options.metrics_jsonl))
    return writers
