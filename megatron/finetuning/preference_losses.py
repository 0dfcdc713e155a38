"""The losses of preferences: pure functions of the log-probabilities of pairs of answers.

P is the number of pairs. Rewards are TRL's: beta times the log-ratio of policy and reference, or
beta times the mean log-probability of a token if the loss has no reference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.preferences import PreferenceConfig


class Pairs(NamedTuple):
    """One number for each answer of P pairs.

    Attributes:
        chosen: The numbers of the chosen answers, [P].
        rejected: The numbers of the rejected answers, [P].
    """

    chosen: Tensor
    rejected: Tensor

    @property
    def difference(self) -> Tensor:
        """The number of the chosen answer minus that of the rejected one, [P]."""
        return self.chosen - self.rejected

    def over(self, divisors: Pairs) -> Pairs:
        """Return the numbers divided by others, of which none counts as less than 1."""
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
        options: The name of the loss and its numbers.
        policy: The log-probabilities of the answers, sums over their tokens.
        tokens: The number of tokens in each answer.
        reference: What `policy` is for the reference model; `None` if the loss has none.
    """
    beta, smoothing = options.preference_beta, options.preference_label_smoothing
    if reference is None:
        scores = policy.over(tokens)
    else:
        scores = Pairs(*(x - y for x, y in zip(policy, reference, strict=True)))
    match options.preference_loss:
        case "dpo":
            losses = smoothed(beta * scores.difference, smoothing)
        case "ipo":
            # Azar et al., 2023, arXiv:2310.12036, with mean log-probabilities as its authors use.
            losses = (scores.over(tokens).difference - 1 / (2 * beta)) ** 2
        case "hinge":  # SLiC-HF (Zhao et al., 2023, arXiv:2305.10425)
            losses = torch.relu(1 - beta * scores.difference)
        case "robust":
            losses = robust(beta * scores.difference, smoothing)
        case "simpo":
            losses = smoothed(beta * scores.difference - options.simpo_gamma, smoothing)
        case "orpo":
            losses = -scores.chosen - beta * F.logsigmoid(log_odds(scores))
        case loss:
            raise AssertionError(f"{loss} is no loss of log-probabilities")
    return PairLosses(losses, Pairs(*(beta * score.detach() for score in scores)))


def smoothed(margin: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid(margin), or its mean under labels of which some are wrong.

    Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290) and, with smoothing,
    conservative DPO (Mitchell, 2023). Minus a target margin it is SimPO (Meng et al., 2024,
    arXiv:2405.14734).
    """
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def robust(margin: Tensor, smoothing: float) -> Tensor:
    """Return the unbiased estimate of DPO's loss under labels of which some are wrong.

    Chowdhury et al., 2024, arXiv:2403.00409.
    """
    wrong = smoothing * F.logsigmoid(-margin)
    return (wrong - (1 - smoothing) * F.logsigmoid(margin)) / (1 - 2 * smoothing)


def log_odds(means: Pairs) -> Tensor:
    """Return the logarithm of the ratio of the answers' odds, [P].

    The odds of ORPO (Hong et al., 2024, arXiv:2403.07691) are p / (1 - p), in which log p is the
    mean log-probability of a token.

    Args:
        means: The mean log-probabilities, below 0.
    """
    return means.difference - (log1mexp(means.chosen) - log1mexp(means.rejected))


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x below 0, without a loss of digits at either end."""
    near = x > -math.log(2)
    # Each form gets inputs for which its gradient is finite, because `where` multiplies it by 0.
    small = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    return torch.where(near, small, torch.log1p(-torch.exp(torch.where(near, -1.0, x))))
