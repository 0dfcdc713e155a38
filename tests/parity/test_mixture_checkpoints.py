"""Checkpoints of a mixture of experts: saved in one layout, loaded in any other, bit for bit."""

from dataclasses import replace

import pytest
import torch

from megatron.training.checkpointing import save_run
from tests.checkpoint.states import read_all
from tests.distributed import run_sharing_memory
from tests.parity.mixtures import SIGMOID, SOFTMAX, MixtureCase
from tests.training.toy import build_toy, train_toy

_SP = "--sequence-parallel"
CASES = {
    "one process": MixtureCase(1),
    "expert 2": MixtureCase(2, expert=2),
    "expert 4, sharded": MixtureCase(4, expert=4, flags="--zero-stage 1"),
    "expert 2 of data 4, sharded": MixtureCase(4, expert=2, flags="--zero-stage 2"),
    "tensor 2": MixtureCase(2, tensor=2),
    "whole experts": MixtureCase(4, tensor=2, expert=4, expert_tensor=1, flags=_SP),
    "split experts, sharded": MixtureCase(
        4, tensor=2, expert=1, flags=f"{_SP} --zero-stage 1 --overlap-param-gather"
    ),
    "expert 2 of data 4, weights in shards": MixtureCase(4, expert=2, flags="--zero-stage 3"),
    "whole experts, weights in shards": MixtureCase(
        4, tensor=2, expert=2, expert_tensor=1, flags=f"{_SP} --zero-stage 3"
    ),
    "pipeline": MixtureCase(
        4, pipeline=2, expert=2, flags="--num-layers-per-virtual-pipeline-stage 1 --zero-stage 1"
    ),
}


def _train(layout, words):
    recorder, _ = train_toy(layout, words)
    return recorder.values("lm loss"), recorder.values("grad-norm")


def _pass_on(layout, words):
    run = build_toy(layout, words)
    save_run(run)
    return run.progress.iteration


def _run(function, case, *words):
    return run_sharing_memory(case.processes, function, [*case.words, *words], **case.sizes)


def _saving(folder, at=3):
    return ("--save", str(folder), "--save-interval", str(at), "--exit-interval", str(at))


def _same(ours, theirs):
    ours, theirs = read_all(ours), read_all(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize("network", [SOFTMAX, f"{SOFTMAX} --bf16"], ids=["fp32", "bf16"])
def test_every_layout_takes_over_every_bit(tmp_path, network):
    """Pass from layout to layout and back to the first: weights, moments, masters, position."""
    first, *others = [replace(case, network=network) for case in CASES.values()]
    _run(_train, first, *_saving(tmp_path / "0"))
    for number, case in enumerate([*others, first], 1):
        load = ("--load", str(tmp_path / str(number - 1)))
        save = ("--save", str(tmp_path / str(number)), "--save-interval", "3")
        assert set(_run(_pass_on, case, *load, *save)) == {3}
        saved = _same(tmp_path / str(number), tmp_path / "0")
    experts = {name: tensor for name, tensor in saved.items() if ".experts.up.weight" in name}
    kinds = 4 if "bf16" in network else 3  # weight, two moments, and a master
    assert len(experts) == 3 * kinds
    assert {tensor.shape[0] for tensor in experts.values()} == {8}


@pytest.mark.parametrize(
    "name", ["expert 2 of data 4, sharded", "whole experts, weights in shards", "pipeline"]
)
def test_resuming_is_bit_for_bit(tmp_path, name):
    case = replace(CASES[name], iterations=6)
    whole = _run(_train, case, *_saving(tmp_path / "whole", 6))
    first = _run(_train, case, *_saving(tmp_path / "half"))
    load = ("--load", str(tmp_path / "half"))
    second = _run(_train, case, *load, *_saving(tmp_path / "joined", 6))
    for a, b, joined in zip(first, second, whole, strict=True):
        assert len(a[0]) == len(b[0]) == 3
        assert [x + y for x, y in zip(a, b, strict=True)] == list(joined)
    _same(tmp_path / "joined", tmp_path / "whole")


@pytest.mark.parametrize("network", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_losses_continue_in_another_layout(tmp_path, network):
    """Router biases continue too."""
    one = replace(CASES["one process"], network=network, iterations=6)
    expected = _run(_train, one)[0][0]
    first = _run(_train, replace(one, processes=2, expert=2), *_saving(tmp_path))[0][0]
    other = replace(CASES["whole experts"], network=network, iterations=6)
    for second, _ in _run(_train, other, "--load", str(tmp_path)):
        assert [*first, *second] == pytest.approx(expected, rel=1e-5)
