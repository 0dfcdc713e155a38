"""How much memory one process needs, by arithmetic alone.

Counts what training keeps: parameters, gradients, optimizer states and the activations saved for
backward. Temporary buffers, the allocator's rounding and the CUDA context are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import RunConfig

_GIB = 1024.0**3
_MIB = 1024.0**2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def describe(self) -> str:
        names = ("parameters", "gradients", "optimizer", "activations")
        parts = ", ".join(f"{name} {_amount(getattr(self, name))}" for name in names)
        return f"{_amount(self.total)} ({parts})"


def _amount(size: int) -> str:
    """Bytes in the unit that keeps digits readable."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def estimate_memory(
    config: RunConfig, parameters: int, padded_vocab_size: int, replicas: int = 1
) -> MemoryEstimate:
    """Memory of one process of `replicas` that hold the same `parameters` parameters."""
    half = config.precision.fp16 or config.precision.bf16
    width = 2 if half else 4
    fp32_gradients = not half or config.precision.accumulate_allreduce_grads_in_fp32
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    stage = config.parallel.zero_stage or 0
    updated = parameters // replicas if stage > 0 else parameters
    return MemoryEstimate(
        parameters=width * parameters,
        gradients=(4 if fp32_gradients else 2) * (updated if stage > 1 else parameters),
        optimizer=(4 * moments + (4 if half else 0)) * updated,
        activations=_activations(config, width, padded_vocab_size),
    )


def _activations(config: RunConfig, width: int, padded_vocab_size: int) -> int:
    """Bytes saved for the backward of one micro-batch."""
    model, training = config.model, config.training
    assert model.num_layers and model.hidden_size and config.data.seq_length
    assert training.micro_batch_size
    tokens = config.data.seq_length * training.micro_batch_size
    boundary = width * tokens * model.hidden_size
    layer = _layer_activations(config, width, tokens)
    layers = model.num_layers * layer
    if training.recompute_granularity == "full":
        group = training.recompute_num_layers or 1
        if training.recompute_method == "uniform":
            layers = -(-model.num_layers // group) * boundary + group * layer
        else:
            kept = max(0, model.num_layers - group)
            layers = (model.num_layers - kept) * boundary + max(kept, 1) * layer
    logits = (width + 4) * tokens * padded_vocab_size  # in their own format and as fp32 softmax
    return layers + 2 * boundary + logits


def _layer_activations(config: RunConfig, width: int, tokens: int) -> int:
    model = config.model
    assert model.hidden_size and model.ffn_hidden_size and model.kv_channels
    assert model.num_attention_heads and config.data.seq_length
    heads = model.num_attention_heads * model.kv_channels
    keys_values = 2 * model.kv_heads * model.kv_channels
    inner = model.ffn_hidden_size * (3 if model.swiglu else 2)
    # Two norm inputs, two norm outputs; query, key, value; attention output; MLP inner tensors.
    elements = 4 * model.hidden_size + heads + keys_values + heads + inner
    total = width * tokens * elements
    if model.hidden_dropout > 0:
        total += 2 * tokens * model.hidden_size  # one byte a mask entry
    plain_scores = not model.masked_softmax_fusion
    if plain_scores and config.training.recompute_granularity != "selective":
        scores = tokens * config.data.seq_length * model.num_attention_heads
        total += scores * (2 * width + (1 if model.attention_dropout > 0 else 0))
    return total
