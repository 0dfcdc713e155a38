#!/usr/bin/env python3
"""Pretrain a Retro model. This script defines what to train; `megatron/training` does the training.

python pretrain_retro.py --help-all                                all flags
python pretrain_retro.py --retro-workdir FOLDER ...                one process
torchrun --nproc-per-node 8 pretrain_retro.py --retro-workdir ...  eight processes

tools/retro/main.py creates the folder.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

if __name__ == "__main__":
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("pretrain_retro.py")
    # Objects that imports create are never freed. Scanning them for garbage takes 0.3 s of the
    # 2.6 s that start-up takes.
    gc.disable()

from torch import Tensor

from megatron.config import RunConfig
from megatron.data.datasets import DataRequest, Datasets
from megatron.data.gpt import document_positions, make_batch, make_loss_mask
from megatron.models.retro import RetroModel
from megatron.parallel.context.split import context_part, split_sequence
from megatron.parallel.layout import Layout
from megatron.retro.dataset import build_retro_datasets
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import Batch, Recipe, SampleCounts


class RetroRecipe(Recipe):
    """Next-token prediction on a stream of documents, with the neighbors of each chunk."""

    program = "pretrain_retro.py"
    architecture = "retro"
    network = RetroModel

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build datasets of documents, with the neighbors of their chunks. Collective."""
        request = DataRequest.of(config, samples, layout)
        return build_retro_datasets(request, config.model, tokenizer)

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return the loss mask of whole sequences [b, s]: 1 for labels that count, otherwise 0."""
        return make_loss_mask(batch, eod=tokenizer.eod, eod_mask_loss=config.data.eod_mask_loss)

    def forward(
        self,
        part: RetroModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model. The last part returns the loss."""
        whole = make_batch(
            batch,
            eod=tokenizer.eod,
            reset_position_ids=config.data.reset_position_ids,
            eod_mask_loss=config.data.eod_mask_loss,
        )
        local = context_part(whole, layout.context)
        neighbors = split_sequence(batch["neighbors"], layout.context, dim=1)
        neighbor_positions = None
        if config.data.reset_position_ids:
            neighbor_positions = document_positions(neighbors, tokenizer.eod)
        result = part(
            local.tokens,
            neighbors,
            local.position_ids,
            local.labels,
            hidden,
            loss_mask=local.loss_mask,
            neighbor_positions=neighbor_positions,
        )
        if not part.part.head:
            return result
        counted = whole.loss_mask.sum().clamp(min=1)  # if none counts, the loss is 0 instead of nan
        # The factor makes the mean over the context ranks equal to the mean over all tokens.
        return {"lm loss": layout.context.size * result / counted}


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(RetroRecipe()))
