"""`RunConfig`: everything that was asked for, one frozen dataclass a concern."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.evaluation import EvaluationConfig
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
