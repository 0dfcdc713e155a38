"""GPT with its sequences split over context ranks: loss and gradients of one process."""

import pytest
import torch

from megatron.data.gpt import make_batch
from megatron.models.recompute import RecomputePlan
from megatron.parallel.context.split import context_part, join_sequence
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.models.small import LLAMA, VOCAB, gpt
from tests.models.test_latent_attention import NETWORK as LATENT
from tests.parallel.buffers import new_buffer
from tests.parallel.test_layers import take_part

S = 16
BASE = {"max_position_embeddings": S, "init_method_std": 0.3}  # large, so that attention matters
NETWORKS = {
    "learned": {**BASE, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "rope": {**LLAMA, **BASE},
    "groups": {**LLAMA, **BASE, "num_query_groups": 4},
    "longrope": {  # the whole sequence is long, each rank's part is not
        **LLAMA,
        **BASE,
        "rope_type": "longrope",
        "longrope_original_max_position_embeddings": 8,
        "longrope_short_factor": (1.0, 1.0),
        "longrope_long_factor": (3.0, 5.0),
    },
    "dynamic": {  # as above
        **LLAMA,
        **BASE,
        "rope_type": "dynamic",
        "rotary_scaling_factor": 3.0,
        "max_position_embeddings": 8,
    },
    "sinks": {**LLAMA, **BASE, "softmax_type": "learnable"},
    "windows": {
        **LLAMA,
        **BASE,
        "window_size": "3,0",
        "window_attn_skip_freq": "2",
        "softmax_type": "learnable",
        "softmax_scale": 0.7,
    },
    "chunks": {
        **LLAMA,
        **BASE,
        "num_query_groups": 4,
        "attention_chunk_size": 5,
        "no_rope_freq": "2",
        "attention_temperature_scale": 0.7,
        "attention_temperature_floor": 3,
        "qk_l2_norm": True,
    },
    "alibi": {**LLAMA, **BASE, "position_embedding_type": "alibi", "window_size": "5,0"},
    "latent sinks": {**LATENT, **BASE, "softmax_type": "learnable"},
}
CASES = {
    "learned": ("learned", "p2p", None, {"context": 2}),
    "rope": ("rope", "p2p", None, {"context": 2}),
    "ring of 4": ("rope", "p2p", None, {"context": 4}),
    "recomputed": ("rope", "p2p", "full", {"context": 2}),
    "tensor too": ("rope", "p2p", None, {"context": 2, "tensor": 2}),
    "learned a2a": ("learned", "a2a", None, {"context": 2}),
    "rope a2a": ("rope", "a2a", "selective", {"context": 2}),
    "a2a over 4": ("groups", "a2a", None, {"context": 4}),
    "longrope": ("longrope", "p2p", None, {"context": 2}),
    "dynamic": ("dynamic", "p2p", None, {"context": 2}),
    "sinks": ("sinks", "p2p", None, {"context": 2}),
    "sinks and tensor": ("sinks", "p2p", "selective", {"context": 2, "tensor": 2}),
    "sinks a2a": ("sinks", "a2a", None, {"context": 2}),
    "alibi and windows a2a": ("alibi", "a2a", None, {"context": 2}),
    "alibi and windows": ("alibi", "p2p", "selective", {"context": 2, "tensor": 2}),
    "windows in some layers": ("windows", "p2p", None, {"context": 4}),
    "chunks": ("chunks", "p2p", "selective", {"context": 4}),
    "chunks a2a and tensor": ("chunks", "a2a", None, {"context": 2, "tensor": 2}),
    "latent sinks": ("latent sinks", "p2p", None, {"context": 2}),
    "tensor and a2a": ("groups", "a2a", None, {"context": 2, "tensor": 2}),
}


def whole_batch():
    """Return a batch with document ends, where positions restart and the loss mask is 0."""
    text = torch.randint(VOCAB, (2, S + 1), generator=torch.Generator().manual_seed(5))
    text[0, 3] = text[1, 10] = text[1, 12] = 0
    return make_batch({"text": text}, eod=0, reset_position_ids=True, eod_mask_loss=True)


def step(model, layout):
    """Return the loss [b, s/C] and gradients of the whole batch's mean, reduced as in training."""
    gradients = new_buffer(model.named_parameters(), layout, accumulate_in_fp32=False)
    gradients.zero()
    batch = whole_batch()
    counted = batch.loss_mask.sum()
    part = context_part(batch, layout.context)
    loss = model(part.tokens, part.position_ids, part.labels)
    (layout.context.size * (loss * part.loss_mask).sum() / counted).backward()
    gradients.reduce()
    grads = {name: gradients.gradient(p).clone() for name, p in model.named_parameters()}
    return loss.detach(), grads


def _split(layout, network, comm_type, recompute):
    plan = recompute and RecomputePlan(recompute)
    model = gpt(NETWORKS[network], layout=layout, recompute=plan, cp_comm_type=comm_type)
    loss, grads = step(model, layout)
    whole = dict(gpt(NETWORKS[network]).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, take_part(whole[name], parameter))
    _, expected = step(gpt(NETWORKS[network]), Layout.single())
    for name, parameter in model.named_parameters():
        theirs = take_part(expected[name], parameter)
        assert (grads[name] - theirs).abs().max() < 1e-5 * theirs.abs().max(), name
    return layout.context.rank, loss


@pytest.mark.parametrize("case", CASES)
def test_context_parallel_equals_one_process(case):
    network, comm_type, recompute, sizes = CASES[case]
    expected, grads = step(gpt(NETWORKS[network]), Layout.single())
    processes = sizes["context"] * sizes.get("tensor", 1)
    results = run_distributed(processes, _split, network, comm_type, recompute, **sizes)
    parts = dict(results)
    losses = join_sequence([parts[rank] for rank in range(sizes["context"])], 1)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in grads.items():
        assert gradient.abs().max() > (1e-3 if name.endswith("sinks") else 1e-2), name


def _positions_of_their_own(layout):
    model = gpt(NETWORKS["learned"], layout=layout)
    part = context_part(whole_batch(), layout.context)
    return model(part.tokens).detach()


def test_without_position_ids_tokens_keep_their_place():
    batch = whole_batch()
    expected = gpt(NETWORKS["learned"])(batch.tokens).detach()
    parts = run_distributed(2, _positions_of_their_own, context=2)
    torch.testing.assert_close(join_sequence(parts, 1), expected, rtol=1e-5, atol=1e-5)
