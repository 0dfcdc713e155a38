"""What a program that runs a trained model runs it on, for its start-up panel on rank 0."""

from __future__ import annotations

from megatron.device import Device
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded
from megatron.training.panel import Row, device_row


def model_rows(loaded: Loaded, device: Device) -> list[Row]:
    """Which model, where, in what number format and layout."""
    config = loaded.config
    model = config.model
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    return [
        ("checkpoint", f"{config.checkpoint.load}, iteration {loaded.iteration:,}"),
        ("network", f"{model.num_layers} layers, hidden size {model.hidden_size}"),
        ("tokenizer", f"{loaded.tokenizer.kind}, {loaded.tokenizer.vocab_size:,} entries"),
        device_row(device),
        ("precision", f"{dtype} weights"),
        ("layout", loaded.layout.describe()),
    ]


def engine_rows(loaded: Loaded, engine: BatchEngine, device: Device) -> list[Row]:
    """The same, and what text generation chose there."""
    window = f"{engine.limits.max_length:,} tokens, for a prompt and its answer together"
    return [*model_rows(loaded, device), ("window", window), *engine.choices]
