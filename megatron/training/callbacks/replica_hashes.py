"""A comparison of weights and moments between replicas, which finds faulty hardware.

Replicas begin with the same values and apply the same updates, so their tensors are bitwise
identical. A flipped bit, in memory or in the result of a matrix product, changes a tensor's hash.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.checkpoint.entries import buffer_state, flatten
from megatron.checkpoint.exchange import JsonExchange
from megatron.command import print_line
from megatron.errors import NumericsError
from megatron.parallel.collectives import all_gather
from megatron.parallel.layout import Axis
from megatron.parallel.parameter import spec_of
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.checkpoints import is_save_due
from megatron.training.run import Run
from megatron.training.step import StepOutcome, any_rank

_FLAG = "--check-weight-hash-across-dp-replicas-interval"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1024  # elements whose order does not affect a hash
_SHOWN = 5  # tensors in a message
_QUERY_KEY_NORM = re.compile(r"\.attention\.(?:query|key)_norm\.")


class ReplicaHashes(Callback):
    """A callback that compares replicas at an interval, and before every checkpoint.

    It runs before the checkpoint callback, so that no checkpoint is saved while replicas differ.
    """

    def __init__(self) -> None:
        """Create the callback, with no comparison made yet."""
        self._equal_at = 0

    def on_start(self, run: Run) -> None:
        """Compare the initial or loaded values. Collective."""
        if max(run.layout.replica.size, run.layout.expert_replica.size) == 1 and run.is_log_rank:
            print_line(
                f"  {_FLAG}: there is only one replica of the weights, so nothing is compared"
            )
        self.compare(run)

    def interrupts(self, run: Run) -> bool:
        """Return whether a comparison follows. An early forward pass would delay it."""
        return self._is_due(run, run.progress.iteration + 1)

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Compare if a comparison is due, or if a checkpoint is about to be saved."""
        if self._is_due(run, run.progress.iteration) or is_save_due(run, outcome, early_exit):
            self.compare(run)

    def compare(self, run: Run) -> None:
        """Compare the copies of all replicated tensors. Collective.

        Raises:
            NumericsError: Copies differ. Every rank raises this and names the tensors and ranks.
        """
        run.layout.journal.enter("comparison of the replicas")
        differences = []
        for axis, tensors in _copies(run):
            if axis.size > 1 and tensors:
                differences += _differences(axis, tensors, run.device.torch_device)
        _stop_if_any(differences, run, what="replicas", equal_at=self._equal_at)
        self._equal_at = run.progress.iteration

    @staticmethod
    def _is_due(run: Run, iteration: int) -> bool:
        interval = run.config.training.check_weight_hash_across_dp_replicas_interval
        return interval is not None and iteration % interval == 0


class QueryKeyNorms(Callback):
    """A callback that compares the normalizations of queries and keys after every update.

    Tensor-parallel ranks have copies of them too. Their gradients are summed over these ranks, so
    the copies are bitwise identical, which is not true of all weights that every rank holds.
    """

    def __init__(self) -> None:
        """Create the callback, with no comparison made yet."""
        self._equal_at = 0

    def on_start(self, run: Run) -> None:
        """Compare the initial or loaded values. Collective."""
        self.compare(run)

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Compare the updated values. Collective."""
        self.compare(run)

    def compare(self, run: Run) -> None:
        """Compare the copies among replicas and among tensor-parallel ranks. Collective.

        Raises:
            NumericsError: Copies differ. Every rank raises this and names the tensors and ranks.
        """
        run.optimizer.wait_for_weights()
        run.layout.journal.enter("comparison of the normalizations of queries and keys")
        norms, differences = _query_key_norms(run), list[str]()
        for axis in (run.layout.replica, run.layout.tensor):
            if axis.size > 1 and norms:
                differences += _differences(axis, norms, run.device.torch_device)
        _stop_if_any(differences, run, what="copies", equal_at=self._equal_at)
        self._equal_at = run.progress.iteration


def _query_key_norms(run: Run) -> dict[str, Tensor]:
    """Return the weights and biases that normalize queries and keys, which no rank splits."""
    return {
        name: parameter.detach()
        for name, parameter in run.named_parameters()
        if _QUERY_KEY_NORM.search(name)
    }


def _stop_if_any(differences: list[str], run: Run, *, what: str, equal_at: int) -> None:
    """Raise an error on every rank if some rank found differences. Collective.

    Args:
        differences: Descriptions of the tensors whose copies differ.
        run: The run.
        what: A name for the compared tensors, for the message.
        equal_at: The last iteration after which the copies were equal.

    Raises:
        NumericsError: Copies differ.
    """
    if not any_rank([bool(differences)], run)[0]:
        return
    gathered = JsonExchange(run.layout.world).gather(differences)
    lines = list(dict.fromkeys(line for rank_lines in gathered for line in rank_lines))
    suffix = f"; and {len(lines) - _SHOWN} more tensors" if len(lines) > _SHOWN else ""
    raise NumericsError(
        f"iteration {run.progress.iteration}: {what} differ: "
        + "; ".join(lines[:_SHOWN])
        + f"{suffix}. They were equal after iteration {equal_at}: test the machine of the rank "
        "that differs, and resume without it from a checkpoint of that iteration or earlier"
    )


def _copies(run: Run) -> list[tuple[Axis, dict[str, Tensor]]]:
    """Return the tensors of this process that have replicas, grouped by the axis of the replicas.

    These are the weights, the buffers and, unless updates are sharded (ZeRO), the optimizer
    states. The order is the same on all processes of an axis.
    """
    run.optimizer.wait_for_weights()
    shared: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    named_tensors = [(name, p.detach(), p) for name, p in run.named_parameters()]
    if not run.gradients.is_sharded:
        named_tensors += [(name, t, p) for name, (t, p) in run.optimizer.named_tensors().items()]
    for name, tensor, parameter in named_tensors:
        (experts if spec_of(parameter).is_expert else shared)[name] = tensor
    for name, entry in flatten(buffer_state(run.parts)):
        shared[name.removeprefix("model.")] = entry.tensor
    return [(run.layout.replica, shared), (run.layout.expert_replica, experts)]


def _differences(axis: Axis, tensors: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Return a description of each tensor whose copies differ. Collective over the axis."""
    local_hashes = torch.stack([hash_of(tensor).to(device) for tensor in tensors.values()])
    hashes = all_gather(local_hashes[None], axis)  # [copies, tensors]
    differ = (hashes != hashes[0]).any(0).nonzero().flatten()
    if not len(differ):
        return []
    names, columns = list(tensors), hashes[:, differ].T.tolist()
    lines = []
    for i, column in zip(differ.tolist(), columns, strict=True):
        ((usual, count), *_) = Counter(column).most_common()
        if 2 * count > axis.size:
            ranks = [rank for rank, each in zip(axis.ranks, column, strict=True) if each != usual]
            suffix = f", unlike {count} others"
        else:
            ranks, suffix = list(axis.ranks), " (too few agree to tell which is wrong)"
        plural = "s" * (len(ranks) > 1)
        lines.append(f"{names[i]} of rank{plural} {', '.join(map(str, ranks))}{suffix}")
    return lines


def hash_of(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits: a scalar int64 on its device.

    The hash is a sum of integers, so the order of summation does not matter and one pass over
    memory suffices. A single flipped bit always changes the hash. Swapping elements within a row of
    1024 does not.
    """
    flat = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    whole = flat.numel() // _ROW * _ROW
    rows = flat[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    weights = 2 * torch.arange(len(rows), device=flat.device) + 3  # odd: no bit is shifted out
    return (rows * weights).sum() + flat[whole:].sum(dtype=torch.int64)
