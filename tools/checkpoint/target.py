"""How `tools/checkpoint/util.py` is to split Megatron-LM's files: the --target flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelOptions
from megatron.config.rules_legacy import tensor_misfit
from megatron.config.rules_model import divisors
from megatron.config.stages import plan_model
from megatron.errors import ConfigError


def target(
    old: Mapping[str, Any], model: ModelConfig, options: argparse.Namespace
) -> ParallelOptions:
    """How the files are to be split.

    Args:
        old: how the checkpoint was, by the names of `ParallelOptions`, which are Megatron's too.
        model: its network.
        options: of `util.py`.

    Raises:
        ConfigError: heads do not fit the ranks, or layers the stages.
    """
    split = options.target_pipeline_parallel_split_rank
    if split is not None and model.architecture != "t5":
        raise ConfigError(f"--target-pipeline-parallel-split-rank {split} is for a T5: drop it")
    if split is None and options.target_pipeline_parallel_size is None:
        split = old.get("pipeline_model_parallel_split_rank")
    tensor, stages = options.target_tensor_parallel_size, options.target_pipeline_parallel_size
    parallel = ParallelOptions(
        tensor_model_parallel_size=tensor or old.get("tensor_model_parallel_size") or 1,
        pipeline_model_parallel_size=stages or old.get("pipeline_model_parallel_size") or 1,
        pipeline_model_parallel_split_rank=split,
        num_layers_per_virtual_pipeline_stage=(
            options.target_num_layers_per_virtual_pipeline_stage
        ),
    )
    _check_split(model, parallel, options)
    return parallel


def _check_split(
    model: ModelConfig, parallel: ParallelOptions, options: argparse.Namespace
) -> None:
    """Raise ConfigError, in terms of this program's flags, where the network does not split so."""
    misfit = tensor_misfit(model, parallel.tensor_model_parallel_size)
    if misfit:
        raise ConfigError(f"--target-tensor-parallel-size: Megatron-LM 23.08 {misfit}")
    try:
        plan_model(model, parallel)
    except ConfigError as error:
        stages = f"--target-pipeline-parallel-size {parallel.pipeline_model_parallel_size}"
        virtual = options.target_num_layers_per_virtual_pipeline_stage
        if virtual is not None:
            stages += f" --target-num-layers-per-virtual-pipeline-stage {virtual}"
        if model.architecture == "t5":
            raise ConfigError(f"{stages}: {error}") from None
        raise ConfigError(
            f"{stages}: --num-layers {model.num_layers} does not split so: in Megatron-LM's files "
            "every stage, and every virtual stage, has as many layers: use a "
            f"--target-pipeline-parallel-size of {divisors(model.num_layers)}"
            + (", and what divides a stage's layers for its virtual ones" * (virtual is not None))
        ) from None
