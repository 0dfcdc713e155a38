"""Megatron Core's parameters by our names: what its `torch` format holds since 2023.

One flat dict, `decoder.layers.3.self_attention.linear_qkv.weight` and so on. With Transformer
Engine a normalization's weights are kept by the linear layer after it.
"""

from __future__ import annotations

import re

from megatron.errors import CheckpointError

TIED_COPY = "output_layer.weight"  # on the last stage, where the word embeddings are tied

_WHOLE = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "output_layer.weight": "output.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "decoder.final_layernorm.bias": "final_norm.bias",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LINEAR = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
}
_PARTS = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in _LINEAR.items()
    for kind in ("weight", "bias")
} | {
    f"{linear}.layer_norm_{kind}": f"{norm}.{kind}"
    for linear, norm in (
        ("self_attention.linear_qkv", "attention_norm"),
        ("mlp.linear_fc1", "mlp_norm"),
    )
    for kind in ("weight", "bias")
}


def is_no_parameter(path: str) -> bool:
    """Whether an entry is state that follows from the flags: fp8 scales, rotary frequencies."""
    return path.endswith(("_extra_state", "inv_freq"))


def our_name(path: str, first_layer: int, *, tied: bool) -> str | None:
    """Our name; None for the copy of tied word embeddings that the last stage holds.

    Raises:
        CheckpointError: our GPT has no such parameter.
    """
    if path == TIED_COPY and tied:
        return None
    if path in _WHOLE:
        return _WHOLE[path]
    match = _LAYER.fullmatch(path)
    if match and match.group(2) in _PARTS:
        return f"layers.{first_layer + int(match.group(1))}.{_PARTS[match.group(2)]}"
    raise CheckpointError(f"parameter {path} has no place in our GPT")


def layers_of(paths: list[str]) -> int:
    """How many layers the entries are of."""
    matches = (_LAYER.fullmatch(path) for path in paths)
    return len({match.group(1) for match in matches if match})
