"""Retro against Megatron-LM's recording, and split over ranks against a single process."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.checkpoint.legacy.names import megatron_path
from megatron.checkpoint.legacy.reader import LegacyReader
from megatron.config.model import ModelConfig
from megatron.config.stages import ModelPart
from megatron.models.arithmetic import count_parameters, count_part_parameters
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.plans import model_plan
from megatron.models.recompute import RecomputePlan
from megatron.models.retrieval import ChunkedCrossAttention, NeighborCrossAttention
from megatron.models.retro import RetroModel
from megatron.parallel.context.split import join_sequence, split_sequence
from megatron.parallel.layout import Axis, Layout
from megatron.parallel.parameter import initialize
from tests.distributed import run_distributed, run_sharing_memory
from tests.models.small import VOCAB, config, new_context
from tests.parallel.buffers import new_buffer
from tests.parallel.test_layers import take_part

CHUNK, LENGTH, BATCH = 4, 16, 2
QUIET = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "retro_encoder_hidden_dropout": 0.0,
    "retro_encoder_attention_dropout": 0.0,
}
# Large initial weights, so that attention is not uniform.
FLAGS = {
    "architecture": "retro",
    "num_layers": 9,
    "max_position_embeddings": LENGTH,
    "retro_chunk_length": CHUNK,
    "retro_num_neighbors": 3,
    "init_method_std": 0.3,
    **QUIET,
}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def retro(flags=None, layout=None, part=None, recompute=None, parallel=False):
    """Return a small Retro with the same weights in every layout."""
    network = config(**{**FLAGS, **(flags or {})})
    layout = replace(layout or Layout.single(), sequence_parallel=parallel)
    model = RetroModel(
        model_plan(network, VOCAB), new_context(network, layout=layout), part, recompute
    )
    initialize(model.named_parameters(), 1)
    return model


def batch():
    """Return tokens [b, s + 1] and neighbors [b, l, k, r]."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    shape = (BATCH, LENGTH // CHUNK, 3, 2 * CHUNK)
    return text, torch.randint(VOCAB, shape, generator=generator)


def step(model, layout):
    """Return the loss [b, s/C] and gradients of the whole batch's mean, reduced as in training."""
    gradients = new_buffer(model.named_parameters(), layout, accumulate_in_fp32=False)
    gradients.zero()
    text, neighbors = batch()
    tokens, labels, read = (
        split_sequence(x, layout.context, 1) for x in (text[:, :-1], text[:, 1:], neighbors)
    )
    loss = model(tokens.contiguous(), read, labels=labels.contiguous())
    (layout.context.size * loss.sum() / labels.numel() / layout.context.size).backward()
    gradients.reduce()
    return loss.detach(), {n: gradients.gradient(p).clone() for n, p in model.named_parameters()}


CASES = {
    "tensor": ({}, {"tensor": 2}, False, None),
    "sequence": ({}, {"tensor": 2}, True, None),
    "context": ({}, {"context": 2}, False, None),
    "modern": (LLAMA, {"context": 2}, False, RecomputePlan("selective")),
    "recomputed": (LLAMA, {"tensor": 2}, True, RecomputePlan("full", "uniform", 2)),
    "inputs split": ({}, {"tensor": 2}, False, RecomputePlan("full", split_inputs=True)),
    "all": ({}, {"tensor": 2, "context": 2}, True, RecomputePlan("full", "block", 7)),
}


def _split(layout, flags, parallel, recompute):
    layout = replace(layout, sequence_parallel=parallel)
    model = retro(flags, layout, recompute=recompute, parallel=parallel)
    loss, grads = step(model, layout)
    _, expected = step(retro(flags), Layout.single())
    for name, parameter in model.named_parameters():
        theirs = take_part(expected[name], parameter)
        assert (grads[name] - theirs).abs().max() < 1e-5 * theirs.abs().max() + 1e-8, name
    return layout.context.rank, loss


@pytest.mark.parametrize("case", CASES)
def test_layouts_equal_one_process(case):
    flags, sizes, parallel, recompute = CASES[case]
    expected, grads = step(retro(flags), Layout.single())
    processes = sizes.get("tensor", 1) * sizes.get("context", 1)
    run = run_sharing_memory if processes > 2 else run_distributed
    results = dict(run(processes, _split, flags, parallel, recompute, **sizes))
    losses = join_sequence([results[rank] for rank in range(sizes.get("context", 1))], 1)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in grads.values())


@pytest.mark.parametrize("cut", [1, 5, 6, 8])
def test_parts_pass_on_the_sequence_and_the_neighbors(cut):
    text, neighbors = batch()
    tokens = text[:, :-1]
    first = retro(part=ModelPart(range(cut), embedding=True, head=False))
    last = retro(part=ModelPart(range(cut, 9), embedding=False, head=True))
    whole = retro()
    state = whole.state_dict()
    for model in (first, last):
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    message = first(tokens, neighbors)
    assert message.shape == (LENGTH + LENGTH // CHUNK * 3 * 2 * CHUNK, BATCH, 16)
    torch.testing.assert_close(last(tokens, neighbors, hidden=message), whole(tokens, neighbors))


def test_a_neighbor_is_read_from_the_end_of_its_chunk_on():
    model = retro().eval()
    text, neighbors = batch()
    expected = model(text[:, :-1], neighbors)
    for chunk in range(LENGTH // CHUNK):
        other = neighbors.clone()
        other[:, chunk, 1, 0] = (other[:, chunk, 1, 0] + 1) % VOCAB
        changed = (model(text[:, :-1], other) - expected).abs().amax(2) > 1e-7
        first = (chunk + 1) * CHUNK - 1
        assert not changed[:, :first].any()
        assert changed[:, first].all()


def test_dropout_is_drawn_again_by_recomputation():
    flags = dict.fromkeys(QUIET, 0.3)
    torch.manual_seed(1)
    _, expected = step(retro(flags), Layout.single())
    for plan in (RecomputePlan("selective"), RecomputePlan("full", "uniform", 4)):
        torch.manual_seed(1)
        _, grads = step(retro(flags, recompute=plan), Layout.single())
        torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def test_flops_of_cross_attention_are_counted():
    """Training takes three times the forward pass, a product 2 FLOPs per weight and row."""
    plan = model_plan(config(**FLAGS), VOCAB)  # width 16, chunks of 4 tokens, 3 neighbors of 8
    # Queries and outputs of 16 tokens, and keys and values of 4 chunks' 24 tokens of neighbors.
    counted = ChunkedCrossAttention.flops(plan.layers[5].cross_attention, 16, 0)
    assert counted == (6 * 2 * (16 + 4 * 24) * 16 * 16, 6 * 2 * 16 * 24 * 16)
    # Queries and outputs of a neighbor's 8 tokens, and a third of its chunk's keys and values.
    reads_chunk = plan.layers[5].retriever.layers[0].cross_attention
    counted = NeighborCrossAttention.flops(reads_chunk, 8, 0)
    assert counted == (6 * 2 * (3 * 8 + 4) * 16 * 16 / 3, 6 * 2 * 8 * 4 * 16)


def test_activations_of_cross_attention_are_counted():
    """Count them on a rank of 2 tensor and 2 context ranks, for 2 sequences of 16 tokens."""
    plan = model_plan(config(**FLAGS), VOCAB)  # 4 chunks of 4 tokens, with 3 neighbors of 8
    micro = MicroBatch(sequences=2, length=16, tensor=2, context=2, width=2)
    reads_neighbors = plan.layers[5].cross_attention
    # Queries and outputs of 16 tokens, and keys and values of 4 chunks' neighbors, of width 8.
    counted = ChunkedCrossAttention.activation_bytes(reads_neighbors, micro)
    assert counted == 2 * (16 + 4 * 3 * 8) * 2 * 8
    # Queries and outputs of 24 neighbors' 8 tokens; keys and values of 8 chunks' 4 tokens.
    reads_chunk = plan.layers[5].retriever.layers[0].cross_attention
    micro = replace(micro, sequences=24, length=8, context=1)
    counted = NeighborCrossAttention.activation_bytes(reads_chunk, micro)
    assert counted == 2 * (24 * 8 + 8 * 4) * 2 * 8
    # If scores are kept, so are the weights: 4 heads / 2 ranks, 2 x 2 bytes each.
    counted = NeighborCrossAttention.activation_bytes(
        reads_chunk, replace(micro, keeps_scores=True)
    )
    assert counted == 2 * (24 * 8 + 8 * 4) * 2 * 8 + 24 * 8 * 4 * 2 * 4


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["gpt", "modern"])
def test_parameters_are_counted(flags):
    model = retro(flags)
    assert count_parameters(model.plan) == sum(p.numel() for p in model.parameters())
    part = ModelPart(range(4, 7), embedding=False, head=False)
    split = retro(flags, Layout.at(0, 2, tensor=2), part)
    counted = count_part_parameters(model.plan, part, WeightSplit(tensor=2))
    assert counted == sum(p.numel() for p in split.parameters())


@pytest.fixture(scope="module")
def recording(golden):
    """Return the recorded model, a reader of recorded arrays, and the recorded numbers."""
    folder = golden / "retro_fp32"
    reader = LegacyReader(folder / "ckpt/iter_0000020", Axis(), verify=False, allow_foreign=True)
    # Megatron-LM takes the chunk length from its working folder.
    network = ModelConfig(**{**reader.meta["config"]["model"], "retro_chunk_length": 64})
    model = RetroModel(model_plan(network, reader.meta["padded_vocab_size"]), new_context(network))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(reader.read(f"model.{name}"))
    told = json.loads((folder / "forward/forward.json").read_text())
    return model, lambda name: torch.from_numpy(np.load(folder / f"forward/{name}.npy")), told


def test_recorded_logits(recording):
    model, read, _ = recording
    tokens, labels = (read("text").long()[:, part] for part in (slice(-1), slice(1, None)))
    neighbors = read("neighbor_tokens").long()
    logits = model(tokens, neighbors)[:, read("logits_positions").long()]
    torch.testing.assert_close(logits, read("logits"), rtol=0, atol=1e-5)
    losses = model(tokens, neighbors, labels=labels)
    torch.testing.assert_close(losses, read("per_token_loss"), rtol=0, atol=1e-5)


def test_recorded_gradients(recording):
    model, read, told = recording
    text, neighbors = read("text").long(), read("neighbor_tokens").long()
    model.zero_grad()
    model(text[:, :-1], neighbors, labels=text[:, 1:]).mean().backward()
    for name, parameter in model.named_parameters():
        holder = name.rpartition(".cross_norm.")[0] or name.partition(".mlp_norm.")[0]
        crosses = any(f"{holder}.cross_norm" in other for other, _ in model.named_parameters())
        crosses = crosses or ".cross_" in name
        theirs = ".".join(megatron_path(name, 0, crosses=crosses))
        norm = told["gradient norms"][theirs]
        assert parameter.grad.norm().item() == pytest.approx(norm, rel=1e-3), name
