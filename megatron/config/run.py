"""`RunConfig`: everything that was asked for, one frozen dataclass a concern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.evaluation import EvaluationConfig
from megatron.config.fields import Field, fields_of
from megatron.config.logging import LoggingConfig, ProfilingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Field names are the section names of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


def sections() -> dict[str, type]:
    """Section name to its dataclass, in the order of `--help`."""
    hints = get_type_hints(RunConfig)
    return {entry.name: hints[entry.name] for entry in fields(RunConfig)}


def field_at(path: str) -> Field:
    """The field that a "section.field" names, for example "model.num_layers"."""
    section, name = path.split(".")
    (found,) = (entry for entry in fields_of(sections()[section]) if entry.name == name)
    return found


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every value by "section.field", for example "model.num_layers"."""
    return {
        f"{section.name}.{entry.name}": getattr(part, entry.name)
        for section in fields(config)
        for part in (getattr(config, section.name),)
        for entry in fields(part)
    }


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with the given "section.field" values: `flatten` the other way round."""
    changed: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, name = path.split(".")
        changed.setdefault(section, {})[name] = value
    return replace(
        config, **{name: replace(getattr(config, name), **part) for name, part in changed.items()}
    )


def evaluations_until(config: RunConfig, iteration: int) -> int:
    """How many times a run has evaluated once it has done so many iterations: at none of those that
    --iterations-to-skip leaves out."""
    interval = config.evaluation.eval_interval
    left_out = {number + 1 for number in config.training.iterations_to_skip or ()}
    missed = sum(number <= iteration and number % interval == 0 for number in left_out)
    return max(0, iteration) // interval - missed


def known(value: int | None) -> int:
    """A number that resolving has filled in."""
    assert value is not None, "the configuration is not resolved"
    return value
