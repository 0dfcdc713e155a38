"""Options for multi-token prediction, named as in Megatron Core."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import Requirement, flag

MAX_DEPTHS = 64
_PREDICTS = Requirement(lambda run: run.model.mtp_num_layers, "--mtp-num-layers")


@dataclass(frozen=True, kw_only=True)
class MultiTokenOptions:
    """Multi-token prediction (DeepSeek-V3).

    Attributes:
        mtp_num_layers: Number of additional tokens that each position learns to predict, one after
            another. Each has its own layer, which reads the hidden states of the previous layer and
            the embedding of the next token. Default: none.
        mtp_loss_scaling_factor: Weight of the mean loss of multi-token prediction in the training
            loss. The log shows each loss unweighted, as "mtp_1 loss" and so on.
    """

    mtp_num_layers: int | None = flag(
        None, unit="layers", at_least=1, at_most=MAX_DEPTHS, only_for=("gpt",)
    )
    mtp_loss_scaling_factor: float = flag(0.1, at_least=0, requires=_PREDICTS)

    @property
    def mtp_loss_weight(self) -> float:
        """The weight of each depth's loss in the training loss."""
        return self.mtp_loss_scaling_factor / (self.mtp_num_layers or 1)
