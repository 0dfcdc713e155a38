"""Multi-token prediction: its definition, its cost, and what it must not change."""

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.stages import plan_parts, whole_model
from megatron.data.ahead import batches_ahead
from megatron.finetuning.distillation import GPTInputs
from megatron.models.arithmetic import (
    count_depth_parameters,
    count_part_experts,
    count_part_parameters,
    flops_per_token,
    largest_layer,
)
from megatron.models.block import Block
from megatron.models.costs import WeightSplit
from megatron.models.gpt import GPTModel
from megatron.models.head import Output
from megatron.models.mixture_plan import MixturePlan
from megatron.models.norm import Stream
from megatron.models.plan import multi_token_plan
from megatron.models.recompute import RecomputePlan
from megatron.parallel.context.split import TokenBatch
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import initialize
from pretrain_gpt import losses_ahead
from tests.config.command import parse
from tests.models.small import LLAMA, SEQUENCE, batch, config, gpt, new_context, plan

TIED = {**LLAMA, "untie_embeddings_and_output_weights": False}
DEPTHS = {"mtp_num_layers": 2}
MIXTURES = {"num_experts": (4,), "moe_layer_freq": "[0,1,1]", "moe_router_topk": 2}


_TWO_STAGES = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|tL"}


def _ahead(depths: int = 2) -> tuple[TokenBatch, list[TokenBatch]]:
    """Return a whole micro-batch, and the inputs and labels of each depth."""
    tokens, labels = batch()
    places = torch.arange(SEQUENCE).expand_as(tokens)
    whole = TokenBatch(tokens, labels, torch.ones(tokens.shape), places)
    return whole, list(batches_ahead(whole, depths))


def _losses(model: GPTModel, depths: int = 2) -> torch.Tensor:
    whole, ahead = _ahead(depths)
    return model(whole.tokens, labels=whole.labels, loss_mask=whole.loss_mask, ahead=ahead)


@pytest.mark.parametrize("flags", ["", "--calculate-per-token-loss"])
def test_the_gradient_of_a_depth_is_that_of_its_mean_loss(flags):
    """A micro-batch's weight, its number of labels of the next token, multiplies all its losses."""
    words = "--position-embedding-type rope --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
    run = parse(words, flags).config
    whole, _ = _ahead()
    counted = (torch.tensor(30), (torch.tensor(20), torch.tensor(10)))
    inputs = GPTInputs(whole, None, counted[0], num_labels_ahead=counted[1])
    sums = torch.tensor([60.0, 80.0, 70.0], requires_grad=True)
    losses = losses_ahead(sums, inputs, run, Layout.single())
    assert [loss.item() for loss in losses.values()] == pytest.approx([2, 4, 7])
    sum(losses.values()).backward()
    assert sums.grad.tolist() == pytest.approx([1 / 30, 0.25 / 20, 0.25 / 10])


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


@pytest.mark.parametrize(
    ("frequency", "rotates"), [(None, (True, True)), ("[1,0,1]", (False, True))]
)
def test_each_depth_predicts_one_more_token_from_the_depth_before(frequency, rotates):
    """Apply the definition to one sample at a time, using only the tokens that exist.

    As in Megatron Core, --no-rope-freq counts the depths anew: depth 1 is like layer 1.
    """
    model = gpt({**LLAMA, **DEPTHS, "num_layers": 3, "no_rope_freq": frequency})
    for parameter in model.parameters():  # norms start at one, which would hide their order
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator())
    sums = _losses(model)
    tokens, labels = batch()
    text = torch.cat((tokens, labels[:, -1:]), 1)
    words = model.embedding.word.weight
    expected = torch.zeros(3)
    for row in text:
        stream = model.layers.run(
            Stream(words[row[:-1], None]), None, model.rotation(torch.arange(SEQUENCE))
        )
        states = _rms(stream.join(), model.final_norm.weight)
        for depth in range(3):
            if depth:
                part = model.mtp[depth - 1]
                joined = torch.cat(
                    (
                        _rms(words[row[depth:-1], None], part.embedding_norm.weight),
                        _rms(states[:-1], part.hidden_norm.weight),
                    ),
                    -1,
                )
                (rotation,) = model.rotation(torch.arange(len(joined)))
                rotation = rotation if rotates[depth - 1] else None
                x = part.layer(Stream(joined @ part.projection.weight.t()), None, rotation).join()
                states = _rms(x, part.final_norm.weight)
            logits = (states @ model.output.weight.t())[:, 0]
            following = row[depth + 1 :]
            expected[depth] += torch.nn.functional.cross_entropy(logits, following, reduction="sum")
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


def test_depths_are_like_the_last_layer_except_for_windows():
    """As in Megatron Core: depth 1 has the window of layer 1, whatever the last layer has."""
    flags = {"window_size": "4,0", "window_attn_skip_freq": "[0,1,0]", "num_layers": 3}
    run = config(**{**LLAMA, **MIXTURES, **flags, "mtp_num_layers": 3})
    depths = multi_token_plan(plan(run))
    assert [layer.mixer.window for layer in depths.layers] == [None, 4, None]
    assert {type(layer.mlp) for layer in depths.layers} == {MixturePlan}


@pytest.mark.parametrize("flags", [TIED, LLAMA], ids=["tied", "untied"])
def test_without_its_losses_the_model_is_the_base_model(flags):
    base, model = gpt(flags), gpt({**flags, **DEPTHS})
    whole, _ = _ahead()
    expected = base(whole.tokens, labels=whole.labels, loss_mask=whole.loss_mask)
    sums = _losses(model)
    assert torch.equal(sums[0], expected)
    expected.backward()
    sums[0].backward()
    others = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        if name.startswith("mtp."):
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert torch.equal(parameter.grad, others[name].grad), name


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_depths_have_the_same_gradients(granularity):
    plans = (None, RecomputePlan(granularity, modules=("core_attn", "mlp", "layernorm")))
    found = []
    for recompute in plans:
        model = gpt({**TIED, **DEPTHS}, recompute=recompute)
        _losses(model).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("flags", [TIED, LLAMA], ids=["tied", "untied"])
def test_the_last_stage_looks_words_up_in_its_own_copy(flags):
    network = config(**{**flags, "num_layers": 4, **DEPTHS})
    cut = plan_parts(4, ParallelConfig(pipeline_model_parallel_size=2))
    parts = [GPTModel(plan(network), new_context(network), part) for part in (None, *cut)]
    for part in parts:
        initialize(part.named_parameters(), 1)
    whole, first, last = parts
    tokens, further = _ahead()
    expected = _losses(whole)
    sums = last(
        tokens.tokens,
        labels=tokens.labels,
        loss_mask=tokens.loss_mask,
        hidden=first(tokens.tokens),
        ahead=further,
    )
    assert torch.equal(sums, expected)
    expected.sum().backward()
    sums.sum().backward()
    held = [dict(part.named_parameters()) for part in (first, last)]
    for name, parameter in whole.named_parameters():
        gradient = sum(part[name].grad for part in held if name in part)
        torch.testing.assert_close(gradient, parameter.grad)
    assert held[1]["embedding.word.weight"].spec.is_copy


@pytest.mark.parametrize("flags", [TIED, LLAMA, {**LLAMA, **MIXTURES}])
def test_arithmetic_counts_what_each_process_holds(flags):
    network = config(**{**flags, "num_layers": 3, **DEPTHS})
    record, split = plan(network), WeightSplit(tensor=2, expert_tensor=2)
    layout = Layout.at(0, 4, tensor=2, pipeline=2)
    first, last = plan_parts(3, ParallelConfig(**_TWO_STAGES))
    for part in (first, last, whole_model(3)):
        model = GPTModel(record, new_context(network, layout=layout, device="meta"), part)
        held = sum(parameter.numel() for parameter in model.parameters())
        assert count_part_parameters(record, part, split) == held
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        assert count_part_experts(record, part, split) == experts
    depths = sum(parameter.numel() for parameter in model.mtp.parameters())
    assert count_depth_parameters(record, split) == depths
    assert largest_layer(record, split)[0] == depths // 2


def test_operations_are_those_of_layers_projections_and_outputs():
    record, length = plan(config(**LLAMA, **DEPTHS)), 8
    base, ahead = plan(config(**LLAMA)), multi_token_plan(record)
    assert ahead.layers == record.layers[-1:] * 2
    assert (base.layers, base.heads) == (record.layers, record.heads[:1])
    assert record.output is not None
    each = sum(Block.flops(record.layers[-1], length)) + Output.flops(record.output, length)
    each += 6 * length * 2 * 16 * 16  # the projection [2h -> h], forward and backward
    assert flops_per_token(record, length) == flops_per_token(base, length) + 2 * each // length


def test_predictions_stop_at_the_ends_of_sequences_and_documents():
    text = torch.tensor([[5, 1, 2, 0, 3, 4, 6, 0, 7]])  # 0 ends a document
    whole = TokenBatch(text[:, :-1], text[:, 1:], torch.ones(1, 8), torch.arange(8).view(1, 8))
    (one, two) = batches_ahead(whole, 2)
    assert one.tokens.tolist() == [[1, 2, 0, 3, 4, 6, 0, 0]]
    assert one.labels.tolist() == [[2, 0, 3, 4, 6, 0, 7, 0]]
    assert one.position_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert one.loss_mask.tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]
    assert two.loss_mask.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]

    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    (one, two) = batches_ahead(whole, 2, documents, eod=0)
    assert one.labels.tolist() == [[2, 0, 3, 4, 6, 0, 7, 0]]
    assert one.loss_mask.tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]]  # 2, 0 and 6, 0
    assert two.loss_mask.tolist() == [[1, 0, 0, 0, 1, 0, 0, 0]]

    trained = whole._replace(loss_mask=torch.tensor([[0.0, 1, 1, 0, 0, 1, 1, 0]]))
    (one,) = batches_ahead(trained, 1, documents)
    assert one.loss_mask.tolist() == [[1, 1, 0, 0, 1, 1, 0, 0]]
