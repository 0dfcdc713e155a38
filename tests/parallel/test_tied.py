"""Tied parameters: which stages have copies, and that their gradients add up."""

import pytest
import torch
from torch import nn

from megatron.parallel.layout import Layout
from megatron.parallel.tied import (
    WORD_EMBEDDING,
    SharedTable,
    borrowed_parameters,
    find_ties,
    share_tables,
    tied_names,
)
from tests.distributed import run_distributed


@pytest.mark.parametrize(
    ("rank", "size", "word_embeddings", "names"),
    [
        (0, 3, True, {WORD_EMBEDDING, "a", "b"}),
        (2, 3, True, {WORD_EMBEDDING, "a", "b"}),
        (1, 3, True, {"a", "b"}),  # has no copy of the word embeddings
        (0, 3, False, {"a", "b"}),
        (0, 1, True, set()),
    ],
)
def test_parameters_have_copies_in_a_pipeline_only(rank, size, word_embeddings, names):
    layout = Layout.at(rank, size, pipeline=size)
    found = tied_names(layout, word_embeddings=word_embeddings, tables=["a", "b"])
    assert found == names


# The elements of the gradients that each stage has.
_HELD = [{WORD_EMBEDDING: 4, "a": 3, "frozen": 2}, {"a": 3}, {WORD_EMBEDDING: 4, "b": 0}]


def _parameters(rank):
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in _HELD[rank].items()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name != "frozen")
        parameter.main_grad = torch.full_like(parameter, 10.0**rank)
    return parameters


def _add_up(layout, word_embeddings):
    parameters = _parameters(layout.pipeline.rank)
    ties = find_ties(
        parameters.items(),
        layout,
        word_embeddings=word_embeddings,
        tables=["a", "b", "frozen", "elsewhere"],
        device=torch.device("cpu"),
        gradient_dtype=torch.float32,
    )
    for _ in range(2):  # a stage without a copy adds zeros in every update
        for tie in ties:
            tie.add_up()
    kinds = [(len(tie.axis.ranks), None if tie.zeros is None else len(tie.zeros)) for tie in ties]
    return kinds, {name: p.main_grad.tolist() for name, p in parameters.items()}


def test_gradients_of_copies_are_added_up():
    first, second, third = run_distributed(3, _add_up, True, pipeline=3)
    assert first[0] == [(2, None), (3, None), (3, 0)]
    assert second[0] == [(3, None), (3, 0)]
    assert third[0] == [(2, None), (3, 3), (3, None)]
    words, table = [2 * 101.0] * 4, [2 * 11.0] * 3
    assert first[1] == {WORD_EMBEDDING: words, "a": table, "frozen": [1.0, 1.0]}
    assert second[1] == {"a": table}
    assert third[1] == {WORD_EMBEDDING: words, "b": []}


def test_without_a_pipeline_or_tables_nothing_is_tied():
    options = {"device": torch.device("cpu"), "gradient_dtype": torch.float32}
    for layout, tables in ((Layout.single(), ["a"]), (Layout.at(1, 3, pipeline=3), [])):
        parameters = _parameters(0).items()
        assert find_ties(parameters, layout, word_embeddings=True, tables=tables, **options) == []
    layout, parameters = Layout.at(0, 2, pipeline=2), _parameters(0)
    assert find_ties(parameters.items(), layout, word_embeddings=False, tables=[], **options) == []
    (tie,) = find_ties(parameters.items(), layout, word_embeddings=True, tables=[], **options)
    assert (tie.copy, tie.axis, tie.zeros) == (parameters[WORD_EMBEDDING], layout.embedding, None)
    parameters[WORD_EMBEDDING].requires_grad_(False)
    assert find_ties(parameters.items(), layout, word_embeddings=True, tables=[], **options) == []


class _Table(SharedTable):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def test_parts_in_one_process_share_a_table():
    parts = [nn.ModuleDict({"bias": _Table(), "layer": nn.Linear(2, 2)}) for _ in range(3)]
    parts[1]["other"] = _Table()
    share_tables(parts)
    first, *others = (part["bias"] for part in parts)
    assert first.original is None
    assert all(table.original is first for table in others)
    assert [len(list(part.parameters())) for part in parts] == [3, 3, 2]
    assert parts[1]["other"].original is None
    assert [list(borrowed_parameters(part)) for part in parts] == [
        [],
        [first.weight],
        [first.weight],
    ]
