"""Many tensors for one launch: their addresses and sizes in a table on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**16  # elements that a block takes; a multiple of what any access needs


@dataclass(frozen=True)
class TensorTable:
    """What a kernel reads to find its tensors. They must stay where they are.

    Attributes:
        tensors: int64 [tensors, fields + 1]: addresses (0 for None), then the size in elements.
        pieces: int64 [pieces, 2]: tensor and first element of what each block takes.
        held: the tensors, kept alive.
    """

    tensors: Tensor
    pieces: Tensor
    held: tuple[Sequence[Tensor | None], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> TensorTable:
        """A table of `rows`: tensors of one size each, the first not None, all contiguous."""
        table, pieces = [], []
        for i, row in enumerate(rows):
            assert row[0] is not None
            size = row[0].numel()
            for tensor in row:
                assert tensor is None or (tensor.numel() == size and tensor.is_contiguous())
            table.append([0 if x is None else x.data_ptr() for x in row] + [size])
            pieces += [(i, start) for start in range(0, size, CHUNK)]
        return cls(
            torch.tensor(table, dtype=torch.int64).to(device),
            torch.tensor(pieces, dtype=torch.int64).reshape(-1, 2).to(device),
            tuple(rows),
        )
