"""Results of the recorded networks on fixed weights and tokens.

The weights come from numpy's legacy generator, so results depend on the network alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.kernels.segments import Segments
from megatron.models.bert import BertModel
from megatron.models.biencoder import BiEncoderModel
from megatron.models.gpt import GPTModel
from megatron.models.plans import model_plan
from megatron.models.retro import RetroModel
from megatron.models.t5 import T5Model
from tests.models.small import new_context

_VOCABULARY, _LENGTH, _DECODER, _BATCH = 128, 20, 12, 2
_NETWORKS: dict[str, type[Any]] = {
    "gpt": GPTModel,
    "bert": BertModel,
    "t5": T5Model,
    "retro": RetroModel,
    "ict": BiEncoderModel,
}


def results_of(model: ModelConfig) -> list[float]:
    """Return a network's results in training and evaluation, without dropout.

    They are the mean and the deviation of its losses, the norm of all gradients, the gradients in a
    random direction, the deviation of its logits, and the logits in a random direction. A GPT has
    two documents in its first sample, and its results without them follow.
    """
    kind = model.architecture
    names = [field.name for field in dataclasses.fields(model) if field.name.endswith("_dropout")]
    model = dataclasses.replace(model, **dict.fromkeys(names, 0.0))
    network = _NETWORKS[kind](model_plan(model, _VOCABULARY), new_context(model))
    for name, parameter in network.named_parameters():
        _fill(name, parameter)
    texts = _random("texts").integers(_VOCABULARY, size=(_BATCH, _LENGTH + 1))
    tokens = torch.from_numpy(texts[:, :-1])
    labels = torch.from_numpy(texts[:, 1:])
    results = []
    if kind == "gpt":
        ends = torch.tensor([0, 9, _LENGTH, 2 * _LENGTH])
        for mask in (Segments.of(ends, tokens), None):
            results += _losses_and_gradients(network, network(tokens, None, labels, mask))
        logits = _evaluate(network, tokens)
    elif kind == "retro":
        chunks = (_BATCH, 2, model.retro_num_neighbors, 2 * model.chunk_length)
        neighbors = torch.from_numpy(_random("neighbors").integers(_VOCABULARY, size=chunks))
        texts = _random("texts").integers(_VOCABULARY, size=(_BATCH, 2 * model.chunk_length + 1))
        tokens, labels = torch.from_numpy(texts[:, :-1]), torch.from_numpy(texts[:, 1:])
        results += _losses_and_gradients(network, network(tokens, neighbors, labels=labels))
        logits = _evaluate(network, tokens, neighbors)
    else:
        padding = torch.ones(_BATCH, _LENGTH, dtype=torch.bool)
        padding[1, -4:] = False
        if kind == "ict":
            vectors = network(tokens, padding, labels, padding)
            losses = (vectors.queries @ vectors.contexts.t()).square()
            logits = _evaluate(network, tokens, padding, labels, padding).contexts
        elif kind == "t5":
            given = (tokens, labels[:, :_DECODER], padding)
            losses = network(*given, labels[:, 1 : _DECODER + 1])
            logits = _evaluate(network, *given)
        else:
            given = (tokens, padding, (tokens > 60).long())
            found = network(*given, labels)
            losses = found.tokens if found.order is None else found.tokens + found.order.sum()
            logits = _evaluate(network, *given).tokens
        results += _losses_and_gradients(network, losses)
    return results + _told(logits)


def _random(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.MT19937(zlib.crc32(name.encode())))


def _fill(name: str, tensor: Tensor) -> None:
    values = 0.2 * _random(name).standard_normal(tuple(tensor.shape))
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(values + (tensor.ndim == 1 and name.endswith("weight"))))


def _losses_and_gradients(network: nn.Module, losses: Tensor) -> list[float]:
    network.zero_grad()
    losses.mean().backward()
    gradients = {name: one.grad for name, one in network.named_parameters() if one.grad is not None}
    flat = torch.cat([one.flatten().double() for one in gradients.values()])
    direction = np.concatenate(
        [_random(name).choice([-1, 1], one.numel()) for name, one in gradients.items()]
    )
    along = flat @ torch.from_numpy(direction).double()
    losses = losses.detach()
    return [float(losses.mean()), float(losses.std()), float(flat.norm()), float(along)]


def _evaluate(network: nn.Module, *given: Tensor) -> Any:
    with torch.no_grad():
        return network.eval()(*given)


def _told(logits: Tensor) -> list[float]:
    direction = _random("logits").choice([-1, 1], logits.numel())
    along = logits.flatten().double() @ torch.from_numpy(direction).double()
    return [float(logits.std()), float(along)]
