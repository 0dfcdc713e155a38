"""Rotary position embedding (Su et al., 2021), with channels paired by halves.

The first r of a head's d channels are rotated. Channels i and i + r/2 form a plane that is rotated
by position / base^(2i/r) radians. The other channels do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.kernels.amax import FusedAmax, zero_for
from megatron.kernels.library import (
    DTYPE_CODES,
    VECTOR_BYTES,
    Kernel,
    KernelLibrary,
    aligned,
    operator,
    supports,
)
from megatron.kernels.plans import (
    KernelLaunch,
    PlanError,
    Pointer,
    Strided,
    divide_up,
    vector_size,
)
from megatron.kernels.sources import FLOATS, constant, instance

_THREADS = 192  # the approximate number of threads of a block with several rows


class _SplitRotate(NamedTuple):
    """The arguments of a kernel that splits a fused projection into rotated heads, or the reverse.

    Without `key_value_heads` there are only queries, and without cosine and sine nothing is
    rotated. The backward pass writes the gradients of the heads, rotated back, to `fused`.
    """

    fused: Pointer  # [positions, batch, groups, per_group + key_value_heads, d]
    cosine: Pointer | None  # fp32 [positions, rotary]; the second half repeats the first
    sine: Pointer | None  # like cosine
    query: Strided  # [positions, batch, groups * per_group, d]
    key: Strided | None  # [positions, batch, groups, d]
    value: Strided | None  # like key
    amax: Pointer | None  # initially zero; raised to the largest magnitude of fused
    query_position: int  # strides
    query_sample: int
    query_head: int
    key_position: int
    key_sample: int
    key_head: int
    value_position: int
    value_sample: int
    value_head: int
    positions: int
    batch: int
    groups: int
    per_group: int
    key_value_heads: int  # 2 if there are keys and values, otherwise 0
    head_size: int
    rotary: int
    backward: int
    dtype: int

    def plan(self) -> list[KernelLaunch]:
        """Return the kernel launch."""
        name = FLOATS[self.dtype]
        max_threads = constant("rope.cu", "kMostThreads")
        pairs = self.head_size // (2 * vector_size(name))
        if not 1 <= pairs <= max_threads:
            raise PlanError(f"heads of {self.head_size} channels of type {name} are not supported")
        rows = self.positions * self.batch
        heads = self.groups * (self.per_group + self.key_value_heads)
        shares = divide_up(heads, constant("rope.cu", "kHeadsAtOnce"))
        lanes = min(max_threads // pairs, shares)
        rows_at_once = max(1, _THREADS // (pairs * lanes))
        sizes = (self.groups, self.per_group, self.key_value_heads, self.head_size, self.rotary)
        return [
            KernelLaunch(
                instance("split_rotate_kernel", name, bool(self.backward)),
                (divide_up(rows, rows_at_once), divide_up(shares, lanes)),
                (pairs, lanes * rows_at_once),
                (*self[:16], rows, self.batch, lanes, *sizes),  # tensors and strides first
            )
        ]


SPLIT_ROTATE = Kernel.of("split_rotate", _SplitRotate)
LARGEST_PAIRS = 256  # the maximum number of pairs of vectors per head, as in rope.cu
_FIRST_CONTEXT = 8192  # the length of Llama 3.1's original context, in tokens
_SLOWED_TURNS = 1.0  # frequencies with at most this many turns in the original context are divided


class Scaling(NamedTuple):
    """Frequencies for a longer context, as in Llama 3.1 (Grattafiori et al., 2024).

    Planes that turn often within the original context distinguish nearby positions and keep their
    frequency. The frequency of planes that turn at most once is divided, so that distant positions
    look like positions seen in training. Frequencies in between are interpolated.

    Attributes:
        factor: The divisor of the lowest frequencies, above 0.
        min_kept_turns: The minimum number of turns within the original context with which a plane
            keeps its frequency, at least 1.
    """

    factor: float
    min_kept_turns: float = 4.0

    def slow_down(self, frequency: Tensor) -> Tensor:
        """Return frequencies [r/2] in radians per token, the low ones divided by `factor`."""
        turns = _FIRST_CONTEXT * frequency / (2 * math.pi)
        if self.min_kept_turns == _SLOWED_TURNS:
            kept = (turns >= self.min_kept_turns).to(turns.dtype)
        else:
            kept = ((turns - _SLOWED_TURNS) / (self.min_kept_turns - _SLOWED_TURNS)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class Yarn(NamedTuple):
    """YaRN: frequencies for an extended context (Peng et al., 2023, arXiv:2309.00071).

    Attributes:
        factor: The extended context length divided by the training context length.
        original: The training context length in tokens.
        fast: The minimum number of turns within the training context with which a plane keeps its
            frequency.
        slow: The maximum number of turns with which a frequency is divided by the full `factor`.
        rounds: Whether the limits `fast` and `slow` are rounded to whole planes.
        concentration: The factor applied to cosines and sines, and therefore to queries and keys.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    rounds: bool = True
    concentration: float = 1.0

    def slow_down(self, frequency: Tensor, base: float) -> Tensor:
        """Return frequencies [r/2] in radians per token, the low ones divided by `factor`.

        Args:
            frequency: The frequencies base^(-2i/r), in radians per token.
            base: The base of the frequencies, above 1.
        """
        planes = len(frequency)

        def plane_of(turns: float) -> float:
            return planes * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)

        first, last = plane_of(self.fast), plane_of(self.slow)
        if self.rounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * planes - 1)
        last = last + 0.001 if last == first else last  # as in the paper's code
        index = torch.arange(planes, dtype=frequency.dtype, device=frequency.device)
        slowed = ((index - first) / (last - first)).clamp(0, 1)
        return frequency * (1 - slowed + slowed / self.factor)


class LongRope(NamedTuple):
    """LongRoPE: a divisor for each frequency (Ding et al., 2024, arXiv:2402.13753).

    Attributes:
        original: The training context length in tokens. Sequences of up to this length use the
            short divisors at all positions; longer sequences use the long divisors.
        short: The divisors for short sequences, [r/2].
        long: The divisors for long sequences, [r/2].
        concentration: The factor applied to cosines and sines, and therefore to queries and keys.
    """

    original: int
    short: tuple[float, ...]
    long: tuple[float, ...]
    concentration: float

    @property
    def both(self) -> Tensor:
        """The short and the long divisors, fp64 [2, r/2]."""
        return torch.tensor((self.short, self.long), dtype=torch.float64)


class DynamicNtk(NamedTuple):
    """Dynamic NTK: a base that grows with the length of the sequence (bloc97, emozilla, 2023).

    Attributes:
        factor: The growth of the base. For a sequence of l > `original` tokens, the base is
            multiplied by (1 + factor (l / original - 1))^(r / (r - 2)).
        original: The training context length in tokens. Sequences of up to this length keep the
            base.
    """

    factor: float
    original: int

    def rotation(
        self, positions: Tensor, length: int | Tensor, rotary_size: int, base: float
    ) -> Rotation:
        """Return the rotation of positions [s].

        Args:
            positions: The positions, int64 [s].
            length: The length of the sequence, or of each position's sequence, int64 [s].
            rotary_size: The number r of channels of a head that are rotated, above 2.
            base: The base of the frequencies in short sequences.
        """
        device, exact = positions.device, torch.float64
        if not isinstance(length, Tensor):
            length = torch.full((), length, device=device)
        longer = self.factor * (length.to(exact).clamp(min=self.original) / self.original - 1) + 1
        bases = base * longer ** (rotary_size / (rotary_size - 2))
        even = torch.arange(0, rotary_size, 2, dtype=exact, device=device)
        angle = positions.unsqueeze(-1) * bases.unsqueeze(-1) ** -(even / rotary_size)
        angle = torch.cat((angle, angle), dim=-1)[..., None, None, :]
        return angle.cos().float(), angle.sin().float()


Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [s, 1, 1, r]


def rotation_table(
    positions: int,
    rotary_size: int,
    *,
    base: float = 10000.0,
    interpolation: float | None = None,
    planes: int | None = None,
    scaling: Scaling | None = None,
    yarn: Yarn | None = None,
    long_rope: LongRope | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the cosines and sines of every position.

    Args:
        positions: The number of positions, counted from 0.
        rotary_size: The number r of channels of a head that are rotated, which must be even.
        base: The base of the frequencies.
        interpolation: The divisor of the positions, to extend the context (Chen et al., 2023);
            `None` means 1.
        planes: The number of planes that are rotated, those with the highest frequencies; `None`
            for all.
        scaling: Llama 3.1's changes to the frequencies, if any.
        yarn: YaRN's changes to the frequencies, if any.
        long_rope: LongRoPE's divisors of the frequencies, if any.
        device: The device of the table.

    Returns:
        The cosines and sines, fp32 [2, positions, r]. With `long_rope`, [2, 2 * positions, r]: the
        values for short sequences, and then those for long sequences.
    """
    assert rotary_size % 2 == 0, rotary_size
    even = torch.arange(0, rotary_size, 2, dtype=torch.float64, device=device)
    position = torch.arange(positions, dtype=torch.float64, device=device) / (interpolation or 1)
    frequency = base ** -(even / rotary_size)
    if planes is not None:
        frequency[planes:] = 0
    if scaling is not None:
        frequency = scaling.slow_down(frequency)
    if yarn is not None:
        frequency = yarn.slow_down(frequency, base)
    if long_rope is None:
        angle = torch.outer(position, frequency)
    else:
        frequencies = frequency / long_rope.both.to(frequency.device)  # [2, r/2]
        angle = (position[:, None] * frequencies[:, None]).flatten(0, 1)
    angle = angle.repeat(1, 2)
    table = torch.stack((angle.cos(), angle.sin()))
    scaled = yarn or long_rope
    return (table if scaled is None else table * scaled.concentration).float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys by position.

    Args:
        x: The queries or keys [s, b, n, d].
        rotation: The cosines and sines, fp32 [s, 1, 1, r].

    Returns:
        The rotated heads [s, b, n, d], computed in fp32 and rounded to the dtype of x.
    """
    cosine, sine = rotation
    size = cosine.shape[-1]
    rotary, unrotated = x[..., :size], x[..., size:]
    first, second = rotary.chunk(2, dim=-1)
    rotated_half = torch.cat((-second, first), dim=-1)
    rotated = (rotary * cosine + rotated_half * sine).to(x.dtype)
    return rotated if unrotated.shape[-1] == 0 else torch.cat((rotated, unrotated), dim=-1)


Rotate = Callable[[Tensor, Rotation], Tensor]
"""An implementation of `rotate`."""


def choose_rotate(model: ModelConfig, library: KernelLibrary | None) -> Rotate:
    """Choose the kernel if there is a library and --no-rope-fusion is not given.

    Args:
        model: The resolved network flags.
        library: Compiled kernels.
    """
    if library is None or not model.apply_rope_fusion:
        return rotate
    return partial(fused_rotate, library)


SplitRotate = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""An implementation of `split_rotate`."""


def choose_split_rotate(model: ModelConfig, library: KernelLibrary | None) -> SplitRotate:
    """Choose the kernel if there is a library and --no-rope-fusion is not given.

    Args:
        model: The resolved network flags.
        library: Compiled kernels.
    """
    if library is None or not model.apply_rope_fusion:
        return split_rotate
    return partial(fused_split_rotate, library)


def split_rotate(
    qkv: Tensor,
    groups: int,
    head_size: int,
    rotation: Rotation | None,
    fused_amax: FusedAmax | None = None,
    *,
    contiguous: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection into heads and rotate queries and keys, in PyTorch.

    Args:
        qkv: The projection [s, b, (n + 2g) d], ordered by group: n/g query heads, a key head and a
            value head.
        groups: The number g of key-value heads.
        head_size: The number d of channels of a head.
        rotation: The cosines and sines, fp32 [s, 1, 1, r]; `None` for no rotation.
        fused_amax: Where to store the amax of the gradient of the projection. Only the kernel
            computes it.
        contiguous: Whether heads should be contiguous, because this makes the next operation
            faster. Only the kernel respects this.

    Returns:
        Queries [s, b, n, d], keys and values [s, b, g, d], which are views or rotated copies.
    """
    by_group = qkv.unflatten(2, (groups, -1, head_size))
    query = by_group[:, :, :, :-2].flatten(2, 3)
    key, value = by_group[..., -2, :], by_group[..., -1, :]
    if rotation is None:
        return query, key, value
    return rotate(query, rotation), rotate(key, rotation), value


def fused_split_rotate(
    library: KernelLibrary,
    qkv: Tensor,
    groups: int,
    head_size: int,
    rotation: Rotation | None,
    fused_amax: FusedAmax | None = None,
    *,
    contiguous: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `split_rotate`, with the same arguments and results, using one kernel.

    The kernel writes contiguous heads. The backward kernel gathers the gradients of the heads,
    which attention may return in any layout, into the gradient of the projection. Without rotation,
    heads are views of the projection if each query head has its own key and `contiguous` is False.
    PyTorch's operations handle arguments that the kernel does not support.
    """
    if not _fits(qkv, head_size, rotation or ()):
        return split_rotate(qkv, groups, head_size, rotation)
    cosine, sine = rotation or (None, None)
    inputs = (library, qkv, cosine, sine, groups, head_size)
    query, key, value = _apply(*inputs, fused_amax, contiguous)
    return query, key, value


def _fits(x: Tensor, head_size: int, rotation: Sequence[Tensor]) -> bool:
    """Return whether the kernel supports heads in `x` [s, ...] and the rotation."""
    pair = 2 * VECTOR_BYTES // x.element_size()
    fits = supports(x) and head_size % pair == 0 and head_size // pair <= LARGEST_PAIRS
    return fits and all(
        supports(angles)
        and angles.dtype == torch.float32
        and angles.is_contiguous()
        and angles.shape[-1] % pair == 0
        and angles.numel() == x.shape[0] * angles.shape[-1]  # one row per position, for all samples
        for angles in rotation
    )


def fused_rotate(library: KernelLibrary, x: Tensor, rotation: Rotation) -> Tensor:
    """Compute `rotate` with a kernel, or with PyTorch for unsupported arguments."""
    if not _fits(x, x.shape[-1], rotation):
        return rotate(x, rotation)
    result: Tensor = _rotate(library, x, *rotation, False)
    return result


@operator()
def rotate_heads(
    library: KernelLibrary, x: Tensor, cosine: Tensor, sine: Tensor, backward: bool
) -> Tensor:
    """Rotate heads with one kernel.

    Args:
        library: Compiled kernels.
        x: The heads [s, b, n, d].
        cosine: The cosines, fp32 [s, 1, 1, r].
        sine: The sines, fp32 [s, 1, 1, r].
        backward: Whether to rotate in the opposite direction, for gradients.

    Returns:
        The rotated heads, contiguous.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    s, b, n, head_size = x.shape
    fused, heads = (out, x) if backward else (x, out)
    library.launch(
        SPLIT_ROTATE,
        *(fused, cosine, sine, heads, None, None, None, *heads.stride()[:3], *(0,) * 6),
        *(s, b, 1, n, 0, head_size, cosine.shape[-1], int(backward), DTYPE_CODES[x.dtype]),
    )
    return out


@operator()
def split_rotate_forward(
    library: KernelLibrary,
    qkv: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    groups: int,
    head_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split and rotate with one kernel.

    Args:
        library: Compiled kernels.
        qkv: The fused projection [s, b, (n + 2g) d], as for `split_rotate`.
        cosine: The cosines, fp32 [s, 1, 1, r]; `None` for no rotation.
        sine: The sines, fp32 [s, 1, 1, r]; `None` for no rotation.
        groups: The number g of key-value heads.
        head_size: The number d of channels of a head.

    Returns:
        Queries [s, b, n, d], keys and values [s, b, g, d], contiguous.
    """
    qkv = qkv.contiguous()
    s, b, width = qkv.shape
    query = qkv.new_empty(s, b, width // head_size - 2 * groups, head_size)
    key, value = (qkv.new_empty(s, b, groups, head_size) for _ in range(2))
    _launch(library, qkv, (cosine, sine), (query, key, value), None, backward=False)
    return query, key, value


@operator()
def split_rotate_backward(
    library: KernelLibrary,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    fused_amax: FusedAmax | None = None,
) -> Tensor:
    """Compute the gradient of the fused projection.

    Args:
        library: Compiled kernels.
        grad_query: The gradient of the queries [s, b, n, d], in any layout.
        grad_key: The gradient of the keys [s, b, g, d], in any layout.
        grad_value: The gradient of the values [s, b, g, d], in any layout.
        cosine: The cosines, as for `split_rotate_forward`.
        sine: The sines, as for `split_rotate_forward`.
        fused_amax: Where to store the amax of the result.

    Returns:
        The gradient [s, b, (n + 2g) d].
    """
    # The kernel supports any strides, but channels must be contiguous and heads aligned.
    heads = [
        x
        if x.stride(-1) == 1
        and aligned(x)
        and all(x.stride(i) * x.element_size() % VECTOR_BYTES == 0 for i in range(3))
        else x.contiguous()
        for x in (grad_query, grad_key, grad_value)
    ]
    s, b, _, head_size = heads[0].shape
    grad = heads[0].new_empty(s, b, sum(x.shape[2] for x in heads) * head_size)
    amax = zero_for(grad, fused_amax)
    _launch(library, grad, (cosine, sine), heads, amax, backward=True)
    return grad


def _launch(
    library: KernelLibrary,
    fused: Tensor,
    rotation: Sequence[Tensor | None],
    heads: Sequence[Tensor],
    amax: Tensor | None,
    *,
    backward: bool,
) -> None:
    query, key, _ = heads
    cosine, sine = rotation
    strides = [x.stride(i) for x in heads for i in range(3)]
    s, b, groups, head_size = key.shape
    rotary = 0 if cosine is None else cosine.shape[-1]
    library.launch(
        SPLIT_ROTATE,
        *(fused, cosine, sine, *heads, amax, *strides, s, b, groups, query.shape[2] // groups),
        *(2, head_size, rotary, int(backward), DTYPE_CODES[fused.dtype]),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.library, _, cosine, sine, _, _, *optional = inputs
    ctx.fused_amax = optional[0] if optional else None
    ctx.save_for_backward(cosine, sine)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    grad = split_rotate_backward(ctx.library, *grads, *ctx.saved_tensors, fused_amax=ctx.fused_amax)
    return None, grad, *(None,) * 6


def _forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    qkv, cosine, _, groups, head_size, _, contiguous = inputs[1:]
    if cosine is None and not contiguous and qkv.shape[2] == 3 * groups * head_size:
        heads = split_rotate(qkv.detach(), groups, head_size, None)
    else:
        heads = split_rotate_forward.function(*inputs[:-2])
    _keep(ctx, inputs, heads)
    return heads


_apply = split_rotate_forward.differentiate(_differentiate, _keep, _forward)


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.library, _, cosine, sine, *_ = inputs
    ctx.save_for_backward(cosine, sine)


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad = rotate_heads(ctx.library, grad, *ctx.saved_tensors, True)
    return None, grad, None, None, None


_rotate = rotate_heads.differentiate(_rotate_back, _keep_angles)
