"""GPT: a decoder-only transformer language model (Radford et al., 2019; Shoeybi et al., 2019).

Shapes: s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.stages import ModelPart, whole_model
from megatron.device import Device, parameter_dtype
from megatron.kernels.attention import choose_attention
from megatron.kernels.rope import Rotation
from megatron.models.block import Block
from megatron.models.cache import KeyValueCache
from megatron.models.context import over_context
from megatron.models.embedding import Embedding, RotaryTable, TiedWordEmbedding
from megatron.models.head import OutputWeight, TokenLoss, vocabulary_logits
from megatron.models.kernels import choose_kernels
from megatron.models.norm import Stream, new_norm
from megatron.models.recompute import RecomputePlan, layer_groups, recompute
from megatron.models.sizes import sizes_of
from megatron.parallel.context.split import local_positions
from megatron.parallel.gradients import GradientBuffer, GradientSlot
from megatron.parallel.layers import set_overlap
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.replicas import shares_weights


class GPTModel(nn.Module):
    """Embedding, layers, final normalization, output.

    Parameters are allocated on `device`, not filled: see `parallel.initialization.initialize`.
    Their names are global: layer i is `layers.i` whatever part of the model this process holds.

    Args:
        model: network flags, resolved (no None among the sizes).
        precision: number formats.
        layout: who this process is.
        padded_vocab_size: v.
        part: the layers that this process holds, and whether it begins or ends the model; None:
            the whole model.
        recompute: what to compute again in backward; None: nothing.
        cp_comm_type: how context ranks attend to each other, "p2p" or "a2a".
        device: where it runs.
        parameter_device: of the parameters where it is another: "meta" leaves them without memory.
        dtype: of the parameters.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        layout: Layout,
        *,
        padded_vocab_size: int,
        part: ModelPart | None = None,
        recompute: RecomputePlan | None = None,
        cp_comm_type: str = "p2p",
        device: torch.device,
        parameter_device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.part = part or whole_model(sizes_of(model).layers)
        self.layout = layout
        self.overlap = True  # of the output's communication; see `set_overlap`
        splits = recompute is not None and recompute.split_inputs and layout.sequence.size == 1
        self.saved_by = layout.tensor if splits else Axis()
        self.token_loss = TokenLoss.from_config(precision, device)
        self.output_slot: GradientSlot | None = None  # where the output weight's gradient goes
        self.attention_choice = over_context(
            choose_attention(model, precision, device),
            cp_comm_type,
            layout.context,
            model,
            precision,
            device,
        )
        self.groups = layer_groups(recompute, self.part.layers)
        kernels = choose_kernels(precision, device)
        allocation: dict[str, Any] = {"device": parameter_device or device, "dtype": dtype}
        words = {"padded_vocab_size": padded_vocab_size, **allocation}
        tied = not model.untie_embeddings_and_output_weights
        self.embedding: Embedding | TiedWordEmbedding | None = None
        if self.part.embedding:
            self.embedding = Embedding(model, precision, layout, kernels, **words)
        elif self.part.head and tied:
            self.embedding = TiedWordEmbedding(model, layout, **words)
        has_rope = model.position_embedding_type == "rope"
        self.rotary = RotaryTable(model, device=device) if has_rope else None
        self.layers = nn.ModuleDict()
        for index in self.part.layers:
            self.layers[str(index)] = Block(
                model,
                layout,
                index + 1,
                self.attention_choice,
                recompute_core=recompute is not None and recompute.granularity == "selective",
                kernels=kernels,
                **allocation,
            )
        self.final_norm = self.output = None
        if self.part.head:
            self.final_norm = new_norm(model, layout, kernels, **allocation)
            self.output = None if tied else OutputWeight(model, layout, **words)

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        layout: Layout,
        device: Device,
        padded_vocab_size: int,
        part: ModelPart | None = None,
    ) -> GPTModel:
        """The model that a run's flags describe, or a part of it.

        Weights that processes share are fp32 and have no memory yet: see `ShardedModel`.
        """
        parallel, numbers = config.parallel, config.precision
        is_shared = shares_weights(parallel, layout)
        dtype = parameter_dtype(fp16=numbers.fp16, bf16=numbers.bf16)
        recompute = RecomputePlan.from_config(
            config.training, split_inputs=parallel.distribute_saved_activations
        )
        model = cls(
            config.model,
            config.precision,
            layout,
            padded_vocab_size=padded_vocab_size,
            part=part,
            recompute=recompute,
            cp_comm_type=parallel.cp_comm_type,
            device=device.torch_device,
            parameter_device=torch.device("meta") if is_shared else None,
            dtype=torch.float32 if is_shared else dtype,
        )
        set_overlap(model, parallel.async_tensor_model_parallel_allreduce)
        return model

    def take_slots(self, gradients: GradientBuffer) -> None:
        """See `parallel.layers.attach_slots`."""
        if self.part.head:
            self.output_slot = gradients.slot(self._output_weight())

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        hidden: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """One pass through the layers held here.

        With context parallelism s counts this rank's tokens: its part of every sequence.

        Args:
            tokens: [b, s].
            position_ids: [b, s], for learned positions; None: places in the sequence.
            labels: [b, s], the token that follows each.
            mask: bool [b or 1, 1, s, s], True where a query may attend; None: causal.
            hidden: [s, b, h], from the part before; None where this part begins the model.
            cache: of earlier tokens, with the places of these; b is 1 then. None: the tokens are
                whole sequences.

        Returns:
            Where the model goes on in another part: hidden states [s, b, h]. At its end, with
            labels the loss of each token, fp32 [b, s]; else logits [b, s, v/t], with a cache of
            the tokens that it wants them of.
        """
        if cache is None:
            sequence = tokens.shape[1] * self.layout.context.size
            positions = local_positions(sequence, self.layout.context, tokens.device)
        else:
            positions = cache.positions
        if position_ids is None:
            position_ids = positions.expand_as(tokens)
        rotation = None if self.rotary is None else self.rotary(positions)
        if hidden is None:
            assert isinstance(self.embedding, Embedding), "this part takes hidden states"
            hidden = self.embedding(tokens, position_ids)
        stream = self._through_layers(hidden, mask, rotation, cache)
        if self.final_norm is None:
            return stream.join()
        _, x = self.final_norm(stream)  # [s, b, h]
        if cache is not None:
            x = x[cache.outputs]
        weight = self._output_weight()
        options: dict[str, Any] = {"overlap": self.overlap, "slot": self.output_slot}
        if labels is None:  # [s, b, v/t]
            return vocabulary_logits(x, weight, self.layout, **options).transpose(0, 1)
        return self.token_loss(x, weight, labels.t(), self.layout, **options).t()

    def _output_weight(self) -> nn.Parameter:
        if self.output is not None:
            return self.output.weight
        assert self.embedding is not None
        return self.embedding.word.weight

    def _through_layers(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None,
    ) -> Stream:
        stream = Stream(hidden)
        for group in self.groups:
            if group.recomputed and torch.is_grad_enabled():
                # Joined: a group keeps one tensor.
                x = stream.join()
                x = recompute(
                    self._joined, group.layers, x, mask, rotation, split_over=self.saved_by
                )
                stream = Stream(x)
            else:
                stream = self._run(group.layers, stream, mask, rotation, cache)
        return stream

    def _joined(
        self, layers: range, x: Tensor, mask: Tensor | None, rotation: Rotation | None
    ) -> Tensor:
        return self._run(layers, Stream(x), mask, rotation).join()

    def _run(
        self,
        layers: range,
        stream: Stream,
        mask: Tensor | None,
        rotation: Rotation | None,
        cache: KeyValueCache | None = None,
    ) -> Stream:
        for index in layers:
            stream = self.layers[str(index)](stream, mask, rotation, cache)
        return stream
