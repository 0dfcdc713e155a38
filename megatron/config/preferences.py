"""Options for training on preferences: the loss and the reference model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import SFT, Requirement, flag

# Losses that compare the policy with a reference model, and those that need none.
WITH_REFERENCE = ("dpo", "ipo", "hinge", "robust", "kto")
WITHOUT_REFERENCE = ("simpo", "orpo")
# The loss of a reward model, which scores answers instead of generating them.
REWARD_LOSS = "bradley-terry"
_BETA = Requirement(
    lambda run: run.preferences.preference_loss not in (None, REWARD_LOSS),
    f"a --preference-loss other than {REWARD_LOSS}",
)
_REWARD_MODEL = Requirement(
    lambda run: run.preferences.trains_reward_model, f"--preference-loss {REWARD_LOSS}"
)
_SMOOTHED = ("dpo", "robust", "simpo")
_SMOOTHING = Requirement(
    lambda run: run.preferences.preference_loss in _SMOOTHED,
    "--preference-loss dpo, robust or simpo",
)
_SIMPO = Requirement(
    lambda run: run.preferences.preference_loss == "simpo", "--preference-loss simpo"
)
_KTO = Requirement(lambda run: run.preferences.trains_on_labels, "--preference-loss kto")
_REFERENCE_MODEL = Requirement(
    lambda run: run.preferences.needs_reference, "--preference-loss dpo, ipo, hinge, robust or kto"
)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Preferences (finetune.py).

    Attributes:
        preference_loss: Train on pairs of a chosen and a rejected answer with this loss: DPO, IPO,
            the hinge loss of SLiC, robust DPO, SimPO or ORPO. kto trains on single answers, each
            labeled desirable or undesirable. bradley-terry trains a reward model, whose output
            layer gives each answer a reward.
        preference_beta: Factor that turns log-probabilities into rewards (TRL's beta). It
            determines how closely the policy follows the reference. In IPO it is tau, in ORPO
            lambda. SimPO's authors use 2 to 10.
        preference_label_smoothing: Probability that the two answers of a pair were swapped by
            mistake (TRL's label_smoothing). With dpo this is conservative DPO.
        simpo_gamma: The margin by which the reward of the chosen answer should exceed the reward of
            the rejected one, in SimPO (TRL's simpo_gamma).
        kto_desirable_weight: Weight of desirable answers in the kto loss (TRL's desirable_weight).
            Give the rarer kind of answers the higher weight.
        kto_undesirable_weight: Weight of undesirable answers in the kto loss (TRL's
            undesirable_weight).
        center_rewards_coefficient: Coefficient of the squared sum of a pair's rewards, which is
            added to the loss of a reward model so that rewards are 0 on average (TRL's
            center_rewards_coefficient; 0.01 is usual).
        reference_log_probs: File for the log-probabilities of all answers under the reference
            model, which has the run's initial weights. It is written if it is missing or belongs to
            different data or weights. Default: reference_log_probs.npz in the --save folder.
    """

    preference_loss: str | None = flag(
        None,
        choices=(*WITH_REFERENCE, *WITHOUT_REFERENCE, REWARD_LOSS),
        requires=SFT,
        only_for=("gpt",),
    )
    preference_beta: float = flag(0.1, above=0, needs=_BETA)
    preference_label_smoothing: float = flag(
        0.0, unit="0 to 0.5", at_least=0, below=0.5, needs=_SMOOTHING
    )
    simpo_gamma: float = flag(0.5, needs=_SIMPO)
    kto_desirable_weight: float = flag(1.0, at_least=0, needs=_KTO)
    kto_undesirable_weight: float = flag(1.0, at_least=0, needs=_KTO)
    center_rewards_coefficient: float = flag(0.0, at_least=0, needs=_REWARD_MODEL)
    reference_log_probs: str | None = flag(None, needs=_REFERENCE_MODEL)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference model."""
        return self.preference_loss in WITH_REFERENCE

    @property
    def trains_on_labels(self) -> bool:
        """Whether the data consists of single answers, each desirable or not, instead of pairs."""
        return self.preference_loss == "kto"

    @property
    def trains_reward_model(self) -> bool:
        """Whether the run trains a reward model, whose head gives rewards instead of logits."""
        return self.preference_loss == REWARD_LOSS
