"""Training on preferences: pairs of a chosen and a rejected answer to the same prompt.

The two documents of a pair lie next to each other in one row. The loss is the mean over the pairs
of the global batch, because rows contain different numbers of pairs.

The losses of DPO and its variants are functions of the log-probabilities of P pairs. Rewards are
defined as in TRL: beta times the log-ratio of policy and reference, or beta times the mean
log-probability per token if the loss has no reference.

A reward model has a linear layer instead of the output layer. The reward of an answer is the
layer's value at the answer's last token, and the loss is that of the Bradley-Terry model, as in
InstructGPT (Ouyang et al., 2022, arXiv:2203.02155).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import RunConfig
from megatron.config.preferences import PreferenceConfig
from megatron.data.chat import members_of
from megatron.data.datasets import DataRequest, Datasets
from megatron.data.gpt import longest_segment, make_batch
from megatron.data.preferences import (
    PAIRS,
    REFERENCE,
    PreferenceDataset,
    build_preference_datasets,
)
from megatron.data.sample import SEGMENT_ENDS, TRAINED
from megatron.finetuning.documents import ComparingRecipe, DocumentSums, document_sums
from megatron.kernels.segments import Segments
from megatron.models.gpt import GPTModel
from megatron.parallel.context.split import context_part
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.recipe import Batch, SampleCounts

# TRL's names for the values in the log.
REWARD_METRICS = (
    "loss",
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
)
METRICS = (*REWARD_METRICS, "logps/chosen", "logps/rejected")


class Pairs(NamedTuple):
    """One value for each answer of P pairs.

    Attributes:
        chosen: The values of the chosen answers, [P].
        rejected: The values of the rejected answers, [P].
    """

    chosen: Tensor
    rejected: Tensor

    @property
    def difference(self) -> Tensor:
        """The value for the chosen answer minus that for the rejected one, [P]."""
        return self.chosen - self.rejected

    def minus(self, others: Pairs) -> Pairs:
        """Return these values minus `others`."""
        return Pairs(self.chosen - others.chosen, self.rejected - others.rejected)

    def divided_by(self, divisors: Pairs) -> Pairs:
        """Return these values divided by `divisors`, where divisors below 1 count as 1."""
        return Pairs(*(x / n.clamp(min=1) for x, n in zip(self, divisors, strict=True)))


class PairLosses(NamedTuple):
    """The losses of P pairs, and the rewards of their answers.

    Attributes:
        losses: The losses, [P].
        rewards: The rewards, without a gradient.
    """

    losses: Tensor
    rewards: Pairs


def pair_losses(
    options: PreferenceConfig, policy: Pairs, tokens: Pairs, reference: Pairs | None = None
) -> PairLosses:
    """Return the loss of each pair, and its rewards.

    Args:
        options: The name of the loss and its parameters.
        policy: The log-probabilities of the answers, summed over their tokens.
        tokens: The number of tokens in each answer.
        reference: The same sums under the reference model, or `None` if the loss has no reference.
    """
    beta, smoothing = options.preference_beta, options.preference_label_smoothing
    scores = policy.divided_by(tokens) if reference is None else policy.minus(reference)
    match options.preference_loss:
        case "dpo":
            losses = dpo_loss(beta * scores.difference, smoothing)
        case "ipo":
            # Azar et al., 2023, arXiv:2310.12036, with mean log-probabilities, like the authors.
            losses = (scores.divided_by(tokens).difference - 1 / (2 * beta)) ** 2
        case "hinge":  # SLiC-HF (Zhao et al., 2023, arXiv:2305.10425)
            losses = torch.relu(1 - beta * scores.difference)
        case "robust":
            losses = robust_dpo_loss(beta * scores.difference, smoothing)
        case "simpo":
            losses = dpo_loss(beta * scores.difference - options.simpo_gamma, smoothing)
        case "orpo":
            losses = -scores.chosen - beta * F.logsigmoid(log_odds_ratio(scores))
        case loss:
            raise AssertionError(f"{loss} is not a loss of log-probabilities")
    return PairLosses(losses, Pairs(*(beta * score.detach() for score in scores)))


def dpo_loss(margin: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid(margin), or its expectation if some labels are wrong.

    This is the loss of direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290)
    and, with smoothing, of conservative DPO (Mitchell, 2023). With a target margin subtracted from
    `margin`, it is the loss of SimPO (Meng et al., 2024, arXiv:2405.14734).

    Args:
        margin: The difference between the rewards of chosen and rejected answers, [P].
        smoothing: The fraction of labels that are assumed to be wrong.
    """
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def robust_dpo_loss(margin: Tensor, smoothing: float) -> Tensor:
    """Return an unbiased estimate of DPO's loss on correct labels, computed from noisy labels.

    The estimate is that of Chowdhury et al., 2024, arXiv:2403.00409.

    Args:
        margin: The difference between the rewards of chosen and rejected answers, [P].
        smoothing: The fraction of labels that are assumed to be wrong, below 1/2.
    """
    wrong = smoothing * F.logsigmoid(-margin)
    return (wrong - (1 - smoothing) * F.logsigmoid(margin)) / (1 - 2 * smoothing)


def log_odds_ratio(means: Pairs) -> Tensor:
    """Return the log odds ratio of the chosen to the rejected answers, [P].

    The odds of ORPO (Hong et al., 2024, arXiv:2403.07691) are p / (1 - p), where log p is the mean
    log-probability per token.

    Args:
        means: The mean log-probabilities, below 0.
    """
    return means.difference - (log1mexp(means.chosen) - log1mexp(means.rejected))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x below 0, without cancellation for x near 0."""
    return torch.log(-torch.expm1(x))


class PreferenceRecipe(ComparingRecipe):
    """A recipe for training on packed pairs, with a loss computed from log-probabilities."""

    program = "finetune.py"

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names under which the loss and TRL's other metrics are logged."""
        return METRICS

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build rows of packed pairs. Collective."""
        return build_preference_datasets(
            DataRequest.of(config, samples, layout),
            config.finetuning,
            seq_length=config.data.seq_length,
            tokenizer=(config.tokenizer, tokenizer),
            labels=config.preferences.trains_on_labels,
        )

    def epoch_samples(self, config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> int:
        """Return the number of rows in an epoch of pairs. Collective."""
        train = self.build_datasets(config, tokenizer, (1, 0, 0), layout).train
        return sum(member.packing.rows for member in members_of(train, PreferenceDataset))

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return 1 at the first token of each pair, 0 elsewhere: the loss averages over pairs."""
        return batch[PAIRS].float()

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
        is_pair = values_at_segments(batch, PAIRS)[:-1] > 0
        policy, tokens = (pair_values(sums, is_pair) for sums in output)
        reference = None
        if config.preferences.needs_reference:
            reference = pair_values(values_at_segments(batch, REFERENCE), is_pair)
        result = pair_losses(config.preferences, policy, tokens, reference)
        values = {
            **_reward_metrics(result),
            "logps/chosen": policy.chosen.detach(),
            "logps/rejected": policy.rejected.detach(),
        }
        return means_over_pairs(values, is_pair)


class RewardRecipe(PreferenceRecipe):
    """A recipe for training a reward model on packed pairs."""

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names under which the loss and its metrics are logged."""
        return REWARD_METRICS

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
        output = run_part(part, batch, hidden, tokenizer, layout)
        if not part.part.head:
            return output
        is_pair = values_at_segments(batch, PAIRS)[:-1] > 0
        rewards = pair_values(last_token_scores(output, batch, layout), is_pair)
        losses = -F.logsigmoid(rewards.difference)
        centering = config.preferences.center_rewards_coefficient
        if centering:  # Eisenstein et al., 2023, arXiv:2312.09244
            losses = losses + centering * (rewards.chosen + rewards.rejected) ** 2
        result = PairLosses(losses, Pairs(*(reward.detach() for reward in rewards)))
        return means_over_pairs(_reward_metrics(result), is_pair)


def _reward_metrics(result: PairLosses) -> dict[str, Tensor]:
    """Return the values of `REWARD_METRICS` for each pair, [P]."""
    difference = result.rewards.difference
    return {
        "loss": result.losses,
        "rewards/chosen": result.rewards.chosen,
        "rewards/rejected": result.rewards.rejected,
        "rewards/accuracies": (difference > 0).double(),
        "rewards/margins": difference,
    }


def means_over_pairs(values: Mapping[str, Tensor], is_pair: Tensor) -> dict[str, Tensor]:
    """Return the mean of each metric over the pairs of a micro-batch, or 0 if there are none.

    Args:
        values: The values of each metric, [k - 1].
        is_pair: Which entries belong to a pair, bool [k - 1].
    """
    count = is_pair.sum().clamp(min=1)
    return {
        name: (torch.where(is_pair, metric, 0).sum() / count).float()
        for name, metric in values.items()
    }


def run_documents(
    part: GPTModel, batch: Batch, hidden: Tensor | None, tokenizer: Tokenizer, layout: Layout
) -> Tensor | DocumentSums:
    """Run one micro-batch through a part of the model.

    Args:
        part: The part of the model.
        batch: Rows of packed documents.
        hidden: The previous part's output; `None` for the first part.
        tokenizer: The run's tokenizer.
        layout: The ranks of this process.

    Returns:
        Hidden states [s, b, h], or the sums of each segment if the part is the last one.
    """
    result = run_part(part, batch, hidden, tokenizer, layout)
    if not part.part.head:
        return result
    return document_sums(result, batch[TRAINED], batch[SEGMENT_ENDS], layout.context)


def run_part(
    part: GPTModel, batch: Batch, hidden: Tensor | None, tokenizer: Tokenizer, layout: Layout
) -> Tensor:
    """Run one micro-batch through a part of the model and return the part's output.

    Args:
        part: The part of the model.
        batch: Rows of packed documents.
        hidden: The previous part's output; `None` for the first part.
        tokenizer: The run's tokenizer.
        layout: The ranks of this process.

    Returns:
        Hidden states [s, b, h]; from the last part, the loss of each token or, with a reward head,
        its score, fp32 [b, s].
    """
    full = make_batch(batch, eod=tokenizer.eod)
    local = context_part(full, layout.context)
    documents = Segments.of(batch[SEGMENT_ENDS], full.tokens, longest_segment(batch))
    result: Tensor = part(local.tokens, local.position_ids, local.labels, documents, hidden)
    return result


def values_at_segments(batch: Batch, name: str) -> Tensor:
    """Return the values [k] of one of the batch's arrays [b, s] at each segment's first token.

    Empty segments after the last token have the values of that token, at which no pair begins.
    """
    values = batch[name].flatten()
    return values[batch[SEGMENT_ENDS][:-1].clamp(max=len(values) - 1)]


def pair_values(values: Tensor, is_pair: Tensor) -> Pairs:
    """Return the values of each pair's answers, given a value for each of k segments.

    The results have the shape [k - 1] for any number of pairs, so that the host need not wait for
    the device to count them. Entries without a pair are -1, a value for which the gradient of every
    loss is finite.

    Args:
        values: The value for each segment, [k].
        is_pair: Whether each segment but the last is a chosen answer, followed by the rejected one,
            [k - 1].
    """
    return Pairs(torch.where(is_pair, values[:-1], -1.0), torch.where(is_pair, values[1:], -1.0))


def last_token_scores(scores: Tensor, batch: Batch, layout: Layout) -> Tensor:
    """Return the score at the last token of each segment, fp64 [k]. Collective over context ranks.

    Args:
        scores: The score of each token on this context rank, [b, s/C].
        batch: Rows of packed documents.
        layout: The ranks of this process.
    """
    ends = batch[SEGMENT_ENDS]
    is_last = torch.zeros_like(batch[TRAINED]).flatten()
    is_last[ends[1:] - 1] = 1
    is_last = is_last.view_as(batch[TRAINED])
    return document_sums(-scores, is_last, ends, layout.context).log_probs
