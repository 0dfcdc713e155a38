"""The host waits for the device once per update, at its end. A CPU never waits, but shows which
operations would make a host wait for a GPU; `tests/gpu/test_waits.py` asks a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.layout import Layout
from megatron.training.step import Updates
from tests.distributed import run_distributed
from tests.training.toy import build_toy

# Here the host needs the result or its size, or sends data of its own.
_WAITING = {
    "_local_scalar_dense",  # item(), bool(), float(), an index or a length that is a tensor
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "bincount",
    "lift_fresh",  # torch.tensor([1.0]), tensor[0] = 1.0
}


def test_the_journal_names_every_part_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of a hang says in which of them a process is."""
    run = build_toy(Layout.single(), ["--train-iters", "1", "--calculate-per-token-loss"])
    journal, named = run.layout.journal, list[str]()
    enter = journal.enter

    def note(operation: object) -> None:
        named.append(str(operation))
        enter(operation)

    monkeypatch.setattr(journal, "enter", note)
    Updates(run).make(look_ahead=False)
    assert [name for name in named if "micro-batch" not in name] == [
        "end of the passes",
        "reduction of the gradients",
        "count of the tokens",
        "update of the routers' biases",
        "reduction of the losses",
        "optimizer step",
        "end of the iteration",
    ]


class _Watch(TorchDispatchMode):
    """Records the names of operations that would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        by_mask = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool
            for group in args[1:]
            if isinstance(group, list | tuple)
            for x in group
        )
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _WAITING or by_mask or counts:
            self.names.append(name)
        return func(*args, **kwargs)


def _waits(run, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the second of three updates' waits by name. `tolist` reads without an operation."""
    run.train_batches = iter([next(run.train_batches) for _ in range(12)])  # the host's own work
    updates = Updates(run)
    updates.make(look_ahead=True)  # the first one allocates
    read = []
    real = Tensor.tolist
    with monkeypatch.context() as patch, _Watch() as watch:
        patch.setattr(Tensor, "tolist", lambda self: read.append("tolist") or real(self))
        updates.make(look_ahead=True)
    return Counter([*watch.names, *read])


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("gpt", "--bf16"),
        ("gpt", "--fp16 --initial-loss-scale 256"),
        ("gpt", "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope"),
        ("gpt", "--bf16 --cross-entropy-fusion-impl linear --eod-mask-loss"),
        ("gpt", "--bf16 --reset-attention-mask --reset-position-ids"),
        ("gpt", "--bf16 --recompute-activations --log-num-zeros-in-grad"),
        ("gpt", "--no-masked-softmax-fusion --optimizer sgd --embedding-weights-in-fp32"),
        *(
            ("gpt", f"--bf16 --fp8-format hybrid --fp8-recipe {recipe}")
            for recipe in ("tensorwise", "rowwise", "delayed")
        ),
        ("bert", "--bf16"),
        ("gpt", "--bf16 --eod-mask-loss --calculate-per-token-loss"),
        ("t5", "--bf16"),
        ("t5", "--bf16 --position-embedding-type relative --geglu"),
    ],
)
def test_an_update_waits_for_the_device_once(kind: str, flags: str, monkeypatch) -> None:
    run = build_toy(Layout.single(), flags.split(), kind)
    # The ids of four micro-batches, which stay on the host, and the update's outcome.
    assert _waits(run, monkeypatch) == {"tolist": 4 + 1}


# Layout sizes, and flags of runs in the layout.
_LAYOUTS: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    (
        {},
        (
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            "--zero-stage 2 --fp8-format hybrid --fp8-param-gather",
            "--eod-mask-loss --calculate-per-token-loss",
        ),
    ),
    (
        {"tensor": 2},
        (
            "--sequence-parallel",
            "--sequence-parallel --fp8-format hybrid",
            "--fp8-format e4m3 --fp8-recipe delayed",
        ),
    ),
    (
        {"pipeline": 2},
        (
            "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
            "--pipeline-schedule zero-bubble --fp8-format hybrid",
        ),
    ),
    ({"context": 2}, ("--attention-dropout 0",)),
)


def _waits_in_layouts(world: Layout) -> list[tuple[str, Counter[str], int]]:
    """Return each run's flags, an update's waits, and how many micro-batches' ids it reads."""
    found = []
    for sizes, runs in _LAYOUTS:
        layout = Layout.at(world.world.rank, 2, **sizes).connect("cpu")
        split = [f"--{name}-model-parallel-size 2" for name in sizes if name != "context"]
        split += ["--context-parallel-size 2"] * ("context" in sizes)
        for flags in runs:
            words = " ".join(["--bf16", *split, flags])
            run = build_toy(layout, words.split())
            with pytest.MonkeyPatch.context() as patch:
                waits = _waits(run, patch)
            found.append((words, waits, run.batches.micro_batches_at(0)))
    return found


def test_so_does_one_of_two_processes() -> None:
    for results in run_distributed(2, _waits_in_layouts):
        assert len(results) == 9
        for words, waits, micro_batches in results:
            assert waits == {"tolist": micro_batches + 1}, words


def test_a_wait_is_seen(monkeypatch) -> None:
    run = build_toy(Layout.single())
    real = run.gradients.reduce

    def reduce() -> None:
        total = torch.ones(3)
        if total.sum() > 0:
            total[0] = float(total[total > 1].sum())
        real()

    monkeypatch.setattr(run.gradients, "reduce", reduce)
    seen = _waits(run, monkeypatch)
    seen.pop("lift_fresh", None)  # a number that becomes a tensor; not in torch 2.15
    assert seen == {"tolist": 5, "_local_scalar_dense": 2, "index": 1}
