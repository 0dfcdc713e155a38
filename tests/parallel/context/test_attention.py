"""Ring and Ulysses attention over gloo processes equal attention on one process."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.attention import AttentionOptions, attention_reference, fused_attention
from megatron.kernels.segments import Segments
from megatron.parallel.context.block import choose_block
from megatron.parallel.context.ring import ring_attention, ring_plan, ulysses_attention
from megatron.parallel.context.split import join_sequence, local_positions, split_sequence
from megatron.parallel.layout import Axis
from megatron.planner.cost import _BACKWARD_COPIES, _FORWARD_COPIES
from tests.distributed import run_distributed
from tests.parallel.context.inputs import heads, one_process, weights_of

S = 16
BLOCK = choose_block(8, torch.float32, torch.device("cpu"))


def attend(comm_type, axis, causal, inputs):
    options = AttentionOptions(causal=causal)
    if comm_type == "p2p":
        return ring_attention(*inputs, options, axis=axis, block=BLOCK)
    return ulysses_attention(*inputs, options, axis=axis, attend=fused_attention)


def _parts(layout, cases):
    return [_part(layout.context, *case) for case in cases]


def _part(axis, comm_type, groups, causal):
    whole = heads(S, groups)
    inputs = [split_sequence(x, axis, 0).requires_grad_() for x in whole]
    out = attend(comm_type, axis, causal, inputs)
    out.backward(split_sequence(weights_of(torch.empty(S, 2, 32)), axis, 0))
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("size", [2, 4])
def test_attention_equals_one_process(size):
    cases = [("p2p", groups, causal) for groups in (1, 2, 4) for causal in (True, False)]
    cases += [("a2a", groups, causal) for groups in (size, 4) for causal in (True, False)]
    results = run_distributed(size, _parts, cases, context=size)
    for (comm_type, groups, causal), *parts in zip(cases, *results, strict=True):
        expected = one_process(heads(S, groups), causal=causal)
        for theirs, *ours in zip(expected, *parts, strict=True):
            torch.testing.assert_close(
                join_sequence(ours, 0),
                theirs,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, case=(comm_type, groups, causal): f"{case}: {text}",
            )


SLOPES = torch.tensor([0.7, 0.3, 0.1, 0.01])
# Windows that end in the first chunk or inside another, that hide nothing, or that leave each token
# only itself; documents, and other score functions.
RULES = {
    "alone": {"window": 0},
    "near": {"window": 1},
    "three": {"window": 3},
    "half": {"window": 7},
    "all but one": {"window": S - 2},
    "everything": {"window": S - 1},
    "documents": {"window": 3, "documents": True},
    "biases": {"slopes": SLOPES},
    "biases in documents": {"slopes": SLOPES, "documents": True},
    "all at once": {"window": 5, "slopes": SLOPES, "scale": 0.9, "documents": True, "sinks": True},
    "scale": {"scale": 0.2},
}


def _options(name):
    given = dict(RULES[name])
    mask = None
    if given.pop("documents", False):
        ends = torch.tensor([0, 1, 11, 16, 22, 22, 27, 32])
        mask = Segments(ends.int(), (2, S), longest=int(ends.diff().max()))
    if given.pop("sinks", False):
        given["sinks"] = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    return AttentionOptions(mask, **given)


def _by_rules(layout):
    results = []
    for name in RULES:
        inputs = [split_sequence(x, layout.context, 0).requires_grad_() for x in heads(S, 2)]
        out = ring_attention(*inputs, _options(name), axis=layout.context, block=BLOCK)
        out.backward(split_sequence(weights_of(torch.empty(S, 2, 32)), layout.context, 0))
        results.append([out.detach(), *(x.grad for x in inputs)])
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_windows_and_biases_in_a_ring_are_those_of_one_process(size):
    for name, *parts in zip(RULES, *run_distributed(size, _by_rules, context=size), strict=True):
        inputs = [x.double().requires_grad_() for x in heads(S, 2)]
        out = attention_reference(*inputs, _options(name), softmax_in_fp32=False)
        out.backward(weights_of(out).double())
        expected = [out.detach(), *(x.grad for x in inputs)]
        for theirs, *ours in zip(expected, *parts, strict=True):
            found = join_sequence(ours, 0).double()
            torch.testing.assert_close(
                found, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("longest", [None, 3, 9])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 9, 30])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_blocks_of_a_window_cover_its_pairs_once_and_skip_the_rest(size, window, longest):
    length, s = 4, 4 * size
    seen = torch.zeros(s, s)
    axes = [Axis(size=size, rank=rank, ranks=tuple(range(size))) for rank in range(size)]
    places = [local_positions(s, axis) for axis in axes]
    for axis in axes:
        plan = ring_plan(axis, length, causal=True, window=window, longest=longest)
        sources = list(dict.fromkeys(step.source for step in plan))
        assert sources == [(axis.rank - i) % size for i in range(size)]
        own = [step.source == axis.rank and step.causal for step in plan[:2]]
        assert own == [True, True]  # a query sees its own key first
        for step in plan:
            rows, columns = places[axis.rank][step.queries], places[step.source][step.keys]
            distance = rows[:, None] - columns
            block = (distance >= 0) & (distance <= window) & (distance < (longest or s))
            assert step.causal == bool((distance < 0).any())
            assert step.is_empty == (not block.any())
            seen[rows[:, None], columns] += block.float()
    reach = min(window, (longest or s) - 1)
    assert torch.equal(seen, torch.ones(s, s).tril().triu(-reach))


def _change_the_future(layout, comm_type):
    """Return which results change with the keys and values from position 6, and which should."""
    axis = layout.context
    query, key, value = (split_sequence(x, axis, 0) for x in heads(S, 2))
    before = attend(comm_type, axis, True, (query, key, value))
    late = local_positions(S, axis) >= 6
    key[late] += 1
    value[late] -= 1
    after = attend(comm_type, axis, True, (query, key, value))
    changed = (before != after).flatten(1).any(1)
    return changed.tolist(), late.tolist()


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_no_look_ahead(comm_type):
    for changed, late in run_distributed(2, _change_the_future, comm_type, context=2):
        assert changed == late


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_the_plan_covers_every_pair_once(size, causal):
    length = 4
    seen = torch.zeros(size * length, size * length)
    areas = set()
    axes = [Axis(size=size, rank=rank, ranks=tuple(range(size))) for rank in range(size)]
    places = [local_positions(size * length, axis) for axis in axes]
    for axis in axes:
        plan = ring_plan(axis, length, causal=causal)
        assert [step.source for step in plan] == [(axis.rank - i) % size for i in range(size)]
        for index, step in enumerate(plan):
            block = torch.ones(length, length)[step.queries, step.keys]
            areas.add((index > 0, block.numel()))
            rows, columns = places[axis.rank][step.queries], places[step.source][step.keys]
            seen[rows[:, None], columns] += block.tril() if step.causal else block
    expected = torch.ones_like(seen)
    assert torch.equal(seen, expected.tril() if causal else expected)
    assert areas == {(False, 16), (True, 8 if causal else 16)}  # every step has equal work


def _drop(layout, seed):
    """Return the weights that a ring keeps for this rank's queries [l, b, n, s], and gradients."""
    axis, dropout = layout.context, 0.25
    query, key, _ = heads(S, 4, d=S)
    units = torch.eye(S)[:, None, None].expand_as(key)
    inputs = [split_sequence(x, axis, 0).requires_grad_() for x in (query, key, units)]
    torch.manual_seed(seed + axis.rank)
    weights = ring_attention(*inputs, AttentionOptions(dropout=dropout), axis=axis, block=BLOCK)
    weights.backward(split_sequence(weights_of(torch.empty(S, 2, 4 * S)), axis, 0))
    return [weights.detach().unflatten(2, (4, S)), *(x.grad for x in inputs)]


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_drops_weights_alike_in_both_directions(size):
    weights, *gradients = (
        join_sequence(parts, 0)
        for parts in zip(*run_distributed(size, _drop, 5, context=size), strict=True)
    )
    again = run_distributed(size, _drop, 5, context=size)
    assert torch.equal(join_sequence([parts[0] for parts in again], 0), weights)
    other = run_distributed(size, _drop, 50, context=size)
    assert not torch.equal(join_sequence([parts[0] for parts in other], 0), weights)
    query, key, _ = heads(S, 4, d=S)
    inputs = [x.double().requires_grad_() for x in (query, key, torch.eye(S)[:, None, None])]
    scores = torch.einsum("qbnd,kbnd->qbnk", *inputs[:2]) / S**0.5
    past = torch.ones(S, S, dtype=torch.bool).tril()[:, None, None]
    whole = scores.masked_fill(~past, -torch.inf).softmax(-1)
    dropped = (weights == 0)[past.expand_as(weights)].double().mean().item()
    assert dropped == pytest.approx(0.25, abs=0.05)
    values = inputs[2].expand_as(inputs[1]).contiguous().detach().requires_grad_()
    kept = whole * torch.where(weights > 0, 4 / 3, 0.0)
    torch.testing.assert_close(weights.double(), kept.detach(), rtol=1e-5, atol=1e-6)
    torch.einsum("qbnk,kbnd->qbnd", kept, values).flatten(2).backward(
        weights_of(torch.empty(S, 2, 4 * S)).double()
    )
    for ours, theirs in zip(gradients, (*(x.grad for x in inputs[:2]), values.grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


class _Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def _largest_tensor(layout):
    axis = layout.context
    sequence = 256
    inputs = [
        split_sequence(x, axis, 0).requires_grad_() for x in heads(sequence, 1, batch=1, n=2, d=4)
    ]
    with _Largest() as largest:
        attend("p2p", axis, True, inputs).sum().backward()
    return largest.elements


def test_a_ring_holds_no_more_scores_than_one_block():
    blocks = run_distributed(4, _largest_tensor, context=4)
    assert blocks == [2 * 64 * 64] * 4  # two heads, s/C by s/C; the whole matrix has 2 * 256 * 256


class _CountCopies(TorchDispatchMode):
    """Counts copy-only kernels and the elements that they write."""

    def __init__(self):
        super().__init__()
        self.kernels = self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("cat", "stack", "clone", "copy_"):
            self.kernels += 1
            self.elements += out.numel()
        return out


class _Zeros(torch.autograd.Function):
    """Stands in for an attention that copies nothing itself, such as cuDNN's."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.shapes = [x.shape for x in inputs]
        return torch.zeros(inputs[0].shape)

    @staticmethod
    def backward(ctx, grad):
        return tuple(map(torch.zeros, ctx.shapes))


def _copies_of_all_to_all(layout, n, g):
    axis = layout.context
    inputs = [torch.ones(S // axis.size, 2, h, 4, requires_grad=True) for h in (n, g, g)]
    with _CountCopies() as forward:
        out = ulysses_attention(
            *inputs,
            AttentionOptions(),
            axis=axis,
            attend=lambda query, key, value, _: _Zeros.apply(query, key, value).flatten(2),
        )
    with _CountCopies() as backward:
        out.backward(torch.ones_like(out))
    return [(mode.kernels, mode.elements) for mode in (forward, backward)]


@pytest.mark.parametrize("size", [2, 4])
def test_the_planner_counts_the_copies_of_all_to_all(size):
    n, g = 8, 4
    channels = S // size * 2 * 4  # per head
    expected = [
        (kernels + size, channels * (inputs * (n + 2 * g) + results * n))
        for inputs, results, kernels in (_FORWARD_COPIES, _BACKWARD_COPIES)
    ]
    assert run_distributed(size, _copies_of_all_to_all, n, g, context=size) == [expected] * size
