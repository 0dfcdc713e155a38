"""Train a GPT whose first layer has a mixer from outside the package, with all flags of a GPT.

python -m tests.models.own_layers --config examples/gpt_tiny.yaml
"""

from __future__ import annotations

import sys
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.models import plans
from megatron.models.block import MIXERS
from megatron.models.plan import HeadSpec, ModelPlan
from megatron.training.pretrain import main
from pretrain_gpt import GPTRecipe
from tests.models.toy_mixer import RunningMean, RunningMeanPlan


def own_plan(model: ModelConfig, padded_vocab_size: int, head: HeadSpec) -> ModelPlan:
    """Return a GPT's plan, with a running mean instead of attention in the first layer."""
    plan = plans.gpt_plan(model, padded_vocab_size, head)
    first, *others = plan.layers
    mixer = RunningMeanPlan(hidden=plan.hidden, width=24, init=first.mixer.init)
    return replace(plan, layers=(replace(first, mixer=mixer), *others))


if __name__ == "__main__":
    MIXERS["running_mean"] = RunningMean
    plans.PLANS["gpt"] = own_plan
    sys.exit(main(GPTRecipe()))
