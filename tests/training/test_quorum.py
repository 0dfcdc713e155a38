"""Jobs that train one model together continue without those that are lost."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.training.batches import BatchPlan, BatchStep, Share, SharedSampler
from megatron.training.callbacks.base import Callback
from megatron.training.loop import standard_callbacks, train
from megatron.training.quorum import PeerTransport, Quorum
from megatron.training.run import Run
from tests.config.command import parse, problems
from tests.distributed import run_distributed
from tests.reliability.processes import wait_until
from tests.reliability.scoreboard.commands import Command
from tests.training.toy import Recorder, build_toy, fingerprint, train_toy

_LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    "[::]:0", min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=5000
)
print(server.address(), flush=True)
sys.stdin.read()
"""
_LENGTH = 16
_WORDS = [
    *("--global-batch-size", "8", "--train-iters", str(_LENGTH), "--hidden-dropout", "0.1"),
    *("--eval-interval", "100", "--eval-iters", "0"),
]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    pytest.importorskip("torchft")
    with subprocess.Popen(
        [sys.executable, "-c", _LIGHTHOUSE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RUST_LOG": "error"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


class _Hook(Callback):
    """Calls a function before each update."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def before_step(self, run: Run) -> None:
        self._function(run.progress.iteration)


def _train(
    layout: Layout, words: Sequence[str], ready: Path, before: Callable[[int], None]
) -> tuple[list[float], str, int]:
    """Train a replica; return its losses, the digest of its state, and its first update."""
    run, recorder = build_toy(layout, words), Recorder()
    ready.touch()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, [*callbacks, _Hook(before)])
    first = int(recorder.records[0]["iteration"]) if recorder.records else 0
    return recorder.values("lm loss"), fingerprint(run), first


class _Replicas:
    """Replicas in processes of their own, each of which writes its result to a file."""

    def __init__(self, folder: Path, address: str, stack: ExitStack) -> None:
        self._folder, self._address, self._stack = folder, address, stack

    def start(
        self,
        name: str,
        number: int,
        before: Callable[[int], None],
        *flags: str,
        sizes: dict[str, int] | None = None,
    ) -> Command:
        """Start a replica of one process or, with the sizes of a layout, of two."""
        words = ["--torchft-lighthouse", self._address, "--torchft-replica", str(number)]
        words += [*_WORDS, "--torchft-timeout", "60", *flags]

        def run() -> None:
            given = words, self._folder / f"{name}.ready", before
            if sizes is None:
                results = [_train(Layout.single(), *given)]
            else:
                results = run_distributed(2, _train, *given, **sizes)
            (self._folder / f"{name}.json").write_text(json.dumps(results))

        return self._stack.enter_context(Command(run, self._folder / f"{name}.log"))

    def is_ready(self, name: str) -> bool:
        return (self._folder / f"{name}.ready").exists()

    def results(self, name: str, command: Command) -> list[tuple[list[float], str, int]]:
        ended = command.end()
        assert ended.code == 0, ended.output
        return [tuple(each) for each in json.loads((self._folder / f"{name}.json").read_text())]


def _nothing(iteration: int) -> None:
    pass


def test_a_replica_is_lost_and_another_joins(lighthouse: str, tmp_path: Path) -> None:
    """Every update has the samples and the dropout of an undisturbed run, and nothing is lost."""
    expected, alone = train_toy(Layout.single(), _WORDS)
    losses, continued = expected.values("lm loss"), tmp_path / "continued"

    def dies(iteration: int) -> None:
        wait_until(lambda: all(map(replicas.is_ready, ("0", "1", "2"))), 120.0)
        if iteration == 5:
            os._exit(9)

    def waits(iteration: int) -> None:
        """Let the others reach the same updates, and the new replica one of the last."""
        wait_until(lambda: all(map(replicas.is_ready, ("0", "1", "2"))), 120.0)
        if iteration == 8:
            continued.touch()
        if iteration == 10:
            wait_until(lambda: replicas.is_ready("again"), 120.0)
            time.sleep(2.0)  # its request is on the way

    with ExitStack() as stack:
        replicas = _Replicas(tmp_path, lighthouse, stack)
        lost = replicas.start("1", 1, dies)
        others = {name: replicas.start(name, int(name), waits) for name in ("0", "2")}
        assert lost.end().code == 9
        wait_until(continued.exists, 120.0)
        again = replicas.start("again", 1, _nothing)
        results = [replicas.results(name, command)[0] for name, command in others.items()]
        results += replicas.results("again", again)
    for found, _, first in results:
        assert found == pytest.approx(losses[first - 1 :], rel=2e-6)
    assert {digest for _, digest, _ in results} == {results[0][1]}
    assert [first for *_, first in results[:2]] == [1, 1]
    assert results[2][2] > 10
    assert alone.progress.consumed_samples == _LENGTH * 8
    told = (tmp_path / "0.log").read_text()
    assert "  2 replicas take part from iteration 6\n" in told
    joined = results[2][2]
    assert f"  3 replicas take part from iteration {joined}\n" in told
    state = f"  3 replicas take part from iteration {joined}, with the state of iteration"
    assert f"{state} {joined - 1}\n" in (tmp_path / "again.log").read_text()


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ({"pipeline": 2}, "--pipeline-model-parallel-size 2"),
        ({}, "--use-distributed-optimizer --bf16 --global-batch-size 12"),
        (
            {},
            "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --swiglu "
            "--expert-model-parallel-size 2 --global-batch-size 12",
        ),
    ],
)
def test_replicas_of_several_processes(
    lighthouse: str, sizes: dict[str, int], flags: str, tmp_path: Path
) -> None:
    """With 12 samples, each of two replicas has 3 micro-batches on each of two processes."""
    words = [*_WORDS, *flags.split(), "--train-iters", "6"]
    expected = run_distributed(2, _losses_of, words, **sizes)[0]

    def waits(iteration: int) -> None:
        wait_until(lambda: all(map(replicas.is_ready, ("0", "1"))), 120.0)

    with ExitStack() as stack:
        replicas = _Replicas(tmp_path, lighthouse, stack)
        started = {
            name: replicas.start(name, int(name), waits, *words[len(_WORDS) :], sizes=sizes)
            for name in ("0", "1")
        }
        results = {name: replicas.results(name, command) for name, command in started.items()}
    tolerance = 1e-2 if "--bf16" in flags else 2e-6
    for ranks in results.values():
        assert ranks[0][0] == pytest.approx(expected[-len(ranks[0][0]) :], rel=tolerance)
    for first, second in zip(*results.values(), strict=True):
        assert first[1] == second[1], "both replicas end with the same state"


def _losses_of(layout: Layout, words: Sequence[str]) -> list[float]:
    return train_toy(layout, words)[0].values("lm loss")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_micro_batch_is_in_one_share(count: int) -> None:
    shares = [[*Share(index, count).of(8)] for index in range(count)]
    assert sum(shares, []) == [*range(8)]
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1


def test_shares_follow_a_batch_that_grows() -> None:
    plan = BatchPlan(2, 12, (BatchStep(0, 4), BatchStep(8, 12)), data_parallel=2)
    micro_batches = [[i] for i in range(8)]  # updates of 1, 1, 3 and 3 micro-batches
    shares = [[*SharedSampler(micro_batches, plan, 0, Share(i, 2))] for i in range(2)]
    assert shares == [[[2], [5]], [[0], [1], [3], [4], [6], [7]]]
    resumed = SharedSampler(micro_batches[2:], plan, 8, Share(0, 3))
    assert [*resumed] == [[2], [5]]


class _Pipe:
    """A process group of two, whose messages wait in a list."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        self.sent += [tensor.clone() for tensor in tensors]
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        tensors[0].copy_(self.sent.pop(0))
        return SimpleNamespace(wait=lambda: None)


def test_a_state_is_sent_as_tensors() -> None:
    pipe, cpu = _Pipe(), torch.device("cpu")
    tensors = [torch.randn(3, 2).T, torch.arange(4), torch.randn(5).bfloat16()]
    sender = PeerTransport(pipe, lambda: (b"", tensors), cpu)
    state = {"user": {"default": (b'{"x": 1}', tensors)}, "torchft": {"step": 7}}
    sender.send_checkpoint([1], 7, state, None)  # type: ignore[arg-type]
    receiver = PeerTransport(pipe, lambda: (b"", [x * 0 for x in tensors]), cpu)
    found = receiver.recv_checkpoint(0, "", 7, None)  # type: ignore[arg-type]
    assert found["torchft"] == {"step": 7}
    counters, received = found["user"]["default"]
    assert counters == b'{"x": 1}'
    assert all(map(torch.equal, received, tensors))
    assert not pipe.sent


def test_more_replicas_than_micro_batches_are_refused() -> None:
    run = build_toy(Layout.single(), ["--global-batch-size", "2"])
    quorum = Quorum.__new__(Quorum)
    quorum._run, quorum.share, quorum._is_positioned = run, Share(), False
    manager: Any = SimpleNamespace(
        start_quorum=lambda: None, participating_rank=lambda: 2, num_participants=lambda: 3
    )
    quorum._manager = manager
    with pytest.raises(ConfigError, match="3 replicas have joined, but an update has only 2 micro"):
        quorum.begin()


def test_a_machine_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft")
    monkeypatch.setattr(platform, "node", lambda: "nowhere.invalid")
    with pytest.raises(ConfigError, match=r"by its name nowhere\.invalid \(.*/etc/hosts"):
        build_toy(
            Layout.single(),
            ["--torchft-lighthouse", "http://127.0.0.1:1", "--torchft-timeout", "0.5"],
        )


def test_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    (tmp_path / "corpus.jsonl").write_text('{"text": "12 13 14"}\n' * 40)
    words = ["--data-path", str(tmp_path / "corpus.jsonl"), "--split", "1,0,0", "--eval-iters", "0"]
    with pytest.raises(ConfigError, match="the training data is text, whose position a job"):
        build_toy(Layout.single(), [*words, "--torchft-lighthouse", "http://127.0.0.1:1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--zero-stage 3", "a job that joins could not receive shards of weights"),
        ("--on-spike rewind", "--on-spike rewind: a job that has joined has no checkpoint"),
        ("--calculate-per-token-loss", "labels are not counted across jobs"),
        ("--ema-decay 0.9", "does not receive averages"),
    ],
)
def test_what_several_jobs_cannot_do_is_refused(words: str, said: str) -> None:
    lines = problems("--torchft-lighthouse http://10.0.0.1:29510", words)
    assert any(said in line for line in lines), lines


def test_flags_of_replicas_are_checked() -> None:
    (line,) = problems("--torchft-lighthouse 10.0.0.1")
    assert line.endswith("expected an address such as http://10.0.0.1:29510")
    config = parse("--torchft-lighthouse http://10.0.0.1:29510 --torchft-replica 3").config
    assert config.reliability.torchft_replica == 3
    (line,) = problems("--torchft-replica 1")
    assert "--torchft-lighthouse" in line
