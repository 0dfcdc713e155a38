"""The command line that a checkpoint for Megatron Core holds."""

import pytest
import torch

from megatron.checkpoint.core.arguments import core_arguments
from tests.config.command import parse

MIXTURE = "--num-experts 8 --moe-expert-capacity-factor 1.5"


@pytest.mark.parametrize(
    ("flags", "over_all"),
    [
        ("", False),
        ("--moe-router-pre-softmax", True),
        ("--moe-router-gating deepspeed --moe-router-topk 1", True),
        ("--moe-router-gating deepspeed --moe-router-topk 2", False),
        ("--moe-router-gating deepspeed --moe-router-topk 3", False),
    ],
)
def test_core_computes_what_a_network_with_deepspeed_s_gating_computes(flags, over_all):
    config = parse(MIXTURE, flags).config
    meta = {"consumed_train_samples": 0, "iteration": 0}
    args = core_arguments(config, meta, rows=1024, dtype=torch.float32, data_parallel=1)
    assert args.moe_router_pre_softmax == over_all
    assert args.moe_token_dropping is False
