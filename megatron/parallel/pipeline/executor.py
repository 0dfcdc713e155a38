"""Execution of a stage's operations under any schedule.

Autograd runs the backward pass of each model part separately. A part's input is a leaf of its
graph, whose gradient goes to the previous stage. Only the graph node of a part's output is kept.
The values of the output are freed once they have been sent, unless the graph has saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import COMPUTE, SENDS, Operation, Operations
from megatron.parallel.pipeline.weight_gradients import WeightGradientQueue

ForwardStep = Callable[[int, Tensor | None], Tensor]
"""The forward pass of a model part for one micro-batch.

It is called with the index of the micro-batch and the input [s, b, h], which is `None` for the
first part. It returns the output [s, b, h] or, for the last part, the scalar loss.
"""
Observer = Callable[[Operation], None]
Key = tuple[int, int]  # micro-batch, chunk
ForwardTensors = tuple[Tensor | None, GradientEdge | None]  # the input and output of a forward pass


def run_schedule(
    operations: Operations,
    parts: Sequence[ForwardStep],
    channel: PipelineChannel | None,
    *,
    weight_gradients: WeightGradientQueue | None = None,
    before: Observer | None = None,
    ahead: bool = True,
) -> None:
    """Run one stage's operations. Gradients accumulate in the parameters.

    Args:
        operations: The operations of this stage, from `make_schedule` or `forward_only`.
        parts: The forward pass of each chunk of this stage.
        channel: The connection to the other stages; `None` if there are no others.
        weight_gradients: The queue to which layers push weight gradients; required for
            "backward_input" and "backward_weight".
        before: A function to call with each operation before it starts, for example to time it or
            to record it for hang reports.
        ahead: Whether to post receives ahead of time (see `receives_to_post`).
    """
    run = _Run(operations, parts, channel, weight_gradients)
    posts = receives_to_post(operations, ahead=ahead)
    with torch.set_grad_enabled(run.has_backward):
        for operation, receives in zip(operations, posts, strict=True):
            if before is not None:
                before(operation)
            for receive in receives:
                run.channel.post_receive(receive)
            run.carry_out(operation)
        run.finish()


def receives_to_post(operations: Operations, *, ahead: bool = True) -> list[list[Operation]]:
    """Return, for each operation, the receives to post before it starts.

    A receive is posted before the computation that precedes it, so that the transfer runs during
    this computation. It is not posted earlier, because on GPUs a posted receive occupies
    multiprocessors.

    CUDA loads a kernel when it is first launched, and may do so only once the messages in progress
    have arrived. Two neighbors that both launch a new kernel while each waits for the other's
    result would wait forever. For computations that may launch new kernels, receives must therefore
    be posted as late as possible, directly before their messages are used. With 1F1B and
    zero-bubble schedules nothing can hang then, even if every computation waits for all earlier
    messages.

    Args:
        operations: The operations of a stage.
        ahead: Whether to post receives before the preceding computation, instead of as late as
            possible.
    """
    posts: list[list[Operation]] = [[] for _ in operations]
    last_compute = 0
    for i, operation in enumerate(operations):
        if operation.kind in COMPUTE:
            last_compute = i
        elif operation.kind not in SENDS:
            posts[last_compute if ahead else i].append(operation)
    return posts


def completing_operations(operations: Operations) -> dict[int, Operation]:
    """Return, for each chunk, the operation that completes the gradients of the chunk."""
    kinds = {"backward", "backward_weight"}
    return {operation.chunk: operation for operation in operations if operation.kind in kinds}


class _Run:
    """The tensors that a stage holds during an update, each only while it is needed."""

    def __init__(
        self,
        operations: Operations,
        parts: Sequence[ForwardStep],
        channel: PipelineChannel | None,
        weight_gradients: WeightGradientQueue | None,
    ) -> None:
        kinds = {operation.kind for operation in operations}
        self.has_backward = not kinds.isdisjoint({"backward", "backward_input"})
        self._sending = {o.chunk for o in operations if o.kind == "send_activation"}
        self._parts = parts
        self._channel = channel
        self._queue = weight_gradients
        self._inputs: dict[Key, Tensor] = {}  # until the forward pass
        self._outputs: dict[Key, Tensor] = {}  # until sent
        # From the forward pass until the backward pass.
        self._forward_tensors: dict[Key, ForwardTensors] = {}
        self._output_gradients: dict[Key, Tensor] = {}  # until the backward pass
        self._input_gradients: dict[Key, Tensor] = {}  # until sent

    @property
    def channel(self) -> PipelineChannel:
        assert self._channel is not None, "several stages need a channel"
        return self._channel

    @property
    def queue(self) -> WeightGradientQueue:
        assert self._queue is not None, "deferred weight gradients need a queue"
        return self._queue

    def carry_out(self, operation: Operation) -> None:
        key = (operation.micro_batch, operation.chunk)
        match operation.kind:
            case "forward":
                self._forward(key)
            case "backward":
                self._backward(key)
            case "backward_input":
                with self.queue.collecting(key):
                    self._backward(key)
            case "backward_weight":
                self.queue.run(key)
            case "send_activation":
                self.channel.send(operation, self._outputs.pop(key))
            case "send_gradient":
                self.channel.send(operation, self._input_gradients.pop(key))
            case "receive_activation":
                self._inputs[key] = self.channel.receive(operation)
            case "receive_gradient":
                self._output_gradients[key] = self.channel.receive(operation)

    def finish(self) -> None:
        """Wait until everything has been sent, and check that no tensor or work remains."""
        pending = (
            *(self._inputs, self._outputs, self._forward_tensors),
            *(self._output_gradients, self._input_gradients),
        )
        assert not any(pending), f"left over: {[list(tensors) for tensors in pending]}"
        assert not self._queue, "some weight gradients were not computed"
        if self._channel is not None:
            self._channel.finish()

    def _forward(self, key: Key) -> None:
        micro_batch, chunk = key
        x = self._inputs.pop(key, None)
        if x is not None and self.has_backward:
            x.requires_grad_()
        output = self._parts[chunk](micro_batch, x)
        if self.has_backward:
            # The first stage's output has no gradient if all its weights are frozen.
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._forward_tensors[key] = x, edge
        if chunk in self._sending:
            self._outputs[key] = output.detach()
        elif chunk < len(self._parts) - 1:  # the next part is also in this process
            self._inputs[micro_batch, chunk + 1] = output.detach()

    def _backward(self, key: Key) -> None:
        micro_batch, chunk = key
        x, output = self._forward_tensors.pop(key)
        gradient = self._output_gradients.pop(key, None)
        if output is not None:
            torch.autograd.backward(output, gradient)
        if x is None:
            return
        assert x.grad is not None, f"chunk {chunk}: its output does not depend on its input"
        if self._channel is None:
            self._output_gradients[micro_batch, chunk - 1] = x.grad
        else:
            self._input_gradients[key] = x.grad
