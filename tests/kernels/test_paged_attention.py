"""Attention over a cache in blocks: kernel against plain form in float64."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.device import Device
from megatron.kernels.attention import AttentionOptions, attention_reference
from megatron.kernels.batch_invariant import batch_invariant_attention
from megatron.kernels.cached_sequences import Chunks, Singles
from megatron.kernels.chunk_attention import chunk_attention
from megatron.kernels.paged_attention import (
    PART,
    BatchInvariantPaged,
    FusedPaged,
    PagedAttention,
    choose_paged_attention,
    latent_attention,
)
from megatron.kernels.segments import Segments
from tests.kernels.compare import BF16, FP16, FP32, fresh

BLOCK = 4
TOLERANCE = {FP32: 2e-6, FP16: 2e-3, BF16: 2e-2}


def case(lengths, *, groups, per_group, size, dtype=torch.float32, device="cpu"):
    """Return queries, a cache with each sequence's blocks in arbitrary order, and tables."""
    generator, chance = fresh(), random.Random(0)
    counts = [-(-length // BLOCK) for length in lengths]
    free = list(range(sum(counts) + 3))
    chance.shuffle(free)
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    slots = (sum(counts) + 3) * BLOCK
    query = torch.randn(len(lengths), groups * per_group, size, generator=generator)
    keys, values = (torch.randn(slots, groups, size, generator=generator) for _ in range(2))
    singles = Singles(
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        max(lengths),
        BLOCK,
    )
    return [x.to(device, dtype) for x in (query, keys, values)], singles


def expected(query, keys, values, singles, options=AttentionOptions()):  # noqa: B008
    """Compute the formula row by row in float64."""
    window = options.window
    rows = []
    for row, table, length in zip(query, singles.tables, singles.lengths.tolist(), strict=True):
        first = 0 if window is None else max(0, length - 1 - window)
        if options.chunk is not None:
            first = (length - 1) // options.chunk * options.chunk
        places = torch.arange(first, length, device=query.device)
        slots = table[places // BLOCK].long() * BLOCK + places % BLOCK
        parts = (row[None], keys[slots], values[slots])
        wide = [x.double().unsqueeze(1) for x in parts]
        plain = options._replace(causal=False, window=None)
        out = attention_reference(*wide, plain, softmax_in_fp32=False)
        rows.append(out.view(len(row), -1))
    return torch.stack(rows)


def effect_of_rounding(query, keys, values, singles):
    """Return the first-order error of the results if each product in a score is rounded to fp32."""
    rows = []
    for row, table, length in zip(
        query.double(), singles.tables, singles.lengths.tolist(), strict=True
    ):
        places = torch.arange(length)
        slots = table[places // BLOCK].long() * BLOCK + places % BLOCK
        key, value = keys[slots].double(), values[slots].double()  # [l, g, d]
        heads = row.view(key.shape[1], -1, row.shape[-1]) / row.shape[-1] ** 0.5  # [g, n, d]
        weights = torch.einsum("gnd,lgd->gnl", heads, key).softmax(-1)
        errors = torch.einsum("gnd,lgd->gnl", heads.abs(), key.abs()) * 2**-24
        result = torch.einsum("gnl,lgd->gnd", weights, value)
        away = (value.permute(1, 0, 2).unsqueeze(1) - result.unsqueeze(2)).abs()  # [g, n, l, d]
        rows.append(torch.einsum("gnl,gnld->gnd", weights * errors, away).view_as(row))
    return torch.stack(rows)


SHAPES = [(2, 1, 64), (1, 4, 128), (2, 2, 16), (3, 3, 80), (1, 11, 32), (1, 8, 256)]


@pytest.mark.parametrize(("groups", "per_group", "size"), SHAPES)
def test_the_plain_form_equals_the_formula(groups, per_group, size):
    tensors, singles = case([1, 9, 4, 30], groups=groups, per_group=per_group, size=size)
    found, exact = (
        PagedAttention().singles(*tensors, singles, AttentionOptions()),
        expected(*tensors, singles),
    )
    # A few inputs in a thousand need more, which rounding of their scores in fp32 explains.
    allowed = (4 * effect_of_rounding(*tensors, singles)).clamp(min=TOLERANCE[FP32])
    worst = ((found.double() - exact).abs() / allowed).max().item()
    assert worst <= 1, worst


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(("groups", "per_group", "size"), SHAPES)
def test_the_kernel_equals_the_formula(kernels, dtype, groups, per_group, size):
    library, device = kernels
    paged = choose_paged_attention(library, size, dtype)
    if not isinstance(paged, FusedPaged):
        assert (size, dtype) == (256, FP32)
        return
    lengths = [1, 5, PART - 1, 2 * PART + 3]
    tensors, singles = case(
        lengths, groups=groups, per_group=per_group, size=size, dtype=dtype, device=device
    )
    found = paged.singles(*tensors, singles, AttentionOptions())
    torch.testing.assert_close(
        found.double(), expected(*tensors, singles), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("window", [0, 6, PART - 1, PART + 40])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_window_hides_earlier_tokens(kernels, dtype, window):
    """Some windows end within a part, and whole parts before the window are not read."""
    library, device = kernels
    lengths = [1, 5, PART, PART + 2, 2 * PART + 3]
    tensors, singles = case(lengths, groups=2, per_group=3, size=32, dtype=dtype, device=device)
    options = AttentionOptions(window=window)
    exact = expected(*tensors, singles, options)
    for paged in (PagedAttention(), FusedPaged(library)):
        found = paged.singles(*tensors, singles, options)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", [BLOCK, 10 * BLOCK, PART + BLOCK, 3 * PART])
def test_a_query_sees_its_chunk(kernels, chunk):
    library, device = kernels
    lengths = [1, 5, 40, 41, PART + BLOCK, PART + BLOCK + 1, 2 * PART + 3]
    tensors, singles = case(lengths, groups=2, per_group=3, size=32, dtype=FP32, device=device)
    options = AttentionOptions(chunk=chunk)
    exact = expected(*tensors, singles, options)
    for paged in (PagedAttention(), BatchInvariantPaged(), FusedPaged(library)):
        found = paged.singles(*tensors, singles, options)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[FP32])


@pytest.mark.parametrize("chunk", [1, 7, 39])
def test_kernels_do_not_divide_blocks(chunk):
    chosen = choose_paged_attention(object(), 32, FP32, chunk_remainder=chunk % BLOCK)
    assert "--attention-chunk-size: no kernel divides blocks" in chosen.name
    tensors, singles = case([1, 5, 7, 40, 78], groups=2, per_group=3, size=32)
    options = AttentionOptions(chunk=chunk)
    found = chosen.singles(*tensors, singles, options)
    exact = expected(*tensors, singles, options)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[FP32])


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
@pytest.mark.parametrize("chunk", [7, 40])
def test_a_chunk_has_the_bits_of_training(chunk):
    length = 93
    parts, keys, values = sequences(
        [length], groups=2, heads=4, size=16, dtype=torch.float32, device="cpu"
    )
    query, key, value, slots = parts[0]
    whole = Segments(torch.tensor([0, length], dtype=torch.int32), (1, length)).within(chunk)
    heads = [x.unsqueeze(1) for x in (query, key, value)]
    training = batch_invariant_attention(*heads, AttentionOptions(whole)).squeeze(1)
    options = AttentionOptions(chunk=chunk)
    for last in range(0, length, 5):
        end = last + 1
        one = Singles(slots[None, :end].int(), torch.tensor([end], dtype=torch.int32), end, 1)
        found = BatchInvariantPaged().singles(query[last:end], keys, values, one, options)
        assert torch.equal(found.flatten(), training[last])
        start = max(0, last - 11)
        chunks = chunks_of([start], [end - start], [slots])
        rows = [x[start:end] for x in (query, key, value)]
        found = BatchInvariantPaged().chunks(*rows, (keys, values), chunks, options)
        assert torch.equal(found, training[start:end])


SPECIAL = {
    "scale": {"scale": 0.05},
    "bound": {"softcap": 1.5, "scale": 0.3},
    "sinks": {"sinks": True},
    "all": {"softcap": 3.0, "scale": 0.7, "sinks": True, "window": PART + 40},
}


@pytest.mark.parametrize("which", SPECIAL)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_scales_bounds_and_sinks_are_those_of_the_formula(kernels, dtype, which):
    """Sequences have one part or several; seven heads share a key, so a block has only some."""
    library, device = kernels
    lengths = [1, 5, PART, 2 * PART + 3]
    tensors, singles = case(lengths, groups=2, per_group=7, size=32, dtype=dtype, device=device)
    given = dict(SPECIAL[which])
    if given.pop("sinks", False):
        given["sinks"] = torch.linspace(-4, 9, 14, device=device)
    options = AttentionOptions(**given)
    exact = expected(*tensors, singles, options)
    for paged in (PagedAttention(), FusedPaged(library)):
        found = paged.singles(*tensors, singles, options)
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[dtype])


def latent_case(lengths, heads, width, dtype, device):
    (query, vectors, _), singles = case(
        lengths, groups=1, per_group=heads, size=width, dtype=dtype, device=device
    )
    return query, vectors, singles


@pytest.mark.parametrize("options", [{}, *SPECIAL.values()], ids=["plain", *SPECIAL])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("heads", "width", "rank"), [(16, 72, 40), (9, 96, 64)])
def test_latent_vectors_are_keys_and_their_beginnings_values(
    kernels, dtype, heads, width, rank, options
):
    """Sequences have one part or several; the last product has unused heads."""
    library, device = kernels
    lengths = [1, 5, PART, 2 * PART + 3]
    query, vectors, singles = latent_case(lengths, heads, width, dtype, device)
    given = {"scale": width**-0.5, **options}
    if given.pop("sinks", False):
        given["sinks"] = torch.linspace(-4, 9, heads, device=device)
    options = AttentionOptions(**given)
    values = vectors[..., :rank]
    exact = expected(query, vectors, values, singles, options)
    plain = PagedAttention().singles(query, vectors, values, singles, options)
    fused = latent_attention(
        library,
        *(query, vectors, rank, singles.tables, singles.lengths),
        *(singles.longest, BLOCK, options),
    )
    for found in (plain, fused):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "width", "rank"), [(128, 576, 512), (20, 576, 512)])
def test_latent_vectors_of_published_sizes(kernels, heads, width, rank):
    """DeepSeek's sizes, with several blocks of heads; results do not depend on the batch."""
    library, device = kernels
    query, vectors, singles = latent_case([3, 0, PART + 9], heads, width, BF16, device)
    options = AttentionOptions(scale=width**-0.5)
    tables, lengths = singles.tables, singles.lengths
    found = latent_attention(
        library, query, vectors, rank, tables, lengths, singles.longest, BLOCK, options
    )
    assert not found[1].any()
    for row in (0, 2):
        one = slice(row, row + 1)
        alone = latent_attention(
            library, query[one], vectors, rank, tables[one], lengths[one], 4 * PART, BLOCK, options
        )
        assert torch.equal(alone[0], found[row])
        places = Singles(tables[one], lengths[one], int(lengths[row]), BLOCK)
        exact = expected(query[one], vectors, vectors[..., :rank], places, options)
        torch.testing.assert_close(alone.double(), exact, rtol=0, atol=TOLERANCE[BF16])


@pytest.mark.parametrize("special", [False, True], ids=["plain", "bounded, with sinks"])
@pytest.mark.parametrize("paged", [PagedAttention(), BatchInvariantPaged()], ids=lambda x: x.name)
def test_biases_are_those_of_a_whole_sequence(paged, special):
    """No kernel is used, and the choice reports why."""
    chosen = choose_paged_attention(object(), 32, FP32, has_slopes=True)
    assert type(chosen) is PagedAttention
    assert "--position-embedding-type alibi" in chosen.name
    tensors, singles = case([1, 5, 40], groups=2, per_group=3, size=32)
    slopes = torch.tensor([0.9, 0.5, 0.2, 0.1, 0.03, 0.01])
    options = AttentionOptions(window=30, slopes=slopes)
    if special:
        options = options._replace(softcap=1.5, sinks=torch.linspace(-4, 3, 6))
    found = paged.singles(*tensors, singles, options)
    exact = expected(*tensors, singles, options)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[FP32])
    without = paged.singles(*tensors, singles, options._replace(slopes=None))
    assert (found - without).abs().max() > 0.1


def test_bits_do_not_depend_on_the_batch(kernels):
    library, device = kernels
    (query, keys, values), singles = case(
        [7, 40, PART + 9], groups=2, per_group=2, size=32, dtype=BF16, device=device
    )
    paged = FusedPaged(library)
    together = paged.singles(query, keys, values, singles, AttentionOptions())
    for row, length in enumerate(singles.lengths.tolist()):
        for longest in (length, 4 * PART):
            alone = Singles(singles.tables[[row]], singles.lengths[[row]], longest, BLOCK)
            assert torch.equal(
                paged.singles(query[[row]], keys, values, alone, AttentionOptions())[0],
                together[row],
            )


def test_a_row_without_tokens_is_zero(kernels):
    library, device = kernels
    (query, keys, values), singles = case(
        [5, 6], groups=1, per_group=2, size=32, dtype=FP32, device=device
    )
    singles.lengths[1] = 0
    found = FusedPaged(library).singles(query, keys, values, singles, AttentionOptions())
    assert not found[1].any()
    assert found[0].any()


def test_appending_writes_where_it_is_told_and_nowhere_else(kernels):
    library, device = kernels
    key, value = (torch.randn(3, 2, 16, generator=fresh()).to(device, BF16) for _ in range(2))
    slots = torch.tensor([7, 0, 3], device=device)
    caches = [torch.zeros(2, 9, 2, 16, dtype=BF16, device=device) for _ in range(2)]
    for paged, (keys, values) in zip((PagedAttention(), FusedPaged(library)), caches, strict=True):
        paged.append(key, value, keys, values, slots)
        assert torch.equal(keys[slots], key)
        assert torch.equal(values[slots], value)
    assert torch.equal(*caches)


def chunks_of(starts, sizes, slots, device="cpu"):
    """Return chunks as an executor makes them; slots [l] of each sequence."""
    totals = [start + size for start, size in zip(starts, sizes, strict=True)]
    ends = torch.tensor([[0, *sizes], [0, *totals]]).cumsum(1).int().to(device)
    known = torch.cat([s[:n] for s, n in zip(slots, totals, strict=True)]) if any(starts) else None
    return Chunks(tuple(starts), tuple(sizes), ends, known)


def sequences(lengths, *, groups, heads, size, dtype, device):
    """Return each sequence's query, key, value and slots, and caches of all keys and values."""
    generator = fresh()
    slots = torch.randperm(2 * sum(lengths), generator=generator)[: sum(lengths)].to(device)
    shapes = [(sum(lengths), count, size) for count in (heads, groups, groups)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    keys, values = (torch.zeros(2 * sum(lengths), *shapes[1][1:]).to(device, dtype) for _ in "kv")
    PagedAttention().append(tensors[1], tensors[2], keys, values, slots)
    each = [x.split(lengths) for x in (*tensors, slots)]
    return list(zip(*each, strict=True)), keys, values


def attend(parts, keys, values, cuts, options=None):
    """Return attention for the new tokens of each sequence, between the given positions."""
    here = [tuple(x[a:b] for x in part[:3]) for part, (a, b) in zip(parts, cuts, strict=True)]
    query, key, value = (torch.cat(tensors) for tensors in zip(*here, strict=True))
    starts, sizes = [a for a, _ in cuts], [b - a for a, b in cuts]
    chunks = chunks_of(starts, sizes, [part[3] for part in parts], query.device)
    return chunk_attention(
        query, key, value, (keys, values), chunks, options or AttentionOptions()
    ).split(sizes)


@pytest.mark.parametrize("special", [False, True], ids=["plain", "bounded, with sinks and biases"])
@pytest.mark.parametrize("window", [None, 3])
def test_chunks_attend_to_what_is_before_them(window, special):
    """Results are the same as if each whole sequence were computed at once."""
    lengths, options = [13, 6], AttentionOptions(window=window)
    if special:
        sinks = torch.tensor([-1.0, 0.0, 1.0, 4.0])
        options = AttentionOptions(window=window, scale=0.5, softcap=2.0, sinks=sinks)
        options = options._replace(slopes=torch.tensor([0.5, 0.2, 0.1, 0.03]))
    parts, keys, values = sequences(
        lengths, groups=2, heads=4, size=8, dtype=torch.float32, device="cpu"
    )
    whole = []
    for query, key, value, _ in parts:
        wide = [x.unsqueeze(1) for x in (query, key, value)]
        out = attention_reference(*wide, options)
        whole.append(out.squeeze(1))
    for cuts in ([(0, 5), (0, 6)], [(5, 6), (2, 6)], [(6, 13), (0, 1)]):
        found = attend(parts, keys, values, cuts, options)
        for out, expected_out, (a, b) in zip(found, whole, cuts, strict=True):
            torch.testing.assert_close(out, expected_out[a:b], rtol=0, atol=1e-6)


def test_chunks_of_prompts_attend_within_chunks_of_attention():
    """Steps cut prompts anywhere; each token still sees its chunk of five tokens, up to itself."""
    parts, keys, values = sequences(
        [13, 6], groups=2, heads=4, size=8, dtype=torch.float32, device="cpu"
    )
    whole = []
    for query, key, value, _ in parts:
        ends = torch.tensor([0, 5, 10, 13, 13]).clamp(max=len(query)).int()
        wide = [x.unsqueeze(1) for x in (query, key, value)]
        options = AttentionOptions(Segments(ends, (1, len(query))))
        whole.append(attention_reference(*wide, options).squeeze(1))
    options = AttentionOptions(chunk=5)
    for cuts in ([(0, 5), (0, 6)], [(5, 6), (2, 6)], [(6, 13), (0, 1)], [(0, 13), (0, 6)]):
        found = attend(parts, keys, values, cuts, options)
        for out, expected_out, (a, b) in zip(found, whole, cuts, strict=True):
            torch.testing.assert_close(out, expected_out[a:b], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [64, 128])
def test_neither_cuts_nor_company_change_the_bits_of_a_chunk(kernels, size):
    _, device = kernels
    if not Device(torch.device(device)).has_flash:
        pytest.skip("needs the flash kernel of a GPU")
    shape = {"groups": 2, "heads": 8, "size": size, "dtype": BF16, "device": device}
    parts, keys, values = sequences([700, 330, 65], **shape)
    whole = attend(parts, keys, values, [(0, 700), (0, 330), (0, 65)])
    reference = attention_reference(
        *(x.double().unsqueeze(1) for x in parts[0][:3]), AttentionOptions()
    )
    torch.testing.assert_close(whole[0].double(), reference.squeeze(1), rtol=0, atol=2e-2)
    for cuts in (
        [(0, 700)],
        [(0, 1)],
        [(699, 700)],
        [(300, 301), (329, 330)],
        [(16, 400), (128, 330), (64, 65)],
        [(512, 700), (1, 2)],
    ):
        found = attend(parts[: len(cuts)], keys, values, cuts)
        for out, all_of_it, (a, b) in zip(found, whole, cuts, strict=False):
            assert torch.equal(out, all_of_it[a:b]), (cuts, a, b)
