"""Train a small network with DeepSpeed's own engine, and save it. Each rank runs this program.

    python -m tests.checkpoint.deepspeed.engine KIND FOLDER

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. KIND is zero1, zero2, bf16 or mixture. Each
rank also writes `held_R.pt` next to the checkpoint: the parameters and states that the engine
reports.
"""

from __future__ import annotations

import importlib
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, LAYERS, WORDS, EXPERTS = 8, 2, 16, 4
_DENSE = {
    "input_layernorm.weight": (HIDDEN,),
    "input_layernorm.bias": (HIDDEN,),
    "self_attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
    "self_attention.query_key_value.bias": (3 * HIDDEN,),
    "self_attention.dense.weight": (HIDDEN, HIDDEN),
    "self_attention.dense.bias": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.bias": (HIDDEN,),
}
_MLP = {
    "dense_h_to_4h.weight": (4 * HIDDEN, HIDDEN),
    "dense_h_to_4h.bias": (4 * HIDDEN,),
    "dense_4h_to_h.weight": (HIDDEN, 4 * HIDDEN),
    "dense_4h_to_h.bias": (HIDDEN,),
}
_EMBEDDINGS = {"word_embeddings.weight": (WORDS, HIDDEN), "position_embeddings.weight": (6, HIDDEN)}


class Named(nn.Module):
    """Parameters under dotted names; each has a small effect on the output."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place._modules[part]
            place.register_parameter(last, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        parts = [one.square().mean().to(x.dtype) for one in self.parameters(recurse=True)]
        return x + torch.stack(parts).sum()


class Routed(nn.Module):
    """A layer whose MLP is DeepSpeed's mixture of experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        for name, part in Named(_DENSE).named_children():
            self.add_module(name, part)
        self.mlp = MoE(HIDDEN, Named(_MLP), num_experts=EXPERTS, ep_size=experts, k=1)

    def forward(self, x: Tensor) -> Tensor:
        own = [p for name, p in self.named_parameters() if not name.startswith("mlp.")]
        x = x + torch.stack([one.square().mean() for one in own]).sum()
        return x + self.mlp(x)[0]


class Whole(nn.Module):
    """A model under Megatron's names, with experts in the second layer."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embedding = Named(_EMBEDDINGS)
        encoder = self.language_model.encoder = nn.Module()
        layer = _DENSE | {f"mlp.{name}": shape for name, shape in _MLP.items()}
        encoder.layers = nn.ModuleList([Named(layer), Routed(experts) if experts else Named(layer)])
        encoder.final_layernorm = Named({"weight": (HIDDEN,), "bias": (HIDDEN,)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.language_model.embedding(x)
        for layer in self.language_model.encoder.layers:
            x = layer(x)
        return self.language_model.encoder.final_layernorm(x).square().mean()


def arguments(kind: str) -> Namespace:
    """Return Megatron-DeepSpeed's command line for this network."""
    return Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_key_value_heads=2,
        ffn_hidden_size=4 * HIDDEN,
        normalization="layernorm",
        add_position_embedding=True,
        num_experts=[EXPERTS if kind == "mixture" else 1],
        expert_interval=2,
        topk=1,
        consumed_train_samples=12,
        params_dtype=torch.bfloat16 if kind == "bf16" else torch.float32,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_pipeline_parallel=True,
        ds_sequence_parallel_fpdt=False,
    )


def optimizer_of(model: nn.Module, kind: str) -> Any:
    """Return AdamW with Megatron-DeepSpeed's groups."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    decayed = [p for name, p in model.named_parameters() if p.dim() > 1]
    others = [p for name, p in model.named_parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "name": "wd"}, {"params": others, "name": "no_wd"}]
    if kind == "mixture":
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return torch.optim.AdamW(groups, lr=1e-2)


def held_by(engine: Any, kind: str) -> dict[str, Tensor]:
    """Return this rank's parameters and their states as the engine reports them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # With PyTorch's AdamW, the engine looks for states that only exist after the first step.
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    first = engine.global_rank * EXPERTS // 2
    for name, parameter in engine.module.named_parameters():
        shift = re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first}", name)
        found[shift] = safe_get_full_fp32_param(parameter).clone()
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{shift}:{state}"] = safe_get_full_optimizer_state(parameter, state).clone()
    return found


def main(kind: str, folder: Path) -> None:
    """Train for three steps and save."""
    import deepspeed

    # DeepSpeed would compile an operator for shared memory, which takes a minute.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    model = Whole(experts=2 if kind == "mixture" else 0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2 if kind == "zero2" else 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": kind == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model, kind), config=config
    )
    x = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    schedule = {"num_steps": 12, "max_lr": 1e-2}
    state = {"args": arguments(kind), "checkpoint_version": 3.0, "iteration": 3}
    engine.save_checkpoint(str(folder), client_state=state | {"lr_scheduler": schedule})
    torch.save(held_by(engine, kind), folder / f"held_{engine.global_rank}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
