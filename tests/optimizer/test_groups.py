"""Which parameters decay, and which have groups of their own."""

import torch
from torch import nn

from megatron.optimizer.groups import split_groups
from megatron.optimizer.rules import SGD
from megatron.parallel.parameter import ZEROS
from tests.parallel.buffers import new_parameter


def _one_rule(name, parameter):
    return SGD(0.0)


def _parameter(*shape):
    return nn.Parameter(torch.zeros(shape))


def test_matrices_and_embeddings_decay_and_biases_and_vectors_do_not():
    named = {
        "embedding.word_embeddings.weight": _parameter(8, 4),
        "layers.0.input_norm.weight": _parameter(4),
        "layers.0.input_norm.bias": _parameter(4),
        "layers.0.mlp.dense_h_to_4h.weight": _parameter(2, 4, 4),
        "layers.0.mlp.dense_h_to_4h.bias": _parameter(2, 4),  # SwiGLU: a two-dimensional bias
        "head.unbiased.weight": _parameter(8, 4),
        "bias": _parameter(2, 2),
    }
    decayed, kept = split_groups(named.items(), _one_rule)
    assert decayed.is_decayed
    assert decayed.names == (
        "embedding.word_embeddings.weight",
        "layers.0.mlp.dense_h_to_4h.weight",
        "head.unbiased.weight",
    )
    assert not kept.is_decayed
    assert kept.names == (
        "layers.0.input_norm.weight",
        "layers.0.input_norm.bias",
        "layers.0.mlp.dense_h_to_4h.bias",
        "bias",
    )
    assert kept.parameters[-1] is named["bias"]


def test_norms_of_queries_and_keys_decay_on_request():
    names = [
        "model.layers.0.attention.query_norm.weight",
        "model.layers.0.attention.query_norm.bias",
        "model.layers.0.attention.key_norm.weight",
        "model.layers.0.attention_norm.weight",
        "model.layers.0.attention.out_norm.weight",
    ]
    parameters = [(name, _parameter(4)) for name in names]
    (kept,) = split_groups(parameters, _one_rule)
    assert not kept.is_decayed
    decayed, kept = split_groups(parameters, _one_rule, decays_qk_norms=True)
    assert (decayed.is_decayed, list(decayed.names)) == (True, names[:3])
    assert (kept.is_decayed, list(kept.names)) == (False, names[3:])


def test_empty_groups_and_frozen_parameters_are_left_out():
    frozen = _parameter(3)
    frozen.requires_grad_(False)
    groups = split_groups([("a.weight", _parameter(2, 2)), ("a.bias", frozen)], _one_rule)
    assert [group.names for group in groups] == [("a.weight",)]


def test_vocabularies_with_a_rate_of_their_own_have_their_own_groups():
    named = {
        name: new_parameter(shape, init=ZEROS, is_vocabulary=name in ("words", "output"))
        for name, shape in {
            "words": (8, 4),
            "a.weight": (4, 4),
            "a.bias": (4,),
            "output": (8, 4),
        }.items()
    }
    named["head.weight"] = _parameter(2, 4)  # belongs to no model, so it has no spec
    together = [group.names for group in split_groups(named.items(), _one_rule)]
    assert together == [("words", "a.weight", "output", "head.weight"), ("a.bias",)]
    groups = split_groups(named.items(), _one_rule, decouples=True)
    assert [group.names for group in groups] == [
        ("a.weight", "head.weight"),
        ("a.bias",),
        ("words", "output"),
    ]
    assert [group.is_decoupled for group in groups] == [False, False, True]


def test_different_rules_have_different_groups():
    named = {"a.weight": _parameter(4, 4), "b.weight": _parameter(4, 4), "a.bias": _parameter(4)}
    rules = {"a": SGD(0.5), "b": SGD(0.9)}
    groups = split_groups(named.items(), lambda name, parameter: rules[name[0]])
    assert [(group.rule, group.names) for group in groups] == [
        (rules["a"], ("a.weight",)),
        (rules["a"], ("a.bias",)),
        (rules["b"], ("b.weight",)),
    ]
