"""Kernels of the package flash-linear-attention for recurrent mixers on a GPU.

The package (https://github.com/fla-org/flash-linear-attention, distribution `fla-core`) has Triton
kernels for the gated delta rule, for Mamba-2's scan and for the causal convolution. The references
are `delta_rule.py`, and `scan` and `CausalConvolution` in `models`. Shapes are those of the
references: s sequence, b samples, g groups, r heads per group, m key heads, n value heads.

The package expects samples first and heads in one dimension, [b, s, heads, channels]. Mamba-2's
scan is the package's "simple gated linear attention", with C as queries, B as keys, time step times
input as values, and time step times rate as the logarithm of the decay.

The package separates documents by their ends, which it reads on the host. This module instead
decays the state at the first token of a document by exp(-64), about 1e-28. Shapes then do not
depend on the documents, and CUDA graphs can record the kernels.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import Device

_DISTRIBUTION = "fla-core"
_OLDEST_RELEASE = (0, 6)
_OLDEST_CAPABILITY = (8, 0)
_SIZES = 16  # head sizes must be multiples of this, the smallest tile of a matrix product
_LARGEST_KEY = 256
_SHORTEST = 64  # the minimum number of tokens; with fewer, the kernels would be tuned again
_RESET = -64.0  # the logarithm of the decay at the start of a document
_HALF = (torch.float16, torch.bfloat16)
# From the first of these releases until the second, Triton computes wrong gradients on Hopper in a
# kernel that most of the package's backward passes share. The package then refuses to run the
# kernel (https://github.com/fla-org/flash-linear-attention/issues/640).
_BROKEN_TRITON, _HOPPER = ((3, 4), (3, 7, 1)), 9

_Function = Callable[..., Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecurrenceKernels:
    """The package's functions, with the interfaces of the references.

    Attributes:
        simple_gla: `chunk_simple_gla`, or another function with its interface.
        recurrent_simple_gla: `fused_recurrent_simple_gla`.
        gated_delta_rule: `chunk_gated_delta_rule`, or another function with its interface.
        recurrent_gated_delta_rule: `fused_recurrent_gated_delta_rule`.
        causal_conv1d: `causal_conv1d`.
        rms_norm: `rmsnorm_fn`, which also gates.
    """

    simple_gla: _Function
    recurrent_simple_gla: _Function
    gated_delta_rule: _Function
    recurrent_gated_delta_rule: _Function
    causal_conv1d: _Function
    rms_norm: _Function

    @staticmethod
    def supports(projected: Tensor, states: tuple[Tensor, ...] | None) -> bool:
        """Return whether to run the kernels for these tokens, instead of the references.

        Compilers trace the references, because the package's functions break their graphs.

        Args:
            projected: The tokens after the mixer's input projection, [s, b, ...].
            states: The states before the first token; `None` means zeros.
        """
        if projected.dtype not in _HALF or torch.compiler.is_compiling():
            return False
        return len(projected) >= _SHORTEST or (len(projected) == 1 and states is not None)

    def scan(
        self,
        x: Tensor,
        steps: Tensor,
        rates: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run Mamba-2's scan over whole sequences, as `models.mamba.scan` does, in 16 bits.

        Args:
            x: The inputs, [s, b, g, r, p].
            steps: The time steps, fp32 [s, b, g, r].
            rates: The negative decay rates, fp32 [g, r].
            b: The vectors B of each token, [s, b, g, n].
            c: The vectors C of each token, [s, b, g, n].
            state: The states before the first token, fp32 [b, g, r, p, n]; `None` means zeros.
            documents: The index of each token's document, [s, b]; `None` means that each sample is
                a single document.

        Returns:
            The outputs [s, b, g, r, p] in the dtype of x, and the states after the last token, fp32
            [b, g, r, p, n].
        """
        groups, heads = rates.shape
        before = None if state is None else state.flatten(1, 2).mT.contiguous()
        query, key, value, decay = _scan_inputs(x, steps, rates, b, c, documents)
        out, after = self.simple_gla(
            *(query, key, value),
            g=decay,
            scale=1.0,
            initial_state=before,
            output_final_state=True,
        )
        out = out.unflatten(2, (groups, heads)).transpose(0, 1)
        return out, after.mT.unflatten(1, (groups, heads))

    def step(
        self, x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Process a single token of each sequence, as `models.mamba.step` does, in fp32.

        Args:
            x: The inputs, [1, b, g, r, p].
            steps: The time steps, fp32 [1, b, g, r].
            rates: The negative decay rates, fp32 [g, r].
            b: The vectors B, [1, b, g, n].
            c: The vectors C, [1, b, g, n].
            state: The states before the token, [b, g, r, p, n].

        Returns:
            The outputs [1, b, g, r, p] and the states after the token, [b, g, r, p, n].
        """
        query, key, value, decay = _scan_inputs(x, steps, rates, b, c, None)
        out, after = self.recurrent_simple_gla(
            *(query, key, value),
            g=decay,
            scale=1.0,
            initial_state=state.flatten(1, 2),
            output_final_state=True,
            state_v_first=True,  # [p, n]
        )
        return out.unflatten(2, rates.shape).transpose(0, 1), after.unflatten(1, rates.shape)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        rate: Tensor,
        *,
        documents: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply the gated delta rule to sequences, as `chunked_delta_rule` does, in 16 bits.

        Args:
            query: The queries [s, b, m, e], before normalization.
            key: The keys [s, b, m, e], before normalization.
            value: The values [s, b, n, d].
            decay: The logarithm of each token's decay, fp32 [s, b, n].
            rate: The rate of each token, 0 to 1, [s, b, n].
            documents: The index of each token's document, [s, b]; `None` means that each sample is
                a single document.
            state: The states before the first token, fp32 [b, n, e, d]; `None` means zeros.

        Returns:
            The outputs [s, b, n, d] in the dtype of the values, and the states after the last
            token, fp32 [b, n, e, d].
        """
        decay = _reset(decay, documents)
        query, key, value, decay, rate = (
            part.transpose(0, 1) for part in (query, key, value, decay, rate)
        )
        out, after = self.gated_delta_rule(
            *(query, key, value),
            g=decay,
            beta=rate,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out.transpose(0, 1), after

    def delta_rule_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        rate: Tensor,
        *,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Apply the gated delta rule to one token of each sequence, as `delta_rule_step` does.

        Args:
            query: The queries [1, b, m, e], before normalization.
            key: The keys [1, b, m, e], before normalization.
            value: The values [1, b, n, d].
            decay: The logarithm of the decay, fp32 [1, b, n].
            rate: The rate, 0 to 1, [1, b, n].
            state: The states before the token, fp32 [b, n, e, d].

        Returns:
            The outputs [1, b, n, d] in the dtype of the values, and the states after the token,
            fp32 [b, n, e, d].
        """
        query, key, value, decay, rate = (
            part.transpose(0, 1) for part in (query, key, value, decay, rate)
        )
        out, after = self.recurrent_gated_delta_rule(
            *(query, key, value),
            g=decay,  # the next arguments are decays by channel
            beta=rate,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out.transpose(0, 1), after

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Convolve each channel over the latest k tokens and apply SiLU (see `CausalConvolution`).

        Args:
            x: The input [s, b, c], with at least k - 1 tokens.
            weight: The weight [c, k], with the coefficient of the latest token last.
            bias: The bias [c], or `None`.
            state: The inputs of the tokens before x, [b, k - 1, c]; `None` means zeros.

        Returns:
            The results [s, b, c] and the state after x, [b, k - 1, c], both in the dtype of x.
        """
        before = weight.shape[1] - 1
        # The package keeps the last k inputs, and ignores the first of these.
        earlier = None if state is None else F.pad(state.transpose(1, 2).to(x.dtype), (1, 0))
        out, _ = self.causal_conv1d(
            x.transpose(0, 1), weight, bias, initial_state=earlier, activation="silu"
        )
        return out.transpose(0, 1), x[len(x) - before :].transpose(0, 1)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool
    ) -> Tensor:
        """Normalize rows (RMSNorm) and multiply them by SiLU(gate), in fp32.

        Args:
            x: The rows [s, b, n, c].
            gate: The gate of each element, [s, b, n, c].
            weight: The weight of the normalization: [c], or [n, c] if the rows of a token have
                different weights.
            epsilon: The number added to the mean square.
            gate_first: Whether rows are multiplied by SiLU(gate) before they are normalized.

        Returns:
            The result [s, b, n, c] in the dtype of x.
        """
        shape, size = x.shape, x.shape[-1]
        if weight.dim() == 2:
            x, gate, weight = x.flatten(2), gate.flatten(2), weight.flatten()
        out: Tensor = self.rms_norm(
            x,
            weight,
            None,
            z=gate,
            eps=epsilon,
            group_size=size,
            norm_before_gate=not gate_first,
        )
        return out.view(shape)


def _scan_inputs(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and decays: [b, s, heads, n or p], and fp32 [b, s, heads]."""
    query, key = (part.unsqueeze(3).expand(*x.shape[:4], -1) for part in (c, b))
    value = (x * steps.unsqueeze(-1)).to(x.dtype)
    decay = _reset(steps * rates, documents)
    query, key, value, decay = (
        part.transpose(0, 1).flatten(2, 3) for part in (query, key, value, decay)
    )
    return query, key, value, decay


def _reset(decay: Tensor, documents: Tensor | None) -> Tensor:
    """Return decays [s, b, ...] that clear the state at the start of each later document."""
    if documents is None:
        return decay
    begins = F.pad(documents[1:] != documents[:-1], (0, 0, 1, 0))
    return decay.masked_fill(begins.view(*begins.shape, *[1] * (decay.dim() - 2)), _RESET)


@dataclass(frozen=True)
class RecurrenceChoice:
    """The chosen implementation of recurrent mixers, and the reason for the choice.

    Attributes:
        name: The name of the implementation.
        reason: Why it was chosen, for the start-up panel.
        kernels: The package's kernels; `None` if the references run.
    """

    name: str = "PyTorch operations"
    reason: str = "fla-core has no kernels for a CPU"
    kernels: RecurrenceKernels | None = None


def choose_recurrence(
    model: ModelConfig, precision: PrecisionConfig, device: torch.device
) -> RecurrenceChoice:
    """Choose the implementation of recurrent mixers. Call this once, when a model is built.

    Args:
        model: The resolved network flags.
        precision: The number formats.
        device: The device on which the model runs.
    """
    if not model.has_states:
        return RecurrenceChoice(reason="the model has no recurrent layers")
    choice = find_recurrence(device)
    problem = _unsupported_sizes(model)
    if precision.weight_dtype not in _HALF:
        problem = f"{_DISTRIBUTION} rounds the operands of fp32 products to TF32"
    return RecurrenceChoice(reason=problem) if choice.kernels is not None and problem else choice


def find_recurrence(device: torch.device) -> RecurrenceChoice:
    """Return the package's kernels, or the references if the package cannot be used.

    If the package is installed but cannot be imported, log a warning.
    """
    capability, reason = Device(device).capability, ""
    try:
        release = version(_DISTRIBUTION)
    except PackageNotFoundError:
        release, reason = "", "faster with fla-core: pip install fla-core"
    if not Device(device).is_gpu:
        return RecurrenceChoice()
    if release and _version_numbers(release) < _OLDEST_RELEASE:
        oldest = ".".join(map(str, _OLDEST_RELEASE))
        reason = f"{_DISTRIBUTION} {release} is older than {oldest}: upgrade it"
    elif capability < _OLDEST_CAPABILITY:
        reason = f"{_DISTRIBUTION} needs a GPU with compute capability 8.0 or newer"
    elif torch.are_deterministic_algorithms_enabled():
        reason = f"--deterministic-mode: {_DISTRIBUTION} chooses its kernels by measuring them"
    if reason:
        return RecurrenceChoice(reason=reason)
    try:
        kernels, functions = _load(capability)
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.warning("%s %s is not used: %s", _DISTRIBUTION, release, error)
        return RecurrenceChoice(reason=f"{_DISTRIBUTION} {release} cannot be imported: {error}")
    return RecurrenceChoice(f"{_DISTRIBUTION} {release}", functions, kernels)


def _unsupported_sizes(model: ModelConfig) -> str:
    """Return why the package does not support the sizes of a mixer's heads, or "" if it does."""
    keys, values = {}, {}
    if model.has_mamba:
        keys["--mamba-state-dim"] = model.mamba_state_dim
        values["--mamba-head-dim"] = model.mamba_head_dim
    if model.experimental_attention_variant is not None:
        keys["--linear-key-head-dim"] = model.linear_key_head_dim
        values["--linear-value-head-dim"] = model.linear_value_head_dim
    for flag, size in (keys | values).items():
        if size % _SIZES or (flag in keys and size > _LARGEST_KEY):
            most = f" up to {_LARGEST_KEY}" if flag in keys else ""
            return f"{flag} {size}: {_DISTRIBUTION} is used for multiples of {_SIZES}{most}"
    return ""


def _load(capability: tuple[int, int]) -> tuple[RecurrenceKernels, str]:
    """Import the package. Return its functions, and a description of them for the start-up panel.

    Raises:
        ImportError: The package, or Triton, cannot be imported.
        AttributeError: The package lacks a function.
    """
    import fla.ops.gated_delta_rule as gated
    import fla.ops.simple_gla as simple
    import triton
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.layernorm_gated import rmsnorm_fn

    scan, rule = simple.chunk_simple_gla, gated.chunk_gated_delta_rule
    reason = "chunk_simple_gla, chunk_gated_delta_rule"
    first_broken, first_fixed = _BROKEN_TRITON
    if (
        capability[0] == _HOPPER
        and first_broken <= _version_numbers(triton.__version__) < first_fixed
    ):
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda

        # `fused_chunk_simple_gla` is no substitute: the errors of its decays' gradients add up over
        # a sequence. After 4096 tokens they were 67% of the rates' gradient; with chunk_gla, 0.4%.
        scan, rule = _by_channel(chunk_gla), _by_channel(chunk_kda)
        fixed = ".".join(map(str, first_fixed))
        reason = f"chunk_gla, chunk_kda: the usual kernels need Triton {fixed} on this GPU, not "
        reason += triton.__version__
    kernels = RecurrenceKernels(
        simple_gla=scan,
        recurrent_simple_gla=simple.fused_recurrent_simple_gla,
        gated_delta_rule=rule,
        recurrent_gated_delta_rule=gated.fused_recurrent_gated_delta_rule,
        causal_conv1d=causal_conv1d,
        rms_norm=rmsnorm_fn,
    )
    return kernels, f"{reason}; tuned at first use, which takes minutes"


def _by_channel(function: _Function) -> _Function:
    """Return a function with a decay for each head, given one with a decay for each key channel."""

    def by_head(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, **options: Any) -> Any:
        return function(q, k, v, g=g.unsqueeze(-1).expand(*g.shape, q.shape[-1]), **options)

    return by_head


def _version_numbers(release: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, such as (3, 7, 1)."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
