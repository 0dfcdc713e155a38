#!/usr/bin/env python3
"""Pretrain a GPT: what to train. How it is trained stands in `megatron/training`.

python pretrain_gpt.py --help                                all flags
python pretrain_gpt.py --mock-data ...                       one process
torchrun --nproc-per-node 8 pretrain_gpt.py --data-path ...  eight
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor

from megatron.config import RunConfig
from megatron.data.build import BuildSync, Splits, build_gpt_datasets
from megatron.data.masks import gpt_inputs
from megatron.device import Device
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import Batch, SampleCounts


class GPTRecipe:
    """Next-token prediction on a stream of documents."""

    program = "pretrain_gpt.py"

    def build_model(
        self, config: RunConfig, layout: Layout, device: Device, padded_vocab_size: int
    ) -> GPTModel:
        return GPTModel.from_config(config, layout, device, padded_vocab_size)

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, sync: BuildSync
    ) -> Splits:
        return build_gpt_datasets(config, tokenizer, samples, sync)

    def losses(
        self, model: GPTModel, batch: Batch, config: RunConfig, tokenizer: Tokenizer
    ) -> Mapping[str, Tensor]:
        inputs = gpt_inputs(batch["text"], tokenizer.eod, config.data)
        loss = model(inputs.tokens, inputs.position_ids, inputs.labels, inputs.mask)  # [b, s]
        kept = inputs.loss_mask.sum().clamp(min=1)  # a fully masked micro-batch has loss 0
        return {"lm loss": (loss * inputs.loss_mask).sum() / kept}


if __name__ == "__main__":
    sys.exit(main(GPTRecipe()))
