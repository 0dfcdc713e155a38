"""When and how long to evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation."""

    eval_iters: int = flag(100, "Global batches of one evaluation. 0: no evaluation.")
    eval_interval: int = flag(
        1000,
        "Iterations between evaluations.",
        unit="iterations",
        is_common=True,
    )
