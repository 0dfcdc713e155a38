"""What a `pretrain_*.py` script supplies: a model, its datasets and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.config import RunConfig
from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.tokenizer.base import Tokenizer

Batch = dict[str, Tensor]
SampleCounts = tuple[int, int, int]  # training, validation, test


class Recipe(Protocol):
    """One kind of pretraining. `run_pretraining` does everything else."""

    program: str
    """Name for messages and `--help`, for example `pretrain_gpt.py`."""

    def build_model(
        self, config: RunConfig, layout: Layout, device: Device, padded_vocab_size: int
    ) -> nn.Module:
        """This process's part of the model, its parameters not yet initialized."""
        ...

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, **sync: Any
    ) -> tuple[Dataset[Any] | None, Dataset[Any] | None, Dataset[Any] | None]:
        """Training, validation and test samples; None for an empty split."""
        ...

    def losses(
        self, model: nn.Module, batch: Batch, config: RunConfig, tokenizer: Tokenizer
    ) -> Mapping[str, Tensor]:
        """Scalar losses of one micro-batch, by log name. Their sum is differentiated."""
        ...
