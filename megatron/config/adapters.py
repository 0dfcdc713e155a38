"""Options for finetuning a part of a network's weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The weights that are trained.

    Attributes:
        freeze: Patterns of the names of parameters or modules that are not trained, for example
            `embedding` or `layers.*.mlp`. Frozen weights have no gradients, no optimizer states and
            no fp32 copies.
    """

    freeze: tuple[str, ...] | None = flag(None, only_for=("gpt", "bert", "t5", "retro"))
