"""A BERT and a T5 small enough for tests, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.precision import PrecisionConfig
from megatron.models.bert import BertModel
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from tests.models.small import BATCH, SEQUENCE, VOCAB, config, new_context, plan

NETWORKS: dict[str, type[nn.Module]] = {"bert": BertModel, "t5": T5Model}
DECODER = 8  # tokens of T5's decoder


def build(
    kind: str,
    flags: dict[str, Any] | None = None,
    *,
    layout: Layout | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: PrecisionConfig | None = None,
    head: HeadSpec = LANGUAGE_MODEL_HEAD,
    **options: Any,
) -> Any:
    """Return a model of this kind, without dropout unless the flags ask for it."""
    own = {"decoder_num_layers": 2} if kind == "t5" else {}
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    network = config(architecture=kind, **{**own, **quiet, **(flags or {})})
    numbers = precision or PrecisionConfig()
    context = new_context(network, numbers, layout, device=device, dtype=dtype)
    model: Any = NETWORKS[kind](plan(network, head), context, **options)
    initialize(model.named_parameters(), 1)
    return model


def batch_of(kind: str, device: torch.device | str = "cpu") -> list[Tensor]:
    """Return the arguments of the model's forward, labels last. The second sample has padding."""
    return [part.to(device) for part in _batch_of(kind)]


def _batch_of(kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> Tensor:
        return torch.randint(VOCAB, (BATCH, length), generator=generator)

    padding = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    padding[1, SEQUENCE - 4 :] = False
    if kind == "t5":
        return [draw(SEQUENCE), draw(DECODER), padding, draw(DECODER)]
    types = (torch.arange(SEQUENCE) > SEQUENCE // 2).long().expand(BATCH, -1)
    return [draw(SEQUENCE), padding, types, draw(SEQUENCE)]


def losses(kind: str, model: Any, batch: list[Tensor]) -> Tensor:
    """Return the losses of non-padding tokens, plus BERT's sentence-order loss."""
    result = model(*batch)
    if kind == "t5":
        loss: Tensor = result.mean()
        return loss
    order = torch.nn.functional.cross_entropy(
        result.order.float(), torch.ones(BATCH, dtype=torch.int64, device=result.order.device)
    )
    return result.tokens[batch[1]].mean() + order
