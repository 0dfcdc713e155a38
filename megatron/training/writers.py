"""Writers: where a run's metrics go. TensorBoard, Weights & Biases, or a file of JSON lines."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron import __version__
from megatron.config import RunConfig
from megatron.config.run import flatten, values_of
from megatron.durable import writing_to
from megatron.errors import ConfigError
from megatron.training.expert_load import ExpertLoad
from megatron.training.panel import start_rows
from megatron.training.run import Run

_LONGEST_RECORD = 1 << 24  # bytes that are read to recognize a file of metrics


@dataclass(frozen=True)
class RunStart:
    """The description of a run that is written with its metrics.

    Attributes:
        program: The script that trains.
        iterations: The number of iterations of the run.
        tokens_per_sample: The number of tokens in a sample.
        settings: The value of every setting, keyed by its flag.
        changed: The flags whose values differ from their defaults, because they were given or
            derived from others.
        facts: Versions, the machine, and rows of the start-up panel.
    """

    program: str
    iterations: int
    tokens_per_sample: int
    settings: dict[str, Any]
    changed: list[str]
    facts: dict[str, str]

    @classmethod
    def of(cls, run: Run) -> RunStart:
        """Describe a run after its checkpoint has been loaded."""
        settings, changed = {}, []
        for path, field, value in values_of(run.config):
            flag = field.names[0] if field.names else path
            settings[flag] = list(value) if isinstance(value, tuple) else value
            if value != field.default:
                changed.append(flag)
        versions = f"megatron {__version__}, torch {torch.__version__}"
        return cls(
            program=run.recipe.program,
            iterations=run.train_iterations,
            tokens_per_sample=run.config.data.sample_tokens * run.recipe.head.sequences,
            settings=settings,
            changed=changed,
            facts={
                "versions": f"{versions}, Python {platform.python_version()}",
                "host": platform.node(),
                **dict(start_rows(run)),
            },
        )

    def tables(self) -> str:
        """Return two Markdown tables: the settings, changed ones first, and the facts."""
        names = [*self.changed, *(name for name in self.settings if name not in self.changed)]
        settings = [
            (f"**{name}**" if name in self.changed else name, self.settings[name]) for name in names
        ]
        return f"{_table('flag', settings)}\n\n{_table('fact', list(self.facts.items()))}"


def _table(head: str, rows: list[tuple[str, Any]]) -> str:
    lines = [
        f"| {name} | {str(value).replace('|', chr(92) + '|').replace(chr(10), ' ')} |"
        for name, value in rows
    ]
    return "\n".join([f"| {head} | value |", "| --- | --- |", *lines])


class Writer(Protocol):
    """A destination for a run's metrics.

    Methods that write files raise StorageError if the disk cannot be written to. A later `write`
    may succeed.
    """

    def write(
        self,
        scalars: Mapping[str, float],
        iteration: int,
        samples: int,
        *,
        at_end_of_training: bool = False,
    ) -> None:
        """Write the scalars of an iteration or evaluation.

        Args:
            scalars: The values by tag.
            iteration: The iteration that has ended.
            samples: The number of consumed samples.
            at_end_of_training: Whether the scalars are those of the evaluation after the last
                iteration.
        """

    def write_expert_load(self, load: ExpertLoad, iteration: int, samples: int) -> None:
        """Write the load of the experts since the last log line."""

    def write_start(self, start: RunStart, iteration: int, samples: int) -> None:
        """Write the description of the run when training starts or resumes."""

    def write_event(self, kind: str, text: str, iteration: int, samples: int) -> None:
        """Write an event: its kind, such as "checkpoint", and its details."""

    def close(self) -> None:
        """Write any remaining data and close the files."""


class TensorBoardWriter:
    """A writer of event files in `--tensorboard-dir`. Every tag is also plotted against samples."""

    def __init__(self, folder: str, queue_size: int) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing_to("--tensorboard-dir", folder):
            self._writer = SummaryWriter(log_dir=folder, max_queue=queue_size)

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int, **_: bool) -> None:
        """Add a point to the curve of every tag."""
        # The writer's thread ends at its first failure, and later calls raise that failure again.
        with writing_to("--tensorboard-dir", self._folder):
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, iteration)
                self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def write_expert_load(self, load: ExpertLoad, iteration: int, samples: int) -> None:
        """Add a point to two curves of each layer, and a heat map of all layers."""
        self.write(load.scalars(), iteration, samples)
        with writing_to("--tensorboard-dir", self._folder):
            picture = load.picture()
            self._writer.add_image("expert-load", picture, iteration, dataformats="HWC")

    def write_start(self, start: RunStart, iteration: int, samples: int) -> None:
        """Add the settings and facts as tables."""
        with writing_to("--tensorboard-dir", self._folder):
            self._writer.add_text("settings", start.tables(), iteration)

    def write_event(self, kind: str, text: str, iteration: int, samples: int) -> None:
        """Add a line of text."""
        with writing_to("--tensorboard-dir", self._folder):
            self._writer.add_text("events", f"{kind}: {text}", iteration)

    def close(self) -> None:
        """Close the event file."""
        with writing_to("--tensorboard-dir", self._folder):
            self._writer.close()


class WandbWriter:
    """A Weights & Biases run, resumed if `--wandb-id` names an existing one.

    As in Megatron, its files are written to --wandb-save-dir or, by default, to `wandb` in --save.
    Without either flag, the package chooses the folder.

    Raises:
        ConfigError: The package is missing, no user is logged in, or the server refuses the run.
        StorageError: The folder cannot be created.
    """

    def __init__(self, config: RunConfig) -> None:
        """Start or resume the run."""
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
        if folder is not None:  # if the folder does not exist, wandb uses a temporary one
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

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int, **_: bool) -> None:
        """Log the scalars together with the number of consumed samples."""
        self._run.log({**scalars, "consumed-samples": samples}, step=iteration)

    def write_expert_load(self, load: ExpertLoad, iteration: int, samples: int) -> None:
        """Log the load of the most and the least loaded expert of each layer."""
        self.write(load.scalars(), iteration, samples)

    def write_start(self, start: RunStart, iteration: int, samples: int) -> None:
        """Do nothing: the settings were passed to `init`, and the package records versions."""

    def write_event(self, kind: str, text: str, iteration: int, samples: int) -> None:
        """Do nothing: the package saves the log, which contains the events."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class JsonLinesWriter:
    """A file of JSON lines, with floats in full precision.

    Each evaluation, and each iteration at --tensorboard-log-interval, adds an object. Objects are
    appended, so that a resumed run continues the same file. "time" is in seconds since 1970. An
    object with "event" records what happened, for example "start" (with all settings),
    "checkpoint", "skipped update", "rewind", "straggler", "end" or "failure". The evaluation at the
    end of training has "end of training": true, which distinguishes it from a regular evaluation at
    the same iteration.
    """

    def __init__(self, path: str) -> None:
        """Open the file for appending.

        Raises:
            ConfigError: The file exists and does not contain metrics.
            StorageError: The file cannot be written.
        """
        self._path = path
        with writing_to("--metrics-jsonl", path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if Path(path).is_file() and not _holds_metrics(Path(path)):
                raise ConfigError(
                    f"--metrics-jsonl {path}: line 1 is not a metrics record: name another file, "
                    "or remove this one"
                )
            # Unbuffered, so that no part of a failed line is written with a later one.
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - held for the run

    def write(
        self,
        scalars: Mapping[str, float],
        iteration: int,
        samples: int,
        *,
        at_end_of_training: bool = False,
    ) -> None:
        """Append a line with the scalars."""
        end = {"end of training": True} if at_end_of_training else {}
        self._append({**end, **scalars}, iteration, samples)

    def write_expert_load(self, load: ExpertLoad, iteration: int, samples: int) -> None:
        """Append a line with one field, "expert load": each expert's load by layer."""
        self._append({"expert load": load.compact()}, iteration, samples)

    def write_start(self, start: RunStart, iteration: int, samples: int) -> None:
        """Append a line with the description of the run."""
        self._append({"event": "start", **asdict(start)}, iteration, samples)

    def write_event(self, kind: str, text: str, iteration: int, samples: int) -> None:
        """Append a line with the event."""
        self._append({"event": kind, "text": text}, iteration, samples)

    def _append(self, fields: Mapping[str, Any], iteration: int, samples: int) -> None:
        """Append a whole line, or nothing if the disk is full."""
        record = {
            "iteration": iteration,
            "consumed samples": samples,
            "time": round(time.time(), 3),
            **fields,
        }
        line = json.dumps(record).encode() + b"\n"
        with writing_to("--metrics-jsonl", self._path):
            written = self._file.write(line)
            if written < len(line):  # the disk became full in the middle of the line
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _holds_metrics(path: Path) -> bool:
    """Return whether a file is empty or begins with a record of `JsonLinesWriter`."""
    with path.open("rb") as file:
        line = file.readline(_LONGEST_RECORD)
    try:
        return not line or "iteration" in json.loads(line)
    except (ValueError, TypeError):
        return False


def open_writers(config: RunConfig, *, is_log_rank: bool) -> list[Writer]:
    """Open the writers that the flags request. Ranks that do not log get none.

    Raises:
        ConfigError: --metrics-jsonl names a file of another kind, or Weights & Biases is not
            available.
        StorageError: A folder or file cannot be written.
    """
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
