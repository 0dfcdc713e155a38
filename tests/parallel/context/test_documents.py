"""Documents in ring and all-to-all attention: no document attends to another."""

import math

import pytest
import torch

from megatron.kernels.attention import AttentionOptions, fused_attention
from megatron.kernels.segments import Segments
from megatron.parallel.context.block import (
    BlockDocuments,
    BlockOptions,
    QueryRows,
    choose_block,
    flash_backward,
    flash_forward,
    merge,
    reference_forward,
)
from megatron.parallel.context.ring import (
    documents_of,
    ring_attention,
    ring_plan,
    ulysses_attention,
)
from megatron.parallel.context.split import join_sequence, split_segments, split_sequence
from megatron.parallel.layout import Axis
from tests.distributed import run_distributed
from tests.parallel.context.inputs import by_head, heads, one_process, ring_in_one, weights_of

S = 16
CPU = torch.device("cpu")
BLOCK = choose_block(8, torch.float32, CPU)
# For two samples each: the ends of documents that are shorter than a chunk, span several chunks,
# fill a sample, or are empty.
ENDS = {
    "short": [0, 1, 3, 6, 9, 11, 15, 16, 18, 18, 21, 25, 30, 32, 32, 32],
    "mixed": [0, 13, 16, 32],
    "whole": [0, 16, 32],
}


def segments_of(name, causal=True, length=S):
    ends = torch.tensor(ENDS[name], dtype=torch.int32) * (length // S)
    return Segments(ends, (2, length), causal=causal, longest=int(ends.diff().max()))


def _parts(layout, cases):
    return [_part(layout.context, *case) for case in cases]


def _part(axis, comm_type, name, groups, causal):
    inputs = [split_sequence(x, axis, 0).requires_grad_() for x in heads(S, groups)]
    options = AttentionOptions(segments_of(name, causal))
    if comm_type == "p2p":
        out = ring_attention(*inputs, options, axis=axis, block=BLOCK)
    else:
        out = ulysses_attention(*inputs, options, axis=axis, attend=fused_attention)
    out.backward(split_sequence(weights_of(torch.empty(S, 2, 32)), axis, 0))
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("size", [2, 4])
def test_documents_attend_as_on_one_process(size):
    cases = [("p2p", name, g, causal) for name in ENDS for g in (1, 4) for causal in (True, False)]
    cases += [("a2a", name, 4, causal) for name in ENDS for causal in (True, False)]
    results = run_distributed(size, _parts, cases, context=size)
    for (comm_type, name, groups, causal), *parts in zip(cases, *results, strict=True):
        mask = segments_of(name, causal).mask
        expected = one_process(heads(S, groups), causal=causal, mask=mask)
        for theirs, *ours in zip(expected, *parts, strict=True):
            torch.testing.assert_close(
                join_sequence(ours, 0),
                theirs,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, case=(comm_type, name, groups, causal): f"{case}: {text}",
            )


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_token_of_a_document_lies_in_one_chunk(name, size):
    segments = segments_of(name)
    number = torch.searchsorted(segments.ends[1:], torch.arange(2 * S), right=True).view(2, S)
    parts = split_segments(segments, size)
    for rank in range(size):
        axis = Axis(size=size, rank=rank, ranks=tuple(range(size)))
        for half, counts in zip(split_sequence(number, axis, 1).chunk(2, 1), parts, strict=True):
            expected = half.flatten().bincount(minlength=len(segments.ends) - 1)
            assert counts[rank].tolist() == expected.tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ENDS)
def test_blocks_cover_every_pair_of_a_document_once(name, causal):
    segments = segments_of(name, causal)
    size, length = 4, S // 4
    seen = skipped = 0
    for rank in range(size):
        axis = Axis(size=size, rank=rank, ranks=tuple(range(size)))
        plan = ring_plan(axis, length, causal=causal, longest=segments.longest)
        for step, documents in zip(plan, documents_of(segments, plan, axis, length), strict=True):
            pairs = documents.query_ends.diff() * documents.key_ends.diff()
            if step.causal:  # the rank's own tokens: as many keys as queries
                pairs = documents.query_ends.diff() * (documents.query_ends.diff() + 1) // 2
            assert not (step.is_empty and pairs.any())
            lonely = documents.query_ends.diff()[documents.key_ends.diff() == 0].sum()
            if documents.has_keys is not None:
                assert (~documents.has_keys).sum() == lonely
            else:
                assert lonely == 0
            skipped += step.is_empty
            seen += int(pairs.sum())
    # Documents of up to 5 tokens do not span two chunks of 2, from rank 0 to rank 3.
    assert skipped == (2 if name == "short" else 0)
    assert seen == int(segments.mask.sum())


def test_a_query_without_keys_changes_nothing():
    """Its document has no keys in the block: the sum is -inf, and merging keeps its row."""
    query, key, value = by_head(heads(8, 2))
    ends = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    documents = BlockDocuments(ends, torch.tensor([0, 0, 8, 16], dtype=torch.int32), 8)
    options = BlockOptions(causal=False, dropout=0.0)
    within = options._replace(documents=documents)
    part, part_sum, _ = reference_forward(query, key, value, within)
    assert (part[0, :, :3] == 0).all()
    assert (part_sum[0, :, :3] == -math.inf).all()
    whole, whole_sum, _ = reference_forward(query, key, value, options)
    torch.testing.assert_close(part[1], whole[1])
    out, logsumexp = whole.clone(), whole_sum.clone()
    merge(out, logsumexp, part, part_sum)
    assert torch.equal(out[0, :, :3], whole[0, :, :3])
    assert torch.equal(logsumexp[0, :, :3], whole_sum[0, :, :3])
    assert out.isfinite().all()
    assert logsumexp.isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_flash_form_of_documents_calls_operations_that_torch_has(dropout):
    """Check types and shapes on the meta device; values are compared on a GPU."""
    query, key, value = (x.bfloat16().to("meta") for x in by_head(heads(16, 2)))
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    has_keys = torch.ones(2, 16, dtype=torch.bool, device="meta")
    documents = BlockDocuments(ends, ends, 16, has_keys)
    options = BlockOptions(True, dropout, documents)
    out, logsumexp, rng_state = flash_forward(query, key, value, options)
    assert len(rng_state) == (2 if dropout else 0)
    assert out.shape == query.shape
    assert (logsumexp.shape, logsumexp.dtype) == (query.shape[:3], torch.float32)
    rows = QueryRows(out, query, out, logsumexp)
    gradients = flash_backward(rows, key, value, options, rng_state)
    assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]


@pytest.mark.parametrize("name", ENDS)
def test_a_ring_on_one_process_equals_attention(name):
    """The corresponding GPU test relies on this."""
    inputs, segments = heads(S, 2), segments_of(name)
    got = ring_in_one(inputs, segments, size=2, block=BLOCK)
    for ours, theirs in zip(got, one_process(inputs, causal=True, mask=segments.mask), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_layers_derive_from_segments_is_made_once():
    segments, made = segments_of("mixed"), []
    for _ in range(3):
        assert segments.shared("a", lambda: made.append(1) or len(made)) == 1
    assert segments.shared("b", lambda: 5) == 5
    assert made == [1]
    assert segments_of("mixed").shared("a", lambda: 7) == 7
