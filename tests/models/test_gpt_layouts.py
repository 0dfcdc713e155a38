"""GPT split over tensor ranks: the same initial weights, loss and gradients as on one process."""

import weakref
from dataclasses import replace

import pytest
import torch

from megatron.models.gpt import GPTModel
from megatron.models.recompute import RecomputePlan
from megatron.parallel.collectives import all_reduce_coalesced
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import spec_of
from tests.distributed import run_sharing_memory
from tests.models.small import (
    LLAMA,
    batch,
    config,
    gpt,
    loss_and_gradients,
    new_context,
    plan,
)
from tests.parallel.test_layers import take_part

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
GEMMA = {
    "geglu": True,
    "apply_layernorm_1p": True,
    "norm_placement": "both",
    "scale_embeddings": True,
    "softmax_scale": 0.3,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 0.2,
    "window_size": "3,0",
    "window_attn_skip_freq": "2",
    "window_rotary_base": 50.0,
}
NETWORKS = {
    "gpt2": NO_DROPOUT,
    "llama": LLAMA,
    "plain": {**NO_DROPOUT, "masked_softmax_fusion": False, "swiglu": True},
    "one group": {**NO_DROPOUT, "group_query_attention": True, "num_query_groups": 1},
    "qwen2": {**LLAMA, "add_qkv_bias": True},
    "qwen3": {**LLAMA, "qk_layernorm": True, "kv_channels": 6},
    "olmoe": {
        **LLAMA,
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "kv_channels": 6,
    },
    "projections": {**NO_DROPOUT, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "norms": {**NO_DROPOUT, "apply_residual_connection_post_layernorm": True, "kv_channels": 6},
    "sinks": {**LLAMA, "softmax_type": "learnable", "window_size": "3,0", "init_method_std": 0.1},
    "sinks of one group": {
        **NO_DROPOUT,
        "softmax_type": "learnable",
        "group_query_attention": True,
        "num_query_groups": 1,
        "init_method_std": 0.1,
    },
    "off by one": {**LLAMA, "softmax_type": "off-by-one"},
    "gemma": {
        **LLAMA,
        **GEMMA,
        "swiglu": False,
        "untie_embeddings_and_output_weights": False,
    },
    "after": {**LLAMA, "norm_placement": "after", "qk_layernorm": True, "add_qkv_bias": True},
    "bloom": {
        **NO_DROPOUT,
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "init_method_std": 0.3,
    },
    "falcon": {
        **NO_DROPOUT,
        "position_embedding_type": "alibi",
        "scale_alibi": True,
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "group_query_attention": True,
        "num_query_groups": 1,
        "init_method_std": 0.3,
    },
    "gpt-j": {
        **NO_DROPOUT,
        "position_embedding_type": "rope",
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "add_bias_attention": False,
        "lm_head_bias": True,
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.3,
    },
    "cohere": {
        **LLAMA,
        "normalization": "LayerNorm",
        "layernorm_bias": False,
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "logit_scale": 0.3,
        "init_method_std": 0.3,
    },
    "llama 4": {
        **LLAMA,
        "attention_chunk_size": 5,
        "no_rope_freq": "2",
        "attention_temperature_scale": 0.7,
        "attention_temperature_floor": 4,
        "qk_l2_norm": True,
        "kv_channels": 6,
        "init_method_std": 0.3,
    },
    "command r plus": {
        **LLAMA,
        "normalization": "LayerNorm",
        "layernorm_bias": False,
        "qk_layernorm": True,
        "qk_layernorm_scope": "each-head",
        "kv_channels": 6,
    },
    "each head": {**NO_DROPOUT, "qk_layernorm": True, "qk_layernorm_scope": "each-head"},
    "parallel": {**NO_DROPOUT, "parallel_residual": True},
    "parallel, dropout": {**NO_DROPOUT, "parallel_residual": True, "hidden_dropout": 1e-9},
    "after, dropout": {**NO_DROPOUT, "norm_placement": "both", "hidden_dropout": 1e-9},
    # The dropout code path, with nothing dropped.
    "dropout": {**NO_DROPOUT, "hidden_dropout": 1e-9},
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_start_as_slices_of_the_whole(network, size):
    flags = NETWORKS[network]
    whole = dict(gpt(flags).named_parameters())
    seen = dict.fromkeys(whole, 0)
    for rank in range(size):
        part = gpt(flags, layout=Layout.at(rank, size, tensor=size))
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, take_part(whole[name], parameter)), name
            seen[name] += parameter.numel()
    for name, parameter in whole.items():
        copies = size if spec_of(parameter).split_dim is None else 1
        assert seen[name] == copies * parameter.numel(), name


def _layout(layout, sequence):
    return replace(layout, sequence_parallel=sequence)


def _train_split(layout, flags, sequence, recompute=None, precision=None, overlap=True):
    layout = _layout(layout, sequence)
    model = gpt(flags, precision, layout=layout, recompute=recompute, overlap=overlap)
    loss, grads = loss_and_gradients(model)
    partial = [p.grad for p in model.parameters() if spec_of(p).partial_gradient]
    all_reduce_coalesced(partial, layout.tensor)
    with torch.no_grad():
        logits = model.eval()(batch()[0])
    return loss, logits, grads


def _train_all(layout, cases):
    return [_train_split(layout, *case) for case in cases]


def _check_equal(flags, results):
    """Compare every rank's loss, logits and gradients with the single process."""
    whole = gpt(flags)
    loss, grads = loss_and_gradients(whole)
    logits = whole.eval()(batch()[0]).detach()
    size = len(results)
    torch.testing.assert_close(torch.cat([r[1] for r in results], -1), logits, rtol=0, atol=1e-5)
    for rank, (part_loss, _, part_grads) in enumerate(results):
        torch.testing.assert_close(part_loss, loss, rtol=1e-5, atol=0)
        layout = Layout.at(rank, size, tensor=size)
        network = config(**flags)
        shapes = GPTModel(plan(network), new_context(network, layout=layout, device="meta"))
        for name, parameter in shapes.named_parameters():
            expected = take_part(grads[name], parameter)
            torch.testing.assert_close(part_grads[name], expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_equals_one_process(size, sequence):
    networks = list(NETWORKS.values())
    by_rank = run_sharing_memory(
        size, _train_all, [(flags, sequence) for flags in networks], tensor=size
    )
    for flags, results in zip(networks, zip(*by_rank, strict=True), strict=True):
        _check_equal(flags, results)


DROPOUT = {"attention_dropout": 0.3, "hidden_dropout": 0.3}
PLANS = [
    RecomputePlan("selective"),
    RecomputePlan("full", "uniform", 1),
    RecomputePlan("full", "block", 2),
    RecomputePlan("full", "uniform", 2, split_inputs=True),
    RecomputePlan("full", "block", 1, split_inputs=True),
]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("plain", [False, True])
def test_other_ways_to_the_same_bits(sequence, plain):
    """With dropout, compare a second run, each recomputation mode, and unoverlapped messages."""
    flags = {**DROPOUT, "masked_softmax_fusion": not plain}
    cases = [(flags, sequence), (flags, sequence), *((flags, sequence, plan) for plan in PLANS)]
    cases.append((flags, sequence, None, None, False))
    for results in run_sharing_memory(2, _train_all, cases, tensor=2):
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_fp32_residual_and_fp32_lookup_equal_one_process():
    """In fp32 these flags change nothing, split or not."""
    precision = {"fp32_residual_connection": True, "embedding_weights_in_fp32": True}
    case = (NO_DROPOUT, True, None, precision)
    by_rank = run_sharing_memory(2, _train_all, [case], tensor=2)
    _check_equal(NO_DROPOUT, [results[0] for results in by_rank])


def _masks(layout, sequence):
    """Return the dropout masks at every site of a one-layer network."""
    layout = _layout(layout, sequence)
    model = gpt({**DROPOUT, "num_layers": 1}, layout=layout)
    seen = {}
    original = torch.nn.functional.dropout

    def record(x, p, training=True):
        out = original(torch.ones_like(x), p, training)
        seen[len(seen)] = out != 0
        return out * x

    attend = model.layers["0"].attention.core.attend

    def attend_recorded(query, key, value, options):
        seen["attention"] = original(torch.ones(64), options.dropout) != 0
        return attend(query, key, value, options)

    model.layers["0"].attention.core.attend = attend_recorded
    torch.nn.functional.dropout = record
    torch.manual_seed(5)
    model(batch()[0])
    return seen


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_dropout_differs_where_ranks_hold_different_parts_only(sequence):
    first, second = run_sharing_memory(2, _masks, sequence, tensor=2)
    assert set(first) == {0, "attention", 2, 3}  # embedding, attention output, mlp output
    assert not torch.equal(first["attention"], second["attention"])
    for site in (0, 2, 3):
        assert first[site].any()
        assert torch.equal(first[site], second[site]) != sequence
    assert not torch.equal(first[2], first[3])
    again, _ = run_sharing_memory(2, _masks, sequence, tensor=2)
    assert all(torch.equal(again[site], mask) for site, mask in first.items())


def _saved_bytes(layout, plan):
    """Return how many group inputs are alive after a forward pass, and how many there were."""
    model = gpt(NO_DROPOUT, layout=layout, recompute=plan)
    inputs = []
    for block in model.layers.values():
        block.register_forward_pre_hook(
            lambda _m, args: inputs.append(weakref.ref(args[0].residual.untyped_storage()))
        )
    tokens, labels = batch()
    loss = model(tokens, labels=labels)
    alive = sum(ref() is not None for ref in inputs)
    loss.mean().backward()
    return alive, len(inputs)


def test_split_inputs_are_not_kept_whole():
    kept = run_sharing_memory(2, _saved_bytes, RecomputePlan("full"), tensor=2)
    split = run_sharing_memory(2, _saved_bytes, RecomputePlan("full", split_inputs=True), tensor=2)
    assert kept == [(3, 6)] * 2  # three layers, each run twice
    assert split == [(0, 6)] * 2


def test_partial_gradients_are_those_of_parameters_outside_the_split_layers():
    layout = replace(Layout.at(0, 2, tensor=2), sequence_parallel=True)
    model = gpt(NO_DROPOUT, layout=layout)
    partial = {n for n, p in model.named_parameters() if spec_of(p).partial_gradient}
    replicated = {n for n, p in model.named_parameters() if spec_of(p).split_dim is None}
    assert partial == replicated
    whole = gpt(NO_DROPOUT, layout=replace(layout, sequence_parallel=False))
    assert not any(spec_of(p).partial_gradient for p in whole.parameters())


def test_the_norm_of_heads_is_partial_without_sequence_parallelism():
    model = gpt({**LLAMA, "qk_layernorm": True}, layout=Layout.at(0, 2, tensor=2))
    partial = {n for n, p in model.named_parameters() if spec_of(p).partial_gradient}
    assert len(partial) == 6
    assert all("query_norm" in name or "key_norm" in name for name in partial)
