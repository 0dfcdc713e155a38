"""Specs of parameters: which shard of the whole tensor each one holds, and how it is initialized.

A parameter's initial values, checkpoint entry and share of the gradient norm depend only on its
`ParameterSpec`, not on how the model is split.

Initial values are a function of the global index and are the same for every layout, device and
order: element i of the tensor called `name` is a pure function of (seed, name, i). A counter-based
generator, Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), turns
(key, i // 4) into four 32-bit words, and the words into values. A shard computes only the blocks
that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.parallel.quantized import PackedWeight
from megatron.parallel.random import derive_key


@dataclass(frozen=True)
class Init:
    """The distribution of a tensor's initial values.

    Attributes:
        kind: "normal", "uniform", "zeros" or "ones"; "log_uniform" for the logarithm of a uniform
            variable; "time_step" for a variable whose softplus is log-uniform.
        scale: The standard deviation of "normal"; the bound of "uniform" on both sides of 0; the
            lower bound of the uniform variable of "log_uniform", and of the softplus of
            "time_step".
        upper: The upper bound of the uniform variable of "log_uniform", and of the softplus of
            "time_step".
        rate: The factor applied to the learning rate of a tensor with this distribution (muP).
    """

    kind: str
    scale: float = 0.0
    upper: float = 0.0
    rate: float = 1.0


ZEROS = Init("zeros")
ONES = Init("ones")


@dataclass(frozen=True)
class Matrices:
    """The matrices [out, in] in a weight, for update rules that treat each matrix separately.

    Leading dimensions of the weight (experts, stacked projections) index matrices.

    Attributes:
        shares: The number of rows per group of each projection, if the rows of several projections
            are interleaved by group. Otherwise empty.
    """

    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class ParameterSpec:
    """The position of a parameter's shard in the whole tensor, and the properties of the tensor.

    Attributes:
        global_shape: The shape of the whole tensor.
        shape: The shape of this shard. The parameter may store the shard as a matrix, or store
            only some of its rows (ZeRO stage 3).
        offset: The index of the shard's first element in each dimension.
        init: How the whole tensor is initialized.
        split_dim: The dimension that is split over tensor ranks; `None` if every rank holds the
            whole tensor.
        partial_gradient: Whether every tensor rank holds the whole tensor but processes only a
            part of the sequence or some of the heads, so its gradient must be summed over the
            ranks.
        is_copy: Whether the original is on another pipeline stage (see `tied`).
        is_expert: Whether the tensor contains expert weights, which are replicated and split over
            different ranks than other weights (`Layout.expert`).
        is_vocabulary: Whether the tensor has a row for each vocabulary entry, like the word
            embeddings and the output layer. --decoupled-lr applies to these parameters.
        matrices: The matrices in the tensor, if a layer multiplies by them; `None` for vectors,
            embeddings and the output layer.
    """

    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    init: Init
    split_dim: int | None = None
    partial_gradient: bool = False
    is_copy: bool = False
    is_expert: bool = False
    is_vocabulary: bool = False
    matrices: Matrices | None = None


def spec_of(parameter: nn.Parameter) -> ParameterSpec:
    """Return the spec that `BuildContext.new_parameter` attached to the parameter."""
    spec: ParameterSpec = parameter.spec  # type: ignore[attr-defined]
    return spec


PHILOX_WORDS = 4  # values in one Philox block
CHUNK = 2**21  # elements generated at a time, so that temporaries stay small (about 100 MB)
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@torch.no_grad()
def initialize(named_parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Initialize every parameter in place according to its spec.

    Args:
        named_parameters: Pairs of a global name and a parameter made by
            `BuildContext.new_parameter`.
        seed: The run's seed.
    """
    for name, parameter in named_parameters:
        initialize_part(name, parameter, spec_of(parameter), seed)


@torch.no_grad()
def initialize_part(name: str, tensor: Tensor, spec: ParameterSpec, seed: int) -> None:
    """Fill `tensor` with its initial values.

    Args:
        name: The global name of the parameter.
        tensor: This process's shard of the parameter, which may be packed.
        spec: The position of the shard in the whole tensor, and the distribution of its values.
        seed: The run's seed.
    """
    key = derive_key(seed, name)
    if isinstance(tensor, PackedWeight):
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        fill(values, spec, key)
        tensor.copy_(values)
    else:
        fill(tensor, spec, key)


def fill(tensor: Tensor, spec: ParameterSpec, key: tuple[int, int]) -> None:
    """Fill `tensor` with its initial values.

    Args:
        tensor: This process's shard of the whole tensor.
        spec: The position of the shard in the whole tensor, and the distribution of its values.
        key: Two 32-bit words that identify the whole tensor (`derive_key`).
    """
    constants = {"zeros": 0, "ones": 1}
    if spec.init.kind in constants:
        tensor.fill_(constants[spec.init.kind])
        return
    runs, length = _runs(tuple(tensor.shape), spec)
    target = tensor.view(runs.numel(), length)
    runs = runs.to(tensor.device)
    for rows, columns in _chunks(runs.numel(), length):
        starts = runs[rows] + columns.start
        count = columns.stop - columns.start
        target[rows, columns] = _values(starts, count, spec.init, key).to(tensor.dtype)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return the four random words that Philox4x32-10 computes from a counter and a key.

    Words are int64 tensors with values from 0 to 2**32 - 1.

    Args:
        counter: Four words of the same shape, least significant first.
        key: Two 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps to 64 bits and is read as signed. After masking, both words are correct.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (first >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = second.bitwise_and_(_MASK), first.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return [c0, c1, c2, c3]


def _runs(shape: tuple[int, ...], spec: ParameterSpec) -> tuple[Tensor, int]:
    """Return where the shard's contiguous runs start in the whole tensor, and their length."""
    dims, length = len(shape), 1
    while dims:  # merge trailing dimensions, up to the first that is split
        dims -= 1
        length *= shape[dims]
        if shape[dims] != spec.global_shape[dims]:
            break
    stride = [math.prod(spec.global_shape[dim + 1 :]) for dim in range(len(shape))]
    starts = torch.tensor([sum(o * s for o, s in zip(spec.offset, stride, strict=True))])
    for dim in range(dims):
        starts = (starts[:, None] + torch.arange(shape[dim]) * stride[dim]).flatten()
    return starts, length


def _chunks(runs: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield rectangles of at most CHUNK elements that cover `runs` rows of `length` columns."""
    height, width = max(1, CHUNK // length), min(CHUNK, length)
    for row in range(0, runs, height):
        for column in range(0, length, width):
            yield slice(row, min(runs, row + height)), slice(column, min(length, column + width))


def _values(starts: Tensor, count: int, init: Init, key: tuple[int, int]) -> Tensor:
    """Return elements starts[r] to starts[r] + count - 1 for every r: float64 [r, count]."""
    phase = starts % PHILOX_WORDS
    blocks = (int(phase.max()) + count + PHILOX_WORDS - 1) // PHILOX_WORDS
    index = (starts // PHILOX_WORDS)[:, None] + torch.arange(blocks, device=starts.device)
    zero = torch.zeros_like(index)
    words = philox((index & _MASK, index >> 32, zero, zero), key)
    values = torch.stack(_transform(words, init), dim=-1).flatten(1)
    if not phase.any():
        return values[:, :count]
    return values.gather(1, phase[:, None] + torch.arange(count, device=starts.device))


def _transform(words: list[Tensor], init: Init) -> list[Tensor]:
    """Transform four words of random bits into four values of the distribution, in float64."""
    # Centers of 2**32 equal cells are never 0, so the logarithm below is finite.
    uniform = [(word.double() + 0.5).mul_(2.0**-32) for word in words]
    if init.kind == "uniform":
        return [u.mul_(2).sub_(1).mul_(init.scale) for u in uniform]
    if init.kind == "log_uniform":
        return [u.mul_(init.upper - init.scale).add_(init.scale).log_() for u in uniform]
    if init.kind == "time_step":
        spread = math.log(init.upper / init.scale)
        steps = [u.mul_(spread).exp_().mul_(init.scale) for u in uniform]
        return [step + step.neg().expm1_().neg_().log_() for step in steps]
    assert init.kind == "normal", init.kind
    normal: list[Tensor] = []
    for u, v in (uniform[:2], uniform[2:]):  # Box and Muller, 1958
        radius = u.log_().mul_(-2).sqrt_().mul_(init.scale)
        angle = v.mul_(2 * math.pi)
        normal += [radius * angle.cos(), radius * angle.sin()]
    return normal
