"""Finetuning a pretrained BERT on labelled texts: what `pretrain_bert.py` is for pretraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import RunConfig
from megatron.config.stages import ModelPart
from megatron.models.bert import BertChooser
from megatron.models.build import build_model
from megatron.models.plan import HeadSpec
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.recipe import Batch, SampleCounts, Splits
from tasks.classify_files import Example
from tasks.classify_samples import Epochs, Repeated, TextSamples
from tasks.table import PROGRAM
from tasks.target import Target


class FinetuneRecipe:
    """The classes of labelled texts by cross entropy, or their numbers by squared error.

    Args:
        target: what is to be found.
        train: examples to train on; none where there is only evaluation.
        valid: examples whose loss is computed between epochs, with --eval-iters.
        used: examples of an epoch; None: all, and what fills no batch goes into the next epoch's.
    """

    program = PROGRAM
    architecture = "bert"

    def __init__(
        self,
        target: Target,
        train: Sequence[Example],
        valid: Sequence[Example],
        used: int | None,
    ) -> None:
        """Take the target and the examples."""
        self.target = target
        self._train = train
        self._valid = valid
        self._used = used

    @property
    def head(self) -> HeadSpec:
        return self.target.head

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        return ("lm loss",)

    def build_part(
        self,
        config: RunConfig,
        context: BuildContext,
        padded_vocab_size: int,
        part: ModelPart,
    ) -> BertChooser:
        network = partial(BertChooser, head_name=self.target.head_name)
        return build_model(network, config, context, padded_vocab_size, part, self.head)

    def describe_kernels(self, part: BertChooser) -> str:
        choice = part.attention_choice
        return f"{choice.name} attention with padding masks ({choice.reason})"

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Splits:
        length = config.data.seq_length
        train = valid = None
        if self._train:
            train = Epochs(
                TextSamples(self._train, tokenizer, length),
                seed=config.training.seed,
                length=samples[0],
                used=self._used,
            )
        if self._valid:
            valid = Repeated(TextSamples(self._valid, tokenizer, length), samples[1])
        return train, valid, None

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        return torch.ones_like(batch["label"])

    def forward(
        self,
        part: BertChooser,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        result = self._scores(part, batch, hidden)
        if not part.part.head:
            return result
        label = batch["label"]
        if self.target.span is not None:
            return {"lm loss": F.mse_loss(result[:, 0], label.float())}
        return {"lm loss": F.cross_entropy(result, label)}

    def guess(
        self,
        part: BertChooser,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """As `forward`, but at the end what is guessed for each sample, float [b]."""
        result = self._scores(part, batch, hidden)
        if not part.part.head:
            return result
        is_number = self.target.span is not None
        return {"guess": result[:, 0] if is_number else result.argmax(dim=-1).float()}

    def _scores(self, part: BertChooser, batch: Batch, hidden: Tensor | None) -> Tensor:
        return part.choose(batch["text"], batch["padding_mask"].bool(), batch["types"], hidden)
