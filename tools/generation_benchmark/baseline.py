"""Measurement of `transformers` with a Llama of the same shape as our model.

The cache is static, and `transformers` may compile the model on a GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.tokenizer import padded_vocabulary
from tools.generation_benchmark.report import Decoding

_WARM_UP_STEPS = 4


class TransformersBaseline:
    """A `transformers` model with random weights."""

    def __init__(self, config: RunConfig, device: Device, *, compiles: bool) -> None:
        """Build the model.

        Args:
            config: Configuration of the network, tokenizer and precision.
            device: Device to run on.
            compiles: Whether `transformers` may compile the model.

        Raises:
            ConfigError: `transformers` is not installed.
        """
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                "--transformers: the package transformers is not installed: install it, or drop "
                "the flag"
            ) from error
        network = config.model
        self._device, self._compiles = device, compiles
        self._vocab = padded_vocabulary(config)
        shape = transformers.LlamaConfig(
            vocab_size=self._vocab,
            hidden_size=network.hidden_size,
            intermediate_size=network.ffn_hidden_size,
            num_hidden_layers=network.num_layers,
            num_attention_heads=network.num_attention_heads,
            num_key_value_heads=network.kv_heads,
            max_position_embeddings=network.max_position_embeddings,
            tie_word_embeddings=not config.model.untie_embeddings_and_output_weights,
            bos_token_id=None,
            eos_token_id=None,
        )
        dtype = config.precision.weight_dtype
        with torch.device(device.torch_device):
            self._model = transformers.LlamaForCausalLM(shape).to(dtype).eval()
        self._processors = transformers.LogitsProcessorList

    def with_transformers(self, decoding: Decoding, prompt: int, new: int) -> Decoding:
        """Return `decoding` with the seconds per step of `transformers` added."""
        return replace(decoding, theirs=self._seconds(decoding.batch, prompt, new))

    def _seconds(self, batch: int, prompt: int, new: int) -> float:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self._vocab, (batch, prompt), generator=generator)
        clock = _Clock(self._device)
        for _ in range(2):  # the first run compiles
            clock.times.clear()
            with torch.no_grad():
                self._model.generate(
                    tokens.to(self._device.torch_device),
                    attention_mask=torch.ones_like(tokens).to(self._device.torch_device),
                    max_new_tokens=new + _WARM_UP_STEPS,
                    do_sample=False,
                    cache_implementation="static",
                    disable_compile=not self._compiles,
                    pad_token_id=0,
                    logits_processor=self._processors([clock]),
                )
        timed = clock.times[_WARM_UP_STEPS:]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


class _Clock:
    """A logits processor that records when the scores of each step arrive."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.times: list[float] = []

    def __call__(self, tokens: Any, scores: Any) -> Any:
        self._device.synchronize()
        self.times.append(time.perf_counter())
        return scores
