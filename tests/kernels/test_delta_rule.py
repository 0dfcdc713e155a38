"""The chunked gated delta rule, against its equations token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.kernels.delta_rule import chunked_delta_rule, delta_rule_step

KEY_HEADS, SERVES, KEYS, VALUES, BATCH, CHUNK = 2, 3, 5, 7, 2, 8
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(length: int) -> Inputs:
    """Return queries, keys, values, decays and rates in fp64."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(length, BATCH, *shape, generator=generator, dtype=torch.float64)

    heads = KEY_HEADS * SERVES
    query, key, value = draw(KEY_HEADS, KEYS), draw(KEY_HEADS, KEYS), draw(heads, VALUES)
    return query, key, value, -draw(heads).exp(), draw(heads).sigmoid()


def by_equations(
    parts: Inputs, documents: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one token, sample and head after another."""
    query, key, value, decay, rate = parts
    outputs, states = torch.zeros_like(value), []
    for sample in range(BATCH):
        for head in range(value.shape[2]):
            of = head // SERVES
            held = torch.zeros(KEYS, VALUES, dtype=value.dtype)
            if state is not None:
                held = state[sample, head]
            for place in range(len(value)):
                document = None if documents is None else documents[:, sample]
                if document is not None and place and document[place] != document[place - 1]:
                    held = torch.zeros_like(held)
                q, k = query[place, sample, of], key[place, sample, of]
                q = q / (q @ q + 1e-6).sqrt() / KEYS**0.5
                k = k / (k @ k + 1e-6).sqrt()
                held = decay[place, sample, head].exp() * held
                wrong = value[place, sample, head] - k @ held
                held = held + torch.outer(k, rate[place, sample, head] * wrong)
                outputs[place, sample, head] = q @ held
            states.append(held)
    return outputs, torch.stack(states).view(BATCH, -1, KEYS, VALUES)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 27])
def test_chunks_compute_what_tokens_compute(length: int) -> None:
    parts = inputs(length)
    torch.testing.assert_close(chunked_delta_rule(*parts, chunk=CHUNK), by_equations(parts))


def test_a_sequence_continues_from_its_states() -> None:
    parts = inputs(21)
    expected, after = by_equations(parts)
    first = tuple(part[:11] for part in parts)
    second = tuple(part[11:] for part in parts)
    start, state = chunked_delta_rule(*first, chunk=CHUNK)
    torch.testing.assert_close(chunked_delta_rule(*second, chunk=CHUNK, state=state)[1], after)
    outputs = [start]
    for place in range(10):
        token = [part[place : place + 1] for part in second]
        output, state = delta_rule_step(*token, state=state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), expected)
    torch.testing.assert_close(state, after)


# Documents end within chunks, at their borders and several in one; one is longer than a chunk.
ENDS = [(3, 8, 9, 22), (1, 2, 17, 24)]


def test_documents_begin_without_states() -> None:
    parts = inputs(27)
    documents = torch.zeros(27, BATCH, dtype=torch.int64)
    for sample, ends in enumerate(ENDS):
        for end in ends:
            documents[end:, sample] += 1
    found = chunked_delta_rule(*parts, chunk=CHUNK, documents=documents)
    torch.testing.assert_close(found, by_equations(parts, documents))


@pytest.mark.parametrize("has_documents", [False, True])
def test_gradients_are_those_of_the_equations(has_documents: bool) -> None:
    documents = torch.arange(19).unsqueeze(1).expand(19, BATCH) // 5 if has_documents else None
    found, expected = inputs(19), inputs(19)
    for part in (*found, *expected):
        part.requires_grad_()
    weights = torch.randn(found[2].shape, generator=torch.Generator().manual_seed(1)).double()
    (chunked_delta_rule(*found, chunk=CHUNK, documents=documents)[0] * weights).sum().backward()
    (by_equations(expected, documents)[0] * weights).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_strong_decays_neither_overflow_nor_vanish_from_gradients() -> None:
    query, key, value, decay, rate = (part.float() for part in inputs(27))
    decay = (100 * decay).requires_grad_()
    output, state = chunked_delta_rule(query, key, value, decay, rate, chunk=CHUNK)
    (output.sum() + state.sum()).backward()
    assert decay.grad is not None
    assert output.isfinite().all()
    assert decay.grad.isfinite().all()
