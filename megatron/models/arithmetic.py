"""Sizes and costs of a model by arithmetic: nothing is built."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.config.stages import ModelPart, whole_model
from megatron.models.sizes import IN_WORDS, Ending, Sizes, sizes_of

_SEGMENTS = 2  # of a BERT sample: token types, and classes of the binary head


def count_parameters(model: ModelConfig, padded_vocab_size: int, ending: Ending = IN_WORDS) -> int:
    """Parameters of the whole model, tied ones once."""
    whole = whole_model(model.all_layers)
    return count_part_parameters(model, padded_vocab_size, whole, tensor=1, ending=ending)


def count_part_parameters(
    model: ModelConfig,
    padded_vocab_size: int,
    part: ModelPart,
    *,
    tensor: int,
    ending: Ending = IN_WORDS,
) -> int:
    """Parameters that one of `tensor` ranks holds of a part of the model.

    The last part of a tied model cut in several holds a second copy of the word embeddings, and
    every part with layers of a stack one of its table of relative positions.
    """
    sizes = sizes_of(model)
    norm = _norm_parameters(model)
    halves = part.halves(sizes.layers)
    count = len(part.layers) * _layer_parameters(model, tensor)
    count += len(halves[1]) * _cross_parameters(model, tensor)
    tables = int(part.embedding)
    if part.embedding:
        count += _small_tables(model) * sizes.hidden
    if part.head:
        count += norm + _head_parameters(model, padded_vocab_size, tensor, ending)
        has_own = model.untie_embeddings_and_output_weights or not part.embedding
        tables += int(ending.guesses_tokens and has_own)
    if model.architecture == "t5" and sizes.layers - 1 in part.layers:
        count += norm  # the encoder's last
    if model.position_embedding_type == "relative":
        stacks = sum(len(half) > 0 for half in halves)
        count += stacks * model.relative_attention_num_buckets * sizes.heads // tensor
    return count + tables * padded_vocab_size // tensor * sizes.hidden


def count_part_matrices(model: ModelConfig, part: ModelPart, *, tensor: int) -> int:
    """Of these the matrices of attention and MLP."""
    sizes = sizes_of(model)
    crossing = len(part.halves(sizes.layers)[1])
    elements = len(part.layers) * layer_matrix_parameters(sizes)
    return (elements + crossing * _cross_matrices(sizes)) // tensor


def _norm_parameters(model: ModelConfig) -> int:
    return sizes_of(model).hidden * _vectors(model)


def _vectors(model: ModelConfig) -> int:
    """Of a normalization: a weight, and a bias where it has one."""
    return 1 if model.normalization == "RMSNorm" else 2


def _layer_parameters(model: ModelConfig, tensor: int) -> int:
    """Attention, MLP and their normalizations."""
    sizes = sizes_of(model)
    count = layer_matrix_parameters(sizes) // tensor + 2 * _norm_parameters(model)
    if model.add_bias_linear or model.add_qkv_bias:
        count += sizes.qkv // tensor
    if model.add_bias_linear:
        count += sizes.up // tensor + 2 * sizes.hidden
    if model.qk_layernorm:
        count += 2 * sizes.head_size * _vectors(model)
    return count


def _cross_parameters(model: ModelConfig, tensor: int) -> int:
    """What a decoder's layer has besides: attention to the encoder and its normalization."""
    sizes = sizes_of(model)
    biases = 3 * sizes.query // tensor + sizes.hidden if model.add_bias_linear else 0
    return _cross_matrices(sizes) // tensor + biases + _norm_parameters(model)


def _cross_matrices(sizes: Sizes) -> int:
    return 4 * sizes.hidden * sizes.query


def _small_tables(model: ModelConfig) -> int:
    """Rows [h] of learned positions and token types."""
    rows = sizes_of(model).positions if model.position_embedding_type == "learned_absolute" else 0
    return rows + (_SEGMENTS if model.architecture == "bert" and model.bert_binary_head else 0)


def _head_parameters(
    model: ModelConfig, padded_vocab_size: int, tensor: int, ending: Ending
) -> int:
    """Between the last normalization and the losses, less the vocabulary's matrix."""
    if model.architecture == "gpt":
        return 0
    hidden, bias = sizes_of(model).hidden, padded_vocab_size // tensor
    if model.architecture == "t5":
        return bias if model.add_output_bias else 0
    dense = hidden * hidden + hidden
    if ending.outputs is not None:
        return dense + ending.outputs * (hidden + 1)  # the pooler, and the task's own
    binary = dense + _SEGMENTS * (hidden + 1) if model.bert_binary_head else 0  # and the pooler
    return bias + dense + _norm_parameters(model) + binary


def flops_per_token(
    model: ModelConfig,
    seq_length: int,
    padded_vocab_size: int,
    *,
    decoder_seq_length: int | None = None,
    ending: Ending = IN_WORDS,
) -> int:
    """Floating-point operations of forward and backward for one token.

    GPT: 6 x (parameters in matrix products: layers and output head, not the input embedding)
    + 6 x layers x sequence x query size (causal attention: half of the square). BERT: its heads
    too, and the whole square. T5: of a sample, divided by its tokens in encoder and decoder; keys
    and values of the decoder's attention to the encoder are products over the encoder's tokens. A
    task's head: of one vector of a sequence, divided by its tokens.
    Recomputation never counts.
    """
    sizes = sizes_of(model)
    layer = layer_matrix_parameters(sizes)
    output = padded_vocab_size * sizes.hidden
    if model.architecture == "t5":
        return _flops_of_t5(model, seq_length, decoder_seq_length or 0, output)
    products = sizes.layers * layer
    square = 6 * sizes.layers * seq_length * sizes.query
    if model.architecture == "bert":
        dense = sizes.hidden * sizes.hidden
        if ending.outputs is not None:
            pooled = dense + ending.outputs * sizes.hidden
        else:
            products += dense + output
            pooled = dense + _SEGMENTS * sizes.hidden if model.bert_binary_head else 0
        return 6 * products + 6 * pooled // seq_length + 2 * square
    return 6 * (products + output) + square


def _flops_of_t5(model: ModelConfig, encoder: int, decoder: int, output: int) -> int:
    """Of a token, with the two sequence lengths."""
    sizes, below = sizes_of(model), model.decoder_num_layers or 0
    layer, matrix = layer_matrix_parameters(sizes), sizes.hidden * sizes.query
    of_encoder = sizes.layers * (6 * layer * encoder + 12 * encoder * encoder * sizes.query)
    products = decoder * (layer + 2 * matrix) + encoder * 2 * matrix
    scores = 6 * decoder * decoder + 12 * decoder * encoder  # causal, and to the encoder
    of_decoder = below * (6 * products + scores * sizes.query)
    return (of_encoder + of_decoder + 6 * decoder * output) // (encoder + decoder)


def layer_matrix_parameters(sizes: Sizes) -> int:
    """Weights of one layer's four matrices."""
    return sizes.hidden * (sizes.qkv + sizes.query + sizes.up + sizes.ffn)
