"""BERT with a head that chooses: among classes, or among several texts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.models.bert import BertModel, whole_linear
from megatron.parallel.build import BuildContext
from megatron.parallel.products import IN_FP32


class BertChooser(BertModel):
    """BERT's layers and pooler, dropout, and one linear layer; no heads of pretraining.

    Parameters are as those of a BERT, and `HEAD.weight` [outputs, h], `HEAD.bias` [outputs]. The
    head multiplies in fp32: rounded to 16 bits, numbers from 0 to 5 would be 1/64 apart.

    Args:
        head_name: HEAD, Megatron's: "classification_head" or "multichoice_head".
        outputs: of the head for each text.
        options: of `BertModel`.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        context: BuildContext,
        *,
        head_name: str,
        outputs: int,
        **options: Any,
    ) -> None:
        assert model.bert_binary_head, "without it there is no pooler"
        super().__init__(model, precision, context, pretraining_heads=False, **options)
        self.head_name = head_name
        self.dropout = model.hidden_dropout
        if self.part.head:
            head = whole_linear(model, context, outputs=outputs, products=IN_FP32)
            self.add_module(head_name, head)

    def choose(
        self, tokens: Tensor, padding: Tensor, token_types: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """One pass; c texts belong to a sample, one where its classes are chosen among.

        Args:
            tokens: [b, c, s].
            padding: bool [b, c, s], True where there is a token.
            token_types: [b, c, s].
            hidden: [s, b c, h], from the part before; None where this part begins the model.

        Returns:
            Hidden states for the next part, [s, b c, h]; at the end scores in fp32 [b, c outputs].
        """
        flat = (tokens.flatten(0, 1), padding.flatten(0, 1), token_types.flatten(0, 1))
        x = self(*flat, hidden=hidden)
        if self.pooler is None:
            return x
        pooled = F.dropout(self.pooler(x), self.dropout, self.training)
        scores: Tensor = self.get_submodule(self.head_name)(pooled[None])[0]
        return scores.view(len(tokens), -1)
