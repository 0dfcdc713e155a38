"""The base class of recipes, with which a `pretrain_*.py` script supplies model, data and loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.stages import ModelPart
from megatron.data.datasets import Datasets
from megatron.models.build import build_model
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.tokenizer.base import Tokenizer

Batch = dict[str, Tensor]
# The numbers of training, validation and test samples. `None` for validation means every sample of
# the validation data, once (--full-validation).
SampleCounts = tuple[int, int | None, int]
PADDED_ATTENTION = "attention with padding masks"  # a value of `Recipe.attention`


@runtime_checkable
class CountsEpochs(Protocol):
    """A recipe that supports --train-epochs."""

    def epoch_samples(self, config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> int:
        """Return the number of training samples in an epoch. Collective."""


@runtime_checkable
class ReportsMeans(Protocol):
    """A recipe that logs values computed from the mean losses instead of the means themselves."""

    def reported(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Compute the values to log, under the names of the losses.

        Args:
            losses: The mean of each loss over a global batch. A loss in `Recipe.loss_names` that
                `forward` does not return is 0.
        """


class Recipe(Protocol):
    """One kind of training. `training.pretrain.main` does everything else.

    Subclasses define `program`, `architecture`, `network`, `build_datasets`, `loss_mask` and
    `forward`. The other members have defaults.
    """

    program: str
    """The name in messages and `--help`, for example `pretrain_gpt.py`."""

    architecture: str
    """The kind of network (`ModelConfig.architecture`)."""

    attention: str = "attention"
    """The name of the model's attention in the start-up panel, which may mention its masks."""

    @property
    @abstractmethod
    def network(self) -> type[nn.Module]:
        """The class of the model."""

    @property
    def head(self) -> HeadSpec:
        """The specification of the model's heads.

        The losses of a language-model head are mean negative log likelihoods of tokens, so the log
        also shows exp(loss), as Megatron's does.
        """
        return LANGUAGE_MODEL_HEAD

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the losses, in the order of the log line.

        These are the names of the losses that `forward` returns, and of any values that only
        `ReportsMeans.reported` computes.
        """
        return ("lm loss",)

    def build_part(
        self,
        config: RunConfig,
        context: BuildContext,
        padded_vocab_size: int,
        part: ModelPart,
    ) -> nn.Module:
        """Build one part of the model, with global parameter names and uninitialized values.

        Args:
            config: The run's configuration.
            context: Everything else that the constructors of layers need.
            padded_vocab_size: The number of rows of the embedding table.
            part: The layers to build.
        """
        return build_model(self.network, config, context, padded_vocab_size, part, self.head)

    @abstractmethod
    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build the training, validation and test datasets (`None` if empty). Collective.

        Args:
            config: The run's configuration.
            tokenizer: The run's tokenizer.
            samples: The number of samples that the run needs from each split (`SampleCounts`).
            layout: The ranks of this process.
        """

    def describe_kernels(self, part: Any) -> str:
        """Describe which kernels the model uses and why, for the start-up panel."""
        choice = part.attention_choice
        return f"{choice.name} {self.attention} ({choice.reason})"

    @abstractmethod
    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return 1 for each label of a micro-batch that contributes to the loss, and 0 otherwise.

        This is used with --calculate-per-token-loss and --full-validation. The shape of the result
        is the same for all micro-batches of an update or evaluation: `[b, s]` if labels are tokens.

        Args:
            batch: The micro-batch, with whole sequences.
            config: The run's configuration.
            tokenizer: The run's tokenizer.
        """

    @abstractmethod
    def forward(
        self,
        part: Any,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model.

        Args:
            part: A part of the model that `build_part` built.
            batch: Whole sequences. Each context rank selects its own slice of them.
            hidden: The output of the previous part, `[s, b, h]`; `None` for the first part.
            config: The run's configuration.
            tokenizer: The run's tokenizer.
            layout: The ranks of this process.

        Returns:
            Hidden states `[s, b, h]` for the next part. The last part returns scalar losses by log
            name; their sum is differentiated. Each loss, averaged over context ranks, is the mean
            over the labels in the loss mask, or 0 if the mask is empty.
        """
