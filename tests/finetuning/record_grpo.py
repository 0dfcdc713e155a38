"""Record what TRL's GRPOTrainer computes from random log-probabilities, for test_grpo.py.

Run it with the extra [parity] installed: python -m tests.finetuning.record_grpo
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RECORD = Path(__file__).with_name("grpo.json")
GROUPS, GROUP, LONGEST = 2, 4, 7
CLIP, CLIP_HIGH = 0.2, 0.28
CASES = [(loss, kl) for loss in ("grpo", "dr_grpo", "dapo") for kl in (0.0, 0.04)]


def main() -> None:
    """Write the record."""
    torch.manual_seed(1)
    count = GROUPS * GROUP
    lengths = torch.randint(1, LONGEST + 1, (count,))
    mask = (torch.arange(LONGEST) < lengths[:, None]).double()
    old = -torch.rand(count, LONGEST, dtype=torch.float64) * 3
    policy, reference = (old + 0.3 * torch.randn_like(old) for _ in range(2))
    rewards = torch.rand(count, dtype=torch.float64)
    record: dict[str, Any] = {"lengths": lengths.tolist(), "rewards": rewards.tolist()}
    record |= {"old": old.tolist(), "policy": policy.tolist(), "reference": reference.tolist()}
    record["cases"] = [
        trl_loss(loss, kl, old, policy, reference, mask, rewards) for loss, kl in CASES
    ]
    RECORD.write_text(json.dumps(record) + "\n")


def trl_loss(
    loss: str,
    kl: float,
    old: Tensor,
    policy: Tensor,
    reference: Tensor,
    mask: Tensor,
    rewards: Tensor,
) -> dict[str, Any]:
    """Return the advantages, the loss and its gradient, as TRL computes them."""
    from trl import GRPOTrainer
    from trl.trainer.utils import nanstd

    grouped = rewards.view(GROUPS, GROUP)
    gains = grouped - grouped.nanmean(dim=1, keepdim=True)
    if loss != "dr_grpo":
        gains = gains / (nanstd(grouped, dim=1)[:, None] + 1e-4)
    log_probs = policy.clone().requires_grad_()
    same = SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        num_processes=1,
        sync_gradients=False,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, old * 0, None),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=same,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=kl,
        loss_type=loss,
        epsilon_low=CLIP,
        epsilon_high=CLIP_HIGH,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros_like(mask).long()
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": gains.flatten(),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    result = GRPOTrainer._compute_loss(trainer, None, inputs)
    result.backward()
    return {
        "loss": loss,
        "kl": kl,
        "value": result.item(),
        "advantages": gains.flatten().tolist(),
        "gradient": log_probs.grad.tolist(),
    }


if __name__ == "__main__":
    main()
