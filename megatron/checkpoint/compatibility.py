"""Check that a checkpoint's network and optimizer match the run that loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.checkpoint.reader import Reader
from megatron.config.adapters import ADAPTER_FIELDS
from megatron.config.attention import delta_net_layers, layer_windows, rotary_layers
from megatron.config.experts import layer_experts
from megatron.config.fields import from_yaml
from megatron.config.model import (
    NETWORK_FIELDS,
    ROTARY_FREQUENCIES,
    UNLEARNED_POSITIONS,
    ModelConfig,
    is_irrelevant,
)
from megatron.config.run import RunConfig, field_at, flatten
from megatron.errors import CheckpointError

# Settings that optimizer states depend on.
_STATE_SETTINGS = ("optimizer.optimizer", "precision.fp16", "precision.bf16")


def check_network(
    config: RunConfig, reader: Reader, flag: str = "--load", *, finetunes: bool = False
) -> list[str]:
    """Check that a checkpoint's network matches the run's.

    The context length may differ if the position embedding has no weights.

    Args:
        config: The run's configuration.
        reader: The checkpoint.
        flag: The flag that named the checkpoint.
        finetunes: Accept differences that finetuning allows: other rotary frequencies, to which the
            weights adapt; a GPT that becomes a Retro model (--retro-add-retriever); new adapters
            (--lora-rank); and a language model that becomes a reward model.

    Returns:
        One line for the log for each flag that changes the rotary frequencies.

    Raises:
        CheckpointError: The networks differ in other ways than these. The message lists the flags
            and values.
    """
    model, saved = config.model, reader.meta["config"].get("model", {})
    # A GPT becomes a Retro model: the modules that it lacks are newly initialized.
    becomes_retro = finetunes and model.retro_add_retriever and saved.get("architecture") == "gpt"
    gets_adapters = finetunes and model.lora_rank is not None and saved.get("lora_rank") is None
    gets_reward = finetunes and model.reward_head and not saved.get("reward_head")
    differing = {
        name: line
        for name, line in network_differences(model, reader).items()
        if not (becomes_retro and (name == "architecture" or name.startswith("retro_")))
        and not (gets_adapters and name in ADAPTER_FIELDS)
        and not (gets_reward and name == "reward_head")
    }
    speeds = [line for name, line in differing.items() if name in ROTARY_FREQUENCIES]
    if finetunes and len(speeds) == len(differing):
        reason = "the rotary frequencies differ from those that the weights were trained with"
        return [f"  --finetune: {line}: {reason}" for line in speeds]
    if differing:
        or_else = ""
        if flag == "--load":
            or_else = ", or --use-checkpoint-args to take them from the checkpoint"
            if model.lora_rank is not None and saved.get("lora_rank") is None:
                or_else += "; --finetune adds adapters to its weights, from iteration 0"
            if speeds and not finetunes:
                or_else += "; --finetune adapts to other rotary frequencies, from iteration 0"
        raise CheckpointError(
            f"{flag} {reader.path}: the checkpoint is for a different network:\n  "
            + "\n  ".join(differing.values())
            + f"\ngive the checkpoint's values{or_else}"
        )
    return []


def network_differences(model: ModelConfig, reader: Reader) -> dict[str, str]:
    """Describe each network setting that differs between checkpoint and run, by field name.

    Settings that the checkpoint does not record, or that have no effect in the run's network, are
    left out, and so is the context length if the position embedding has no weights.

    Args:
        model: The run's network.
        reader: The checkpoint.
    """
    saved = reader.meta["config"].get("model", {})
    may_differ = model.position_embedding_type in UNLEARNED_POSITIONS
    return {
        name: _difference(f"model.{name}", getattr(model, name), saved[name])
        for name in NETWORK_FIELDS
        if name in saved
        and not _is_same(model, name, saved[name])
        and not (may_differ and name == "max_position_embeddings")
        and not is_irrelevant(model, name)
    }


def _is_same(model: ModelConfig, name: str, saved: Any) -> bool:
    """Return whether a saved setting has the same meaning as the run's."""
    value = getattr(model, name)
    if name == "num_experts":
        saved = from_yaml(field_at(f"model.{name}"), saved)  # a single number in older checkpoints
    # The same pattern of layers can be written in several ways.
    of_layers: Callable[[ModelConfig, int], object] | None = None
    if name in ("moe_layer_freq", "num_experts") and model.num_experts:
        of_layers = layer_experts
    elif name in ("window_size", "window_attn_skip_freq"):
        of_layers = layer_windows
    elif name == "no_rope_freq":
        of_layers = rotary_layers
    elif name == "linear_attention_freq":
        of_layers = delta_net_layers
    if of_layers is not None:
        try:
            saved_model = replace(model, **{name: saved})
            return of_layers(saved_model, model.num_layers) == of_layers(model, model.num_layers)
        except ValueError:
            return False
    if name == "moe_ffn_hidden_size":
        return bool((saved or model.ffn_hidden_size) == (value or model.ffn_hidden_size))
    return bool((tuple(saved) if isinstance(saved, list) else saved) == value)


def check_states(config: RunConfig, reader: Reader) -> None:
    """Check that the optimizer states fit the run's optimizer and precision.

    Raises:
        CheckpointError: The states belong to a different optimizer or precision, or are from SGD
            without momentum while the run has momentum.
    """
    saved = dict(reader.meta.get("legacy_args") or {})
    for section in ("precision", "optimizer"):
        saved |= reader.meta["config"].get(section, {})
    current = flatten(config)
    differing = [
        _difference(path, current[path], saved[name])
        for path in _STATE_SETTINGS
        for name in (path.partition(".")[2],)
        if saved.get(name) not in (None, current[path])
    ]
    # SGD without momentum saves no states, but a run with momentum needs them.
    momentum = "optimizer.sgd_momentum"
    if (
        current["optimizer.optimizer"] == "sgd"
        and current[momentum]
        and saved.get("sgd_momentum") == 0
    ):
        differing.append(_difference(momentum, current[momentum], 0.0))
    if differing:
        raise CheckpointError(
            f"--load {reader.path}: the optimizer's states are from a different run:\n  "
            + "\n  ".join(differing)
            + "\ngive the checkpoint's values, or --no-load-optim to continue with fresh states "
            "(--finetune: from iteration 0)"
        )


def _difference(path: str, current: Any, saved: Any) -> str:
    """Describe how the two values of a "section.field" differ, naming its flag if it has one."""
    field = field_at(path)
    flag = field.display_name if field.names else field.name
    if field.is_switch:
        current, saved = ("on" if value != field.default else "off" for value in (current, saved))
    current, saved = ("unset" if value is None else value for value in (current, saved))
    return f"{flag} is {current} here and {saved} in the checkpoint"
