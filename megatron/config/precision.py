"""Number formats of weights, activations, gradients and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from megatron.config.fields import Need, flag

if TYPE_CHECKING:
    import torch


# What some flags change nothing without.
_DYNAMIC_SCALE = Need(
    lambda run: run.precision.fp16 and run.precision.loss_scale is None,
    "without --fp16 and its dynamic loss scale",
)
_HALF = Need(lambda run: run.precision.fp16 or run.precision.bf16, "without --fp16 or --bf16")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision."""

    fp16: bool = flag(False, "Half precision weights with a loss scale.")
    bf16: bool = flag(False, "bfloat16 weights, gradients accumulated in fp32.", is_common=True)
    loss_scale: float | None = flag(
        None, "Fixed loss scale. Default: dynamic with fp16, otherwise 1.", above=0, needs=_HALF
    )
    initial_loss_scale: float = flag(
        2.0**32, "First dynamic loss scale.", above=0, needs=_DYNAMIC_SCALE
    )
    min_loss_scale: float = flag(1.0, "Smallest dynamic loss scale.", above=0, needs=_DYNAMIC_SCALE)
    loss_scale_window: float = flag(
        1000.0,
        "Good iterations before the scale doubles.",
        unit="iterations",
        at_least=1,
        needs=_DYNAMIC_SCALE,
    )
    hysteresis: int = flag(
        2, "Overflows before the scale halves.", unit="iterations", at_least=1, needs=_DYNAMIC_SCALE
    )
    fp32_residual_connection: bool = flag(False, "Keep the residual stream in fp32.")
    apply_query_key_layer_scaling: bool = flag(
        True,
        "Divide scores by the layer number and multiply back in fp32 (guards fp16 from overflow). "
        "Fused attention holds scores in fp32 anyway.",
        off="--no-query-key-layer-scaling",
    )
    attention_softmax_in_fp32: bool = flag(
        False, "Compute the attention softmax in fp32 (fused attention always does)."
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Accumulate and reduce gradients in fp32 (always so with bf16)."
    )
    fp16_lm_cross_entropy: bool = flag(False, "Compute the loss in the model's 16-bit format.")
    embedding_weights_in_fp32: bool = flag(
        False,
        "Look words up in an fp32 copy of their embeddings, so that gradients of a frequent word "
        "add up in fp32.",
    )
    fp8_format: str | None = flag(
        None,
        "FP8 training of the linear layers of attention and MLP: e4m3 everywhere, or hybrid with "
        "e5m2 for gradients. The output head stays in 16 bits.",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "tensorwise",
        "What shares a scale: a whole matrix (tensorwise) or each of its rows (rowwise), by what "
        "it holds at that moment; or a whole matrix, by what it held in earlier updates (delayed).",
        choices=("tensorwise", "rowwise", "delayed"),
    )
    fp8_margin: int = flag(
        0,
        "With --fp8-recipe delayed: how much smaller scales are than the history allows.",
        unit="powers of 2",
        at_least=0,
    )
    fp8_interval: int = flag(
        1,
        "With --fp8-recipe delayed: time from one choice of scales to the next.",
        unit="iterations",
        at_least=1,
    )
    fp8_amax_history_len: int = flag(
        1,
        "With --fp8-recipe delayed: how long a matrix's largest magnitudes are remembered "
        "(Transformer Engine's own default is 1024).",
        unit="iterations",
        at_least=1,
    )
    fp8_amax_compute_algo: str = flag(
        "most_recent",
        "With --fp8-recipe delayed: scale by the last magnitude of --fp8-amax-history-len, or by "
        "the largest (max).",
        choices=("most_recent", "max"),
    )
    fp8_wgrad: bool = flag(
        True,
        "Products for weight gradients in 8 bits too, otherwise in 16.",
        off=("--no-fp8-wgrad", "--disable-fp8-wgrad"),
    )
    fp8_param_gather: bool = flag(
        False,
        "With --fp8-format, and --use-distributed-optimizer or --zero-stage 1 or 2: processes that "
        "share the update gather the weights of 8-bit layers in 8 bits, half the bytes, and in 16 "
        "bits only before something else reads them (a checkpoint, --log-params-norm).",
    )
    gradient_accumulation_fusion: bool = flag(
        True,
        "Add weight gradients to the fp32 buffer in the matrix product itself; off: in a 16-bit "
        "product, then a sum.",
        off="--no-gradient-accumulation-fusion",
    )
    cross_entropy_loss_fusion: bool = flag(
        True,
        "Fuse the loss as --cross-entropy-fusion-impl says; off: plain PyTorch, a few rows in fp32 "
        "at a time.",
        off="--no-cross-entropy-loss-fusion",
    )
    cross_entropy_fusion_impl: str = flag(
        "native",
        "native, te: one kernel over the 16-bit logits each way, the gradient written over them "
        "(Transformer Engine is not needed); linear: the output product and its gradients too, a "
        "chunk of logits at a time.",
        choices=("native", "te", "linear"),
    )

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of weights, and of what layers compute in."""
        import torch  # which flags alone do without

        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of hidden states between layers, as pipeline stages send them."""
        import torch

        return torch.float32 if self.fp32_residual_connection else self.weight_dtype

    def without_fp8(self) -> PrecisionConfig:
        """The same, multiplying in the weights' own format."""
        ours = [field for field in fields(self) if field.name.startswith("fp8_")]
        defaults: dict[str, Any] = {field.name: field.default for field in ours}
        return replace(self, **defaults)
