"""Finetuning a pretrained BERT on labelled texts: what `pretrain_bert.py` is for pretraining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import RunConfig
from megatron.config.run import known
from megatron.config.stages import ModelPart
from megatron.device import Device
from megatron.models.bert_heads import BertChooser
from megatron.models.construct import build_model
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.recipe import Batch, SampleCounts, Splits
from tasks.classify_files import Example
from tasks.classify_samples import Epochs, Repeated, TextSamples
from tasks.table import PROGRAM


@dataclass(frozen=True)
class Choice:
    """What is chosen among.

    Attributes:
        task: its name.
        classes: their names, in order.
        texts: of a sample: 1, or as many as there are classes, one of which is right.
        score: what the best checkpoint is chosen by.
    """

    task: str
    classes: tuple[str, ...]
    texts: int = 1
    score: str = "accuracy"

    @property
    def head_name(self) -> str:
        """Megatron's name of the last layer."""
        return "classification_head" if self.texts == 1 else "multichoice_head"

    @property
    def outputs(self) -> int:
        """Of the last layer, for each text."""
        return len(self.classes) // self.texts


class FinetuneRecipe:
    """Cross entropy over the classes of labelled texts, an epoch after another.

    Args:
        choice: what is chosen among.
        train: examples to train on; none where there is only evaluation.
        valid: examples whose loss is computed between epochs, with --eval-iters.
        used: examples of an epoch; None: all, and what fills no batch goes into the next epoch's.
    """

    program = PROGRAM
    architecture = "bert"

    def __init__(
        self,
        choice: Choice,
        train: Sequence[Example],
        valid: Sequence[Example],
        used: int | None,
    ) -> None:
        self.choice = choice
        self._train = train
        self._valid = valid
        self._used = used

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        return ("lm loss",)

    def build_part(
        self,
        config: RunConfig,
        layout: Layout,
        device: Device,
        padded_vocab_size: int,
        part: ModelPart,
    ) -> BertChooser:
        network = partial(BertChooser, head_name=self.choice.head_name, outputs=self.choice.outputs)
        return build_model(network, config, layout, device, padded_vocab_size, part)

    def describe_kernels(self, part: BertChooser) -> str:
        choice = part.attention_choice
        return f"{choice.name} attention with padding masks ({choice.reason})"

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Splits:
        length = known(config.data.seq_length)
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
        return {"lm loss": F.cross_entropy(result.float(), batch["label"])}

    def guess(
        self,
        part: BertChooser,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """As `forward`, but at the end how often each class was taken for each: [class, guess]."""
        result = self._scores(part, batch, hidden)
        if not part.part.head:
            return result
        size = len(self.choice.classes)
        cells = batch["label"] * size + result.argmax(dim=-1)
        counts = torch.zeros(size * size, dtype=torch.int64, device=cells.device)
        return {"counts": counts.index_add(0, cells, batch["counted"]).view(size, size)}

    def _scores(self, part: BertChooser, batch: Batch, hidden: Tensor | None) -> Tensor:
        return part.choose(batch["text"], batch["padding_mask"].bool(), batch["types"], hidden)
