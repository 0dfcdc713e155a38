"""Curriculum learning by sequence length, as in DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import MAX_IDS, Requirement, flag

_GROWS = Requirement(
    lambda run: run.curriculum.curriculum_schedule in ("fixed_linear", "fixed_root"),
    "--curriculum-schedule fixed_linear or fixed_root",
)
_ROOT = Requirement(
    lambda run: run.curriculum.curriculum_schedule == "fixed_root",
    "--curriculum-schedule fixed_root",
)
_DISCRETE = Requirement(
    lambda run: run.curriculum.curriculum_schedule == "fixed_discrete",
    "--curriculum-schedule fixed_discrete",
)


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Curriculum learning.

    Attributes:
        curriculum_schedule: Train on the first tokens of each sample and ignore the others. Their
            number grows during the run: in equal steps (fixed_linear), quickly at first
            (fixed_root), or as set by --curriculum-lengths and --curriculum-until (fixed_discrete).
        curriculum_min_length: Length of the first sequences.
        curriculum_max_length: Length of the last sequences. Default: --seq-length.
        curriculum_steps: Iterations until --curriculum-max-length is reached.
        curriculum_length_step: Lengths are multiples of this.
        curriculum_root_degree: Degree of the root: 2 is the square root, and 1 a straight line.
        curriculum_lengths: With fixed_discrete: the lengths, in order.
        curriculum_until: With fixed_discrete: the last iteration of each length except the final
            one.
    """

    curriculum_schedule: str | None = flag(
        None, choices=("fixed_linear", "fixed_root", "fixed_discrete"), only_for=("gpt",)
    )
    curriculum_min_length: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_GROWS
    )
    curriculum_max_length: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_GROWS
    )
    curriculum_steps: int | None = flag(None, unit="iterations", at_least=1, requires=_GROWS)
    curriculum_length_step: int = flag(
        8, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_GROWS
    )
    curriculum_root_degree: float = flag(2.0, at_least=1, requires=_ROOT)
    curriculum_lengths: tuple[int, ...] | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, requires=_DISCRETE
    )
    curriculum_until: tuple[int, ...] | None = flag(
        None, unit="iterations", at_least=1, requires=_DISCRETE
    )
