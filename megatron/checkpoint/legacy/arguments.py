"""The command line in a checkpoint: read as plain JSON and metadata, written as a Namespace."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.entries import Json
from megatron.checkpoint.legacy.unpickler import Namespace, Opaque, show
from megatron.config.data import SPLIT_ROUNDINGS, TOKENIZER_TYPES
from megatron.config.model import NETWORK_FIELDS
from megatron.config.optimizer import FORMAT_FIELDS, OptimizerConfig
from megatron.config.run import ModelRun, evaluations_until
from megatron.config.stages import chunks_of, plan_model
from megatron.config.yaml_file import to_dict
from megatron.errors import CheckpointError

_MAX_LIST = 10_000
_DROPPED = object()
_SCALAR_TYPES = (type(None), str, int, float, bool)

# Fields that describe the network and have the same names on both sides.
_MODEL_FIELDS = (
    *(*NETWORK_FIELDS, "make_vocab_size_divisible_by", "onnx_safe", "bias_gelu_fusion"),
    *("attention_dropout", "hidden_dropout"),
)
_RETRO_FIELDS = (
    *("retro_num_neighbors", "retro_num_retrieved_chunks"),
    *("retro_encoder_hidden_dropout", "retro_encoder_attention_dropout"),
)
_TOKENIZER = "tokenizer_type tokenizer_model vocab_file merge_file vocab_size vocab_extra_ids"
# Other fields that are needed to run a model, by section of `RunOptions`.
_OTHER_FIELDS = {
    "tokenizer": _TOKENIZER.split(),
    "data": ["seq_length"],
    "precision": ["fp16", "bf16"],
}


def plain_arguments(args: Any) -> dict[str, Json]:
    """Return the fields of a Namespace that are scalars, enum members (as text) or flat lists.

    Nested lists are left out, because a small pickle can encode an endless tree. So are lists of
    more than `_MAX_LIST` items.

    Args:
        args: The value of `args` in a file. The result is {} if it is None.

    Raises:
        CheckpointError: The value is not a Namespace.
    """
    if args is None:
        return {}
    if not isinstance(args, Namespace):
        raise CheckpointError("`args` is not an argparse.Namespace")
    plain = {}
    for key, value in args.fields.items():
        is_list = isinstance(value, list | tuple) and len(value) <= _MAX_LIST
        scalars = [_scalar(item) for item in (value if is_list else [value])]
        if _DROPPED not in scalars:
            plain[str(key)] = scalars if is_list else scalars[0]
    return plain


def _scalar(value: Any) -> Json:
    """Return a scalar, or an enum member as text, or `_DROPPED` for any other value."""
    if type(value) in _SCALAR_TYPES:
        return value
    if isinstance(value, Opaque) and all(type(arg) in (str, int) for arg in value.args):
        return f"{value.name}({', '.join(map(str, value.args))})"
    return _DROPPED


def refuse_unknown(args: Mapping[str, Json], neutral: Mapping[str, tuple[Json, ...]]) -> None:
    """Refuse arguments that enable network features that this program does not support.

    Args:
        args: The arguments by name.
        neutral: The accepted values of each argument: those that leave the feature off or that this
            program supports.

    Raises:
        CheckpointError: An argument has a different value.
    """
    for name, allowed in neutral.items():
        if name in args and args[name] not in allowed:
            value = f"{args[name]!r:.80}"
            raise CheckpointError(f"{name} is {value}: such networks are not supported")


def legacy_run_settings(args: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return the settings other than the network's that are needed to run a model.

    They are grouped by section of `RunOptions`. The paths of tokenizer files are those that the run
    used; the files may have been moved since then. A tokenizer type that this program does not have
    is left out.
    """
    sections = {
        section: {name: args[name] for name in names if args.get(name) is not None}
        for section, names in _OTHER_FIELDS.items()
    }
    if sections["tokenizer"].get("tokenizer_type") not in TOKENIZER_TYPES:
        sections["tokenizer"].pop("tokenizer_type", None)
    return sections


def legacy_config(args: Mapping[str, Json], architecture: str) -> dict[str, dict[str, Json]]:
    """Return the settings of the network and the optimizer, by section of `RunOptions`.

    The result also says how --split was rounded, if that is known. Fields that the file's version
    did not have are left out, so their defaults apply.

    Args:
        args: The command line in the file.
        architecture: The kind of network (`ModelConfig.architecture`).
    """
    model = {name: args[name] for name in _MODEL_FIELDS if name in args}
    model["architecture"] = architecture
    if "layernorm_epsilon" in args:
        model.setdefault("norm_epsilon", args["layernorm_epsilon"])
    if args.get("add_bias_linear"):  # implies add_qkv_bias since Core 0.10
        model.pop("add_qkv_bias", None)
    if args.get("use_rotary_position_embeddings"):
        model["position_embedding_type"] = "rope"
    elif (
        args.get("add_position_embedding") is False
        and args.get("position_embedding_type") != "rope"
    ):
        # Many scripts give --no-position-embedding with rotary embeddings.
        model["position_embedding_type"] = "none"
    if architecture == "retro":
        model |= {name: args[name] for name in _RETRO_FIELDS if name in args}
        # Megatron-LM reads the chunk length from its working folder.
        model["retro_chunk_length"] = args.get("retro_gpt_chunk_length")
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int):  # these were not flags in v1
        model.setdefault("kv_channels", hidden // heads)
        model.setdefault("ffn_hidden_size", 4 * hidden)
    # Files store states in fp32, regardless of their format in the run.
    packed = ("use_precision_aware_optimizer", *FORMAT_FIELDS)
    names = (field.name for field in fields(OptimizerConfig) if field.name not in packed)
    optimizer = {name: args.get(name) for name in names}
    data = {"split_rounding": _split_rounding(args)}
    return {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in (("model", model), ("optimizer", optimizer), ("data", data))
    }


def _split_rounding(args: Mapping[str, Json]) -> str | None:
    """Return how the run that wrote a file rounded --split, or `None` if the file does not say."""
    for rounding in SPLIT_ROUNDINGS:
        if args.get("split_rounding") == rounding:
            return rounding
    is_ours = "blend_schedule" in args  # our files contain all our settings
    has_core_formats = "ckpt_format" in args or "dist_ckpt_format" in args
    return "bounds" if has_core_formats and not is_ours else None


def saved_iteration(value: Any, path: Path) -> int:
    """Return the number of training steps recorded in a file.

    Args:
        value: The number in the file.
        path: The file, for messages.

    Raises:
        CheckpointError: The value is not a number of steps.
    """
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: iteration {show(value)}")
    return value


def megatron_meta(
    args: dict[str, Json],
    *,
    iteration: int,
    is_release: bool = False,
    rows: int,
    config: Mapping[str, Mapping[str, Json]],
    optimizer: Json,
    schedule: Any,
) -> dict[str, Json]:
    """Return the metadata (`Reader.meta`) of a checkpoint in any of Megatron's formats.

    Args:
        args: All plain fields of the command line in the checkpoint.
        iteration: Training steps taken.
        is_release: Whether the checkpoint starts a new run, which has seen no samples.
        rows: The number of rows of the word embedding in the files.
        config: The settings of the network and the optimizer, by section of `RunOptions`.
        optimizer: The optimizer's step count and loss scale; `None` if its state is not available.
        schedule: The schedules in the checkpoint, under the names of the program that wrote it.
            Only scalar values are kept.

    Raises:
        CheckpointError: The arguments do not say how many samples were seen.
    """
    fields = schedule.items() if isinstance(schedule, dict) else ()
    return {
        "iteration": iteration,
        "consumed_train_samples": 0 if is_release else _consumed_samples(args, iteration),
        "skipped_train_samples": 0 if is_release else args.get("skipped_train_samples", 0),
        "padded_vocab_size": rows,
        "optimizer": optimizer,
        "schedule": {str(key): value for key, value in fields if type(value) in _SCALAR_TYPES},
        "config": config,
        **_consumed_tokens(args),
        "legacy_args": args,
    }


def _consumed_samples(args: Mapping[str, Json], iteration: int) -> int:
    """Return the number of training samples seen.

    This is the saved number or, in older files, the iterations times the global batch size.

    Raises:
        CheckpointError: The arguments do not say how many samples were seen.
    """
    if "consumed_train_samples" in args:
        return int(args["consumed_train_samples"])
    if "global_batch_size" in args:
        return iteration * int(args["global_batch_size"])
    if "batch_size" in args:  # v1: samples per process and step
        ranks = int(args.get("world_size", 1)) // int(args.get("model_parallel_size", 1))
        return iteration * int(args["batch_size"]) * ranks
    raise CheckpointError("`args` does not say how many samples were seen: use --finetune")


def _consumed_tokens(args: Mapping[str, Json]) -> Json:
    """Return the metadata about tokens seen, or {}. Megatron-LM does not count tokens."""
    tokens = args.get("consumed_train_tokens")
    return {"consumed_train_tokens": tokens} if type(tokens) is int and tokens >= 0 else {}


def step_count(steps: Collection[float], path: Path, default: int) -> int:
    """Return the number of optimizer steps.

    Args:
        steps: The different numbers in the files.
        path: The checkpoint, for messages.
        default: The number if the files contain none.

    Raises:
        CheckpointError: The files contain different numbers.
    """
    if len(steps) > 1:
        raise CheckpointError(f"{path}: step counts differ: {sorted(steps)}")
    return int(next(iter(steps), default))


def megatron_arguments(
    config: ModelRun, meta: Json, *, rows: int, dtype: torch.dtype, data_parallel: int
) -> argparse.Namespace:
    """Return a run's settings as Megatron 23.08's command-line arguments.

    The result contains our values, most of which have Megatron's names. If the checkpoint was
    converted from Megatron's files, their Namespace (`legacy_args`) overrides these values. Fields
    that depend on the new files override both.

    Args:
        config: The configuration of the run that wrote the checkpoint, or for which it was made.
        meta: The checkpoint's metadata.
        rows: The number of rows of the vocabulary tables in the files.
        dtype: The dtype of the weights.
        data_parallel: The number of processes that hold the same weights.
    """
    values = {name: value for part in to_dict(config).values() for name, value in part.items()}
    model, parallel, evaluation = config.model, config.parallel, config.evaluation
    layers, stages = model.num_layers, parallel.pipeline_model_parallel_size
    chunks = chunks_of(layers, parallel)
    per_chunk, split_rank = layers // (stages * chunks), None
    if model.decoder_layers and stages > 1:  # find the stage on which a T5's decoder begins
        parts = plan_model(model, parallel)
        split_rank = sum(part.layers.start < layers for part in parts)
    evaluated = 0  # validation samples seen by the run; Megatron evaluates before it saves
    if evaluation.eval_interval and not evaluation.full_validation:
        times = evaluations_until(config, meta.get("iteration", 0))
        batch = evaluation.eval_global_batch_size or config.training.global_batch_size or 0
        evaluated = times * evaluation.eval_iters * batch
    values |= {
        "DDP_impl": parallel.ddp_impl,
        "layernorm_epsilon": model.norm_epsilon,
        "encoder_num_layers": layers,
        "encoder_seq_length": config.data.seq_length,
        "add_position_embedding": model.position_embedding_type != "none",
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "transformer_impl": "local",
        "consumed_valid_samples": evaluated,
    }
    if model.retro_chunk_length is not None:
        length = model.retro_chunk_length
        values |= {
            "retro_add_retriever": True,
            "retro_gpt_chunk_length": length,
            "retro_gpt_retrieved_length": length * model.retro_num_retrieved_chunks,
        }
    values |= dict(meta.get("legacy_args") or {})
    values |= {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": stages,
        "transformer_pipeline_model_parallel_size": stages,
        "pipeline_model_parallel_split_rank": split_rank,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": per_chunk if chunks > 1 else None,
        "data_parallel_size": data_parallel,
        "world_size": data_parallel * parallel.tensor_model_parallel_size * stages,
        "rank": 0,
        "use_distributed_optimizer": parallel.use_distributed_optimizer,
        "padded_vocab_size": rows,
        "consumed_train_samples": meta.get("consumed_train_samples") or 0,
        "skipped_train_samples": meta.get("skipped_train_samples") or 0,  # Megatron Core reads it
        **_consumed_tokens(meta),
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }
    values.pop("model_type", None)  # an enum in Megatron, whose loader does not read it
    return argparse.Namespace(**values)
