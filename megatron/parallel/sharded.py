"""Sharding of all tensors of a model (ZeRO stage 3), based on PyTorch's `fully_shard`.

A layer's weights are whole only during its forward or backward pass. Just before the pass they are
gathered, in the dtype of the forward pass, from the processes that hold the same part of the model.
Weights outside the layers (embeddings, final normalization, output) are gathered together and stay
whole from the start of the forward pass to the end of the backward pass, so that tied embeddings
are whole for both uses.

A process keeps an fp32 shard of every parameter (the master copy of 16-bit weights) and an fp32
shard of its gradient. Each backward pass reduces gradients immediately and adds them to this shard.
With d processes this takes 4/d + 4/d bytes per parameter, plus optimizer states.

Packed frozen weights (--frozen-weights-dtype) are sharded and gathered as codes and scales.

The experts of a layer are gathered separately, from the processes that hold the same experts. This
gather starts together with that of the layer's other weights, because the host waits for the token
counts of the mixture and would otherwise start the gather too late.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.errors import ConfigError
from megatron.parallel.adapter import Adapter
from megatron.parallel.buckets import Span, row_shards, runs
from megatron.parallel.collectives import (
    all_gather_single,
    all_reduce_coalesced,
    reduce_scatter_single,
)
from megatron.parallel.fp8 import Fp8Products
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import spec_of
from megatron.parallel.quantized import PackedWeight


class ShardedModel:
    """A model that is sharded in place, which implements `Gradients` and `SharedWeights`.

    The modules' parameters become sharded tensors under the same names, allocated on `device` but
    not initialized. Each parameter keeps its `spec`. The `main_grad` of a trained parameter is this
    process's shard of the gradient, 1-D.

    Args:
        parts: The parts of the model, built with fp32 parameters on the meta device, or with
            values that may be discarded.
        layout: The grid of processes. Those of the replica axis share the model, and those of the
            expert replica axis share the experts. Partial gradients are summed over the tensor
            axis, those of experts over the expert tensor axis.
        device: The device of the shards.
        compute_dtype: The data type of the forward pass.
        reduce_dtype: The data type in which gradients are reduced.

    Raises:
        ConfigError: The rows of a packed weight do not divide evenly over the processes.
    """

    is_sharded = True
    shares_weights = True

    def __init__(
        self,
        parts: Sequence[nn.Module],
        layout: Layout,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Shard the parts in place."""
        self._layout = layout
        self._compute_dtype = compute_dtype
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        for part in parts:
            _check_packed(part, layout)
        sharding = _Sharding(layout, policy, device)
        self._roots = [sharding.part(part) for part in parts]
        parameters = [p for part in parts for p in part.parameters()]
        self._parameters = [p for p in parameters if p.requires_grad]
        with torch.no_grad():  # this process's rows, in the parameter's memory
            self._shards = {id(p): cast(DTensor, p).to_local() for p in parameters}
        assert all(shard.is_contiguous() for shard in self._shards.values())
        trained = sum(self._shards[id(p)].numel() for p in self._parameters)
        self._storage = torch.zeros(trained, device=device)
        self._slots: dict[int, Span] = {}
        self._gradients: list[tuple[nn.Parameter, DTensor]] = []
        end = 0
        for parameter in self._parameters:
            slot = Span(end, end + self._shards[id(parameter)].numel())
            self._slots[id(parameter)], end = slot, slot.end
            self._gradients.append((parameter, self._attach(parameter, slot)))

    def _attach(self, parameter: nn.Parameter, slot: Span) -> DTensor:
        """Return the parameter's gradient as autograd expects it, a `DTensor` in our buffer."""
        flat = slot.of(self._storage)
        parameter.main_grad = flat  # type: ignore[attr-defined]
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            flat.view_as(self._shards[id(parameter)]),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def owned(self, parameter: nn.Parameter) -> Span:
        """Return the span of the flattened parameter that this process holds; it may be empty."""
        axis = _replicas(self._layout, parameter)
        return row_shards(parameter.shape[0], parameter.numel(), axis.size)[axis.rank]

    def part(self, parameter: nn.Parameter) -> Tensor:
        """Return the weights that `owned` selects, 1-D: an fp32 tensor or a `PackedWeight`."""
        return self._shards[id(parameter)].view(-1)

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of the weights that `part` returns, as a 1-D fp32 tensor."""
        return self._slots[id(parameter)].of(self._storage)

    def compute_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the parameter's data type in the forward pass."""
        return self._compute_dtype

    def views(self, select: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """Return the fewest 1-D views that contain the owned gradients of selected parameters."""
        members = ((parameter, self._slots[id(parameter)]) for parameter in self._parameters)
        return [run.of(self._storage) for run in runs(members, select)]

    def share_weights(
        self, overlap_in: Sequence[nn.Module] | None, in_8_bits: Mapping[nn.Parameter, Fp8Products]
    ) -> ShardedModel:
        """Return this object, whose forward pass gathers the weights that it needs."""
        assert not in_8_bits, "a rule refuses fp8"
        return self

    def gather(self) -> None:
        """Do nothing, because the next forward pass gathers the weights that it needs."""

    def settle(self) -> None:
        """Free gathered weights, as `wait` does."""
        self.wait()

    def forget(self) -> None:
        """Do nothing, because no copies of the weights are kept."""

    def wait(self) -> None:
        """Free weights that are still whole after a forward pass without a backward pass."""
        for root in self._roots:
            root.reshard()

    def zero(self) -> None:
        """Reset all gradients. Call before the first micro-batch of an update."""
        self._storage.zero_()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    @contextmanager
    def micro_batch(self, *, is_last: bool, wave: Hashable = None) -> Iterator[None]:
        """Return a context manager for one backward pass, which reduces gradients. Collective."""
        yield

    def complete(self) -> None:
        """Do nothing, because `zero` has zeroed all gradients."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum partial gradients over tensor ranks, after backward passes have averaged them.

        Collective over the tensor axis and the expert tensor axis.
        """
        for parameter, gradient in self._gradients:
            assert parameter.grad is gradient, "backward has written a gradient elsewhere"
        partial = [p for p in self._parameters if spec_of(p).partial_gradient]
        for axis, is_expert in ((self._layout.tensor, False), (self._layout.expert_tensor, True)):
            ours = [p for p in partial if spec_of(p).is_expert is is_expert]
            all_reduce_coalesced(map(self.gradient, ours), axis)


def _replicas(layout: Layout, parameter: nn.Parameter) -> Axis:
    """Return the processes that share a parameter."""
    return layout.expert_replica if spec_of(parameter).is_expert else layout.replica


def _check_packed(part: nn.Module, layout: Layout) -> None:
    """Raise `ConfigError` if shards of packed weights differ in size; `fully_shard` cannot pad."""
    for name, parameter in part.named_parameters():
        rows, shards = parameter.shape[:-1].numel(), _replicas(layout, parameter).size
        if isinstance(parameter, PackedWeight) and rows % shards:
            raise ConfigError(
                f"--zero-stage 3 with --frozen-weights-dtype: the {rows} rows of {name} do not "
                f"divide evenly over the {shards} processes that share them: use a different "
                "number of processes, or --zero-stage 2"
            )


class _Sharding:
    """The sharding of modules over the processes that hold the same weights.

    Args:
        layout: The grid of processes.
        policy: The data types.
        device: The device of the shards.
    """

    def __init__(self, layout: Layout, policy: MixedPrecisionPolicy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._replicas, self._expert_replicas = layout.replica, layout.expert_replica
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def part(self, part: nn.Module) -> FSDPModule:
        """Shard a part's layers one by one, then its other parameters, allocating only shards."""
        # torch 2.13 warns against changing a layer's output in place, which no model does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        _merge_leading_dimensions(part)
        specs = {name: spec_of(parameter) for name, parameter in part.named_parameters()}
        for layer in _layers(part):
            experts = [self._shard(module, self._expert_replicas) for module in _experts(layer)]
            # In the backward pass, PyTorch prefetches automatically.
            self._shard(layer, self._replicas).set_modules_to_forward_prefetch(experts)
        root = self._shard(part, self._replicas, reshard_after_forward=False)
        # Like `to_empty`, but buffers keep their values.
        part._apply(lambda t: torch.empty_like(t, device=self._device) if t.is_meta else t)
        for name, parameter in part.named_parameters():
            parameter.spec = specs[name]  # type: ignore[attr-defined]
        return root

    def _shard(self, module: nn.Module, axis: Axis, **options: Any) -> FSDPModule:
        """Shard the parameters of a module, except those of submodules that are already sharded."""
        if axis.ranks not in self._meshes:
            group = axis.group
            if group is None:  # a single process takes the same path, with a single shard
                group = dist.new_group(list(axis.ranks), use_local_synchronization=True)
            self._meshes[axis.ranks] = DeviceMesh.from_group(group, self._device.type)
        mesh = self._meshes[axis.ranks]
        sharded = fully_shard(module, mesh=mesh, mp_policy=self._policy, **options)
        gather = _NamedCollective(axis, "all-gather", all_gather_single)
        scatter = _NamedCollective(axis, "reduce-scatter", reduce_scatter_single)
        sharded.set_custom_all_gather(gather)  # type: ignore[arg-type] # a protocol
        sharded.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        return sharded


class _NamedCollective:
    """A collective for `fully_shard` that is recorded in the journal.

    The watchdog can then name a pending collective and the ranks missing from it.

    Args:
        axis: The processes that share the model.
        name: The name in the journal.
        start: PyTorch's function that starts the collective.
    """

    def __init__(self, axis: Axis, name: str, start: Callable[..., dist.Work | None]) -> None:
        self._axis, self._name, self._start = axis, name, start

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, **options: Any
    ) -> dist.Work | None:
        with self._axis.external_collective(self._name):
            return self._start(output_tensor, input_tensor, **options)


def _merge_leading_dimensions(part: nn.Module) -> None:
    """Reshape every parameter to a matrix or a vector.

    Shards are runs of rows, so otherwise at most two processes could share a weight [2, f, h] (gate
    and up).
    """
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > 2:
                matrix = nn.Parameter(
                    parameter.detach().flatten(0, -2), requires_grad=parameter.requires_grad
                )
                matrix.spec = spec_of(parameter)  # type: ignore[attr-defined]
                setattr(module, name, matrix)


def _layers(part: nn.Module) -> Iterable[nn.Module]:
    """Yield the layers of the part, which are the modules in its module lists and dicts.

    Layers inside a layer (Retro's neighbor encoder) are gathered together with the outer layer. The
    adapter of an output layer is gathered with the output layer's weight.
    """
    for child in part.children():
        if isinstance(child, Adapter):
            continue
        if isinstance(child, nn.ModuleDict):
            yield from child.values()
        elif isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _experts(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a layer that contain only expert weights."""
    outermost: list[nn.Module] = []
    for module in layer.modules():  # outer modules first
        specs = [spec_of(parameter) for parameter in module.parameters()]
        is_inside = any(module in outer.modules() for outer in outermost)
        if specs and all(spec.is_expert for spec in specs) and not is_inside:
            outermost.append(module)
    return outermost
