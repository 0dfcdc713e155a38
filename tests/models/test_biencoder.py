"""A bi-encoder's towers, and the comparison of the texts of all ranks."""

import pytest
import torch
import torch.nn.functional as F

from megatron.config.stages import whole_model
from megatron.models.arithmetic import count_parameters, count_part_matrices, flops_per_token
from megatron.models.bert import BertModel
from megatron.models.biencoder import BiEncoderModel, Vectors, compare_all, top_k_accuracy
from megatron.models.costs import WeightSplit
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import initialize
from tests.distributed import run_distributed
from tests.models.small import BATCH, SEQUENCE, VOCAB, config, new_context, plan

QUIET = {"architecture": "ict", "attention_dropout": 0.0, "hidden_dropout": 0.0}
NETWORKS = {
    "two towers": {},
    "projected": {"biencoder_projection_dim": 5},
    "shared": {"biencoder_shared_query_context_model": True, "biencoder_projection_dim": 5},
}


def build(**flags):
    model = config(**QUIET, **flags)
    network = BiEncoderModel(plan(model), new_context(model))
    initialize(network.named_parameters(), 1)
    return network


def texts():
    generator = torch.Generator().manual_seed(3)
    padding = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    padding[1, SEQUENCE - 4 :] = False
    return torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator), padding


@pytest.mark.parametrize("flags", NETWORKS.values(), ids=NETWORKS)
def test_parameters_are_counted(flags):
    network, model = build(**flags), config(**QUIET, **flags)
    parameters = list(network.parameters())
    assert count_parameters(plan(model)) == sum(one.numel() for one in parameters)
    layers = sum(
        one.numel()
        for name, one in network.named_parameters()
        if ".layers." in name and one.ndim > 1
    )
    assert count_part_matrices(plan(model), whole_model(3), WeightSplit()) == layers


def test_sharing_towers_saves_parameters_but_no_work():
    one = plan(config(**QUIET, biencoder_shared_query_context_model=True))
    two = plan(config(**QUIET))
    assert count_parameters(two) == 2 * count_parameters(one)
    assert flops_per_token(two, SEQUENCE) == flops_per_token(one, SEQUENCE)


def test_a_vector_is_the_first_tokens_hidden_state_projected():
    network = build(biencoder_projection_dim=5)
    tokens, padding = texts()
    tower = network.queries
    hidden = BertModel.forward(tower, tokens, padding, torch.zeros_like(tokens))
    expected = F.linear(hidden[0], tower.projection.weight, tower.projection.bias)
    torch.testing.assert_close(tower.encode(tokens, padding), expected)
    assert tower.encode(tokens, padding).shape == (BATCH, 5)
    bare = build()
    hidden = BertModel.forward(bare.queries, tokens, padding, torch.zeros_like(tokens))
    assert torch.equal(bare.queries.encode(tokens, padding), hidden[0])


def test_padding_changes_no_vector():
    network = build()
    tokens, padding = texts()
    other = torch.where(padding, tokens, (tokens + 1) % VOCAB)
    vectors = network(tokens, padding, other, padding)
    torch.testing.assert_close(
        network.contexts.encode(tokens, padding), network.contexts.encode(other, padding)
    )
    assert not torch.allclose(vectors.queries, vectors.contexts)  # each tower has its own weights


def test_a_shared_tower_is_two_equal_ones():
    shared, two = build(biencoder_shared_query_context_model=True), build()
    weights = dict(shared.named_parameters(prefix=""))
    with torch.no_grad():
        for name, parameter in two.named_parameters():
            tower, _, rest = name.partition(".")
            assert tower in ("query_model", "context_model")
            parameter.copy_(weights[f"shared_model.{rest}"])
    tokens, padding = texts()
    batch = (tokens, padding, tokens.flip(0), padding.flip(0))
    torch.testing.assert_close(shared(*batch), two(*batch))
    for network in (shared, two):
        vectors = network(*batch)
        (vectors.queries @ vectors.contexts.t()).square().sum().backward()
    grads = dict(two.named_parameters())
    for name, parameter in shared.named_parameters():
        rest = name.partition(".")[2]
        both = grads[f"query_model.{rest}"].grad + grads[f"context_model.{rest}"].grad
        torch.testing.assert_close(parameter.grad, both, rtol=1e-4, atol=1e-5)


def test_more_contexts_than_queries_are_wrong_ones():
    generator = torch.Generator().manual_seed(1)
    vectors = Vectors(
        torch.randn(3, 4, generator=generator), torch.randn(7, 4, generator=generator)
    )
    found = compare_all(vectors, Axis(), scale=0.5)
    scores = vectors.queries @ vectors.contexts.t() / 2
    torch.testing.assert_close(found.loss, F.cross_entropy(scores, torch.arange(3)))
    order = scores.argsort(dim=1, descending=True)
    expected = [order[i].tolist().index(i) for i in range(3)]
    assert found.ranks.tolist() == expected
    for k in (1, 2, 7):
        share = sum(place < k for place in expected) / 3
        assert top_k_accuracy(found.ranks, k).item() == pytest.approx(100 * share)


def _rank_s_part(layout: Layout):
    queries, contexts = _whole()
    rank, size = layout.data.rank, layout.data.size
    mine = Vectors(
        queries.chunk(size)[rank].clone().requires_grad_(),
        contexts.chunk(size)[rank].clone().requires_grad_(),
    )
    found = compare_all(mine, layout.data, scale=1.0)
    found.loss.backward()
    # Averaged over the ranks, as parameter gradients are.
    return found.loss.item(), found.ranks.tolist(), [v.grad / size for v in mine]


def _whole():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, generator=generator), torch.randn(6, 3, generator=generator)


def test_ranks_compare_their_texts_with_each_others():
    queries, contexts = (part.requires_grad_() for part in _whole())
    scores = queries @ contexts.t()
    loss = F.cross_entropy(scores, torch.tensor([0, 1, 3, 4]))  # each rank has a negative, too
    loss.backward()
    results = run_distributed(2, _rank_s_part)
    for rank, (value, places, grads) in enumerate(results):
        assert value == pytest.approx(loss.item(), rel=1e-6)
        assert places == results[0][1]
        torch.testing.assert_close(grads[0], queries.grad.chunk(2)[rank])
        torch.testing.assert_close(grads[1], contexts.grad.chunk(2)[rank])
