"""Training of reward models: a linear layer instead of the output layer gives an answer's reward.

The reward of an answer to its prompt is the head's value at its last token. The loss is that of
Bradley and Terry's model of comparisons, as in InstructGPT (Ouyang et al., 2022, arXiv:2203.02155).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.preferences import PAIRS
from megatron.data.sample import SEGMENT_ENDS, TRAINED
from megatron.finetuning.documents import document_sums
from megatron.finetuning.preferences import (
    PreferenceRecipe,
    at_segments,
    pairs_of,
    run_part,
)
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.recipe import Batch

METRICS = (
    "loss",
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
)


class RewardRecipe(PreferenceRecipe):
    """The loss of a reward model on packed pairs."""

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the log names of the loss and of what is reported beside it."""
        return METRICS

    def forward(
        self,
        part: GPTModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model; at its end return loss and metrics."""
        found = run_part(part, batch, hidden, tokenizer, layout)
        if not part.part.head:
            return found
        is_pair = at_segments(batch, PAIRS)[:-1] > 0
        rewards = pairs_of(last_values(found, batch, layout), is_pair)
        losses = -F.logsigmoid(rewards.difference)
        centering = config.preferences.center_rewards_coefficient
        if centering:  # Eisenstein et al., 2023, arXiv:2312.09244
            losses = losses + centering * (rewards.chosen + rewards.rejected) ** 2
        values = {
            "loss": losses,
            "rewards/chosen": rewards.chosen.detach(),
            "rewards/rejected": rewards.rejected.detach(),
            "rewards/accuracies": (rewards.difference.detach() > 0).double(),
            "rewards/margins": rewards.difference.detach(),
        }
        count = is_pair.sum().clamp(min=1)
        return {
            name: (torch.where(is_pair, values[name], 0).sum() / count).float() for name in METRICS
        }


def last_values(scores: Tensor, batch: Batch, layout: Layout) -> Tensor:
    """Return the score at the last token of each segment, fp64 [k]. Collective over context ranks.

    Args:
        scores: The score of each token on this context rank, [b, s/C].
        batch: Rows of packed documents.
        layout: The ranks of this process.
    """
    ends = batch[SEGMENT_ENDS]
    is_last = torch.zeros_like(batch[TRAINED]).flatten()
    is_last[(ends[1:] - 1).clamp(min=0)] = 1
    is_last = is_last.view_as(batch[TRAINED])
    return document_sums(-scores, is_last, ends, layout.context).log_probs
