"""The gated delta rule (Yang et al., 2024, arXiv:2412.06464), in chunks and token by token.

Each value head has a state S [e, d] of the sequence so far, with e key channels and d value
channels. A token with query q, key k, value v, decay g <= 0 and rate b updates the state and reads
its output o:

    S' = exp(g) S
    S  = S' + k b (v - k S')
    o  = q S

The value that the state returns for k thus moves toward v by the fraction b.

Shapes: s sequence, b samples, m key heads, n value heads, e key channels, d value channels. Each
query and key head serves n / m consecutive value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-6  # added to the squared length of a query or key


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    chunk: int,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule to whole sequences, chunk by chunk.

    Within a chunk, each token's update of the state depends linearly on the updates of earlier
    tokens. A triangular system determines all updates of a chunk. The systems of all chunks are
    solved in parallel, and only the states pass from chunk to chunk. All computations are in fp32,
    or fp64 for fp64 values.

    Args:
        query: The queries [s, b, m, e], before normalization.
        key: The keys [s, b, m, e], before normalization.
        value: The values [s, b, n, d].
        decay: The logarithm of each token's decay, at most 0, fp32 [s, b, n].
        rate: The rate of each token, 0 to 1, [s, b, n].
        chunk: The number of tokens in a chunk.
        documents: The index of each token's document, int64 [s, b]. Every document except the first
            of a sample begins with a zero state. `None` means that each sample is a single
            document.
        state: The states before the first token, fp32 [b, n, e, d]; `None` means zeros.

    Returns:
        The outputs [s, b, n, d] in the dtype of the values, and the states after the last token,
        fp32 [b, n, e, d].
    """
    length, heads = len(value), value.shape[2]
    size = min(chunk, length)
    # [b, m, 1, chunks, tokens, e] and, with r = n / m, [b, m, r, chunks, tokens (, d)]
    query, key = (_in_chunks(part, size).unsqueeze(2) for part in _normalized(query, key))
    wide = torch.promote_types(value.dtype, torch.float32)
    values, decay, rate = (
        _in_chunks(part.to(wide), size).unflatten(1, (key.shape[1], -1))
        for part in (value, decay, rate)
    )
    decayed = decay.cumsum(-1)  # log decay since the chunk began, including the token's own
    between = decayed.unsqueeze(-1) - decayed.unsqueeze(-2)  # from a token [j] to a later one [i]
    visible = torch.ones(size, size, dtype=torch.bool, device=value.device).tril()
    from_start, to_end = decayed.exp(), (decayed[..., -1:] - decayed).exp()
    if documents is not None:
        document = _in_chunks(documents, size)[:, None, None]  # [b, 1, 1, chunks, tokens]
        last = document[..., -1:]
        before = torch.cat((document[..., :1, :1], last[..., :-1, :]), dim=-2)
        visible = visible & (document.unsqueeze(-1) == document.unsqueeze(-2))
        from_start = from_start * (document == before)  # the tokens that the state reaches
        to_end = to_end * (document == last)  # the tokens whose updates reach the next chunk
    weights = between.masked_fill(~visible, -torch.inf).exp()
    system = rate.unsqueeze(-1) * weights * (key @ key.mT)  # only its lower triangle is read
    targets = torch.cat((values, from_start.unsqueeze(-1) * key), dim=-1) * rate.unsqueeze(-1)
    solution = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    updates, erased = solution.split((value.shape[3], key.shape[-1]), dim=-1)
    attended = weights * (query @ key.mT)
    reading, writing = from_start.unsqueeze(-1) * query, (to_end.unsqueeze(-1) * key).mT
    if state is None:
        state = values.new_zeros(len(values), heads, key.shape[-1], value.shape[3])
    state = state.unflatten(1, (key.shape[1], -1))
    outputs = []
    for index in range(values.shape[3]):
        update = updates[:, :, :, index] - erased[:, :, :, index] @ state
        outputs.append(reading[:, :, :, index] @ state + attended[:, :, :, index] @ update)
        remaining = from_start[:, :, :, index, -1, None, None]
        state = remaining * state + writing[:, :, :, index] @ update
    output = torch.stack(outputs, dim=3).flatten(3, 4)[:, :, :, :length]  # [b, m, r, s, d]
    return output.flatten(1, 2).permute(2, 0, 1, 3).to(value.dtype), state.flatten(1, 2)


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, *, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to one token of each sequence.

    Args:
        query: The queries [1, b, m, e], before normalization.
        key: The keys [1, b, m, e], before normalization.
        value: The values [1, b, n, d].
        decay: The logarithm of the decay, at most 0, fp32 [1, b, n].
        rate: The rate, 0 to 1, [1, b, n].
        state: The states before the token, fp32 [b, n, e, d].

    Returns:
        The outputs [1, b, n, d] in the dtype of the values, and the states after the token, fp32
        [b, n, e, d].
    """
    serves = value.shape[2] // key.shape[2]
    query, key = (
        part[0].repeat_interleave(serves, dim=1).unsqueeze(-1) for part in _normalized(query, key)
    )
    # Unlike matrix products, sums over a dimension give each sequence the same result in any batch.
    state = decay[0, ..., None, None].exp() * state
    update = rate[0].unsqueeze(-1) * (value[0].to(state.dtype) - (key * state).sum(2))
    state = state + key * update.unsqueeze(2)
    return (query * state).sum(2).to(value.dtype).unsqueeze(0), state


def _normalized(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize queries and keys to length 1 in fp32, and divide the queries by sqrt(e)."""
    wide = torch.promote_types(key.dtype, torch.float32)
    query, key = (
        part * (part.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
        for part in (query.to(wide), key.to(wide))
    )
    return query * query.shape[-1] ** -0.5, key


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Divide sequences into chunks of `size` tokens.

    [s, b] becomes [b, chunks, size], [s, b, n] becomes [b, n, chunks, size], and [s, b, n, d]
    becomes [b, n, chunks, size, d]. The last chunk is padded with zeros, which leave the state
    unchanged, or with the index of the last document.
    """
    missing = -len(x) % size
    if missing:
        filler = x[-1:] if not x.is_floating_point() else torch.zeros_like(x[-1:])
        x = torch.cat((x, filler.expand(missing, *x.shape[1:])))
    x = x.movedim(0, min(x.dim() - 1, 2))
    return x.unflatten(min(x.dim() - 1, 2), (-1, size))
