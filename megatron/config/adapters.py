"""Options for training only some of a network's weights: freezing, and adapters (LoRA)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from megatron.config.fields import Requirement, flag

if TYPE_CHECKING:
    from megatron.config.model import ModelConfig

ALL_LINEAR = "all-linear"  # PEFT's name for every layer, except the output layer and routers
FROZEN_BLOCK = 64  # neighboring weights of a row that share a scale (--frozen-weights-dtype)
_GPT = ("gpt",)
_KINDS = ("gpt", "bert", "t5")
_BASE = Requirement(
    lambda run: run.model.lora_rank is not None and run.checkpoint.finetune,
    "--lora-rank, --load and --finetune",
)
_ADAPTERS = Requirement(lambda run: run.model.lora_rank is not None, "--lora-rank")


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Trainable weights.

    Attributes:
        freeze: Name patterns of the parameters or modules to freeze, for example `embedding` or
            `layers.*.mlp`. Frozen weights have no gradients, no optimizer states and no fp32
            copies.
        lora_rank: Rank of the LoRA adapters of linear layers. All other weights are frozen.
        lora_alpha: Multiply adapters' outputs by --lora-alpha / --lora-rank. Default: --lora-rank.
        lora_dropout: Dropout on the inputs of adapters.
        lora_target_modules: Name patterns of the linear layers that get adapters, such as `q_proj`,
            `layers.*.mlp` or `linear_qkv`. Default: all linear layers of attention and MLPs. The
            output layer and routers get one only if `output_layer` and `router` are among the
            patterns.
        frozen_weights_dtype: Store the frozen weights of linear layers in 8 bits (fp8) or 4 bits
            (nf4) and train adapters (QLoRA). Matrix products convert the frozen weights to the
            number format of the other weights.
        load_adapter: Folder of an adapter to start from, written by PEFT or by `--saver peft`.
            --load names the model that the adapter was trained for.
        use_rslora: Multiply adapters' outputs by --lora-alpha / sqrt(--lora-rank) (rsLoRA).
        use_dora: Train the magnitude of each row of an adapted weight separately from its direction
            (DoRA).
    """

    freeze: tuple[str, ...] | None = flag(None, only_for=("gpt", "bert", "t5", "retro"))
    lora_rank: int | None = flag(None, at_least=1, at_most=1 << 16, only_for=_KINDS)
    lora_alpha: float | None = flag(None, above=0, requires=_ADAPTERS, only_for=_KINDS)
    lora_dropout: float = flag(
        0.0, unit="0 to 1", at_least=0, below=1, requires=_ADAPTERS, only_for=_KINDS
    )
    lora_target_modules: tuple[str, ...] | None = flag(None, requires=_ADAPTERS, only_for=_KINDS)
    frozen_weights_dtype: str | None = flag(
        None, choices=("fp8", "nf4"), requires=_ADAPTERS, only_for=_GPT
    )
    load_adapter: str | None = flag(None, requires=_BASE, only_for=_GPT)
    use_rslora: bool = flag(False, names="--use-rslora", requires=_ADAPTERS, only_for=_KINDS)
    use_dora: bool = flag(False, names="--use-dora", requires=_ADAPTERS, only_for=_KINDS)

    @property
    def lora_scale(self) -> float:
        """Factor by which an adapter's output is multiplied."""
        rank = self.lora_rank or 1
        alpha = rank if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


# Settings of adapters, which a network without adapters lacks.
ADAPTER_FIELDS = frozenset(
    entry.name
    for entry in fields(AdapterOptions)
    if entry.name not in ("freeze", "lora_dropout", "frozen_weights_dtype", "load_adapter")
)


def is_adapter_parameter(name: str) -> bool:
    """Return whether the parameter with this name belongs to an adapter."""
    return ".adapter." in name


def plain_network(model: ModelConfig) -> ModelConfig:
    """Return the configuration of the network without the settings in `ADAPTER_FIELDS`."""
    return replace(model, **{name: getattr(AdapterOptions, name) for name in ADAPTER_FIELDS})


def lora_flags(
    *, rank: object, alpha: object, targets: Sequence[str] | None, is_rslora: bool, is_dora: bool
) -> str:
    """Return the flags that give a network these adapters, for messages."""
    flags = [f"--lora-rank {rank} --lora-alpha {alpha}"]
    flags += ["--use-rslora"] if is_rslora else []
    flags += ["--use-dora"] if is_dora else []
    flags += ["--lora-target-modules " + " ".join(targets)] if targets else []
    return " ".join(flags)
