"""Latent attention: its equations, its counts, and the settings that it refuses."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.stages import ModelPart
from megatron.kernels.rope import Rotation
from megatron.models.arithmetic import count_part_parameters
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.gpt import GPTModel
from megatron.models.latent_attention import LatentAttention
from megatron.models.plan import LatentAttentionPlan, rotaries
from megatron.models.recompute import RecomputePlan
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.models.small import SEQUENCE, config, gpt, loss_and_gradients, plan
from tests.training.toy import losses_and_norms_of

RANK, STILL, TURNING, VALUE, HEADS, HIDDEN = 10, 6, 4, 7, 4, 16
KEY = STILL + TURNING
NETWORK: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 9,
    "kv_lora_rank": RANK,
    "qk_head_dim": STILL,
    "qk_pos_emb_head_dim": TURNING,
    "v_head_dim": VALUE,
    "kv_channels": KEY,
    "position_embedding_type": "rope",
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "mscale": 0.5,
    "mscale_all_dim": 0.75,
}


def normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def turned(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + d/2) of the last dimension of [s, b, d]."""
    first, second = x.chunk(2, dim=2)
    cos, sin = (part.flatten(1)[:, None, : x.shape[2] // 2] for part in rotation[:2])
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)


def by_equations(layer: LatentAttention, x: Tensor, rotation: Rotation, scale: float) -> Tensor:
    """Evaluate the paper's equations one head at a time, each with its own sizes."""
    plan = layer.plan
    epsilon = plan.qk_norm.epsilon
    query = x
    if layer.query_down is not None:
        query = normalized(x @ layer.query_down.weight.T, layer.query_norm.weight, epsilon)
    query = (query @ layer.query_up.weight.T).unflatten(2, (HEADS, STILL + TURNING))
    latent, shared = (x @ layer.latent_down.weight.T).split((RANK, TURNING), dim=2)
    latent = normalized(latent, layer.latent_norm.weight, epsilon)
    shared = turned(shared, rotation)
    rows = layer.latent_up.weight.unflatten(0, (HEADS, STILL + plan.value_size))
    later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(HEADS):
        key, value = (latent @ rows[head].T).split((STILL, plan.value_size), dim=2)
        still, turning = query[:, :, head].split((STILL, TURNING), dim=2)
        scores = torch.einsum("qbd,kbd->bqk", still, key)
        scores = scores + torch.einsum("qbd,kbd->bqk", turned(turning, rotation), shared)
        weights = (scale * scores).masked_fill(later, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("bqk,kbd->qbd", weights, value))
    return F.linear(torch.cat(outputs, dim=2), layer.output.weight, layer.output.bias)


@pytest.mark.parametrize("query_rank", [9, None])
@pytest.mark.parametrize("value", [7, 13])  # narrower and wider than a key
@pytest.mark.parametrize("yarn", [False, True])
def test_it_computes_its_equations(query_rank: int | None, value: int, yarn: bool) -> None:
    sizes = {"q_lora_rank": query_rank, "v_head_dim": value, "kv_channels": max(KEY, value)}
    model = gpt({**NETWORK, **sizes, **(YARN if yarn else {})}).eval()
    layer = model.layers["1"].attention
    assert isinstance(layer, LatentAttention)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5, generator=generator)
    (rotation,) = model.rotation(torch.arange(SEQUENCE))
    assert rotaries(model.plan.layers)[0].channels == TURNING
    scale = KEY**-0.5
    if yarn:
        scale *= (0.75 * 0.1 * math.log(4) + 1) ** 2
    x = torch.randn(SEQUENCE, 2, HIDDEN, generator=generator)
    got = layer(x, None, rotation)
    torch.testing.assert_close(got, by_equations(layer, x, rotation, scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("query_rank", [9, None])
def test_its_parameters_are_counted(query_rank: int | None) -> None:
    layer = gpt({**NETWORK, "q_lora_rank": query_rank}).layers["0"].attention
    plan = layer.plan
    assert isinstance(plan, LatentAttentionPlan)
    counted = sum(a * b for a, b in LatentAttention.matrices(plan, WeightSplit()))
    counted += LatentAttention.vectors(plan, WeightSplit())
    assert counted == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("query_rank", [9, None])
def test_its_parameters_are_counted_on_a_tensor_rank(query_rank: int | None) -> None:
    network = config(**{**NETWORK, "q_lora_rank": query_rank})
    half = BuildContext(Layout.at(1, 2, tensor=2), torch.device("meta"))
    part = ModelPart(range(2), embedding=True, head=False)
    held = sum(each.numel() for each in GPTModel(plan(network), half, part).parameters())
    assert count_part_parameters(plan(network), part, WeightSplit(tensor=2)) == held


def test_work_counts_products_of_weights_and_pairs_of_tokens() -> None:
    plan = gpt(NETWORK).layers["0"].attention.plan
    work = LatentAttention.flops(plan, SEQUENCE, 0)
    weights = sum(a * b for a, b in LatentAttention.matrices(plan, WeightSplit()))
    # Backward costs twice the forward pass; a multiply-add is two operations; half of the pairs are
    # causal.
    each = HEADS * (KEY + VALUE)
    assert tuple(work)[:2] == (6 * SEQUENCE * weights, 3 * SEQUENCE**2 * each)


def test_learned_positions_are_added_to_words_and_do_not_replace_the_rotation() -> None:
    """A table of words that already contain their positions gives the same logits."""
    free = {**NETWORK, "untie_embeddings_and_output_weights": True}
    learned = gpt({**free, "position_embedding_type": "learned_absolute"}).eval()
    rotary = gpt(free).eval()
    weights = learned.state_dict()
    positions = weights.pop("embedding.position.weight")
    tokens = torch.arange(SEQUENCE)[None]
    weights["embedding.word.weight"] = weights["embedding.word.weight"].clone()
    weights["embedding.word.weight"][:SEQUENCE] += positions
    rotary.load_state_dict(weights)
    torch.testing.assert_close(learned(tokens), rotary(tokens))


@pytest.mark.parametrize("modules", [(), ("core_attn",), ("layernorm",)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        YARN,
        {"q_lora_rank": None},
        {"v_head_dim": 13, "kv_channels": 13},
        {"attention_dropout": 0.5},
    ],
)
def test_recomputed_heads_are_the_same_bits(
    changes: dict[str, Any], modules: tuple[str, ...]
) -> None:
    flags = {**NETWORK, **changes}
    again = gpt(flags, recompute=RecomputePlan("selective", modules=("mla_up_proj", *modules)))
    expected = loss_and_gradients(gpt(flags))
    torch.testing.assert_close(loss_and_gradients(again), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("modules", "is_kept"),
    [((), True), (("mla_up_proj",), False), (("mla_up_proj", "core_attn"), False)],
)
def test_recomputed_heads_are_not_kept(modules: tuple[str, ...], is_kept: bool) -> None:
    recompute = RecomputePlan("selective", modules=modules) if modules else None
    model, seen = gpt(NETWORK, recompute=recompute), []
    model.layers["1"].attention.core.register_forward_pre_hook(
        lambda _, inputs: seen.extend(weakref.ref(x.untyped_storage()) for x in inputs[:3])
    )
    logits = model(torch.arange(SEQUENCE)[None])
    assert [each() is not None for each in seen] == [is_kept] * 3
    logits.sum().backward()
    assert len(seen) == (6 if len(modules) == 2 else 3)


def test_recomputed_heads_are_counted_as_work_and_not_as_memory() -> None:
    held = gpt(NETWORK).layers["0"].attention.plan
    batch = MicroBatch(sequences=2, length=SEQUENCE)
    less = replace(batch, recomputed=frozenset({"mla_up_proj"}))
    saved = LatentAttention.activation_bytes(held, batch)
    saved -= LatentAttention.activation_bytes(held, less)
    assert saved == 4 * 2 * SEQUENCE * HEADS * 5 * KEY  # query, key, value, and parts of two
    up = HEADS * KEY * 9 + HEADS * (STILL + VALUE) * RANK
    others = HIDDEN * 9 + HIDDEN * (RANK + TURNING) + HEADS * VALUE * HIDDEN
    assert LatentAttention.share_of_heads(held) == up / (up + others)


_LATENT = """
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12
    --qk-pos-emb-head-dim 6 --v-head-dim 14 --qk-layernorm --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --train-iters 3
"""


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ({"tensor": 2}, "--tensor-model-parallel-size 2 --tp-comm-overlap --sequence-parallel"),
        ({"context": 2}, "--context-parallel-size 2"),
        ({}, "--zero-stage 3"),
    ],
)
def test_heads_are_recomputed_in_every_layout(sizes: dict[str, int], flags: str) -> None:
    recomputed = f"{_LATENT} {flags} --recompute-granularity selective"
    recomputed += " --recompute-modules layernorm mla_up_proj"
    expected = losses_and_norms_of(Layout.single(), _LATENT)
    for losses, norms in run_distributed(2, losses_and_norms_of, recomputed, **sizes):
        if losses:
            assert losses == pytest.approx(expected[0], rel=1e-5)
            assert norms == pytest.approx(expected[1], rel=1e-4)
