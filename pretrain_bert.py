#!/usr/bin/env python3
"""Pretrain a BERT model. This script defines what to train; `megatron/training` does the training.

python pretrain_bert.py --help-all                            all flags
python pretrain_bert.py --mock-data ...                       one process
torchrun --nproc-per-node 8 pretrain_bert.py --data-path ...  eight processes
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

if __name__ == "__main__":
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("pretrain_bert.py")
    # Objects that imports create are never freed. Scanning them for garbage takes 0.3 s of the
    # 2.6 s that start-up takes.
    gc.disable()

import torch.nn.functional as F
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.bert import build_bert_datasets
from megatron.data.datasets import DataRequest, Datasets
from megatron.models.bert import BertModel
from megatron.models.head import masked_mean
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import PADDED_ATTENTION, Batch, Recipe, SampleCounts


class BertRecipe(Recipe):
    """Prediction of masked tokens and of segment order."""

    program = "pretrain_bert.py"
    architecture = "bert"
    network = BertModel
    attention = PADDED_ATTENTION

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the token loss and, with a binary head, the segment order loss."""
        return ("lm loss", "sop loss") if config.model.bert_binary_head else ("lm loss",)

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build datasets of segment pairs with masked tokens. Collective."""
        return build_bert_datasets(
            DataRequest.of(config, samples, layout),
            seq_length=config.data.seq_length,
            tokenizer=tokenizer,
            binary_head=config.model.bert_binary_head,
        )

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return the loss mask [b, s]: 1 for each masked token, and 0 for all others."""
        return batch["loss_mask"]

    def forward(
        self,
        part: BertModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model. The last part returns the losses."""
        is_token = batch["padding_mask"].bool()
        inputs = (batch["text"], is_token, batch["types"], batch["labels"])
        result = part(*inputs, hidden, loss_mask=batch["loss_mask"])
        if isinstance(result, Tensor):
            return result
        losses = {"lm loss": masked_mean(result.tokens, batch["loss_mask"])}
        if result.order is not None:
            losses["sop loss"] = F.cross_entropy(result.order.float(), batch["is_random"])
        return losses


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(BertRecipe()))
