"""KTO: training on single answers, each labeled desirable or undesirable (Ethayarajh et al., 2024).

Kahneman-Tversky optimization, arXiv:2402.01306, needs no pairs. Its loss compares the reward of an
answer with the mean reward of answers to other prompts, an estimate of the divergence of the policy
from the reference. In a row, each answer is therefore followed by the same prompt with another
answer (`data.preferences.FittedAnswers`). The estimate is the mean over the micro-batches of all
data-parallel processes, as in TRL, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.config.preferences import PreferenceConfig
from megatron.data.preferences import DESIRABLE, PAIRS, REFERENCE
from megatron.finetuning.preferences import (
    PreferenceRecipe,
    means_over_pairs,
    pair_values,
    run_documents,
    values_at_segments,
)
from megatron.models.gpt import GPTModel
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.recipe import Batch

_DESIRABLE, _UNDESIRABLE = "rewards/chosen", "rewards/rejected"  # TRL's names
_MARGINS, _SHARE = "rewards/margins", "desirable"
_MIN_SHARE = 1e-6  # a smaller fraction means that a batch has no answers of a kind
# Metrics that are averaged over one kind of answer: desirable (True) or undesirable ones.
_KIND_OF_METRIC = {
    _DESIRABLE: True,
    "logps/chosen": True,
    _UNDESIRABLE: False,
    "logps/rejected": False,
}
METRICS = (
    "loss",
    "kl",
    _SHARE,
    _DESIRABLE,
    _UNDESIRABLE,
    _MARGINS,
    "logps/chosen",
    "logps/rejected",
)


class AnswerLosses(NamedTuple):
    """The losses of P answers, and their rewards.

    Attributes:
        losses: The losses, [P].
        rewards: The rewards, beta times the log-ratio of policy and reference, without a gradient.
    """

    losses: Tensor
    rewards: Tensor


def kto_losses(
    options: PreferenceConfig, log_ratios: Tensor, divergence: Tensor, desirable: Tensor
) -> AnswerLosses:
    """Return the loss of each answer, and its reward.

    Args:
        options: Beta and the weights of both kinds of answers.
        log_ratios: The log-probabilities of P answers minus those under the reference model, [P].
        divergence: The estimate of the divergence from the reference, at least 0.
        desirable: Whether each answer is desirable, [P].
    """
    beta = options.preference_beta
    margins = beta * torch.where(desirable, log_ratios - divergence, divergence - log_ratios)
    weights = torch.where(desirable, options.kto_desirable_weight, options.kto_undesirable_weight)
    return AnswerLosses(weights * torch.sigmoid(-margins), beta * log_ratios.detach())


@torch.no_grad()
def estimate_divergence(log_ratios: Tensor, is_answer: Tensor, layout: Layout) -> Tensor:
    """Return the mean log-ratio of answers to other prompts, or 0 if it is negative.

    Collective over the data-parallel processes, each of which has a micro-batch.

    Args:
        log_ratios: The log-ratios of the answers to other prompts in the micro-batch, [P].
        is_answer: Which entries to include, [P].
        layout: The ranks of this process.
    """
    sums = torch.stack(
        (torch.where(is_answer, log_ratios, 0).sum(), is_answer.sum().to(log_ratios.dtype))
    )
    total, count = all_reduce(sums, layout.data)
    return (total / count.clamp(min=1)).clamp(min=0)


class KTORecipe(PreferenceRecipe):
    """A recipe for training on packed answers, each labeled desirable or undesirable."""

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names under which the loss and TRL's other metrics are logged."""
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
        """Run one micro-batch through a part of the model. The last part returns the losses."""
        output = run_documents(part, batch, hidden, tokenizer, layout)
        if isinstance(output, Tensor):
            return output
        is_answer = values_at_segments(batch, PAIRS)[:-1] > 0
        desirable = values_at_segments(batch, DESIRABLE)[:-1] > 0
        policy = pair_values(output.log_probs, is_answer)
        reference = pair_values(values_at_segments(batch, REFERENCE), is_answer)
        ratios = policy.minus(reference)
        divergence = estimate_divergence(ratios.rejected.detach(), is_answer, layout)
        result = kto_losses(config.preferences, ratios.chosen, divergence, desirable)
        log_probs = policy.chosen.detach()
        rewards = [torch.where(kind, result.rewards, 0) for kind in (desirable, ~desirable)]
        values = {
            "loss": result.losses,
            "kl": divergence.expand_as(log_probs),
            _SHARE: desirable.double(),
            _DESIRABLE: rewards[0],
            _UNDESIRABLE: rewards[1],
            "logps/chosen": torch.where(desirable, log_probs, 0),
            "logps/rejected": torch.where(desirable, 0, log_probs),
        }
        return means_over_pairs(values, is_answer)

    def reported(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Return the values to log, including the margin.

        Values that exist for only one kind of answer are averaged over the answers of that kind, or
        are 0 if the batch has none.
        """
        shares = {True: losses[_SHARE], False: 1 - losses[_SHARE]}
        values = dict(losses)
        for name, kind in _KIND_OF_METRIC.items():
            values[name] = losses[name] / shares[kind] if shares[kind] > _MIN_SHARE else 0.0
        values[_MARGINS] = values[_DESIRABLE] - values[_UNDESIRABLE]
        return values
