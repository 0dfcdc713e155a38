"""Sizes and costs of a GPT by arithmetic: nothing is built."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.config.stages import ModelPart, whole_model
from megatron.models.sizes import Sizes, sizes_of


def count_parameters(model: ModelConfig, padded_vocab_size: int) -> int:
    """Parameters of the whole model, tied ones once."""
    whole = whole_model(sizes_of(model).layers)
    return count_part_parameters(model, padded_vocab_size, whole, tensor=1)


def count_part_parameters(
    model: ModelConfig, padded_vocab_size: int, part: ModelPart, *, tensor: int
) -> int:
    """Parameters that one of `tensor` ranks holds of a part of the model.

    The last part of a tied model cut in several holds a second copy of the word embeddings.
    """
    sizes = sizes_of(model)
    vectors = 1 if model.normalization == "RMSNorm" else 2
    norm = sizes.hidden * vectors
    layer = layer_matrix_parameters(sizes) // tensor + 2 * norm
    if model.add_bias_linear or model.add_qkv_bias:
        layer += sizes.qkv // tensor
    if model.add_bias_linear:
        layer += sizes.up // tensor + 2 * sizes.hidden
    if model.qk_layernorm:
        layer += 2 * sizes.head_size * vectors
    count = len(part.layers) * layer
    tables = int(part.embedding)
    if part.head:
        count += norm
        tables += int(model.untie_embeddings_and_output_weights or not part.embedding)
    if part.embedding and model.position_embedding_type == "learned_absolute":
        count += sizes.positions * sizes.hidden
    return count + tables * padded_vocab_size // tensor * sizes.hidden


def flops_per_token(model: ModelConfig, seq_length: int, padded_vocab_size: int) -> int:
    """Floating-point operations of forward and backward for one token.

    6 x (parameters in matrix products: layers and output head, not the input embedding)
    + 6 x layers x sequence x query size (causal attention: half of the square).
    Recomputation never counts.
    """
    sizes = sizes_of(model)
    products = sizes.layers * layer_matrix_parameters(sizes) + padded_vocab_size * sizes.hidden
    return 6 * products + 6 * sizes.layers * seq_length * sizes.query


def layer_matrix_parameters(sizes: Sizes) -> int:
    """Weights of one layer's four matrices."""
    return sizes.hidden * (sizes.qkv + sizes.query + sizes.up + sizes.ffn)
