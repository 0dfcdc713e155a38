"""What a file's pickled command line says, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.entries import Json
from megatron.checkpoint.legacy.inert import Namespace, Opaque
from megatron.config.data import TOKENIZER_TYPES
from megatron.config.model import NETWORK_FIELDS
from megatron.errors import CheckpointError

_MAX_LIST = 10_000

# What describes the network: names that are the same on both sides.
_MODEL_FIELDS = (
    *NETWORK_FIELDS,
    "make_vocab_size_divisible_by",
    "onnx_safe",
    "bias_gelu_fusion",
)


def plain_arguments(args: Any) -> dict[str, Json]:
    """The Namespace's fields that are scalars or flat lists; a missing Namespace is empty."""
    if args is None:
        return {}
    if not isinstance(args, Namespace):
        raise CheckpointError("`args` is no argparse.Namespace")
    plain = {str(key): _plain(value) for key, value in args.fields.items()}
    return {key: value for key, value in plain.items() if value is not _DROPPED}


_DROPPED = object()


def _plain(value: Any) -> Json:
    """Not recursive: a small pickle can hold an endless tree."""
    if isinstance(value, list | tuple) and len(value) <= _MAX_LIST:
        scalars = [_scalar(one) for one in value]
        return scalars if _DROPPED not in scalars else _DROPPED
    return _scalar(value)


def _scalar(value: Any) -> Json:
    if value is None or type(value) in (str, int, bool, float):
        return value
    if isinstance(value, Opaque) and all(type(one) in (str, int) for one in value.args):
        return f"{value.name}({', '.join(map(str, value.args))})"
    return _DROPPED


def legacy_run(args: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """What the file says of its run, by `RunConfig`'s sections: enough to run the model."""
    kept = {
        "tokenizer": (
            *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"),
            "vocab_extra_ids",
        ),
        "data": ("seq_length",),
        "precision": ("fp16", "bf16"),
    }
    sections = {
        section: {name: args[name] for name in names if args.get(name) is not None}
        for section, names in kept.items()
    }
    if sections["tokenizer"].get("tokenizer_type") not in TOKENIZER_TYPES:
        sections["tokenizer"].pop("tokenizer_type", None)
    return {"model": legacy_config(args), **sections}


def legacy_config(args: Mapping[str, Json]) -> dict[str, Json]:
    """Model-shape fields for `--use-checkpoint-args`, under `ModelConfig`'s names.

    Fields that the file's version did not have are left out: their defaults hold.
    """
    config = {name: args[name] for name in _MODEL_FIELDS if name in args}
    if "layernorm_epsilon" in args:
        config.setdefault("norm_epsilon", args["layernorm_epsilon"])
    if args.get("use_rotary_position_embeddings"):
        config["position_embedding_type"] = "rope"
    elif args.get("add_position_embedding") is False:
        config["position_embedding_type"] = "none"
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int):  # not yet flags in v1
        config.setdefault("kv_channels", hidden // heads)
        config.setdefault("ffn_hidden_size", 4 * hidden)
    return {name: value for name, value in config.items() if value is not None}


def consumed_samples(args: Mapping[str, Json], iteration: int) -> int:
    """Training samples seen: as saved, or for older files iterations times the batch size."""
    if "consumed_train_samples" in args:
        return int(args["consumed_train_samples"])
    if "global_batch_size" in args:
        return iteration * int(args["global_batch_size"])
    if "batch_size" in args:  # v1: samples per process and step
        ranks = int(args.get("world_size", 1)) // int(args.get("model_parallel_size", 1))
        return iteration * int(args["batch_size"]) * ranks
    raise CheckpointError("`args` does not tell how many samples were seen: use --finetune")
