"""Readers that present other weights: merged with adapters, or replaced by their averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch

from megatron.checkpoint.entries import Box
from megatron.checkpoint.reader import Reader, WrappedReader
from megatron.checkpoint.store import WEIGHTS
from megatron.config.adapters import ADAPTER_FIELDS, is_adapter_parameter
from megatron.config.checkpoint import AVERAGES
from megatron.config.model import ModelConfig
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.yaml_file import from_dict
from megatron.errors import CheckpointError
from megatron.parallel.adapter import AdaptedLayer, Adapter
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear

_WEIGHT = ".weight"


class AveragedReader(WrappedReader):
    """A checkpoint that presents the averages of the weights as the weights.

    Frozen weights and buffers, which are not averaged, are presented unchanged. Optimizer states
    are left out, because they belong to the original weights.
    """

    def __init__(self, reader: Reader) -> None:
        """Wrap a checkpoint.

        Args:
            reader: The opened checkpoint.

        Raises:
            CheckpointError: The checkpoint contains no averages.
        """
        super().__init__(reader)
        self.meta = {**reader.meta, "optimizer": None}
        self.tensors = {n: meta for n, meta in reader.tensors.items() if n.startswith(WEIGHTS)}
        if not any(name.startswith(AVERAGES) for name in reader.tensors):
            raise CheckpointError(
                f"--load-averaged-weights: {reader.path} has no averages of the weights, which "
                "--ema-decay and --lawa-interval compute in training: drop the flag, or load "
                "another checkpoint"
            )

    def _source(self, name: str) -> str:
        average = f"{AVERAGES}{name.removeprefix(WEIGHTS)}"
        return average if average in self._reader.tensors else name

    def chunks(self, name: str) -> list[Box]:
        """Return boxes that tile a tensor in row-major order.

        Args:
            name: The tensor's name.
        """
        return self._reader.chunks(self._source(name))

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._reader.read(self._source(name), box).to(self.tensors[name].dtype)


def network_in(reader: Reader) -> ModelConfig:
    """Return the resolved configuration of a checkpoint's network."""
    sections = {"model": reader.meta["config"].get("model", {})}
    return narrow(resolve(from_dict(sections, str(reader.path)), 1), ModelRun).model


def without_adapters(
    reader: Reader,
    layers_of: Callable[[ModelConfig, int], Mapping[str, AdaptedLayer | ExpertLinear]],
) -> Reader:
    """Return a checkpoint's reader, with adapters merged into the weights if it has any.

    Args:
        reader: The opened checkpoint.
        layers_of: Function (`adapted_layers`) that returns the layers with adapters, by name, given
            the network and the padded vocabulary size.
    """
    saved = reader.meta["config"].get("model", {})
    if saved.get("lora_rank") is None:
        return reader
    return MergedReader(reader, layers_of(network_in(reader), reader.meta["padded_vocab_size"]))


class MergedReader(WrappedReader):
    """A checkpoint that presents its adapters merged into the weights that they adapt.

    Optimizer states are left out, because they belong to the adapters.
    """

    def __init__(self, reader: Reader, layers: Mapping[str, AdaptedLayer | ExpertLinear]) -> None:
        """Wrap a checkpoint.

        Args:
            reader: The opened checkpoint, which has adapters.
            layers: The layers that have adapters, by name.
        """
        super().__init__(reader)
        model = reader.meta["config"]["model"]
        settings = {name: value for name, value in model.items() if name not in ADAPTER_FIELDS}
        config = {**reader.meta["config"], "model": settings}
        self.meta = {**reader.meta, "config": config, "optimizer": None}
        self.tensors = {
            name: meta
            for name, meta in reader.tensors.items()
            if name.startswith("model.") and not is_adapter_parameter(name)
        }
        self._layers = {f"model.{name}{_WEIGHT}": layer for name, layer in layers.items()}

    def chunks(self, name: str) -> list[Box]:
        """Return boxes that tile a tensor in row-major order; one box for an adapted weight.

        Args:
            name: The tensor's name.
        """
        return super().chunks(name) if name in self._layers else self._reader.chunks(name)

    @torch.no_grad()
    def _read(self, name: str, box: Box) -> torch.Tensor:
        linear = self._layers.get(name)
        if linear is None:
            return self._reader.read(name, box)
        weight = self._reader.read(name)
        module = name.removesuffix(_WEIGHT)
        assert isinstance(linear.adapter, Adapter | ExpertAdapter)
        adapter = deepcopy(linear.adapter).to_empty(device="cpu")
        for parameter_name, parameter in adapter.named_parameters():
            parameter.copy_(self._reader.read(f"{module}.adapter.{parameter_name}"))
        merged = adapter.merged(weight)
        return merged.to(weight.dtype)[box.slices_in(Box.whole(tuple(weight.shape)))]
