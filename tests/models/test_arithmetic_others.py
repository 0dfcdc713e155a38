"""Computed counts of BERT and T5 against modules, PyTorch's FLOP counts and published sizes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.stages import ModelPart
from megatron.models.arithmetic import count_parameters, count_part_parameters, flops_per_token
from megatron.models.bert import BertModel, BertTaskModel
from megatron.models.costs import WeightSplit
from megatron.models.plan import HeadSpec
from megatron.models.plans import model_plan
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from tests.models.small import VOCAB, config, new_context, plan

BERT = {"architecture": "bert"}
T5 = {"architecture": "t5", "decoder_num_layers": 2}
NETWORKS = {
    "bert": BERT,
    "bert without binary head": {**BERT, "bert_binary_head": False},
    "bert, untied": {**BERT, "untie_embeddings_and_output_weights": True},
    "t5": T5,
    "t5, wide heads": {**T5, "kv_channels": 10},
    "t5, no biases": {**T5, "add_bias_linear": False, "normalization": "RMSNorm"},
    "t5, rope": {**T5, "position_embedding_type": "rope"},
    "t5, relative": {
        **T5,
        "position_embedding_type": "relative",
        "geglu": True,
        "add_output_bias": False,
    },
}


def _build(model, *, part=None, layout=None, device="meta", vocab=VOCAB):
    network = BertModel if model.architecture == "bert" else T5Model
    context = new_context(model, layout=layout, device=device)
    return network(model_plan(model, vocab), context, part)


def _build_chooser(model, head, *, device="meta", layout=None, part=None):
    context = new_context(model, layout=layout, device=device)
    return BertTaskModel(plan(model, head), context, part, head_name="multichoice_head")


def _held(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_counts(name):
    model = config(**NETWORKS[name])
    assert count_parameters(plan(model)) == _held(_build(model))


@pytest.mark.parametrize(
    ("name", "cut"), [("bert", 2), ("t5", 4), ("t5, relative", 3), ("t5, relative", 4)]
)
def test_every_part_counts(name, cut):
    model = config(**NETWORKS[name])
    for part in (
        ModelPart(range(cut), embedding=True, head=False),
        ModelPart(range(cut, model.num_layers + model.decoder_layers), embedding=False, head=True),
    ):
        network = _build(model, part=part, layout=Layout.at(0, 2, tensor=2))
        assert count_part_parameters(plan(model), part, WeightSplit(tensor=2)) == _held(network)


@pytest.mark.parametrize("name", ["bert", "bert, untied"])
def test_a_tasks_head_stands_in_the_place_of_those_of_pretraining(name):
    model, head = config(**NETWORKS[name]), HeadSpec(outputs=3, sequences=4)
    assert count_parameters(plan(model, head)) == _held(_build_chooser(model, head))
    last = ModelPart(range(2, model.num_layers + model.decoder_layers), embedding=False, head=True)
    network = _build_chooser(model, head, part=last, layout=Layout.at(0, 2, tensor=2))
    assert network.embedding is None  # this stage neither embeds words nor scores them
    counted = count_part_parameters(plan(model, head), last, WeightSplit(tensor=2))
    assert counted == _held(network)


def test_published_sizes():
    """BERT-large has 340 million parameters in the paper, Megatron's head and pooler included."""
    sizes = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16}
    sizes |= {"kv_channels": 64, "num_layers": 24, "max_position_embeddings": 512}
    model = config(**{**BERT, **sizes})
    assert count_parameters(model_plan(model, 30522)) == 336_226_108


def _counted(network, passing, *given):
    """Return the operations of a forward pass as PyTorch counts them."""
    for parameter in network.eval().parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        passing(*given)
    return counter.get_total_flops()


def test_flops_of_a_task_are_those_that_pytorch_counts():
    model = config(**BERT, masked_softmax_fusion=False, max_position_embeddings=12)
    network, e = _build_chooser(model, HeadSpec(outputs=3), device="cpu"), 12
    ones = torch.ones(1, 1, e, dtype=torch.int64)
    counted = _counted(network, network.score, ones, ones.bool(), ones)
    ours = flops_per_token(plan(model, HeadSpec(outputs=3)), e)
    assert ours * e / 3 == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_flops_are_those_that_pytorch_counts(kind):
    """Compare the products of the forward pass, with attention that computes both triangles."""
    model = config(**NETWORKS[kind], masked_softmax_fusion=False, max_position_embeddings=12)
    network = _build(model, device="cpu")
    e, d = 12, 8
    tokens, padding = torch.ones(1, e, dtype=torch.int64), torch.ones(1, e, dtype=torch.bool)
    decoder = torch.ones(1, d, dtype=torch.int64)
    given = (tokens, padding) if kind == "bert" else (tokens, decoder, padding)
    counted = _counted(network, network, *given)
    ours = flops_per_token(plan(model), e, d if kind == "t5" else None)
    count = e if kind == "bert" else e + d
    causal = 0 if kind == "bert" else 2 * 2 * d * d * 16  # the half that we do not count
    assert ours * count / 3 == pytest.approx(counted - causal, rel=1e-3)
