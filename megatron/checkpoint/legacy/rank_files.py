"""The files of a checkpoint of Megatron-LM: which there are, and the tensors in each.

mp_rank_TT[_PPP]/model_optim_rng.pt      everything, or all but the optimizer's states
mp_rank_TT[_PPP]/distrib_optim.pt        those, with --use-distributed-optimizer (23.06, 23.08)
mp_rank_TT[_PPP]/model_rng.pt            the same as the first, in 23.04
mp_rank_TT[_PPP]_DDD/optim.pt            of each data-parallel rank, in 23.04: not read
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.legacy.inert import TensorRef, show
from megatron.checkpoint.legacy.torch_zip import TorchZip
from megatron.checkpoint.legacy.unpickler import read_pickle
from megatron.errors import CheckpointError

MODEL_FILE = "model_optim_rng.pt"
DISTRIBUTED_FILE = "distrib_optim.pt"
MODEL_FILE_OF_23_04 = "model_rng.pt"
STATES_FILE_OF_23_04 = "optim.pt"

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its place in the grid, its tree, and its tensors' bytes."""

    tensor_rank: int
    stage: int
    zip: TorchZip
    tree: Mapping[str, Any]

    def find(self, ref: TensorRef) -> int:
        """The file position of a tensor's storage.

        Raises:
            CheckpointError: the storage is missing, or not as large as the tree says.
        """
        start, size = self.zip.range(f"data/{ref.storage.key}")
        if size != ref.storage.numel * ref.storage.dtype.itemsize:
            raise CheckpointError(f"{self.zip.path}: storage {ref.storage.key} has a wrong size")
        return start

    def load(self, ref: TensorRef) -> torch.Tensor:
        """A tensor over the mapped file; nothing is copied."""
        start = self.find(ref)
        if not math.prod(ref.shape):
            return torch.empty(ref.shape, dtype=ref.storage.dtype)
        flat = torch.frombuffer(
            self.zip.buffer, dtype=ref.storage.dtype, count=ref.storage.numel, offset=start
        )
        return flat.as_strided(ref.shape, ref.stride, ref.offset)


def open_files(path: Path) -> list[RankFile]:
    """The files of a checkpoint's folder, by stage and tensor rank; the grid must be complete.

    Raises:
        CheckpointError: one is missing, damaged, refused, or of a kind that is not read.
    """
    files = []
    for folder in sorted(path.glob("mp_rank_*")):
        if _holds_states_only(folder):
            continue
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match is None:
            raise CheckpointError(f"{folder}: folders per data rank (expert parallel) are not read")
        archive, tree = _open(_model_file(folder))
        files.append(RankFile(int(match.group(1)), int(match.group(2) or 0), archive, tree))
    files.sort(key=lambda file: (file.stage, file.tensor_rank))
    places = [(file.stage, file.tensor_rank) for file in files]
    stages, ranks = (1 + max((place[i] for place in places), default=-1) for i in (0, 1))
    if not places or places != [(s, r) for s in range(stages) for r in range(ranks)]:
        raise CheckpointError(f"{path}: mp_rank_* folders are missing, or are there twice")
    for key in ("iteration", "checkpoint_version"):
        if len({show(file.tree.get(key)) for file in files}) != 1:
            raise CheckpointError(f"{path}: the files differ in {key}: of different saves?")
    return files


def open_distributed(file: RankFile) -> RankFile | None:
    """The distributed optimizer's file beside a rank's; None where there is none.

    Raises:
        CheckpointError: it is damaged, or refused.
    """
    path = file.zip.path.parent / DISTRIBUTED_FILE
    if not path.exists():
        return None
    archive, tree = _open(_plain(path))
    return RankFile(file.tensor_rank, file.stage, archive, tree)


def states_beside(path: Path) -> Iterator[Path]:
    """Files of 23.04 with optimizer states, which are not read."""
    return path.glob(f"mp_rank_*/{STATES_FILE_OF_23_04}")


def _open(path: Path) -> tuple[TorchZip, Mapping[str, Any]]:
    archive = TorchZip(path)
    archive.check("data.pkl")
    tree = read_pickle(bytes(archive.record("data.pkl")), str(path))
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds no dict")
    return archive, tree


def _holds_states_only(folder: Path) -> bool:
    """A data rank's folder of 23.04, whose name can look like that of a pipeline stage."""
    models = (MODEL_FILE, MODEL_FILE_OF_23_04)
    has_model = any((folder / name).exists() for name in models)
    return (folder / STATES_FILE_OF_23_04).exists() and not has_model


def _model_file(folder: Path) -> Path:
    old = folder / MODEL_FILE_OF_23_04
    return _plain(old if old.exists() else folder / MODEL_FILE)


def _plain(file: Path) -> Path:
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{file}: missing, or not a plain file")
    return file
