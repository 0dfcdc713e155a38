"""JSON messages between ranks that save or load, sent as bytes in tensors and never as pickles."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.checkpoint.entries import Json
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.collectives import all_gather, all_reduce
from megatron.parallel.layout import Axis


@dataclass(frozen=True)
class JsonExchange:
    """Exchange of JSON values among all ranks of an axis.

    A single rank sends nothing and needs no process group.

    Attributes:
        world: The ranks that take part.
    """

    world: Axis

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_first

    def gather(self, value: Json) -> list[Json]:
        """Return every rank's value on all ranks, in rank order. Collective."""
        if self.world.size == 1:
            return [value]
        device = self._device()
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world.size, dtype=torch.int64, device=device)
        sizes[self.world.rank] = data.numel()
        all_reduce(sizes, self.world)
        payload = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
        payload[: data.numel()] = data.to(device)
        texts = all_gather(payload, self.world).chunk(self.world.size)
        return [
            json.loads(text[:length].cpu().numpy().tobytes())
            for text, length in zip(texts, sizes.tolist(), strict=True)
        ]

    def on_all_ranks(self, step: Callable[[], Json]) -> list[Json]:
        """Run `step` on every rank, and return all results in rank order. Collective.

        Raises:
            Exception: Raised on every rank if `step` failed on any. A failing rank raises its own
                error. The others raise a `StorageError` or `CheckpointError` if the failing rank
                did, otherwise a `RuntimeError`; the message names the rank.
        """
        failure: Exception | None = None
        value: Json = None
        try:
            value = step()
        except Exception as error:
            failure = error
        failed = [type(failure).__name__, str(failure)] if failure else None
        replies = self.gather({"value": value, "failed": failed})
        if failure is not None:
            raise failure
        for rank, reply in enumerate(replies):
            if reply["failed"]:
                kind, text = reply["failed"]
                error_classes = {cls.__name__: cls for cls in (StorageError, CheckpointError)}
                raise error_classes.get(kind, RuntimeError)(f"rank {rank}: {text or kind}")
        return [reply["value"] for reply in replies]

    def on_main(self, step: Callable[[], Json]) -> Json:
        """Run `step` on rank 0, and return its result on every rank. Collective.

        Raises:
            Exception: Raised on every rank if `step` failed, as in `on_all_ranks`.
        """
        return self.on_all_ranks(step if self.is_main else lambda: None)[0]

    def _device(self) -> torch.device:
        """Return the device for the group's tensors: the CPU if the group's backend supports it."""
        import torch.distributed as dist

        if "cpu" in str(dist.get_backend_config(self.world.group)):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return accelerator
