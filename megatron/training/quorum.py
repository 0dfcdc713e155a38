"""Replicas that leave and join: jobs that train one model together, by means of torchft.

With --torchft-lighthouse, each replica of the model is a job of its own, started by its own
torchrun. Before every update, the replicas that are alive agree on who takes part, and divide the
micro-batches of the global batch. Then they average their gradients. If one of them is lost
meanwhile, the others do not apply the update, but compute it again among themselves. A replica that
joins receives weights, optimizer states and counters from another one. So every update uses exactly
the samples that it would use in a single job.

torchft supplies the agreement, and process groups that can be replaced. Its transports of states
are not used, because they unpickle what they receive.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoint.exchange import JsonExchange
from megatron.command import print_line
from megatron.data.text_stream import text_members
from megatron.environment import quieten_rust
from megatron.errors import ConfigError, HangError
from megatron.training.batches import WHOLE, Share, batches_from

if TYPE_CHECKING:
    from megatron.training.run import Run

_MAX_RETRIES = 20  # of an update that the replicas cannot average
_TAG = 1  # of the messages that carry a state


class Quorum:
    """The replicas that train together, as one process of a replica sees them.

    A process only communicates with the processes of the same rank in the other replicas, which
    hold the same parts of the model and of the optimizer's states.

    Args:
        run: The run of this replica.

    Attributes:
        share: This replica's share of the next update.
    """

    def __init__(self, run: Run) -> None:
        """Connect to the lighthouse. Collective over the replica.

        Raises:
            ConfigError: torchft is not installed, the data is text, or this machine's name cannot
                be resolved.
            HangError: The lighthouse does not answer.
        """
        self._run, options = run, run.config.reliability
        torchft = import_torchft()
        if text_members(run.datasets.train, 0):
            raise ConfigError(
                "--torchft-lighthouse: the training data is text, whose position a job that joins "
                "would not know: tokenize it with tools/preprocess_data.py"
            )
        timeout = timedelta(seconds=options.torchft_timeout)
        kind = torchft.ProcessGroupNCCL if run.device.is_gpu else torchft.ProcessGroupGloo
        self._group = kind(timeout=timeout)
        world = run.layout.world
        # torchft's managers find each other in a store of the replica, which outlives its groups.
        self._store = _new_store(timeout) if world.rank == 0 else None
        stores = JsonExchange(world).gather(self._store and [self._store.host, self._store.port])
        host, port = stores[0]
        # It logs every lost replica with a traceback.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        with self._connection_errors():
            self._manager = torchft.Manager(
                pg=self._group,
                load_state_dict=self._load,
                state_dict=self._state,
                min_replica_size=options.torchft_min_replicas,
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timedelta(minutes=run.config.parallel.distributed_timeout_minutes),
                connect_timeout=timeout,
                rank=world.rank,
                world_size=world.size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=options.torchft_lighthouse,
                replica_id=f"replica{options.torchft_replica}",
                checkpoint_transport=PeerTransport(
                    self._group, self._state, run.device.torch_device
                ),
                init_sync=False,
                max_retries=_MAX_RETRIES,
            )
        step = run.progress.iteration
        self._manager.load_state_dict({"step": step, "batches_committed": step})
        self.share = WHOLE
        self._is_positioned = False

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Turn torchft's errors of connections into errors that name the flag."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            options = self._run.config.reliability
            raise HangError(
                f"--torchft-lighthouse {options.torchft_lighthouse}: the jobs cannot agree: "
                f"{str(error).strip()}: check that torchft_lighthouse is running there, and at "
                f"least {options.torchft_min_replicas} of the jobs (--torchft-min-replicas)"
            ) from error

    def begin(self) -> None:
        """Agree on the replicas of the next update, and open the data at this one's share.

        Collective over all replicas. If others are ahead, their state is loaded first.

        Raises:
            ConfigError: There are more replicas than micro-batches.
            HangError: The lighthouse does not answer, or too few replicas take part.
        """
        run, before = self._run, self._run.progress.iteration
        run.layout.journal.enter("agreement of the replicas")
        with self._connection_errors():
            self._manager.start_quorum()
        share = Share(self._manager.participating_rank(), self._manager.num_participants())
        if self._is_positioned and share == self.share and run.progress.iteration == before:
            return
        progress, iteration = run.progress, run.progress.iteration
        micro_batches = run.batches.micro_batches_at(progress.consumed_samples)
        if share.count > micro_batches:
            raise ConfigError(
                f"{share.count} replicas have joined, but an update has only {micro_batches} "
                "micro-batches: start fewer, each with another --torchft-replica"
            )
        if run.is_log_rank and (share.count != self.share.count or not self._is_positioned):
            joined = f", with the state of iteration {iteration}" if iteration != before else ""
            who = "1 replica takes" if share.count == 1 else f"{share.count} replicas take"
            print_line(f"  {who} part from iteration {iteration + 1}{joined}")
        self.share, self._is_positioned = share, True
        assert run.datasets.train is not None
        run.train_batches = batches_from(
            run, run.datasets.train, consumed=progress.consumed_samples, share=share
        )

    def averages(self, tensors: Sequence[Tensor]) -> bool:
        """Average tensors in place over the replicas, and return whether all of them are averages.

        Replicas have weights in proportion to their shares. If one of them is lost meanwhile, the
        tensors are useless, and the update must be computed again.

        Raises:
            HangError: The same update could not be averaged many times.
        """
        run, journal = self._run, self._run.layout.journal
        if self.share.count > 1:
            journal.enter("average over the replicas")
            micro_batches = run.batches.micro_batches_at(run.progress.consumed_samples)
            weight = len(self.share.of(micro_batches)) / micro_batches
            works = [
                self._manager.allreduce(tensor.mul_(weight), reduce_op=dist.ReduceOp.SUM)
                for tensor in tensors
            ]
            for work in works:
                work.wait()
        journal.enter("agreement of the replicas")
        with self._connection_errors():
            self._is_positioned = bool(self._manager.should_commit())
        return self._is_positioned

    def leave(self) -> None:
        """Leave the other replicas."""
        self._manager.shutdown(wait=False)

    def _state(self) -> tuple[bytes, list[Tensor]]:
        """Return what a replica that joins needs: counters as JSON, and tensors."""
        run = self._run
        counters = {
            "progress": asdict(run.progress),
            "optimizer": run.optimizer.scalars(),
            "spikes": run.spikes and run.spikes.state(),
        }
        return json.dumps(counters).encode(), self._tensors(run.optimizer.named_tensors())

    def _load(self, state: tuple[bytes, Sequence[Tensor]]) -> None:
        """Load the result of another replica's `_state`."""
        run, counters = self._run, json.loads(state[0])
        named = run.optimizer.named_tensors()
        for tensor, received in zip(self._tensors(named), state[1], strict=True):
            tensor.copy_(received)
        run.optimizer.encode_loaded(named)
        run.optimizer.reload_masters(include_16_bit=False)
        run.optimizer.load_scalars(counters["optimizer"])
        run.layers.forget_weights()
        if run.spikes is not None:
            run.spikes.load_state(counters["spikes"])
        vars(run.progress).update(counters["progress"])

    def _tensors(self, named: Mapping[str, tuple[Tensor, nn.Parameter]]) -> list[Tensor]:
        """Return the weights and buffers, and the named states of the optimizer.

        Their order and their shapes are the same in every replica, because the layouts are.
        Nothing on the device still reads or writes them, on any stream.
        """
        self._run.optimizer.wait_for_weights()
        self._run.device.synchronize()
        weights = [x for part in self._run.parts for x in (*part.parameters(), *part.buffers())]
        return [x.detach() for x in (*weights, *(tensor for tensor, _ in named.values()))]


class PeerTransport:
    """A transport that sends states as plain tensors through the replicas' own group.

    It has the methods of torchft's `CheckpointTransport`.

    Args:
        group: The process group of the replicas.
        state: A function that returns the state of this process.
        device: The device whose tensors the group can send.
    """

    def __init__(
        self,
        group: Any,
        state: Callable[[], tuple[bytes, list[Tensor]]],
        device: torch.device,
    ) -> None:
        """Keep the arguments."""
        self._group, self._state, self._device = group, state, device

    def metadata(self) -> str:
        """Return what a receiver must know in advance: nothing."""
        return ""

    def send_checkpoint(
        self,
        dst_ranks: Sequence[int],
        step: int,
        state_dict: Mapping[str, Any],
        timeout: timedelta,
    ) -> None:
        """Send the state to the given replicas."""
        del step, timeout
        counters, tensors = state_dict["user"]["default"]
        own = json.dumps(state_dict["torchft"]).encode()
        for target in dst_ranks:
            for text in (own, counters):
                content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                self._send(torch.tensor([len(content)]), target)
                self._send(content, target)
            for tensor in tensors:
                self._send(tensor, target)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Receive the state of another replica."""
        del metadata, step, timeout
        texts = []
        for _ in range(2):
            size = self._receive(torch.empty(1, dtype=torch.int64), src_rank)
            content = torch.empty(int(size.item()), dtype=torch.uint8)
            texts.append(bytes(self._receive(content, src_rank).tolist()))
        tensors = [self._receive(torch.empty_like(own), src_rank) for own in self._state()[1]]
        return {"torchft": json.loads(texts[0]), "user": {"default": (texts[1], tensors)}}

    def disallow_checkpoint(self) -> None:
        """Do nothing: a state is only sent before an update begins."""

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: there is no server."""

    def _send(self, tensor: Tensor, target: int) -> None:
        self._group.send([tensor.to(self._device).contiguous()], target, _TAG).wait()

    def _receive(self, like: Tensor, source: int) -> Tensor:
        received = torch.empty_like(like, device=self._device).contiguous()
        self._group.recv([received], source, _TAG).wait()
        return received


def _new_store(timeout: timedelta) -> dist.TCPStore:
    """Return a store that the other jobs can reach by this machine's name."""
    host = platform.node()
    try:
        return dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(
            f"--torchft-lighthouse: other jobs cannot reach this machine by its name {host} "
            f"({str(error).splitlines()[0]}): add the name to /etc/hosts"
        ) from error


def import_torchft() -> Any:
    """Return the module `torchft`.

    Raises:
        ConfigError: It is not installed.
    """
    quieten_rust()
    try:
        import torchft
    except ImportError as error:
        raise ConfigError(
            f"--torchft-lighthouse needs torchft: pip install torchft ({error})"
        ) from error
    return torchft
