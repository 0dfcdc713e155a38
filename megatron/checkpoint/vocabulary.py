"""Vocabularies padded to another size: the rows of real entries are the same.

Megatron-LM pads to a multiple of --make-vocab-size-divisible-by times the tensor-parallel size, so
its files have other numbers of rows than ours, and than each other.
"""

from __future__ import annotations

import torch

from megatron.checkpoint.entries import Box
from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError

_ROWS = 4096  # read at a time
_TABLES = ("embedding.word.weight", "output.weight", "output.bias")


class PaddedReader:
    """Presents a checkpoint's vocabulary tables with `rows` rows.

    Rows that the file has beyond them are left out. Rows that it lacks stand for no entry, but
    take part in the softmax: of a weight (and its fp32 master) they read as the mean of the
    entries' rows, of the optimizer's moments as zero. The logit of a mean row is the mean logit,
    whose exponential is at most the mean of the exponentials (Jensen): a padding entry gets no
    more than an even share of the probability. To a row of zeros, whose logit is 0, GPT-2 gives
    nearly everything: its other logits are far below.

    Raises:
        CheckpointError: the file has fewer rows than the tokenizer has entries.
    """

    def __init__(self, reader: Reader, *, rows: int, entries: int) -> None:
        self._reader = reader
        self._rows = rows
        self._entries = entries
        self.format, self.path = reader.format, reader.path
        self.iteration, self.meta = reader.iteration, reader.meta
        for name in filter(is_vocabulary_table, reader.names()):
            held = reader.global_shape(name)[0]
            if held < entries:
                raise CheckpointError(
                    f"{reader.path}: {name} has {held} rows, the tokenizer {entries} entries: give "
                    "the vocabulary files that the checkpoint was trained with"
                )

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return self._reader.names()

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's number type."""
        return self._reader.dtype(name)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor, vocabulary tables with the rows asked for."""
        shape = self._reader.global_shape(name)
        return (self._rows, *shape[1:]) if is_vocabulary_table(name) else shape

    def read(self, name: str, wanted: Box, *, global_shape: tuple[int, ...]) -> torch.Tensor:
        """The wanted part of a tensor, on the CPU."""
        held = self._reader.global_shape(name)
        if not is_vocabulary_table(name) or held[0] == global_shape[0]:
            return self._reader.read(name, wanted, global_shape=global_shape)
        (first, *offset), (rows, *shape) = wanted.offset, wanted.shape
        part = torch.zeros(wanted.shape, dtype=self._reader.dtype(name))
        count = min(rows, max(0, held[0] - first))
        if count < rows and (name.startswith("model.") or name.endswith(".master")):
            mean = self._mean_row(name)
            part[:] = mean[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        if count:
            known = Box(wanted.offset, (count, *shape))
            part[:count] = self._reader.read(name, known, global_shape=held)
        return part

    def _mean_row(self, name: str) -> torch.Tensor:
        """Mean [h] of the entries' rows (of a bias [], their mean), in fp32; read in pieces, which
        no rank holds together."""
        held = self._reader.global_shape(name)
        total = torch.zeros(held[1:], dtype=torch.float64)
        for start in range(0, self._entries, _ROWS):
            shape = (min(_ROWS, self._entries - start), *held[1:])
            piece = Box((start, *(0 for _ in held[1:])), shape)
            rows = self._reader.read(name, piece, global_shape=held)
            total += rows.sum(0, dtype=torch.float64)
        return (total / self._entries).float()


def is_vocabulary_table(name: str) -> bool:
    """`model.` or `optimizer.`, then a table, then perhaps the kind of state."""
    return name.partition(".")[2].startswith(_TABLES)
