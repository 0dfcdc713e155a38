"""What a `pretrain_*.py` script supplies: a model, its datasets and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.stages import ModelPart
from megatron.data.sample import SampleDataset
from megatron.models.plan import HeadSpec
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.tokenizer.base import Tokenizer

Batch = dict[str, Tensor]
Splits = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]
SampleCounts = tuple[int, int, int]  # training, validation, test


class Recipe(Protocol):
    """One kind of pretraining. `training.pretrain.main` does everything else."""

    program: str
    """Name for messages and `--help`, for example `pretrain_gpt.py`."""

    architecture: str
    """Kind of network, see `ModelConfig.architecture`."""

    @property
    def head(self) -> HeadSpec:
        """What the model ends in.

        Losses of a language-model head are mean negative log likelihoods of tokens, and exp(loss)
        stands beside them, as Megatron prints it.
        """
        ...

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """What `forward` returns at the end of the model, in the order of the log line."""
        ...

    def build_part(
        self,
        config: RunConfig,
        context: BuildContext,
        padded_vocab_size: int,
        part: ModelPart,
    ) -> nn.Module:
        """Some layers of the model, their parameters named globally and not yet initialized."""
        ...

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Splits:
        """Training, validation and test samples; None for an empty split. Collective."""
        ...

    def describe_kernels(self, part: Any) -> str:
        """Which kernels the model runs on and why, for the start-up panel."""
        ...

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Of a micro-batch of whole sequences 1 for each label whose loss counts, else 0: of one
        shape in all of a run, `[b, s]` where labels are tokens. Asked for by
        --calculate-per-token-loss."""
        ...

    def forward(
        self,
        part: Any,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """One micro-batch through a part of the model.

        Args:
            batch: whole sequences; each context rank takes its part of them.
            hidden: [s, b, h] from the part before; None for the first.

        Returns:
            Hidden states for the next part; of the last one scalar losses by log name, whose sum
            is differentiated. The mean over context ranks is the loss of the micro-batch: a mean
            over the labels that count; 0 where none does.
        """
        ...
