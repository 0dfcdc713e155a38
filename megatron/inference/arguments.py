"""The command line of programs that let a trained model write: flags over its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.config import (
    ParsedRun,
    parse_config,
    rules_data,
    rules_model,
    rules_ranges,
)
from megatron.config.checks import Rule
from megatron.config.data import TokenizerConfig
from megatron.config.fields import fields_of
from megatron.config.model import ModelOptions
from megatron.config.run import RunOptions
from megatron.inference.load import check_architecture, open_existing, saved_config


def parse_generation(
    arguments: Sequence[str],
    *,
    world_size: int,
    program: str,
    extra: Sequence[type],
    check_extra: Callable[..., Iterable[str]],
) -> ParsedRun:
    """What the checkpoint under `--load` says, changed by Megatron's flags; everything checked.

    `--load` alone is enough. Flags of the network, as Megatron's own scripts give them, must be
    those of the checkpoint: loading it compares them.

    Args:
        extra: dataclasses of the program's own flags.
        check_extra: an instance of each of these to the mistakes in them.

    Raises:
        ConfigError: all mistakes.
        CheckpointError: --load names no checkpoint of a GPT.
    """
    return parse_config(
        arguments,
        world_size=world_size,
        program=program,
        extra=extra,
        find_start=saved_run,
        rules=RULES,
        reads=lambda given: SAVED_MODEL_READS | {"training.seed"},
        check_extra=check_extra,
    )


def saved_run(given: Mapping[str, Any], *, micro_batch: int = 1) -> RunOptions:
    """The run of the GPT under --load, see `parse_config`'s find_start; without one the defaults.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another network.
    """
    folder = given.get("load")
    if folder is None:
        return RunOptions()
    config = saved_config(open_existing(folder, step=given.get("ckpt_step"), verify=False), folder)
    check_architecture(config, "gpt", f"--load {folder}")
    return replace(config, training=replace(config.training, micro_batch_size=micro_batch))


def _loads(config: RunOptions, world_size: int) -> Iterator[str]:
    if config.checkpoint.load is None:
        yield "--load is required: give the folder of a trained model's checkpoints"
    else:  # which names its tokenizer, unless it is old
        yield from rules_data.tokenizer(config, world_size)


def _no_training(config: RunOptions, world_size: int) -> Iterator[str]:
    """What a model may be trained with, and is not run with afterwards."""
    parallel, fp8 = config.parallel, config.precision.fp8_format
    if config.training.dry_run:
        yield "--dry-run is of training: drop it"
    context = parallel.context_parallel_size
    if context != 1:
        yield f"--context-parallel-size {context}: sequences are split in training alone: drop it"
    for name, value in (
        ("layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage),
        ("virtual-stages-per-pipeline-rank", parallel.num_virtual_stages_per_pipeline_rank),
    ):
        if value is not None:
            yield f"--num-{name} {value}: stages have one part outside of training: drop it"
    if fp8 is not None:
        yield f"--fp8-format {fp8}: a trained model multiplies in the weights' 16 bits: drop it"
    if parallel.zero_stage == 3:
        yield "--zero-stage 3 shares the weights of a training run: drop it"
    if parallel.tp_comm_overlap:
        yield "--tp-comm-overlap cuts the products of training alone: drop it"


def _one_copy(config: RunOptions, world_size: int) -> Iterator[str]:
    """Tensor and pipeline ranks alone."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tensor * pipeline != world_size:
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} is "
            f"not the {world_size} launched process(es): text generation runs one copy of the "
            f"model, so launch {tensor * pipeline}"
        )
    if parallel.sequence_parallel:
        yield "--sequence-parallel is of training: drop it"


# For every program that runs a saved model.
SAVED_MODEL_RULES: tuple[Rule, ...] = (
    _loads,
    _no_training,
    rules_ranges.bounds,
    rules_model.layout,
    rules_model.tensor_parallel,
    rules_model.pipeline,
    rules_model.heads,
    rules_model.positions,
    rules_model.activation_function,
    rules_model.normalization,
    rules_model.precision,
)
RULES: tuple[Rule, ...] = (*SAVED_MODEL_RULES, _one_copy)

# Of a network: what only its training, or a new one, depends on.
_OF_TRAINING = (
    *("attention_dropout", "hidden_dropout", "init_method_std", "init_method_xavier_uniform"),
    *("perform_initialization", "make_vocab_size_divisible_by"),
)
_READ: dict[str, tuple[str, ...]] = {
    "model": tuple(f.name for f in fields_of(ModelOptions) if f.name not in _OF_TRAINING),
    "tokenizer": tuple(f.name for f in fields_of(TokenizerConfig)),
    "precision": (
        *("fp16", "bf16", "fp8_format", "fp32_residual_connection", "embedding_weights_in_fp32"),
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
    ),
    "parallel": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        *("pipeline_model_parallel_layout", "pipeline_model_parallel_split_rank"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("sequence_parallel", "tp_comm_overlap", "distributed_backend"),
        *("distributed_timeout_minutes", "local_rank", "use_mpi"),
    ),
    "training": ("deterministic_mode", "dry_run"),
    "checkpoint": ("load", "ckpt_step", "use_checkpoint_args"),
}
# What every program that runs a saved model depends on, or refuses by name.
SAVED_MODEL_READS = frozenset(f"{section}.{name}" for section in _READ for name in _READ[section])
