#!/usr/bin/env python3
r"""Pretrain a retrieval bi-encoder with the inverse cloze task: find the text around a sentence.

python pretrain_ict.py --help-all                              all flags
python pretrain_ict.py --mock-data ...                         one process
torchrun --nproc-per-node 8 pretrain_ict.py --data-path TEXT --titles-data-path TITLES \
    --bert-load BERT ...                                       eight processes
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

if __name__ == "__main__":
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("pretrain_ict.py")
    # Objects that imports create are never freed. Scanning them for garbage takes 0.3 s of the
    # 2.6 s that start-up takes.
    gc.disable()

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.datasets import DataRequest, Datasets
from megatron.data.ict import build_ict_datasets
from megatron.models.biencoder import BiEncoderModel, compare_all, top_k_accuracy
from megatron.models.plan import RETRIEVAL_HEAD
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.from_bert import StartFromBert
from megatron.training.pretrain import main
from megatron.training.recipe import PADDED_ATTENTION, Batch, Recipe, SampleCounts


class ICTRecipe(Recipe):
    """The inverse cloze task: match a sentence with the block of text from which it was taken."""

    program = "pretrain_ict.py"
    architecture = "ict"
    network = BiEncoderModel
    head = RETRIEVAL_HEAD
    attention = PADDED_ATTENTION

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return Megatron-LM's names for the loss and the requested accuracies."""
        chosen = config.retriever.retriever_report_topk_accuracies
        return ("loss", *(f"top{k}_acc" for k in chosen))

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build datasets of sentences, each with the block of text around it. Collective."""
        request = DataRequest.of(config, samples, layout)
        return build_ict_datasets(
            request, config.retriever, seq_length=config.data.seq_length, tokenizer=tokenizer
        )

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return ones [b], because every query counts in the loss."""
        return torch.ones(len(batch["query_tokens"]), device=batch["query_tokens"].device)

    def forward(
        self,
        part: BiEncoderModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Mapping[str, Tensor]:
        """Return the retrieval loss and accuracies over the blocks of all data-parallel ranks."""
        vectors = part(
            batch["query_tokens"],
            batch["query_pad_mask"].bool(),
            batch["context_tokens"],
            batch["context_pad_mask"].bool(),
        )
        scaled = config.retriever.retriever_score_scaling
        scale = config.model.hidden_size**-0.5 if scaled else 1.0
        found = compare_all(vectors, layout.data, scale=scale)
        chosen = config.retriever.retriever_report_topk_accuracies
        # Accuracies have no gradient, so adding them to the loss changes nothing.
        accuracies = {f"top{k}_acc": top_k_accuracy(found.ranks, k) for k in chosen}
        return {"loss": found.loss, **accuracies}


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(ICTRecipe(), extras=StartFromBert()))
