"""Relative positions: the paper's buckets, the bias score by score, and who shares a table."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.models.position_bias import PositionBias, relative_buckets
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize, spec_of
from megatron.parallel.tied import share_tables
from tests.models.others import DECODER, batch_of, build, losses
from tests.models.small import SEQUENCE, config, plan

RELATIVE = {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
}


def bucket_of(distance, both_ways, buckets, longest):
    """Return a distance's bucket: exact if short, then logarithmic, with an unbounded last one."""
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    alone = buckets // 2
    if distance < alone:
        return first + distance
    share = math.log(distance / alone) / math.log(longest / alone)
    return first + min(alone + math.floor(share * (buckets - alone) + 1e-6), buckets - 1)


@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 9), (16, 30)])
@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets(both_ways, buckets, longest):
    distances = torch.arange(-300, 301)
    found = relative_buckets(
        distances, bidirectional=both_ways, buckets=buckets, max_distance=longest
    )
    expected = [bucket_of(d, both_ways, buckets, longest) for d in distances.tolist()]
    assert found.tolist() == expected
    assert set(expected) == set(range(buckets)) - ({buckets // 2} if both_ways else set())


def table(both_ways, layout=None):
    module = PositionBias(
        plan(config(architecture="t5", decoder_num_layers=1, **RELATIVE)).position_bias,
        BuildContext(layout or Layout.single()),
        bidirectional=both_ways,
        is_copy=False,
    )
    initialize([("table", module.weight)], 1)
    return module


@pytest.mark.parametrize("both_ways", [True, False])
def test_every_score_has_the_bias_of_its_distance(both_ways):
    module, length = table(both_ways), 7
    padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
    padding[1, ..., 5:] = False
    bias = module(length, padding if both_ways else None)
    assert bias.shape == (2 if both_ways else 1, 4, length, length)
    lowest = torch.finfo(torch.float32).min
    for sample in range(len(bias)):
        for query in range(length):
            for key in range(length):
                sees = padding[sample, 0, 0, key] if both_ways else key <= query
                row = module.weight[bucket_of(key - query, both_ways, 8, 9)]
                expected = row if sees else torch.full((4,), lowest)
                assert torch.equal(bias[sample, :, query, key], expected)


def test_its_gradient_is_the_sum_over_scores():
    module, weights = table(True), torch.randn(1, 4, 6, 6)
    (module(6, None) * weights).sum().backward()
    expected = torch.zeros_like(module.weight)
    for query in range(6):
        for key in range(6):
            expected[bucket_of(key - query, True, 8, 9)] += weights[0, :, query, key]
    torch.testing.assert_close(module.weight.grad, expected)


def test_a_tensor_rank_has_its_heads():
    whole = table(False)(5, None)
    for rank in range(2):
        part = table(False, Layout.at(rank, 2, tensor=2))
        assert torch.equal(part(5, None), whole[:, 2 * rank : 2 * rank + 2])


def test_parts_in_one_process_share_a_table():
    parts = [torch.nn.ModuleDict({"table": table(True)}) for _ in range(3)]
    share_tables(parts)
    assert [len(list(part.parameters())) for part in parts] == [1, 0, 0]
    sum(part["table"](4, None).sum() for part in parts).backward()
    assert parts[0]["table"].weight.grad.sum() == 3 * 4 * 4 * 4
    with torch.no_grad():
        parts[0]["table"].weight.zero_()
    assert not parts[2]["table"](4, None).any()


@pytest.mark.parametrize("fused", [True, False])
def test_what_a_t5_with_relative_positions_sees(fused):
    model = build("t5", {**RELATIVE, "masked_softmax_fusion": fused, "init_method_std": 0.3})
    tokens, decoder, padding, _ = batch_of("t5")
    before = model(tokens, decoder, padding)
    later = decoder.clone()
    later[:, 5] += 1 - 2 * (later[:, 5] > 0)
    after = model(tokens, later, padding)  # causal self-attention
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])
    last = tokens.clone()
    last[:, SEQUENCE - 1] += 1 - 2 * (last[:, SEQUENCE - 1] > 0)
    read = model(last, decoder, padding)  # all encoder tokens are visible
    assert not torch.allclose(before[0, 0], read[0, 0])
    assert torch.equal(before[1], read[1])  # but the padding is not
    swapped = tokens.clone()
    swapped[:, [0, 1]] = tokens[:, [1, 0]]  # order matters without position embeddings
    assert not torch.allclose(before, model(swapped, decoder, padding), atol=1e-4)


def test_fused_attention_equals_plain():
    plain = {**RELATIVE, "masked_softmax_fusion": False, "softmax_scale": 1.0}
    results = []
    for flags in (plain, {**plain, "masked_softmax_fusion": True}):
        model = build("t5", flags)
        loss = losses("t5", model, batch_of("t5"))
        loss.backward()
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_the_scale_of_scores():
    tokens, decoder, padding, _ = batch_of("t5")
    scores = [
        build("t5", {"softmax_scale": scale, "masked_softmax_fusion": fused})(
            tokens, decoder, padding
        )
        for scale in (None, 0.5, 1.0)  # heads are 4 wide, so 0.5 is the default
        for fused in (True, False)
    ]
    for one in scores[1:4]:
        torch.testing.assert_close(scores[0], one)
    assert not torch.allclose(scores[0], scores[4], atol=1e-5)
    torch.testing.assert_close(scores[4], scores[5])


def test_the_output_reads_less_and_has_no_bias():
    model, (tokens, decoder, padding, labels) = build("t5"), batch_of("t5")
    scaled = build("t5", {"scale_decoder_outputs": True, "add_output_bias": False})
    assert "output.bias" not in dict(scaled.named_parameters())
    with torch.no_grad():
        model.output.bias.zero_()
    logits = scaled(tokens, decoder, padding)
    torch.testing.assert_close(logits, model(tokens, decoder, padding) / 4)  # the square root of 16
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    found = scaled(tokens, decoder, padding, labels)
    torch.testing.assert_close(found, loss.view(-1, DECODER))


def test_the_part_with_a_stack_s_first_layer_has_the_original():
    names = ("encoder.position_bias.weight", "decoder.position_bias.weight")
    parameters = dict(build("t5", RELATIVE).named_parameters())
    assert list(parameters)[0] == "embedding.word.weight"
    assert "embedding.position.weight" not in parameters
    for name in names:
        assert parameters[name].shape == (8, 4)
        assert not spec_of(parameters[name]).is_copy
