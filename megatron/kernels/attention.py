"""The attention core, softmax(Q K^T / sqrt(d)) V, in plain PyTorch or in fused kernels.

Queries are [s, b, n, d], and keys and values are [s, b, g, d], where each of the g key-value heads
serves n / g consecutive query heads. The number of keys may differ from the number of queries.

A mask is boolean, True where a query may attend, or contains values that are added to the scores,
such as T5's relative position bias. Both kinds replace `causal`. A padding mask has one row for all
queries of a sample, which PyTorch's fused kernels accept. `Segments` describe a mask by the ends of
documents.

FlashAttention 4 (https://github.com/Dao-AILab/flash-attention, package `flash-attn-4`) runs only
with --use-flash-attn. Its kernels, for Hopper and later GPUs, are compiled at the first use, which
takes 15 s including the package's start-up. They are faster than cuDNN's on contiguous tensors
[b, s, n, d] (docs/benchmarks/kernels.md). They are far slower on our tensors, which are transposed
from [s, b, n, d], unless b is 1 and the two layouts are the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config.model import ModelConfig, flash_head_problem
from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.kernels.segments import Mask, Segments

MASKED = -10000.0  # score of a masked pair, as in Megatron
# The backends, fastest first. The last one keeps all scores in memory. cuDNN is not used in
# deterministic mode.
_GPU_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# The backends that compute the gradient of a bias added to the scores.
_BIAS_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_FLASH_DISTRIBUTION = "flash-attn-4"
_LARGEST_FLASH_HEAD = 128  # the largest head size that the package supports on all of its GPUs
# The lowest compute capability for which the package has no deterministic backward pass.
_WITHOUT_DETERMINISM = (12, 0)

logger = logging.getLogger(__name__)


class AttentionOptions(NamedTuple):
    """Settings that determine how queries attend to keys.

    Attributes:
        mask: A mask, bool [b or 1, 1, s or 1, keys], True where a query may attend; or values
            [b or 1, n, s, keys] that are added to the scores; or `Segments`, with as many keys as
            queries. With `None`, only `causal` and the other options restrict attention.
        causal: Whether, without a mask, a query attends only to its own and earlier tokens.
        dropout: The probability of dropping an attention weight.
        layer_number: The index of the layer, from 1, for query-key layer scaling.
        scale: The factor applied to the scores; `None` means 1 / sqrt(d).
        window: The maximum number of earlier tokens to which a query attends, in addition to
            `mask` and `causal`; `None` for no limit.
        softcap: The bound c of the scores, which become c tanh(score / c) before masking; `None`
            for no bound.
        sinks: A logit for each query head, [n], which enters the softmax of every query like the
            score of an additional key whose value is zero; `None` for no sinks.
        slopes: The ALiBi slope of each query head, [n]. The slope times the distance between query
            and key, in tokens, is subtracted from a score. `None` for no ALiBi biases.
        chunk: The number of tokens in a chunk of a cached sequence: a query attends only to keys of
            its own chunk. `None` for no chunks. Without a cache this has no effect, because
            `Segments` define the chunks.
    """

    mask: Mask | None = None
    causal: bool = True
    dropout: float = 0.0
    layer_number: int = 1
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    chunk: int | None = None

    def is_limited(self, keys: int) -> bool:
        """Return whether the window hides any of `keys` keys from the last query."""
        return self.window is not None and keys > self.window + 1

    def visible_keys(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return which keys each query sees under `causal` and the window, bool [queries, keys].

        The queries are those of the last tokens.
        """
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if self.causal:
            visible = visible.tril(keys - queries)
        return visible if self.window is None else visible.triu(keys - queries - self.window)

    def mask_of(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the mask, including the window and ALiBi, or `None` if only `causal` applies.

        Args:
            query: The queries [s, b, n, d], whose dtype the biases have.
            key: The keys [keys, b, g, d].
        """
        queries, keys, device = len(query), len(key), query.device
        mask = self.allowed(queries, keys, device)
        if self.slopes is None:
            return mask
        if mask is None:
            mask = self.visible_keys(queries, keys, device)[None, None]
        positions = torch.arange(keys, device=device)
        return add_slopes(
            mask, self.slopes, positions - positions[keys - queries :, None], query.dtype
        )

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the mask, including the window, or `None` if only `causal` applies."""
        mask = self.mask.mask if isinstance(self.mask, Segments) else self.mask
        if not self.is_limited(keys):
            return mask
        if mask is None:
            return self.visible_keys(queries, keys, device)[None, None]
        assert not mask.is_floating_point(), "windows are not supported for T5"
        return mask & self._replace(causal=False).visible_keys(queries, keys, device)


def add_slopes(mask: Tensor, slopes: Tensor, distances: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask with ALiBi biases (Press et al., 2021), to be added to the scores.

    Args:
        mask: A mask, bool [b or 1, 1, q or 1, k], True where a query may attend.
        slopes: The slope of each head, [n].
        distances: The position of the key minus the position of the query, [..., q, k].
        dtype: The dtype of the result.

    Returns:
        The biases [b or 1, n, q, k], with the lowest finite value where the mask is False.
    """
    biases = (slopes[:, None, None] * distances.unsqueeze(-3)).to(dtype)
    return biases.masked_fill(~mask, torch.finfo(dtype).min)


AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""An implementation of the attention core.

It takes queries [s, b, n, d], keys and values [s, b, g, d], and the options, and returns the result
[s, b, n * d].
"""


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen implementation of the attention core.

    Attributes:
        name: The name of the implementation.
        reason: Why it was chosen, for the start-up panel.
        function: The implementation.
    """

    name: str
    reason: str
    function: AttentionFunction


def choose_attention(
    model: ModelConfig, precision: PrecisionConfig, device: torch.device
) -> AttentionChoice:
    """Choose the implementation of the attention core. Call this once, when a model is built.

    Args:
        model: The resolved network flags.
        precision: The number formats.
        device: The device on which the model runs.
    """
    if not model.masked_softmax_fusion and not model.use_flash_attn:
        by_layer = precision.apply_query_key_layer_scaling
        function = partial(
            attention_reference,
            scale_by_layer=by_layer,
            softmax_in_fp32=by_layer or precision.attention_softmax_in_fp32,
        )
        return AttentionChoice("plain", "--no-masked-softmax-fusion", function)
    reason_for_scores = _needs_scores(model, precision, device)
    if reason_for_scores:
        return AttentionChoice("plain", reason_for_scores, attention_reference)
    name, reason, fused = "fused", "scaled_dot_product_attention on CPU", fused_attention
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    fallbacks = f"first of {'' if is_deterministic else 'cuDNN, '}flash, efficient that fits"
    if model.use_flash_attn:
        assert Device(device).is_gpu, "a rule refuses a CPU"
        package = find_flash_package(device)
        name, reason = "flash", f"--use-flash-attn: {fallbacks}"
        if package is not None:
            reason = f"--use-flash-attn: FlashAttention {package.release} where it fits"
        fused = partial(flash_attention, package=package)
    elif Device(device).is_gpu:
        reason, fused = fallbacks, gpu_attention
    if model.softmax_type != "vanilla":
        reason = f"the flash kernel, with its result scaled for --softmax-type {model.softmax_type}"
    if model.position_embedding_type == "alibi":
        kernel = "PyTorch's efficient kernel" if Device(device).is_gpu else reason
        reason = f"{kernel} with a bias for every score: --position-embedding-type alibi"
    return AttentionChoice(name, reason, fused)


def _needs_scores(model: ModelConfig, precision: PrecisionConfig, device: torch.device) -> str:
    """Return why no fused kernel supports the flags, or "" if one does."""
    if model.attn_logit_softcapping is not None:
        return f"--attn-logit-softcapping {model.attn_logit_softcapping:g}: no kernel supports it"
    if model.softmax_type == "vanilla":
        return ""
    if model.position_embedding_type == "alibi":
        return f"--softmax-type {model.softmax_type}: no kernel with sinks adds biases"
    problem = flash_problem(model.kv_channels, precision.weight_dtype, device)
    return problem and f"--softmax-type {model.softmax_type}: {problem}"


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    scale_by_layer: bool = False,
    softmax_in_fp32: bool = True,
) -> Tensor:
    """Compute attention directly from its formula, with all scores in memory.

    Args:
        query: The queries [s, b, n, d].
        key: The keys [keys, b, g, d].
        value: The values [keys, b, g, d].
        options: The attention options.
        scale_by_layer: Whether to divide scores by the layer number before they are rounded to 16
            bits, and then to multiply them by this number in fp32.
        softmax_in_fp32: Whether to compute the softmax in fp32 instead of the dtype of the scores.

    Returns:
        The result [s, b, n * d].
    """
    causal, dropout, scale = options.causal, options.dropout, options.scale
    mask = options.mask_of(query, key)
    layer = options.layer_number if scale_by_layer else 1
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, n or g, s, d]
    key, value = _expand_groups(query, key, value)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # The factor is applied before the scores are rounded to the dtype of the inputs. Because beta
    # is 0, the first argument is ignored.
    scores = torch.baddbmm(
        query.new_zeros(1),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        beta=0,
        alpha=factor / layer,
    ).unflatten(0, query.shape[:2])  # [b, n, s, s]
    if softmax_in_fp32:
        scores = scores.float()
    if options.softcap is not None:
        scores = torch.tanh(scores * (layer / options.softcap)) * (options.softcap / layer)
    if mask is not None and mask.is_floating_point():
        scores, mask, causal = scores + mask / layer, None, False
    weights = masked_softmax(
        scores, mask, causal=causal, factor=layer, dtype=value.dtype, sinks=options.sinks
    )
    weights = F.dropout(weights, dropout)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    factor: float,
    dtype: torch.dtype,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(factor * scores) over keys, computed in the dtype of the scores.

    Args:
        scores: The scores [b, n, s, keys].
        mask: A mask, bool [b or 1, 1, s or 1, keys], True where a query may attend, which replaces
            `causal`; or `None`.
        causal: Whether, without a mask, query i sees only keys up to i + keys - s.
        factor: The factor applied to the scores.
        dtype: The dtype of the result.
        sinks: A logit for each head, [n], that is included in the softmax but not in the result
            (`AttentionOptions`); or `None`.

    Returns:
        The weights [b, n, s, keys]. The weights of a query that sees no key are all equal without
        sinks, and zero with sinks.
    """
    scores = scores * factor
    if mask is None and causal:
        queries, keys = scores.shape[-2:]
        all_pairs = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        mask = all_pairs.tril(keys - queries)
    if mask is not None:
        scores = scores.masked_fill(~mask, MASKED)
    if sinks is None:
        return scores.softmax(dim=-1).to(dtype)
    sink_column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink_column), dim=-1).softmax(dim=-1)[..., :-1].to(dtype)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention as an `AttentionFunction` with PyTorch's fused attention.

    Its scores are fp32, so scaling by layer is not needed. It supports neither sinks nor `softcap`;
    with these, the reference runs.
    """
    if options.softcap is not None or options.sinks is not None:
        return attention_reference(query, key, value, options)
    mask = options.mask_of(query, key)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    # Kernels that support a mask or fp32 do not support grouped queries. Copying keys costs little.
    shares_heads = mask is None and query.dtype != torch.float32
    if not shares_heads:
        key, value = _expand_groups(query, key, value)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=options.causal and mask is None,
        scale=options.scale,
        enable_gqa=shares_heads and key.shape[1] != query.shape[1],
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    allows_math: bool = True,
    package: FlashPackage | None = None,
) -> Tensor:
    """Compute attention on a GPU with the fastest fused kernel that supports the arguments.

    Args:
        query: The queries [s, b, n, d].
        key: The keys [keys, b, g, d].
        value: The values [keys, b, g, d].
        options: The attention options.
        allows_math: Whether PyTorch's kernel that keeps all scores in memory may run. The reference
            does so too, but always runs for `softcap`, and for sinks that the flash kernel does not
            support.
        package: The flash-attn-4 package, which runs if it supports the arguments; or `None`.

    Returns:
        The result [s, b, n * d].

    Raises:
        RuntimeError: No kernel that may run supports the arguments.
    """
    mask = options.mask
    if package is not None and package.supports(query, options):
        return package(query, key, value, options)
    problem = flash_problem(query.shape[-1], query.dtype, query.device)
    has_bias = options.slopes is not None
    has_bias |= isinstance(mask, Tensor) and mask.is_floating_point()
    if not (problem or has_bias or options.softcap is not None or isinstance(mask, Tensor)):
        is_special = options.sinks is not None or options.is_limited(len(key))
        if is_special or mask is not None:
            return _flash_kernel(query, key, value, options)
    kernels = _BIAS_KERNELS if has_bias else _GPU_KERNELS
    with sdpa_kernel(kernels if allows_math else kernels[:-1], set_priority=True):
        return fused_attention(query, key, value, options)


flash_attention = partial(gpu_attention, allows_math=False)


def flash_problem(head_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return why PyTorch's flash kernel cannot run, or "" if it can."""
    if not Device(device).has_flash:
        return f"no flash kernel on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "flash kernels compute in 16 bits"
    return flash_head_problem(head_size)


class _FlashCall(NamedTuple):
    """The arguments of a call to PyTorch's flash kernel, except queries, keys and values.

    PyTorch's public interfaces to this kernel lack windows (`scaled_dot_product_attention`) or
    dropout (`torch.nn.attention.varlen`), and have no gradient for sinks.

    Attributes:
        segments: The ends of the query and key segments, both `None` for whole samples, and the
            maximum lengths of the query and key segments.
        dropout: The probability of dropping an attention weight.
        causal: Whether a query attends only to its own and earlier tokens.
        options: The scale and the window, if any, by the kernel's argument names.
    """

    segments: tuple[Tensor | None, Tensor | None, int, int]
    dropout: float
    causal: bool
    options: dict[str, Any]

    def forward(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Return the result, the log-sum-exp of each query, and the seed and offset of dropout."""
        settings, debug = (self.dropout, self.causal), False
        results: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
            *heads, *self.segments, *settings, debug, **self.options
        )
        return results[:4]

    def backward(self, grad: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value.

        Args:
            grad: The gradient of the result.
            saved: Query, key and value, and the results of `forward`.
        """
        *tensors, seed, offset = saved
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(grad, *tensors, *self.segments, self.dropout, self.causal, seed, offset),
            **self.options,
        )
        return gradients


class _FlashWithSinks(torch.autograd.Function):
    """Attention with sinks, computed by scaling the result of the flash kernel.

    The kernel's backward pass recomputes the weights from the log-sum-exp. Given a log-sum-exp that
    includes the sinks, and the scaled result, it returns the gradients of attention with sinks.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, call: _FlashCall
    ) -> Tensor:
        out, logsumexp, *rng_state = call.forward(query, key, value)
        share, logsumexp = include_sinks(logsumexp, sinks)
        out = (out * _by_token(share)).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp, *rng_state, sinks)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        out, logsumexp = saved[3:5]
        rows = (grad.float() * out.float()).sum(-1).transpose(-1, -2)  # like the log-sum-exp
        of_heads = ctx.call.backward(grad.contiguous(), saved)
        return (*of_heads, sink_gradient(rows, logsumexp, sinks), None)


def include_sinks(logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor by which sinks reduce each query's result.

    Args:
        logsumexp: The log-sum-exp of each query's scores, [..., n, s].
        sinks: The logit of each head, [n].

    Returns:
        The factor, and the log-sum-exp including the sink, both [..., n, s].
    """
    logits = sinks.to(logsumexp.dtype).unsqueeze(-1)
    return (logsumexp - logits).sigmoid(), logsumexp.logaddexp(logits)


def sink_gradient(rows: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks' logits, [n].

    The value of a sink is zero, so the gradient of its logit is -weight * sum(grad * out).

    Args:
        rows: The sum of grad * out over the channels of each query, [..., n, s].
        logsumexp: The log-sum-exp of each query, including the sink, [..., n, s].
        sinks: The logit of each head, [n].
    """
    weights = (sinks.to(logsumexp.dtype).unsqueeze(-1) - logsumexp).exp()
    gradient = -(weights * rows).sum(-1)
    return (gradient if gradient.dim() == 1 else gradient.sum(0)).to(sinks.dtype)


def _by_token(rows: Tensor) -> Tensor:
    """Reshape one value per query, [..., n, s], to a factor for the results, [..., s, n, 1]."""
    return rows.transpose(-1, -2).unsqueeze(-1)


def _flash_kernel(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention with the flash kernel, skipping keys outside a document or window."""
    (length, samples), segments = query.shape[:2], options.mask
    heads = [x.transpose(0, 1) for x in (query, key, value)]  # [b, s, n or g, d]
    kernel_options: dict[str, Any] = {"scale": options.scale}
    if options.window is not None:
        kernel_options["window_size_left"] = options.window
    call = _FlashCall(
        (None, None, length, len(key)), options.dropout, options.causal, kernel_options
    )
    if isinstance(segments, Segments):
        ends, longest = segments.ends, segments.longest or length
        heads = [x.flatten(0, 1) for x in heads]
        call = call._replace(segments=(ends, ends, longest, longest), causal=segments.causal)
    if options.sinks is None:
        out = call.forward(*heads)[0]
    else:
        out = _FlashWithSinks.apply(*heads, options.sinks, call)
    if isinstance(segments, Segments):
        out = out.unflatten(0, (samples, length))
    return out.transpose(0, 1).flatten(2)  # [s, b, n d]


def _expand_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads [b, g, s, d] for the query heads that share them: [b, n, s, d]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


class FlashPackage(NamedTuple):
    """Attention from the package `flash-attn-4`.

    Attributes:
        function: The package's `flash_attn_func`.
        release: The package's version.
    """

    function: Callable[..., Any]
    release: str

    def supports(self, query: Tensor, options: AttentionOptions) -> bool:
        """Return whether the package supports the arguments and is fast for them.

        It requires 16 bits, a supported head size, a single sample, and no options except scale,
        `causal` and window.
        """
        return (
            query.dtype in (torch.float16, torch.bfloat16)
            and not flash_head_problem(query.shape[-1], largest=_LARGEST_FLASH_HEAD)
            and query.shape[1] == 1
            and options.dropout == 0
            and options.mask is None
            and options.softcap is None
            and options.sinks is None
            and options.slopes is None
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Compute attention as an `AttentionFunction`."""
        result = self.function(
            *(x.transpose(0, 1) for x in (query, key, value)),  # [b, s, n or g, d]
            causal=options.causal,
            softmax_scale=options.scale,
            **({} if options.window is None else {"window_size": (options.window, 0)}),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Some releases also return the log-sum-exp.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(0, 1).flatten(2)  # [s, b, n d]


def find_flash_package(device: torch.device) -> FlashPackage | None:
    """Return the package, or `None` if it is not installed or has no kernels for the device.

    With --deterministic-mode, the kernels must also be deterministic. If the package is installed
    but cannot be imported, log a warning and return `None`.
    """
    capability = Device(device).capability
    if capability < (9, 0):
        return None
    if capability >= _WITHOUT_DETERMINISM and torch.are_deterministic_algorithms_enabled():
        return None
    try:
        release = version(_FLASH_DISTRIBUTION)
    except PackageNotFoundError:
        return None
    try:
        return FlashPackage(import_module("flash_attn.cute").flash_attn_func, release)
    except (ImportError, AttributeError) as error:
        logger.warning(
            "--use-flash-attn: %s %s is not used: %s", _FLASH_DISTRIBUTION, release, error
        )
        return None
