"""Number formats of weights, activations and gradients, and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from megatron.config.fields import HALF, Requirement, flag

if TYPE_CHECKING:
    import torch


# Conditions for the flags below, used as their `needs` or `requires`.
_DYNAMIC_SCALE = Requirement(
    lambda run: run.precision.fp16 and run.precision.loss_scale is None,
    "--fp16 and its dynamic loss scale",
)
_FP16 = Requirement(lambda run: run.precision.fp16, "--fp16")
_FP8 = Requirement(lambda run: run.precision.fp8_format, "--fp8-format")
_DELAYED = Requirement(lambda run: run.precision.fp8_recipe == "delayed", "--fp8-recipe delayed")
_ENDS = Requirement(lambda run: run.precision.first_last_layers_bf16, "--first-last-layers-bf16")
_STACKS = ("gpt", "bert")  # the networks with one stack of layers


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision.

    Attributes:
        fp16: Use fp16 weights with a loss scale.
        bf16: Use bf16 weights and accumulate gradients in fp32 (see --main-grads-dtype).
        loss_scale: Fixed loss scale. Default: dynamic with fp16, otherwise 1.
        initial_loss_scale: Initial dynamic loss scale.
        min_loss_scale: Minimum dynamic loss scale.
        loss_scale_window: Iterations without overflow before the loss scale doubles.
        hysteresis: Overflows before the loss scale halves.
        fp32_residual_connection: Keep the residual stream in fp32.
        apply_query_key_layer_scaling: Divide attention scores by the layer number and multiply back
            in fp32 to avoid overflow in fp16. Fused attention always keeps scores in fp32.
        attention_softmax_in_fp32: Compute the attention softmax in fp32 (fused attention always
            does).
        accumulate_allreduce_grads_in_fp32: Accumulate and reduce gradients in fp32 (on with --bf16
            unless --main-grads-dtype bf16 is given).
        fp16_lm_cross_entropy: Compute the loss in the model's 16-bit format.
        embedding_weights_in_fp32: Use an fp32 copy of the word embeddings for look-ups, so that
            gradients of frequent words are summed in fp32.
        fp8_format: FP8 training of the linear layers of attention and MLP: e4m3 everywhere, or
            hybrid with e5m2 for gradients. The output head stays in 16 bits.
        fp8_recipe: How FP8 scales are chosen: per matrix (tensorwise) or per row (rowwise) from
            current values, or per matrix from the values of earlier updates (delayed).
        fp8_margin: With --fp8-recipe delayed, headroom above the largest magnitudes in the history,
            so that larger values do not overflow.
        fp8_interval: With --fp8-recipe delayed, iterations between updates of the scales.
        fp8_amax_history_len: With --fp8-recipe delayed, the length of the history of each matrix's
            largest magnitudes (Transformer Engine's own default is 1024).
        fp8_amax_compute_algo: With --fp8-recipe delayed, scale by the latest magnitude in the
            history of --fp8-amax-history-len (most_recent) or by the largest (max).
        fp8_wgrad: Compute weight gradients in 8 bits too. Off: in 16 bits.
        fp8_param_gather: Gather the updated weights of FP8 layers in 8 bits, which halves the
            traffic. They are gathered in 16 bits only when something else reads them (a checkpoint,
            --log-params-norm). Requires --fp8-format, and --use-distributed-optimizer or
            --zero-stage 1 or 2.
        first_last_layers_bf16: Keep the matrix products of the first and last layers, which need
            more precision, in 16 bits. Depths of multi-token prediction stay in 8 bits.
        num_layers_at_start_in_bf16: With --first-last-layers-bf16, number of layers at the start to
            keep in 16 bits.
        num_layers_at_end_in_bf16: With --first-last-layers-bf16, number of layers at the end to
            keep in 16 bits.
        gradient_accumulation_fusion: Add weight gradients to the fp32 buffer within the matrix
            product. Off: compute a 16-bit product and add it afterwards.
        cross_entropy_loss_fusion: Fuse the loss as chosen by --cross-entropy-fusion-impl. Off: use
            PyTorch's operations on a few fp32 rows at a time.
        cross_entropy_fusion_impl: Fused loss. native and te: one kernel each for forward and
            backward over the 16-bit logits, which the gradient overwrites (Transformer Engine is
            not needed). linear: also fuses the output layer's matrix product and its gradients,
            one chunk of logits at a time.
    """

    fp16: bool = False
    bf16: bool = flag(False, is_common=True)
    loss_scale: float | None = flag(None, above=0, needs=HALF)
    initial_loss_scale: float = flag(2.0**32, above=0, needs=_DYNAMIC_SCALE)
    min_loss_scale: float = flag(1.0, above=0, needs=_DYNAMIC_SCALE)
    loss_scale_window: float = flag(1000.0, unit="iterations", at_least=1, needs=_DYNAMIC_SCALE)
    hysteresis: int = flag(2, unit="iterations", at_least=1, needs=_DYNAMIC_SCALE)
    fp32_residual_connection: bool = flag(False, requires=HALF)
    apply_query_key_layer_scaling: bool = flag(True, off="--no-query-key-layer-scaling")
    attention_softmax_in_fp32: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    fp16_lm_cross_entropy: bool = flag(False, requires=_FP16)
    embedding_weights_in_fp32: bool = False
    fp8_format: str | None = flag(None, choices=("e4m3", "hybrid"))
    fp8_recipe: str = flag(
        "tensorwise", choices=("tensorwise", "rowwise", "delayed"), requires=_FP8
    )
    fp8_margin: int = flag(0, unit="powers of 2", at_least=0, requires=_DELAYED)
    fp8_interval: int = flag(1, unit="iterations", at_least=1, requires=_DELAYED)
    fp8_amax_history_len: int = flag(1, unit="iterations", at_least=1, requires=_DELAYED)
    fp8_amax_compute_algo: str = flag(
        "most_recent", choices=("most_recent", "max"), requires=_DELAYED
    )
    fp8_wgrad: bool = flag(True, off="--no-fp8-wgrad --disable-fp8-wgrad", requires=_FP8)
    fp8_param_gather: bool = flag(False, requires=_FP8)
    first_last_layers_bf16: bool = flag(False, requires=_FP8, only_for=_STACKS)
    num_layers_at_start_in_bf16: int = flag(1, unit="layers", at_least=0, requires=_ENDS)
    num_layers_at_end_in_bf16: int = flag(1, unit="layers", at_least=0, requires=_ENDS)
    gradient_accumulation_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: str = flag("native", choices=("native", "te", "linear"))

    @property
    def weight_dtype(self) -> torch.dtype:
        """Number format of weights and of computation in layers."""
        import torch  # imported here because parsing flags does not need it

        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def stream_dtype(self) -> torch.dtype:
        """Number format of hidden states between layers, as pipeline stages send them."""
        import torch

        return torch.float32 if self.fp32_residual_connection else self.weight_dtype

    def fp8_layers(self, num_layers: int) -> range:
        """Return the indices, from 0, of the layers that compute in FP8 with --fp8-format.

        Args:
            num_layers: The number of layers.
        """
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)

    def without_fp8(self) -> PrecisionConfig:
        """Return the same settings without FP8, so that matrix products use the weights' format."""
        ends = {
            "first_last_layers_bf16",
            "num_layers_at_start_in_bf16",
            "num_layers_at_end_in_bf16",
        }
        ours = [
            field for field in fields(self) if field.name.startswith("fp8_") or field.name in ends
        ]
        defaults: dict[str, Any] = {field.name: field.default for field in ours}
        return replace(self, **defaults)
