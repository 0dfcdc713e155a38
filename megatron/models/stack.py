"""Layers that run one after another, some of them again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.models.block import Block
from megatron.models.norm import Stream
from megatron.models.recompute import RecomputePlan, layer_groups, recompute
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Axis


class LayerStack(nn.ModuleDict):
    """Consecutive layers of a model, by their number in the whole of it.

    It is run, not called: a weight under way is waited for by the layer that reads it, not by all
    of them together (`parallel.weights`).

    Args:
        model: network flags.
        context: what they are built in.
        layers: numbers, from 0, of those that this process holds.
        causal: without a mask, tokens attend to those before them only.
        reads_memory: they attend to an encoder's output too.
        numbered_after: layers of the model before the first of these (an encoder's).
        recompute: what to compute again in backward; None: nothing.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: BuildContext,
        layers: range,
        *,
        causal: bool = True,
        reads_memory: bool = False,
        numbered_after: int = 0,
        recompute: RecomputePlan | None = None,
    ) -> None:
        super().__init__()
        for index in layers:
            self[str(index)] = Block(
                model,
                context,
                numbered_after + index + 1,
                causal=causal,
                reads_memory=reads_memory,
                recompute_core=recompute is not None and recompute.granularity == "selective",
            )
        self.groups = layer_groups(recompute, layers)
        splits = (
            recompute is not None and recompute.split_inputs and context.layout.sequence.size == 1
        )
        self.saved_by = context.layout.tensor if splits else Axis()

    def run(self, stream: Stream, *inputs: Any) -> Stream:
        """[s, b, h] -> [s, b, h]; every layer is given `inputs` after the stream."""
        for group in self.groups:
            if group.recomputed and torch.is_grad_enabled():
                # Joined: a group keeps one tensor.
                x = stream.join()
                x = recompute(self._joined, group.layers, x, *inputs, split_over=self.saved_by)
                stream = Stream(x)
            else:
                stream = self._run(group.layers, stream, *inputs)
        return stream

    def _joined(self, layers: range, x: Tensor, *inputs: Any) -> Tensor:
        return self._run(layers, Stream(x), *inputs).join()

    def _run(self, layers: range, stream: Stream, *inputs: Any) -> Stream:
        for index in layers:
            stream = self[str(index)](stream, *inputs)
        return stream
