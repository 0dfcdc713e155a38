"""Write checkpoints as Megatron-LM does, from whole tensors under our names."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

THEIRS = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
HEADS, HEAD_SIZE, VOCAB = 4, 2, 16
HIDDEN = HEADS * HEAD_SIZE


@dataclass(frozen=True)
class Form:
    """Differences between Megatron-LM versions and runs."""

    tensor: int = 1
    stages: int = 1
    version: float = 3.0
    swiglu: bool = False
    tied: bool = True
    dtype: torch.dtype = torch.float32
    old_names: bool = False


def whole_model(layers: int = 2, *, swiglu: bool = False, tied: bool = True) -> dict:
    """Return random parameters under our names, in Megatron's order."""
    generator = torch.Generator().manual_seed(0)
    up = (2, 12, HIDDEN) if swiglu else (24, HIDDEN)
    shapes = {"embedding.word.weight": (VOCAB, HIDDEN), "embedding.position.weight": (6, HIDDEN)}
    for layer in range(layers):
        parts = {
            "attention_norm": (HIDDEN,),
            "attention.qkv": (3 * HIDDEN, HIDDEN),
            "attention.output": (HIDDEN, HIDDEN),
            "mlp_norm": (HIDDEN,),
            "mlp.up": up,
            "mlp.down": (HIDDEN, 12 if swiglu else 24),
        }
        for part, shape in parts.items():
            shapes[f"layers.{layer}.{part}.weight"] = shape
            bias = shape if len(shape) == 1 else shape[:-1]
            shapes[f"layers.{layer}.{part}.bias"] = bias
    shapes |= {"final_norm.weight": (HIDDEN,), "final_norm.bias": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(root: Path, form: Form, model: dict, folder: str = "iter_0000003", **extra) -> Path:
    """Write a checkpoint of `model` with Adam moments 2x and 3x the weights; `extra` edits the
    tree."""
    layers = 1 + max(int(name.split(".")[1]) for name in model if name.startswith("layers."))
    for rank in range(form.tensor):
        for stage in range(form.stages):
            per_stage = layers // form.stages
            tree = _tree(
                form, model, rank, stage, range(stage * per_stage, (stage + 1) * per_stage)
            )
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if form.stages > 1 else "")
            (root / folder / name).mkdir(parents=True)
            torch.save(tree | extra, root / folder / name / "model_optim_rng.pt")
    number = folder.removeprefix("iter_").lstrip("0")
    (root / "latest_checkpointed_iteration.txt").write_text(number)
    return root / folder


def arguments(form: Form) -> Namespace:
    return Namespace(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        swiglu=form.swiglu,
        consumed_train_samples=48,
        consumed_valid_samples=8,
        params_dtype=form.dtype,
        nested={"kept": "out"},
        data_path=["a", "b"],
    )


def _tree(form: Form, model: dict, rank: int, stage: int, layers: range) -> dict:
    first, last = stage == 0, stage == form.stages - 1
    names = [
        name
        for name in model
        if (name.startswith("layers.") and int(name.split(".")[1]) in layers)
        or (name.startswith("embedding.") and first)
        or (name.startswith("final_norm.") and last)
        or (name == "output.weight" and last)
    ]
    parts = {name: _part(form, name, model[name], rank) for name in names}
    paths = {name: _path(form, name, layers.start) for name in names}
    if form.tied and last and not first:
        word = "embedding.word.weight"
        parts["tied"] = _part(form, word, model[word], rank)
        paths["tied"] = ("word_embeddings_for_head", "weight")
    language: dict = {}
    tree = {"language_model": language}
    for name, path in paths.items():
        where = tree if name == "tied" else language
        for key in path[:-1]:
            where = where.setdefault(key, {})
        where[path[-1]] = parts[name].to(form.dtype)
    result = {
        "args": arguments(form),
        "checkpoint_version": form.version,
        "iteration": 3,
        "model": tree,
        "optimizer": optimizer_of(form, parts, paths),
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 40},
    }
    if form.version == 0:
        del result["checkpoint_version"]
    return result


def _path(form: Form, name: str, first_layer: int) -> tuple[str, ...]:
    encoder = "transformer" if form.old_names else "encoder"
    if name == "output.weight":
        return ("output_layer", "weight")
    if name.startswith("embedding."):
        return ("embedding", f"{name.split('.')[1]}_embeddings", "weight")
    if name.startswith("final_norm."):
        return (encoder, name.replace("final_norm", "final_layernorm"))
    _, layer, *part, kind = name.split(".")
    theirs = THEIRS[".".join(part)]
    if form.old_names:
        theirs = theirs.replace("self_attention", "attention")
    return (encoder, f"layers.{int(layer) - first_layer}.{theirs}.{kind}")


def _part(form: Form, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return this tensor rank's part: rows in the version's order, gate and up stacked."""
    column = name in ("embedding.word.weight", "output.weight") or "attention.qkv" in name
    if "mlp.up" in name:
        dim = 1 if form.swiglu else 0
        part = whole.chunk(form.tensor, dim)[rank]
        return part.flatten(0, 1) if form.swiglu else part
    if column:
        part = whole.chunk(form.tensor, 0)[rank]
        return _reorder(form, part) if "attention.qkv" in name else part
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return whole.chunk(form.tensor, 1)[rank]
    return whole


def _reorder(form: Form, part: torch.Tensor) -> torch.Tensor:
    """Reorder rows [heads, 3, size] for checkpoint versions 0 and 1."""
    rows = part.reshape(HEADS // form.tensor, 3, HEAD_SIZE, *part.shape[1:])
    if form.version == 0:
        rows = rows.transpose(0, 1)
    elif form.version == 1:
        rows = rows.transpose(1, 2)
    return rows.reshape(part.shape)


def optimizer_of(form: Form, parts: dict, paths: dict) -> dict:
    plain = [name for name in parts if paths[name][-1].endswith("bias") or parts[name].dim() == 1]
    groups = [[name for name in parts if name not in plain], plain]
    order = [name for group in groups for name in group]
    state = {
        index: {"exp_avg": 2 * parts[name], "exp_avg_sq": 3 * parts[name]}
        for index, name in enumerate(order)
    }
    numbers = [[order.index(name) for name in group] for group in groups]
    torch_state = {
        "state": state,
        "param_groups": [{"step": 3, "lr": 0.1, "params": group} for group in numbers],
    }
    if form.dtype == torch.float32:
        return torch_state
    for master in parts.values():  # saved with the tensor since PyTorch 1.12
        master.tensor_model_parallel, master.partition_dim = True, 0
    return {
        "optimizer": torch_state,
        "grad_scaler": {
            "scale": torch.tensor([1024.0]),
            "growth_tracker": 5,
            "hysteresis_tracker": 2,
        },
        "fp32_from_fp16_params": [[parts[name] for name in group] for group in groups],
    }
