"""The context that layers are built in: device, number formats, kernels and communication.

A layer's constructor takes the layer's sizes and a `BuildContext`, which provides everything else
that the layer needs, now or later. Nothing is assigned to a layer after it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.kernels import batch_invariant
from megatron.kernels.activation import Activation, choose_activation
from megatron.kernels.amax import Zeros
from megatron.kernels.attention import (
    AttentionChoice,
    choose_attention,
    flash_problem,
    fused_attention,
)
from megatron.kernels.batch_invariant import batch_invariant_attention, batch_invariant_product
from megatron.kernels.dropout import BiasDropoutAdd, bias_dropout_add, choose_bias_dropout_add
from megatron.kernels.fp8 import E4M3, E5M2, Fp8Casts, choose_fp8_casts
from megatron.kernels.fp8_product import choose_fp8_product
from megatron.kernels.library import KernelLibrary, find_library
from megatron.kernels.quantize import FrozenFormat
from megatron.kernels.recurrence import RecurrenceChoice, choose_recurrence
from megatron.kernels.rope import (
    Rotate,
    SplitRotate,
    choose_rotate,
    choose_split_rotate,
    rotate,
    split_rotate,
)
from megatron.parallel.context.block import choose_block, plain_block
from megatron.parallel.context.ring import ring_attention, ulysses_attention
from megatron.parallel.exchange import Exchange
from megatron.parallel.fp8 import Fp8Format, Fp8Products
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.offload import HostActivations
from megatron.parallel.parameter import Init, Matrices, ParameterSpec
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue
from megatron.parallel.products import PLAIN, Products, RowByRow
from megatron.parallel.quantized import PackedWeight
from megatron.parallel.registry import LayerRegistry

_ON_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kernels:
    """The implementation of each operation, chosen once for all layers of a model.

    Attributes:
        library: The fused kernels; `None` means PyTorch's operations.
        new_products: A function that creates the products of one linear layer in attention or an
            MLP.
        output_products: The products that compute logits.
        expert_casts: The casts to FP8 for experts; `None` if experts do not compute in FP8.
        attention: The implementation of the attention core.
        own_attention: The attention core for sequences that are entirely on this rank, regardless
            of the number of context-parallel ranks.
        recurrence: The kernels of mixers that carry states from token to token.
        activation: A function that returns the implementation of an MLP's activation, given its
            name and, by keyword, `fused_amaxes`, `clamp` and `offset` (`choose_activation`).
        rotate: The kernel that rotates heads.
        split_rotate: The kernel that splits queries, keys and values, and rotates them.
        bias_dropout_add: The kernel that adds an update to the residual stream.
    """

    library: KernelLibrary | None = None
    new_products: Callable[[], Products] = Products
    output_products: Products = PLAIN
    expert_casts: Fp8Casts | None = None
    attention: AttentionChoice = AttentionChoice("fused", "PyTorch's", fused_attention)
    own_attention: AttentionChoice = AttentionChoice("fused", "PyTorch's", fused_attention)
    recurrence: RecurrenceChoice = RecurrenceChoice()
    activation: Callable[..., Activation] = choose_activation
    rotate: Rotate = rotate
    split_rotate: SplitRotate = split_rotate
    bias_dropout_add: BiasDropoutAdd = bias_dropout_add


@dataclass(frozen=True)
class BuildContext:
    """The settings that a layer's constructor takes in addition to the layer's own sizes.

    Attributes:
        layout: The grid of processes as this process sees it.
        device: The device on which the model runs.
        parameter_device: The device on which parameters are allocated; "meta" allocates no
            memory. `None` means `device`.
        dtype: The data type of the parameters.
        layer: The number of the layer that is being built, from 1; 0 outside layers.
        precision: The remaining precision settings.
        kernels: The implementation of each operation.
        fp8_layers: The indices, from 0, of the layers whose products are those of `kernels`; other
            layers compute in the format of their weights. `None` means all layers.
        overlap: Whether to communicate while computing. The results are the same without it.
        exchange: The exchange through which split layers send rows during their products, if the
            rows fit and the format allows it (`Products.can_be_split`); otherwise, and if this is
            `None`, layers use collectives before and after the products.
        expert_exchange: The exchange that sends tokens to experts and back if all tokens go to all
            processes; otherwise, and if this is `None`, collectives send them.
        weight_gradients: The queue in which the backward pass defers weight gradients; `None`
            computes them immediately.
        registry: The registry in which layers record what they will need once the model is
            complete.
        recomputed: The modules of a layer that the backward pass recomputes (--recompute-modules).
        frozen_format: The format in which linear layers keep frozen weights; `None` keeps them in
            `dtype`.
        halves_experts: Whether mixtures process each training micro-batch in two halves and send
            one half while they compute the other.
        host_activations: The activations that modules save in host memory; `None` if all stay on
            the device.
    """

    layout: Layout
    device: torch.device = _ON_CPU
    parameter_device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    layer: int = 0
    precision: PrecisionConfig = PrecisionConfig()
    kernels: Kernels = Kernels()
    fp8_layers: range | None = None
    overlap: bool = True
    exchange: Exchange | None = None
    expert_exchange: Exchange | None = None
    weight_gradients: WeightGradientQueue | None = None
    registry: LayerRegistry = field(default_factory=LayerRegistry)
    recomputed: frozenset[str] = frozenset()
    frozen_format: FrozenFormat | None = None
    halves_experts: bool = False
    host_activations: HostActivations | None = None

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are fp32 shards, which are gathered layer by layer (ZeRO stage 3)."""
        return self.parameter_device is not None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The data type of weights in the forward pass."""
        return self.precision.weight_dtype if self.gathers_weights else self.dtype

    def new_parameter(
        self,
        shape: tuple[int, ...],
        *,
        init: Init,
        split_dim: int | None = None,
        partial_gradient: bool = False,
        is_expert: bool = False,
        is_vocabulary: bool = False,
        is_matrix: bool = False,
        matrices: Matrices | None = None,
    ) -> nn.Parameter:
        """Allocate a parameter, or this rank's shard of it along `split_dim`.

        Args:
            shape: The shape of the whole parameter.
            init: The initialization of the parameter.
            split_dim: The dimension to split over tensor ranks. `None` keeps the whole parameter on
                each rank.
            partial_gradient: Whether each tensor rank computes only a part of the gradient (see
                `ParameterSpec`).
            is_expert: Whether the parameter has an entry for each expert along dimension 0. It is
                then split over expert ranks, and along `split_dim` over expert tensor ranks.
            is_vocabulary: Whether the parameter has a row for each vocabulary entry.
            is_matrix: Whether the parameter is a linear layer's weight, to which `frozen_format`
                applies.
            matrices: The matrices in the parameter, if the layer multiplies by them.

        Raises:
            ValueError: A dimension does not divide evenly over its ranks, or a packed row cannot be
                cut into blocks.
        """
        part, offset = list(shape), [0] * len(shape)
        splits = {} if split_dim is None else {split_dim: self.layout.tensor}
        if is_expert:
            splits = dict.fromkeys(splits, self.layout.expert_tensor) | {0: self.layout.expert}
        for dim, axis in splits.items():
            if shape[dim] % axis.size:
                raise ValueError(
                    f"dimension {dim} of {shape} does not divide evenly over {axis.size} ranks"
                )
            part[dim] //= axis.size
            offset[dim] = axis.rank * part[dim]
        device = self.parameter_device or self.device
        if is_matrix and self.frozen_format is not None:
            packed = PackedWeight.empty(
                tuple(part),
                self.frozen_format,
                dtype=self.compute_dtype,
                device=device,
                library=self.kernels.library,
            )
            parameter = nn.Parameter(packed, requires_grad=False)
        else:
            parameter = nn.Parameter(torch.empty(part, dtype=self.dtype, device=device))
        spec = ParameterSpec(
            shape,
            tuple(part),
            tuple(offset),
            init,
            split_dim,
            partial_gradient,
            is_expert=is_expert,
            is_vocabulary=is_vocabulary,
            matrices=matrices,
        )
        parameter.spec = spec  # type: ignore[attr-defined]
        return parameter

    def offloading(self, module: str) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that creates a context manager for each call of a module.

        The context manager makes autograd save tensors in host memory if --offload-modules names
        the module.

        Args:
            module: One of `config.training.OFFLOADED_MODULES`.
        """
        host = self.host_activations
        return nullcontext if host is None else host.offloading(module)

    def for_layer(self, number: int) -> BuildContext:
        """Return a copy of this context for layer `number`, counted from 1."""
        kernels = self.kernels
        if self.fp8_layers is not None and number - 1 not in self.fp8_layers:
            kernels = replace(kernels, new_products=Products, expert_casts=None)
        return replace(self, layer=number, kernels=kernels)

    def within_rank(self) -> BuildContext:
        """Return a copy of this context for attention over sequences that are not split."""
        return replace(self, kernels=replace(self.kernels, attention=self.kernels.own_attention))

    def multiplying_by(
        self, new_products: Callable[[], Products], *, for_output: Products | None = None
    ) -> BuildContext:
        """Return a copy of this context whose linear layers compute in a different format.

        Args:
            new_products: A function that creates the products of one linear layer.
            for_output: The products that compute logits; `None` keeps the current ones.
        """
        output = self.kernels.output_products if for_output is None else for_output
        kernels = replace(self.kernels, new_products=new_products, output_products=output)
        return replace(self, kernels=kernels)


def choose_kernels(
    model: ModelConfig,
    precision: PrecisionConfig,
    layout: Layout,
    device: torch.device,
    *,
    cp_comm_type: str = "p2p",
) -> Kernels:
    """Choose the kernels that the flags request and the device supports.

    Args:
        model: The resolved network flags.
        precision: The number formats.
        layout: The grid of processes as this process sees it.
        device: The device on which the model runs. Parameters may be on another device.
        cp_comm_type: How context-parallel ranks communicate in attention, "p2p" or "a2a".

    Raises:
        ConfigError: --use-flash-attn requests a kernel that cannot run in ring attention, or
            --batch-invariant-mode is given on a GPU or without MKL.
    """
    library = find_library(device).library
    attention = attention_over(layout.context, cp_comm_type, model, precision, device)
    kernels = Kernels(
        library=library,
        attention=attention,
        own_attention=choose_attention(model, precision, device),
        recurrence=choose_recurrence(model, precision, device),
        activation=partial(choose_activation, library=library, fuses_gelu=model.bias_gelu_fusion),
        rotate=choose_rotate(model, library),
        split_rotate=choose_split_rotate(model, library),
        bias_dropout_add=choose_bias_dropout_add(model, library),
    )
    if model.batch_invariant_mode:
        products = RowByRow(batch_invariant_product)
        return replace(kernels, new_products=lambda: products, output_products=products)
    if precision.fp8_format is None:
        return kernels
    fp8_format = Fp8Format(
        values=E4M3,
        gradients=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        by_row=precision.fp8_recipe == "rowwise",
        weight_gradient=precision.fp8_wgrad,
    )
    zeros = Zeros()
    casts = choose_fp8_casts(library, zeros)
    product = choose_fp8_product(device)
    # Only casts that scale a whole tensor by its own amax need zeros.
    amax_zeros = zeros if precision.fp8_recipe == "tensorwise" else None
    return replace(
        kernels,
        new_products=lambda: Fp8Products(fp8_format, casts, product, amax_zeros),
        expert_casts=casts,
    )


def attention_over(
    axis: Axis, comm_type: str, model: ModelConfig, precision: PrecisionConfig, device: torch.device
) -> AttentionChoice:
    """Choose the attention implementation for the context ranks.

    Args:
        axis: The context ranks. A single rank holds whole sequences.
        comm_type: How several ranks communicate in attention: "p2p" for ring attention, "a2a" for
            Ulysses, which runs the single-process implementation between two exchanges.
        model: The resolved network flags.
        precision: The number formats.
        device: The device on which the model runs.

    Raises:
        ConfigError: --use-flash-attn requests a kernel that cannot run in ring attention, or
            --batch-invariant-mode is given on a GPU or without MKL.
    """
    if model.batch_invariant_mode:
        if Device(device).is_gpu:
            raise ConfigError(
                "--batch-invariant-mode: on a GPU, generation and training differ in the last "
                "bits: drop the flag"
            )
        if not torch.backends.mkl.is_available():
            raise ConfigError(
                "--batch-invariant-mode relies on MKL's sums, and this PyTorch has no MKL: drop "
                "the flag"
            )
        reason = "--batch-invariant-mode"
        return AttentionChoice(batch_invariant.NAME, reason, batch_invariant_attention)
    if axis.size == 1:
        return choose_attention(model, precision, device)
    if comm_type == "a2a":
        choice = choose_attention(model, precision, device)
        reason = f"{choice.reason}; all-to-all over {axis.size} context ranks"
        function = partial(ulysses_attention, axis=axis, attend=choice.function)
        return AttentionChoice(choice.name, reason, function)
    head_size, dtype = model.kv_channels, precision.weight_dtype
    unsupported = flash_problem(head_size, dtype, device)
    if model.use_flash_attn and unsupported:
        raise ConfigError(f"--use-flash-attn: {unsupported}: drop the flag")
    block = choose_block(head_size, dtype, device)
    if not model.use_flash_attn and not model.masked_softmax_fusion:
        block = plain_block("--no-masked-softmax-fusion")
    reason = f"{block.reason}; ring of {axis.size} context ranks"
    unfused = {
        "--window-size": model.window_size is not None,
        "--position-embedding-type alibi": model.position_embedding_type == "alibi",
    }
    unfused_flags = [name for name, is_used in unfused.items() if is_used]
    if unfused_flags and block.name != "plain":
        reason = f"{reason}; plain in layers with {' or '.join(unfused_flags)}"
    return AttentionChoice(block.name, reason, partial(ring_attention, axis=axis, block=block))
