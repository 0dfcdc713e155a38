"""Measure the limits of this machine at a workload's shapes, and derive the highest possible speed.

Each operation runs for several seconds, because a GPU is slower at its power limit than when cold.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config import RunConfig
from megatron.device import Device
from megatron.models.arithmetic import count_parameters
from megatron.models.mixture_plan import MixturePlan
from megatron.models.plan import AttentionPlan, MLPPlan, ModelPlan
from megatron.models.plans import model_plan

_BURST_SECONDS = 0.2  # seconds of work to queue at a time
# Bytes per parameter and update: the gradient, the master weight and two moments are read; the last
# three and the 16-bit weight are written.
_OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2
_BACKWARD_OVER_FORWARD = 2.5  # in attention: five products instead of two


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device, each `None` if the device does not support the operation.

    Attributes:
        device: Name of the device.
        datasheet: Dense 16-bit peak, in FLOP/s.
        seconds: Duration of each measurement.
        products: FLOP/s of a layer's matrix products, for the output and both gradients.
        products_fp8: The same as `products`, in FP8.
        head: FLOP/s of the output head's matrix products.
        attention_forward: FLOP/s of causal attention, counting half of the score matrix.
        attention_backward: The same for the backward pass, counted as 2.5 forward passes.
        copy: Bytes/s of a copy on the device, counting bytes read and bytes written.
        layer_seconds: Time of one micro-batch through one layer, forward and backward.
        layer_seconds_fp8: The same in FP8.
        head_seconds: The same for the output head.
        attention_seconds: The same for the attention of one layer.
    """

    device: str
    datasheet: float | None
    seconds: float
    products: float
    products_fp8: float | None
    head: float
    attention_forward: float
    attention_backward: float
    copy: float
    layer_seconds: float
    layer_seconds_fp8: float | None
    head_seconds: float
    attention_seconds: float


def measure_ceilings(
    config: RunConfig, device: Device, vocabulary: int, *, seconds: float
) -> Ceilings:
    """Measure the ceilings at the shapes that one process of a run computes.

    Args:
        config: Configuration of the run.
        device: Device to measure.
        vocabulary: Padded vocabulary size.
        seconds: Duration of each measurement.
    """
    plan, tensor = model_plan(config.model, vocabulary), config.parallel.tensor_model_parallel_size
    tokens = config.training.micro_batch_size * config.data.seq_length
    tokens //= config.parallel.context_parallel_size
    layer, head = layer_products(plan, tensor), [(vocabulary // tensor, plan.hidden)]

    def time_work(work: Callable[[], object]) -> float:
        return time_sustained(work, device, seconds)

    layer_seconds = time_work(products_16bit(layer, tokens, device))
    head_seconds = time_work(products_16bit(head, tokens, device))
    fp8 = device.is_gpu and hasattr(torch, "_scaled_mm")
    layer_fp8 = time_work(products_fp8(layer, tokens, device)) if fp8 else None
    forward, backward = (
        time_work(work) for work in attention_passes(config, plan.attention, device)
    )
    samples, sequence = config.training.micro_batch_size, config.data.seq_length
    square = 2 * samples * sequence**2 * plan.attention.query / tensor
    flops = count_flops(layer, tokens)
    return Ceilings(
        device=device.name,
        datasheet=device.peak_flops,
        seconds=seconds,
        products=flops / layer_seconds,
        products_fp8=flops / layer_fp8 if layer_fp8 else None,
        head=count_flops(head, tokens) / head_seconds,
        attention_forward=square / forward,
        attention_backward=_BACKWARD_OVER_FORWARD * square / backward,
        copy=copy_rate(device, seconds),
        layer_seconds=layer_seconds,
        layer_seconds_fp8=layer_fp8,
        head_seconds=head_seconds,
        # Context-parallel processes share the scores of attention, however the sequence is split.
        attention_seconds=(forward + backward) / config.parallel.context_parallel_size,
    )


def shapes_of(config: RunConfig, vocabulary: int) -> dict[str, Any]:
    """Return the JSON values that determine a run's ceilings, except the number format."""
    return {
        "host": socket.gethostname(),  # GPUs with the same name may differ
        "sizes": _sizes(model_plan(config.model, vocabulary)),
        "vocabulary": vocabulary,
        "micro_batch": config.training.micro_batch_size,
        "sequence": config.data.seq_length,
        "tensor": config.parallel.tensor_model_parallel_size,
        "context": config.parallel.context_parallel_size,
    }


def rooflines(
    ceilings: Ceilings, config: RunConfig, gpus: int, vocabulary: int
) -> dict[str, float | None]:
    """Return the seconds per update from `roofline_step` for each number format."""
    return {
        f"roofline_step_{name}": roofline_step(ceilings, config, gpus, vocabulary, fp8=fp8)
        for name, fp8 in (("16bit", False), ("fp8", True))
    }


def layer_products(plan: ModelPlan, tensor: int) -> list[tuple[int, int]]:
    """Return the shapes (outputs, inputs) of the matrices of a layer on one of `tensor` ranks."""
    attention, mlp = plan.attention, _mlp(plan)
    return [
        (attention.qkv // tensor, plan.hidden),
        (plan.hidden, attention.query // tensor),
        (mlp.up // tensor, plan.hidden),
        (plan.hidden, mlp.inner // tensor),
    ]


def _mlp(plan: ModelPlan) -> MLPPlan:
    """Return the MLP of a layer. A mixture of experts counts as a dense MLP with the same work."""
    mlp = plan.layers[-1].mlp
    if isinstance(mlp, MixturePlan):
        return replace(mlp.expert, inner=mlp.expert.inner * mlp.router.chosen)
    assert isinstance(mlp, MLPPlan), "layers have another kind of MLP"
    return mlp


def _sizes(plan: ModelPlan) -> dict[str, int]:
    """Return the sizes of the network by the names used in measurement files."""
    attention, mlp = plan.attention, _mlp(plan)
    return {
        "layers": len(plan.layers),
        "hidden": plan.hidden,
        "ffn": mlp.inner,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_size": attention.head_size,
        "positions": plan.positions,
        "up_parts": 2 if mlp.gated else 1,
    }


def count_flops(matrices: list[tuple[int, int]], tokens: int) -> int:
    """Return the FLOPs of multiplying `tokens` tokens by the matrices, with both gradients."""
    return sum(6 * tokens * outputs * inputs for outputs, inputs in matrices)


def time_sustained(work: Callable[[], object], device: Device, seconds: float) -> float:
    """Return the mean seconds per call of `work`, repeated for about `seconds` after a warm-up."""
    for _ in range(2):
        work()
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    burst = max(1, int(_BURST_SECONDS / (time.perf_counter() - start)))
    calls, start = 0, time.perf_counter()
    while True:
        for _ in range(burst):
            work()
        device.synchronize()
        calls += burst
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / calls


def products_16bit(
    matrices: list[tuple[int, int]], tokens: int, device: Device
) -> Callable[[], None]:
    """Return a function that computes each matrix product and its two gradients in bfloat16."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device.torch_device)

    tensors = [(random(tokens, i), random(o, i), random(tokens, o)) for o, i in matrices]

    def work() -> None:
        for x, weight, grad in tensors:
            F.linear(x, weight)
            grad @ weight
            grad.t() @ x

    return work


def products_fp8(
    matrices: list[tuple[int, int]], tokens: int, device: Device
) -> Callable[[], None]:
    """Return a function that computes the products of `products_16bit` in float8 e4m3.

    The function uses tensorwise scales and fast accumulation, and includes no casts.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device.torch_device).to(torch.float8_e4m3fn)

    unit_scale = torch.ones((), device=device.torch_device)
    # (rows, inner, columns) of the output, input gradient and weight gradient. The second operand
    # is column-major, as the hardware requires.
    shapes = [
        shape for o, i in matrices for shape in ((tokens, i, o), (tokens, o, i), (o, tokens, i))
    ]
    operands = [(random(m, k), random(n, k).t()) for m, k, n in shapes]

    def work() -> None:
        for a, b in operands:
            torch._scaled_mm(
                a,
                b,
                scale_a=unit_scale,
                scale_b=unit_scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

    return work


def attention_passes(
    config: RunConfig, attention: AttentionPlan, device: Device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run causal attention forward and backward, with cuDNN on a GPU."""
    tensor = config.parallel.tensor_model_parallel_size
    batch, sequence = config.training.micro_batch_size, config.data.seq_length
    heads, kv_heads = attention.heads // tensor, max(1, attention.kv_heads // tensor)

    def random(count: int) -> Tensor:
        shape = (batch, sequence, count, attention.head_size)
        x = torch.randn(shape, dtype=torch.bfloat16, device=device.torch_device)
        return x.transpose(1, 2).requires_grad_()  # [b, n, s, d]

    inputs = (random(heads), random(kv_heads), random(kv_heads))
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if device.is_gpu:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)

    def attend() -> Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(
                *inputs, is_causal=True, enable_gqa=kv_heads != heads
            )

    def forward() -> None:
        with torch.no_grad():
            attend()

    result = attend()
    grad = torch.randn_like(result)

    def backward() -> object:
        return torch.autograd.grad(result, inputs, grad, retain_graph=True)

    return forward, backward


def copy_rate(device: Device, seconds: float) -> float:
    """Return the bytes/s of a copy on the device, counting bytes read and bytes written."""
    size = 2**31 if device.is_gpu else 2**26
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * size / time_sustained(lambda: target.copy_(source), device, seconds)


def roofline_step(
    ceilings: Ceilings, config: RunConfig, gpus: int, vocabulary: int, *, fp8: bool
) -> float | None:
    """Return the seconds of an update that does only its unavoidable work.

    This work is matrix products, attention and the optimizer's memory traffic at the measured
    rates. Pipeline stages are assumed to be equal, and communication to be free. The result is
    `None` if `fp8` is set and the device does not support FP8.
    """
    layer = ceilings.layer_seconds_fp8 if fp8 else ceilings.layer_seconds
    if layer is None:
        return None
    parallel = config.parallel
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    data = gpus // model // parallel.context_parallel_size
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    layers = config.model.num_layers
    pass_seconds = layers * (layer + ceilings.attention_seconds) + ceilings.head_seconds
    passes = batch / micro / data / parallel.pipeline_model_parallel_size
    parameters = count_parameters(model_plan(config.model, vocabulary)) / model
    if parallel.zero_stage:
        parameters /= data
    return passes * pass_seconds + parameters * _OPTIMIZER_BYTES / ceilings.copy
