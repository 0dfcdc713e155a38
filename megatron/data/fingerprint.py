"""Whether a corpus is still the one that a run was trained on: a digest of a part of it.

A position in the data is a count of samples, which means nothing over another corpus. A corpus that
was preprocessed again has the same name, and often the same size.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from megatron.config.data import DataConfig
from megatron.data.indexed import bin_path, idx_path
from megatron.data.members import parse_weighted_paths
from megatron.errors import DataError

_BLOCKS, _BLOCK = 64, 4096  # read of each file, evenly spread, the ends among them; bytes


def corpus_fingerprint(data: DataConfig) -> str | None:
    """Of the training datasets, in their order; None where tokens are generated.

    Sizes and 256 KiB of each file: enough for other text, another tokenizer or another order of
    documents; not for a few tokens that were changed in place.

    Raises:
        DataError: a file cannot be read.
    """
    paths = data.train_data_path or data.data_path
    if data.mock_data or not paths:
        return None
    digest = hashlib.sha256()
    for _, prefix in parse_weighted_paths(paths, "--data-path"):
        for file in (idx_path(prefix), bin_path(prefix)):
            try:
                digest.update(_of_file(file))
            except OSError as error:
                raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]


def _of_file(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        last = max(0, size - _BLOCK)
        for place in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return digest.digest()
