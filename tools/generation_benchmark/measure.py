"""Measurement of our engine with a model of random weights."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import torch

from megatron.config import RunConfig
from megatron.device import Device
from megatron.inference.build import EngineOptions, build_engine
from megatron.inference.engine import BatchEngine
from megatron.inference.load import Loaded, serving_context
from megatron.inference.request import Request, Sampling, Token
from megatron.models.adapters import linear_layers
from megatron.models.build import build_model
from megatron.models.gpt import GPTModel
from megatron.parallel.adapter import Adapter, AdapterPlan, projections_of
from megatron.parallel.adapter_stack import AdapterRows, AdapterStack, LayerAdapter
from megatron.parallel.build import BuildContext
from megatron.parallel.layers import Linear
from megatron.parallel.layout import Layout
from megatron.tokenizer import build_tokenizer, padded_vocabulary
from tools.generation_benchmark.report import Decoding

_BLOCK = 16


class EngineBenchmark:
    """A benchmark of one model, with a new engine for each measurement."""

    def __init__(
        self,
        config: RunConfig,
        device: Device,
        bandwidth: float,
        options: EngineOptions,
        *,
        adapters: int = 0,
        rank: int = 16,
    ) -> None:
        """Build the model with random weights.

        Args:
            config: Configuration of the network, tokenizer and precision.
            device: Device to run on.
            bandwidth: Bytes/s of a copy, from which the floor is computed.
            options: Options of the engine. Sizes in them are ignored.
            adapters: Number of adapters, each for all layers. Sequences use them in turn.
            rank: Rank of each adapter.
        """
        self._options = replace(options, block_size=_BLOCK)
        self._config, self._device, self._bandwidth = config, device, bandwidth
        rows = padded_vocabulary(config)
        self._vocab = rows
        context = serving_context(config, Layout.single(), device)
        model = build_model(GPTModel, config, context, rows)
        with torch.no_grad():
            for parameter in model.parameters():
                # Matrices are small so that nothing overflows; vectors are the norms' weights.
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._weight_bytes = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if not name.startswith("embedding.")  # a step reads a single row per sequence
        )
        self._model: GPTModel | None = model
        self._adapters = add_adapters(model, context, adapters, rank) if adapters else None

    def release(self) -> None:
        """Release the model's memory."""
        self._model = None
        self._device.empty_cache()

    def decode(self, batch: int, prompt: int, new: int, warm_up: int) -> Decoding:
        """Time `new` decoding steps of `batch` sequences with prompts of `prompt` tokens."""
        # While the last prompts are prefilled, the first sequences are already decoding.
        prefill_steps = 2 + batch * prompt // (_step_tokens(batch) - batch)
        max_new = new + warm_up + prefill_steps
        engine = self._engine(batch, batch * (prompt + max_new + _BLOCK))
        for i in range(batch):
            engine.add(self._request(i, prompt, max_new))
        answered: set[str] = set()
        while len(answered) < batch:
            answered |= {event.request for event in engine.step() if isinstance(event, Token)}
        for _ in range(warm_up - 1):
            engine.step()
        self._device.synchronize()
        start = time.perf_counter()
        tokens = 0
        for _ in range(new):
            tokens += len(engine.step())
        seconds = (time.perf_counter() - start) / new
        engine.abort("done")
        assert tokens == new * batch, "every sequence gets a token in every step"
        length = prompt + warm_up + (new + prefill_steps) / 2
        return Decoding(batch, length, seconds, self._floor(batch, length))

    def prefill(self, length: int, tokens: int) -> float:
        """Return the prefill speed in tokens/s for prompts of `length` tokens, `tokens` overall."""
        engine = self._engine(16, max(tokens, length) + 32 * _BLOCK)
        count = max(1, tokens // length)
        # Prompt 0 is the warm-up. It is not timed again, because it would be read from the cache.
        for indices in (range(1), range(1, 1 + count)):
            for i in indices:
                engine.add(self._request(i, length, 1))
            start = time.perf_counter()
            while engine.has_work:
                engine.step()
            seconds = time.perf_counter() - start
        return count * length / seconds

    def _engine(self, sequences: int, tokens: int) -> BatchEngine:
        assert self._model is not None, "the model has been released"
        self._device.empty_cache()
        options = replace(
            self._options,
            max_sequences=sequences,
            max_step_tokens=_step_tokens(sequences),
            cache_tokens=tokens,
        )
        tokenizer = build_tokenizer(self._config.tokenizer)
        loaded = Loaded(
            self._model, tokenizer, self._config, 0, Layout.single(), adapters=self._adapters
        )
        return build_engine(loaded, self._device, options)

    def _request(self, index: int, prompt: int, new: int) -> Request:
        rng = random.Random(index * 1000 + new)  # makes all prompts different
        tokens = tuple(rng.randrange(self._vocab) for _ in range(prompt))
        adapter = 1 + index % len(self._adapters.names) if self._adapters else 0
        return Request(str(index), tokens, Sampling(max_new_tokens=new, temperature=0), adapter)

    def _floor(self, batch: int, length: float) -> float:
        """Return the seconds for reading all weights, and all keys and values of the batch."""
        assert self._model is not None
        plan = self._model.plan
        itemsize = next(self._model.parameters()).element_size()
        token = len(plan.layers) * math.prod(plan.attention.cached(1)) * itemsize
        weights = self._weight_bytes
        if not self._config.model.untie_embeddings_and_output_weights:
            weights += self._vocab * plan.hidden * itemsize
        return (weights + batch * length * token) / self._bandwidth


@torch.no_grad()
def add_adapters(model: GPTModel, context: BuildContext, count: int, rank: int) -> AdapterRows:
    """Add adapters with random weights to the linear layers of transformer layers, except experts.

    Args:
        model: The model, which is changed in place.
        context: The context in which the model was built.
        count: Number of adapters.
        rank: Rank of each adapter.

    Returns:
        The record from which all layers read the adapter of each token.
    """
    rows = AdapterRows(tuple(map(str, range(count))))
    plan = AdapterPlan(rank, scale=1.0)
    for name, linear in linear_layers(model):
        if not isinstance(linear, Linear):
            continue  # requests cannot choose adapters of experts
        parts = []
        for index in range(1, 1 + count):
            adapter = Adapter(linear, projections_of(linear), plan, context, name)
            for parameter in adapter.parameters():
                parameter.normal_(std=0.02)
            parts.append(LayerAdapter.of(index, adapter, linear.weight))
        products = context.kernels.new_products()
        linear.adapter = AdapterStack(linear, parts, rows, products, context.layout)
    return rows


def _step_tokens(sequences: int) -> int:
    return max(2048, 4 * sequences)
