"""The exchange between GPUs, with files for their memory and messages for its flags."""

import weakref
from collections import Counter

import torch
import torch.distributed as dist

from megatron.parallel import symmetric_memory
from megatron.parallel.exchange import SLOTS
from megatron.parallel.symmetric_memory import SymmetricExchange
from tests.distributed import run_distributed

CPU = torch.device("cpu")
COUNT = Counter()  # events in this forked process


class _Stream:
    """A stream that only counts what waits for it."""

    def __init__(self, device, priority=0):
        self.name = "side" if priority == -1 else "main"

    def wait_stream(self, other):
        COUNT[f"{self.name} waits for {other.name}"] += 1

    def __enter__(self):
        COUNT["active"] += 1

    def __exit__(self, *_):
        COUNT["active"] -= 1


class _Handle:
    """Memory of all ranks: a file for each."""

    def __init__(self, folder):
        self._folder, self._sending = folder, []

    def get_buffer(self, rank, shape, dtype):
        path, elements = str(self._folder / str(rank)), torch.Size(shape).numel()
        return torch.from_file(path, shared=True, size=elements, dtype=dtype).view(shape)

    def put_signal(self, rank, channel, timeout_ms):
        assert COUNT["active"] == 1
        assert timeout_ms == 2500
        self._sending.append(dist.isend(torch.ones(1), rank, tag=channel))

    def wait_signal(self, rank, channel, timeout_ms):
        assert timeout_ms == 2500
        dist.recv(torch.empty(1), rank, tag=channel)

    def barrier(self, channel, timeout_ms):
        assert (channel, timeout_ms) == (SLOTS, 2500)  # no channel of a slot
        COUNT["barriers"] += 1
        dist.barrier()


def _new_exchange(layout, folder):
    """Return an exchange for messages of at most 100 bytes."""
    handle, axis = _Handle(folder), layout.tensor

    class Event:
        def __init__(self, device):
            pass

        def record(self, stream):
            assert stream.name == "main"

        def synchronize(self):
            COUNT[f"waits for {axis.journal.waits_for.kind}"] += 1

    def rendezvous(memory, group):
        dist.barrier(group)
        return handle

    def empty(shape, dtype, device):
        assert shape == (SLOTS, 512)  # 300 bytes for three ranks, aligned
        return handle.get_buffer(axis.rank, shape, dtype)

    symmetric_memory._MAX_USES_AHEAD = 12
    symmetric_memory.symmetric.empty = empty
    symmetric_memory.symmetric.rendezvous = rendezvous
    torch.Stream, torch.Event = _Stream, Event
    torch.accelerator.current_stream = _Stream
    exchange = SymmetricExchange(axis, CPU, 100, seconds=2.5)
    assert len(symmetric_memory._MAPPED) == 1  # kept as long as the process
    return exchange


def _rows(use, rank, step):
    """Return the message of a rank to the rank `step` ranks ahead."""
    return torch.arange(4.0).view(2, 2) + 100 * use + 10 * rank + 1000 * step


def _pairs_of_uses(layout, folder):
    """Make pairs of uses, the second within the first, and return what was counted."""
    exchange = _new_exchange(layout, folder)
    axis = layout.tensor
    assert exchange.fits(42, torch.float32)
    assert not exchange.fits(43, torch.float32)
    for pair in range(8):
        uses, sent = [], []
        for number in (2 * pair, 2 * pair + 1):
            use = exchange.open(_rows(number, axis.rank, 1))
            uses.append((number, use))
            for step in (1, 2):
                rows = _rows(number, axis.rank, step)
                use.send(step, rows)
                sent.append(weakref.ref(rows))
                del rows
            use.computing()
        for number, use in reversed(uses):
            expected = [torch.zeros(2, 2)] * 3
            for step in (1, 2):
                source = (axis.rank - step) % 3
                expected[source] = _rows(number, source, step)
                assert torch.equal(use.receive(step), expected[source])
            expected[axis.rank] = own = _rows(number, axis.rank, 0)
            assert torch.equal(use.whole(own), torch.cat(expected))
        assert all(rows() is not None for rows in sent)  # they may still be in transit
        for _, use in reversed(uses):
            use.close()
        assert not any(rows() is not None for rows in sent)
    assert axis.journal.waits_for is None
    return COUNT


def test_all_rows_arrive_and_the_process_does_not_run_far_ahead(tmp_path):
    for count in run_distributed(3, _pairs_of_uses, tmp_path, tensor=3):
        assert count == {
            "active": 0,
            "barriers": 7,
            "side waits for main": 32,  # once for each message
            "main waits for side": 16,
            "waits for exchange": 3,  # at most 12 uses are in the queue
        }
