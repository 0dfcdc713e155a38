"""What a `pretrain_*.py` script supplies: a model, its datasets and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.data.gpt import SampleDataset
from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.tokenizer.base import Tokenizer

Batch = dict[str, Tensor]
Splits = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]
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
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Splits:
        """Training, validation and test samples; None for an empty split. Collective."""
        ...

    def describe_kernels(self, model: Any) -> str:
        """Which kernels the model runs on and why, for the start-up panel."""
        ...

    def losses(
        self, model: Any, batch: Batch, config: RunConfig, tokenizer: Tokenizer
    ) -> Mapping[str, Tensor]:
        """Scalar losses of one micro-batch, by log name. Their sum is differentiated."""
        ...
