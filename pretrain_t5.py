#!/usr/bin/env python3
"""Pretrain a T5 model. This script defines what to train; `megatron/training` does the training.

python pretrain_t5.py --help-all                            all flags
python pretrain_t5.py --mock-data ...                       one process
torchrun --nproc-per-node 8 pretrain_t5.py --data-path ...  eight processes
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

if __name__ == "__main__":
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("pretrain_t5.py")
    # Objects that imports create are never freed. Scanning them for garbage takes 0.3 s of the
    # 2.6 s that start-up takes.
    gc.disable()

from torch import Tensor

from megatron.config import RunConfig
from megatron.data.datasets import DataRequest, Datasets
from megatron.data.t5 import build_t5_datasets
from megatron.models.head import masked_mean
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import Batch, Recipe, SampleCounts


class T5Recipe(Recipe):
    """Span corruption: the decoder predicts the spans that were cut out of the encoder's text."""

    program = "pretrain_t5.py"
    architecture = "t5"
    network = T5Model
    attention = "attention, padding masked except in the decoder"

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build datasets of texts with some spans cut out. Collective."""
        return build_t5_datasets(
            DataRequest.of(config, samples, layout),
            encoder_seq_length=config.data.seq_length,
            decoder_seq_length=config.data.decoder_tokens,
            tokenizer=tokenizer,
        )

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return the decoder's loss mask [b, d]: 1 for labels that count, otherwise 0."""
        return batch["loss_mask"]

    def forward(
        self,
        part: T5Model,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model. The last part returns the loss."""
        is_token = batch["enc_mask"].bool()
        inputs = (batch["text_enc"], batch["text_dec"], is_token, batch["labels"])
        result = part(*inputs, hidden, loss_mask=batch["loss_mask"])
        if not part.part.head:
            return result
        return {"lm loss": masked_mean(result, batch["loss_mask"])}


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(T5Recipe()))
