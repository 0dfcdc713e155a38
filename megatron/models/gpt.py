"""GPT: a decoder-only transformer language model (Radford et al., 2019; Shoeybi et al., 2019).

Shapes: s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import Device, parameter_dtype
from megatron.kernels.attention import choose_attention
from megatron.kernels.rope import Rotation
from megatron.models.block import Block
from megatron.models.embedding import Embedding, RotaryTable
from megatron.models.head import OutputWeight, vocabulary_logits
from megatron.models.norm import new_norm
from megatron.models.recompute import RecomputePlan, layer_groups, recompute
from megatron.models.sizes import sizes_of
from megatron.parallel.cross_entropy import vocabulary_cross_entropy
from megatron.parallel.layers import set_overlap
from megatron.parallel.layout import Axis, Layout


class GPTModel(nn.Module):
    """Embedding, layers, final normalization, output.

    Parameters are allocated on `device`, not filled: see `parallel.initialization.initialize`.
    Their names are global: layer i is `layers.i` whatever part of the model this process holds.

    Args:
        model: network flags, resolved (no None among the sizes).
        precision: number formats.
        layout: who this process is.
        padded_vocab_size: v.
        recompute: what to compute again in backward; None: nothing.
        device: of the parameters; "meta" counts without allocating.
        dtype: of the parameters.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: PrecisionConfig,
        layout: Layout,
        *,
        padded_vocab_size: int,
        recompute: RecomputePlan | None = None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        layers = range(sizes_of(model).layers)
        self.layout = layout
        self.overlap = True  # of the output's communication; see `set_overlap`
        splits = recompute is not None and recompute.split_inputs and layout.sequence.size == 1
        self.saved_by = layout.tensor if splits else Axis()
        self.loss_in_16_bits = precision.fp16_lm_cross_entropy
        self.attention_choice = choose_attention(model, precision, device)
        self.groups = layer_groups(recompute, layers)
        self.embedding = Embedding(
            model,
            precision,
            layout,
            padded_vocab_size=padded_vocab_size,
            device=device,
            dtype=dtype,
        )
        has_rope = model.position_embedding_type == "rope"
        self.rotary = RotaryTable(model, device=device) if has_rope else None
        self.layers = nn.ModuleDict()
        for index in layers:
            self.layers[str(index)] = Block(
                model,
                layout,
                index + 1,
                self.attention_choice,
                recompute_core=recompute is not None and recompute.granularity == "selective",
                device=device,
                dtype=dtype,
            )
        self.final_norm = new_norm(model, layout, device=device, dtype=dtype)
        self.output = None
        if model.untie_embeddings_and_output_weights:
            self.output = OutputWeight(
                model, layout, padded_vocab_size=padded_vocab_size, device=device, dtype=dtype
            )

    @classmethod
    def from_config(
        cls, config: RunConfig, layout: Layout, device: Device, padded_vocab_size: int
    ) -> GPTModel:
        """The model that a run's flags describe."""
        parallel = config.parallel
        recompute = RecomputePlan.from_config(
            config.training, split_inputs=parallel.distribute_saved_activations
        )
        model = cls(
            config.model,
            config.precision,
            layout,
            padded_vocab_size=padded_vocab_size,
            recompute=recompute,
            device=device.torch_device,
            dtype=parameter_dtype(fp16=config.precision.fp16, bf16=config.precision.bf16),
        )
        set_overlap(model, parallel.async_tensor_model_parallel_allreduce)
        return model

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One pass.

        Args:
            tokens: [b, s].
            position_ids: [b, s], for learned positions; None: 0, 1, 2, ...
            labels: [b, s], the token that follows each.
            mask: bool [b or 1, 1, s, s], True where a query may attend; None: causal.

        Returns:
            With labels the loss of each token, fp32 [b, s]; else logits [b, s, v/t].
        """
        sequence = tokens.shape[1]
        if position_ids is None:
            position_ids = torch.arange(sequence, device=tokens.device).expand_as(tokens)
        rotation = None if self.rotary is None else self.rotary(sequence)
        x = self.embedding(tokens, position_ids)  # [s, b, h]
        for group in self.groups:
            if group.recomputed and torch.is_grad_enabled():
                x = recompute(self._run, group.layers, x, mask, rotation, split_over=self.saved_by)
            else:
                x = self._run(group.layers, x, mask, rotation)
        weight = self.embedding.word.weight if self.output is None else self.output.weight
        # [s, b, v/t]
        logits = vocabulary_logits(self.final_norm(x), weight, self.layout, overlap=self.overlap)
        if labels is None:
            return logits.transpose(0, 1)
        loss = vocabulary_cross_entropy(
            logits, labels.t(), self.layout.tensor, in_16_bits=self.loss_in_16_bits
        )
        return loss.t()

    def _run(
        self, layers: range, x: Tensor, mask: Tensor | None, rotation: Rotation | None
    ) -> Tensor:
        for index in layers:
            x = self.layers[str(index)](x, mask, rotation)
        return x
