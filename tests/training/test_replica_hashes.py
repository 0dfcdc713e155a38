"""Replicas that differ are found, and the rank and tensor named."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import NumericsError
from megatron.parallel.layout import Layout
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.replica_hashes import (
    QueryKeyNorms,
    ReplicaHashes,
    _copies,
    _query_key_norms,
    hash_of,
)
from megatron.training.loop import standard_callbacks, train
from megatron.training.run import Run
from tests.distributed import run_distributed
from tests.training.toy import build_toy

_INTERVAL = "--check-weight-hash-across-dp-replicas-interval"
_TRIALS = 20


def _flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element in place."""
    data = tensor.detach().view(-1).view(torch.uint8)
    data[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def test_every_bit_and_every_place_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = torch.arange(3000).to(dtype)
        before = hash_of(tensor)
        assert hash_of(tensor.view(60, 50)) == before
        for bit in range(8 * tensor.element_size()):
            for place in (0, 1023, 1024, 2047, 2999):
                _flip(tensor, place, bit)
                assert hash_of(tensor) != before
                _flip(tensor, place, bit)
        assert hash_of(tensor) == before
    rows = torch.randn(4, 1024)
    assert hash_of(rows) != hash_of(rows[[1, 0, 2, 3]])


def _trials(layout: Layout, words: list[str]) -> list[tuple[bool, bool, bool]]:
    """Return whether each flipped bit was found, named with its rank, and the only one named."""
    run, hashes = build_toy(layout, [*words, _INTERVAL, "100"]), ReplicaHashes()
    hashes.on_start(run)
    chance, answers = random.Random(5), []
    for _ in range(_TRIALS):
        tensors = {name: t for axis, named in _copies(run) for name, t in named.items()}
        name, rank = chance.choice(sorted(tensors)), chance.randrange(layout.world.size)
        tensor = tensors[name]
        place, bit = chance.randrange(tensor.numel()), chance.randrange(8 * tensor.element_size())
        if layout.world.rank == rank:
            _flip(tensor, place, bit)
        told = ""
        try:
            hashes.compare(run)
        except NumericsError as error:
            told = str(error)
        named = f"replicas differ: {name} of rank {rank}, unlike 3 others. They were" in told
        answers.append((bool(told), named, ";" not in told))
        if layout.world.rank == rank:
            _flip(tensor, place, bit)
        hashes.compare(run)
    return answers


@pytest.mark.parametrize("words", ["", "--bf16 --use-distributed-optimizer", "--fp16"])
def test_each_flipped_bit_is_found_and_named(words: str) -> None:
    for of_rank in run_distributed(4, _trials, words.split()):
        assert of_rank == [(True, True, True)] * _TRIALS


class _FlipAt(Callback):
    """Flips a bit on one rank before an update."""

    def __init__(self, iteration: int, rank: int, name: str) -> None:
        self._place = (iteration - 1, rank)
        self._name = name

    def before_step(self, run: Run) -> None:
        if (run.progress.iteration, run.layout.world.rank) == self._place:
            tensors = {n: t for _, named in _copies(run) for n, t in named.items()}
            _flip(tensors[self._name], 3, 20)


def _trained(layout: Layout, words: list[str], name: str) -> str:
    run = build_toy(layout, words)
    callbacks, _ = standard_callbacks(run, [])
    try:
        train(run, [_FlipAt(3, 1, name), *callbacks])
    except NumericsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["layers.1.mlp.up.weight", "layers.0.mlp.up.weight.exp_avg"])
def test_a_run_stops_at_the_next_comparison_before_it_saves(name: str, tmp_path: Path) -> None:
    words = [_INTERVAL, "2", "--save", str(tmp_path), "--save-interval", "2", "--train-iters", "6"]
    told = run_distributed(4, _trained, words, name)
    assert len(set(told)) == 1
    # A wrong moment also changes its weight.
    found = re.fullmatch(
        r"iteration 4: replicas differ: (.*)\. They were equal after iteration 2: .*", told[0]
    )
    assert found is not None, told[0]
    assert f"{name} of rank 1, unlike 3 others" in found[1].split("; ")
    assert set(re.findall(r"of ranks? ([\d, ]+)", found[1])) == {"1, "}
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]


def _of_experts(layout: Layout) -> list[str]:
    words = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2".split()
    run, hashes = build_toy(layout, words), ReplicaHashes()
    run_tensors: dict[str, Any] = {n: t for _, named in _copies(run) for n, t in named.items()}
    expert = next(name for name in sorted(run_tensors) if ".experts." in name)
    hashes.compare(run)
    if layout.world.rank == 3:
        _flip(run_tensors[expert], 0, 7)
    with pytest.raises(NumericsError) as found:
        hashes.compare(run)
    return [expert, str(found.value)]


def test_experts_are_compared_where_they_have_copies() -> None:
    told = run_distributed(4, _of_experts, expert=2)
    assert len({text for _, text in told}) == 1
    expert, text = told[3]
    assert f"{expert} of ranks 1, 3 (too few agree to tell which is wrong)" in text


def test_a_single_replica_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = build_toy(Layout.single(), [_INTERVAL, "2"])
    train(run, standard_callbacks(run, [])[0])
    assert f"{_INTERVAL}: there is only one replica" in capsys.readouterr().out


_CHANGED = "layers.1.attention.key_norm.weight"
_NORMS = "--qk-layernorm --position-embedding-type rope --train-iters 4 --eval-iters 0"


def _trained_in_test_mode(layout: Layout, words: list[str], rank: int | None) -> tuple[str, int]:
    """Return how training ends, and the iteration, if a norm changes on a rank before update 3."""
    run = build_toy(layout, words)

    class Change(Callback):
        def before_step(self, run: Run) -> None:
            if (run.progress.iteration, run.layout.world.rank) == (2, rank):
                # `data`: autograd does not see the change, like a failure of the hardware.
                _flip(dict(run.named_parameters())[_CHANGED].data, 1, 20)

    callbacks, _ = standard_callbacks(run, [])
    assert any(isinstance(callback, QueryKeyNorms) for callback in callbacks)
    try:
        train(run, [Change(), *callbacks])
    except NumericsError as error:
        return str(error), run.progress.iteration
    return "", run.progress.iteration


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, ""),
        ({"tensor": 2}, "--tensor-model-parallel-size 2"),
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --qk-layernorm-scope each-head"),
    ],
)
def test_norms_of_queries_and_keys_are_compared_after_every_update(
    sizes: dict[str, int], words: str
) -> None:
    given = f"{_NORMS} --test-mode {words}".split()
    assert set(run_distributed(2, _trained_in_test_mode, given, None, **sizes)) == {("", 4)}
    (told, iteration), other = run_distributed(2, _trained_in_test_mode, given, 1, **sizes)
    assert other == (told, iteration) == (told, 3)
    found = re.fullmatch(
        r"iteration 3: copies differ: (.*)\. They were equal after iteration 2: .*", told
    )
    assert found is not None, told
    assert f"{_CHANGED} of ranks 0, 1 (too few agree" in found[1]


def test_only_norms_of_queries_and_keys_are_compared() -> None:
    run = build_toy(Layout.single(), f"{_NORMS} --test-mode".split())
    assert list(_query_key_norms(run)) == [
        f"layers.{layer}.attention.{part}_norm.{kind}"
        for layer in range(2)
        for part in ("query", "key")
        for kind in ("weight", "bias")
    ]
