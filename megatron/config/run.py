"""A run as requested (`RunOptions`) and as resolved (`RunConfig`).

Both consist of one frozen dataclass for each concern, called a section. If resolving fills in
fields of a section, `RunConfig` has a subclass of that section with narrower types.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast, get_type_hints

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.curriculum import CurriculumConfig
from megatron.config.data import DataConfig, DataOptions, TokenizerConfig
from megatron.config.distillation import DistillationConfig
from megatron.config.fields import Field, fields_of
from megatron.config.finetuning import FinetuningConfig
from megatron.config.logging import LoggingConfig, ProfilingConfig
from megatron.config.model import ModelConfig, ModelOptions
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.parallel import ParallelConfig, ParallelOptions
from megatron.config.precision import PrecisionConfig
from megatron.config.preferences import PreferenceConfig
from megatron.config.reliability import ReliabilityConfig
from megatron.config.retriever import RetrieverConfig
from megatron.config.training import EvaluationConfig, TrainingConfig, TrainingOptions
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A run as requested. Field names are the section names of the YAML file.

    A value without a default is None until it is given. `resolve` fills in what follows from other
    values, and `narrow` turns the result into a `RunConfig`.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataOptions = field(default_factory=DataOptions)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    finetuning: FinetuningConfig = field(default_factory=FinetuningConfig)
    preferences: PreferenceConfig = field(default_factory=PreferenceConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)


@dataclass(frozen=True, kw_only=True)
class ModelRun(RunOptions):
    """A run in which only the model needs to be resolved. The training options may be unknown.

    This is enough for programs that build or convert a model without training it.
    """

    model: ModelConfig = field()


@dataclass(frozen=True, kw_only=True)
class RunConfig(ModelRun):
    """A resolved and checked run. No required value is None."""

    training: TrainingConfig = field()
    parallel: ParallelConfig = field()
    data: DataConfig = field()

    @property
    def eval_global_batch(self) -> int:
        """The number of samples in one global batch of an evaluation."""
        return self.evaluation.eval_global_batch_size or self.training.global_batch_size

    @property
    def eval_micro_batch(self) -> int:
        """The number of samples in one forward pass of an evaluation on one process."""
        return self.evaluation.eval_micro_batch_size or self.training.micro_batch_size

    @property
    def largest_micro_batch(self) -> int:
        """The largest number of samples in one forward pass of one process."""
        trained = self.training.micro_batch_size
        return max(trained, self.eval_micro_batch) if self.evaluation.takes_place else trained


Run = TypeVar("Run", bound=RunOptions)


@dataclass
class Findings:
    """The mistakes, and the flags without effect, that are found while a configuration is read.

    Attributes:
        problems: One line for each mistake.
        notices: Lines about old flags, flags that have no effect, and values from other files.
        unknown_fields: Names of the fields whose values a mistake leaves unknown.
        origins: For the name of each flag that results from a translation, the flag that was given.
    """

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unknown_fields: set[str] = field(default_factory=set)
    origins: dict[str, str] = field(default_factory=dict)

    def with_origins(self) -> list[str]:
        """Return the mistakes. Those about a translated flag end with the flag that was given."""
        lines = []
        for line in self.problems:
            name = re.split("[ :]", line, maxsplit=1)[0]
            origin = self.origins.get(name)
            lines.append(line if origin is None else f"{line} ({origin} is read as {name})")
        return lines


def narrow(options: RunOptions, into: type[Run]) -> Run:
    """Return resolved and checked options as the configuration that the rest of the package uses.

    Args:
        options: Everything that is known about the run.
        into: `RunConfig`, or `ModelRun` for a program that does not train.

    Raises:
        ConfigError: A required value is missing.
    """
    parts: dict[str, Any] = {entry.name: getattr(options, entry.name) for entry in fields(options)}
    wide, missing = sections(), []
    for name, narrowed in _hints(cast(Any, into)).items():
        if narrowed is wide[name]:
            continue
        values = {entry.name: getattr(parts[name], entry.name) for entry in fields(parts[name])}
        missing += [f"{name}.{key}" for key in narrowed.__annotations__ if values[key] is None]
        parts[name] = narrowed(**values)
    if missing:
        names = [field_at(path).names[0] for path in missing]
        raise ConfigError([f"{name} is required: give it a value" for name in names])
    return into(**parts)


@functools.cache
def _hints(kind: Any) -> Mapping[str, type]:
    """Return the types of a dataclass's fields, cached because a lookup takes a millisecond."""
    return get_type_hints(kind)


@functools.cache
def sections() -> Mapping[str, type]:
    """Return the dataclass of each section, by section name, in the order of `--help-all`."""
    hints = _hints(RunOptions)
    return {entry.name: hints[entry.name] for entry in fields(RunOptions)}


def field_at(path: str) -> Field:
    """Return the field that a "section.field" names, for example "model.num_layers".

    Raises:
        StopIteration: There is no such field.
    """
    return next(entry for known, entry, _ in values_of(RunOptions()) if known == path)


@functools.cache
def _fields_by_path() -> Mapping[str, tuple[tuple[str, Field], ...]]:
    """Return each section's fields with their "section.field", by section name."""
    return {
        name: tuple((f"{name}.{entry.name}", entry) for entry in fields_of(section))
        for name, section in sections().items()
    }


def values_of(config: RunOptions) -> Iterator[tuple[str, Field, Any]]:
    """Yield each value of a run: its "section.field", the field, and the value."""
    for name, entries in _fields_by_path().items():
        part = getattr(config, name)
        for path, entry in entries:
            yield path, entry, getattr(part, entry.name)


def flatten(config: RunOptions) -> dict[str, Any]:
    """Return every value of a run by "section.field", for example "model.num_layers"."""
    return {path: value for path, _, value in values_of(config)}


def with_values(config: Run, values: Mapping[str, Any]) -> Run:
    """Return a copy of a run with some values replaced, by "section.field" as in `flatten`."""
    changed: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, name = path.split(".")
        changed.setdefault(section, {})[name] = value
    return replace(
        config, **{name: replace(getattr(config, name), **part) for name, part in changed.items()}
    )


def evaluations_until(config: RunOptions, iteration: int) -> int:
    """Return how many times a run has evaluated after the given number of iterations.

    No evaluation takes place at iterations that --iterations-to-skip leaves out.
    """
    evaluation = config.evaluation
    skipped = {number + 1 for number in config.training.iterations_to_skip or ()}
    missed = sum(number <= iteration and evaluation.is_due(number) for number in skipped)
    return evaluation.count(iteration) - missed
