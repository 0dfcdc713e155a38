"""Open a checkpoint wherever it lies and whoever wrote it: ours, Megatron-LM's, Hugging Face's."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.find import checkpoint_at
from megatron.checkpoint.hf.files import is_model_folder
from megatron.checkpoint.reader import Reader, open_checkpoint, open_found
from megatron.errors import CheckpointError


def open_any(path: Path, *, verify: bool = True) -> Reader:
    """The checkpoint that a path leads to.

    Args:
        path: a folder of checkpoints, of which the newest that is sound is taken; one of them
            (`iter_0000100`); or a folder of Hugging Face.
        verify: compare digests; files of Hugging Face have none.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a kind that is not read.
    """
    if is_model_folder(path):
        from megatron.checkpoint.hf.reader import HFReader

        return HFReader(path)
    found = checkpoint_at(path)
    if found is not None:
        return open_found(found, verify=verify)
    reader = open_checkpoint(path, verify=verify)
    if reader is None:
        raise CheckpointError(f"{path}: there is no checkpoint")
    return reader
