"""BERT and T5 on one process: attention masks, every knob, names, 16 bits, recomputation."""

import pytest
import torch

from megatron.models.plan import HeadSpec
from megatron.models.recompute import RecomputePlan
from tests.models.others import DECODER, batch_of, build, losses
from tests.models.small import BATCH, SEQUENCE, VOCAB

KINDS = ["bert", "t5"]
KNOBS = {
    "default": {},
    "plain attention": {"masked_softmax_fusion": False},
    "rope": {"position_embedding_type": "rope"},
    "rms norm": {"normalization": "RMSNorm"},
    "swiglu": {"swiglu": True},
    "untied": {"untie_embeddings_and_output_weights": True},
    "no bias": {"add_bias_linear": False},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "wide heads": {"kv_channels": 10},
    "dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
}

GOOGLE_S_T5 = {
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_output_bias": False,
    "softmax_scale": 1.0,
}
T5_KNOBS = {
    "1.0": {**GOOGLE_S_T5, "relu": True, "scale_decoder_outputs": True, "init_method_std": 0.1},
    "1.1": {**GOOGLE_S_T5, "geglu": True, "untie_embeddings_and_output_weights": True},
    "relative, plain attention": {
        "position_embedding_type": "relative",
        "masked_softmax_fusion": False,
    },
}


@pytest.mark.parametrize(
    ("kind", "knob"),
    [*((kind, knob) for kind in KINDS for knob in KNOBS), *(("t5", knob) for knob in T5_KNOBS)],
)
def test_every_knob_trains(kind, knob):
    model, batch = build(kind, {**KNOBS, **T5_KNOBS}[knob]), batch_of(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    curve = []
    for _ in range(25):
        loss = losses(kind, model, batch)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        optimizer.step()
        curve.append(loss.item())
    assert curve[-1] < 0.7 * curve[0]


def _changed(tokens, place):
    tokens = tokens.clone()
    tokens[:, place] = (tokens[:, place] + 1) % VOCAB
    return tokens


@pytest.mark.parametrize("fused", [True, False])
def test_bert_sees_both_ways_but_no_padding(fused):
    model = build("bert", {"masked_softmax_fusion": fused})
    tokens, padding, types, _ = batch_of("bert")
    before = model(tokens, padding, types)
    late = model(_changed(tokens, SEQUENCE - 1), padding, types)  # padding of the second sample
    assert not torch.allclose(before.tokens[0, 0], late.tokens[0, 0])
    assert torch.equal(before.tokens[1, : SEQUENCE - 4], late.tokens[1, : SEQUENCE - 4])
    assert torch.equal(before.order[1], late.order[1])


def test_a_padded_sample_scores_like_a_short_one():
    model = build("bert")
    tokens, padding, types, _ = batch_of("bert")
    short = slice(None, SEQUENCE - 4)
    together = model(tokens, padding, types)
    alone = model(tokens[1:, short], padding[1:, short], types[1:, short])
    torch.testing.assert_close(together.tokens[1:, short], alone.tokens)
    torch.testing.assert_close(together.order[1:], alone.order)


def test_token_types_and_the_first_token_count():
    model = build("bert")
    tokens, padding, types, _ = batch_of("bert")
    before = model(tokens, padding, types)
    assert not torch.allclose(before.tokens, model(tokens, padding, 1 - types).tokens)
    assert not torch.allclose(before.order, model(_changed(tokens, 0), padding, types).order)


def test_what_a_t5s_decoder_sees():
    model = build("t5")
    tokens, decoder, padding, _ = batch_of("t5")
    before = model(tokens, decoder, padding)
    assert before.shape == (BATCH, DECODER, VOCAB)
    later = model(tokens, _changed(decoder, 5), padding)  # causal self-attention
    torch.testing.assert_close(before[:, :5], later[:, :5])
    assert not torch.allclose(before[:, 5], later[:, 5])
    read = model(_changed(tokens, SEQUENCE - 1), decoder, padding)  # all encoder tokens are visible
    assert not torch.allclose(before[0, 0], read[0, 0])
    assert torch.equal(before[1], read[1])  # but the padding is not


def test_names_of_a_bert():
    names = {name for name, _ in build("bert").named_parameters()}
    own = {
        "embedding.token_type.weight",
        "output.bias",
        *(f"{module}.weight" for module in ("pooler.dense", "binary_head", "head.dense")),
        *(f"{module}.bias" for module in ("pooler.dense", "binary_head", "head.dense")),
        "head.norm.weight",
        "head.norm.bias",
    }
    assert own <= names
    without = {n for n, _ in build("bert", {"bert_binary_head": False}).named_parameters()}
    assert {name.split(".")[0] for name in names - without} == {
        "embedding",
        "pooler",
        "binary_head",
    }
    headless = {n for n, _ in build("bert", head=HeadSpec(outputs=1)).named_parameters()}
    assert {name.split(".")[0] for name in names - headless} == {"head", "output", "binary_head"}


def test_names_of_a_t5():
    names = [name for name, _ in build("t5").named_parameters()]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    layer = "attention_norm attention.qkv attention.output mlp_norm mlp.up mlp.down".split()
    cross = "cross_norm cross_attention.query cross_attention.key_value cross_attention.output"
    assert modules == [
        "embedding.word",
        "embedding.position",
        *(f"encoder.layers.{i}.{part}" for i in range(3) for part in layer),
        "encoder.final_norm",
        *(
            f"decoder.layers.{i}.{part}"
            for i in range(2)
            for part in (*layer[:3], *cross.split(), *layer[3:])
        ),
        "decoder.final_norm",
        "output",
    ]
    assert names[-1] == "output.bias"


@pytest.mark.parametrize(
    ("kind", "flags"), [*((kind, {}) for kind in KINDS), ("t5", T5_KNOBS["1.1"])]
)
def test_16_bits_are_near_fp32(kind, flags):
    batch = batch_of(kind)
    rough = losses(kind, build(kind, flags, dtype=torch.bfloat16), batch)
    expected = losses(kind, build(kind, flags), batch)
    torch.testing.assert_close(rough, expected, rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "flags"), [*((kind, {}) for kind in KINDS), ("t5", T5_KNOBS["1.1"])]
)
@pytest.mark.parametrize(
    "plan",
    [
        RecomputePlan("selective"),
        RecomputePlan("selective", modules=("layernorm", "mlp")),
        RecomputePlan("full"),
    ],
    ids=str,
)
def test_recomputation_gives_the_same_bits(kind, flags, plan):
    dropout = {"attention_dropout": 0.3, "hidden_dropout": 0.3, **flags}
    gradients = []
    for recompute in (None, plan):
        model = build(kind, dropout, recompute=recompute)
        torch.manual_seed(3)
        losses(kind, model, batch_of(kind)).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_headless_bert_gives_normalized_hidden_states():
    tokens, padding, types, _ = batch_of("bert")
    model = build("bert", head=HeadSpec(outputs=1))
    hidden = model(tokens, padding, types)
    assert hidden.shape == (SEQUENCE, BATCH, 16)
    torch.testing.assert_close(hidden.mean(-1), torch.zeros(SEQUENCE, BATCH), atol=1e-5, rtol=0)
    assert model.pooler(hidden).shape == (BATCH, 16)


def test_a_bert_may_take_its_samples_one_after_the_other():
    """Take samples one at a time, as on a GPU with dropout; a mask replaces the spans."""
    model = build("bert", {"attention_dropout": 0.0, "hidden_dropout": 0.0})
    assert model.min_packed_length is None, "a CPU has no flash kernel"
    batch = batch_of("bert", "cpu")
    results = []
    for model.min_packed_length in (None, 1):
        model.zero_grad()
        loss = losses("bert", model, batch)
        loss.backward()
        results.append(
            [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        )
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_only_bert_s_head_stores_a_whole_norm_weight_with_layernorm_1p():
    model = build("bert", {"apply_layernorm_1p": True})
    assert (model.head.norm.weight == 1).all()
    norms = {name for name, p in model.named_parameters() if name.endswith("norm.weight")}
    assert len(norms) > 3
    assert all(
        (model.get_parameter(name) == 0).all() for name in norms if name != "head.norm.weight"
    )
    plain = build("bert")
    torch.testing.assert_close(
        losses("bert", model, batch_of("bert")), losses("bert", plain, batch_of("bert"))
    )
