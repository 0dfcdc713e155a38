"""The reference model's log-probabilities of all answers, computed once and stored in a file.

The reference model is the model with the run's initial weights. Its log-probabilities are computed
before the first update, so only one model is in memory during training. A resumed run no longer has
the initial weights, so it reads the file. Adapters that start from zero have no effect at first, so
the reference is the model without them. Its log-probabilities can then be computed at any time,
without a file.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.command import print_line
from megatron.config import RunConfig
from megatron.config.adapters import is_adapter_parameter
from megatron.data.chat import members_of
from megatron.data.preferences import PAIRS, PreferenceDataset
from megatron.data.sample import Sample
from megatron.durable import replace_file, writing_to
from megatron.errors import CheckpointError, ConfigError
from megatron.finetuning.preferences import run_documents, values_at_segments
from megatron.models.adapters import without_adapters
from megatron.optimizer.norms import is_counted_here, sum_over_model
from megatron.parallel.collectives import all_reduce, broadcast
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.batches import batches_from
from megatron.training.forward import DirectForward
from megatron.training.passes import Passes
from megatron.training.pretrain import Extras
from megatron.training.recipe import Batch
from megatron.training.run import Run

FILE_NAME = "reference_log_probs.npz"
_FLAG = "--reference-log-probs"


class ReferenceLogProbs(Extras):
    """The step before training that gives every sample its reference log-probabilities."""

    def begin(self, run: Run) -> None:
        """Read or compute the log-probabilities, if the loss needs them. Collective.

        New ones are stored in the file, which is the one in --reference-log-probs or, by default,
        in --save; without these flags, they are not stored.

        Raises:
            CheckpointError: The run resumes, its model no longer contains the reference, and the
                file is missing or was written for other data.
            ConfigError: --reference-log-probs names a file of another kind.
            StorageError: The file cannot be written.
        """
        options = run.config.preferences
        members = [
            member for split in run.datasets for member in members_of(split, PreferenceDataset)
        ]
        if not options.needs_reference or not members:
            return
        resumes = run.progress.iteration > 0
        target = log_probs_path(run.config, run.config.checkpoint.save)
        source = log_probs_path(run.config, run.config.checkpoint.load) if resumes else target
        data = data_digest(run.config, members)
        is_base = _is_base(run, source if resumes else None)
        weights = ""
        if is_base or not resumes:
            checksum = weights_checksum(
                run, lambda name: not (is_base and is_adapter_parameter(name))
            )
            weights = str(checksum)
        log_probs = _read_shared(
            run, source, data, weights, sum(member.pairs for member in members)
        )
        if log_probs is None and resumes and not is_base:
            raise CheckpointError(
                f"{_FLAG}: {source or 'no file'} does not contain the reference model's "
                "log-probabilities for this data, and they cannot be computed from weights that "
                "are already trained: give the run's data, and the file that it wrote with "
                f"{_FLAG}; or start again from the reference model with --finetune"
            )
        if log_probs is None:
            if run.layout.world.rank == 0:
                count = sum(member.packing.rows for member in members)
                note = " with the adapters off" if is_base else ""
                print_line(
                    f"  computing the reference model's log-probabilities of {count} rows{note} ..."
                )
            with without_adapters(run.parts if is_base else ()):
                log_probs = np.concatenate([compute_reference(run, member) for member in members])
            source = None
        if target not in (None, source) and run.layout.world.rank == 0:
            assert target is not None
            if source is None:
                _write(target, log_probs, data, weights)
            else:  # the run continues in another folder
                with writing_to(_FLAG, target):
                    replace_file(target, source.read_bytes())
        start = 0
        for member in members:
            member.reference = log_probs[start : start + member.pairs]
            start += member.pairs


def log_probs_path(config: RunConfig, folder: str | None) -> Path | None:
    """Return the path of the file of log-probabilities, or `None` if neither argument gives one.

    Args:
        config: The run's configuration. Its --reference-log-probs takes precedence over `folder`.
        folder: Folder of checkpoints, which contains the file by default.
    """
    path = config.preferences.reference_log_probs
    if path is not None:
        return Path(path)
    return None if folder is None else Path(folder) / FILE_NAME


def data_digest(config: RunConfig, members: Sequence[PreferenceDataset]) -> str:
    """Return a digest of the answers and the number format.

    The layout is not included, because it affects only rounding.

    Args:
        config: The run's configuration.
        members: The datasets of pairs, in order.
    """
    digest = hashlib.sha256(str(config.precision.stream_dtype).encode())
    for source in dict.fromkeys(member.source for member in members):
        digest.update(source.digest().encode())
    for member in members:
        digest.update(str((member.first, member.pairs)).encode())
    return digest.hexdigest()


def _is_base(run: Run, source: Path | None) -> bool:
    """Return whether the reference is the model without its adapters. Collective.

    Args:
        run: The run.
        source: For a run that resumes, the file of the log-probabilities. If there is no such file,
            the adapters are assumed to have started from zero.
    """
    if run.config.model.lora_rank is None:
        return False
    if run.progress.iteration == 0:
        # An adapter has no effect if its second matrix, `b`, is zero.
        return (
            weights_checksum(run, lambda name: is_adapter_parameter(name) and name.endswith(".b"))
            == 0
        )
    base = str(weights_checksum(run, lambda name: not is_adapter_parameter(name)))
    is_base = torch.ones(1, dtype=torch.int64, device=run.device.torch_device)
    if run.layout.world.rank == 0 and source is not None and source.exists():
        stored = _load(source)
        is_base.fill_(stored is not None and stored.weights == base)
    return bool(broadcast(is_base, run.layout.world).item())


@torch.no_grad()
def weights_checksum(run: Run, includes: Callable[[str], bool]) -> int:
    """Return a checksum of the model's weights. Collective.

    The checksum is the sum of the bits of all weights, read as integers. It does not depend on the
    layout.

    Args:
        run: The run.
        includes: A function that returns whether the parameter with a given name is included.
    """
    shards = run.gradients.shares_weights
    total = torch.zeros(1, dtype=torch.int64, device=run.device.torch_device)
    for name, parameter in run.named_parameters():
        if includes(name) and is_counted_here(parameter, run.layout, is_sharded=shards):
            weight = run.gradients.part(parameter) if shards else parameter
            kind = {4: torch.int32, 2: torch.int16}[weight.element_size()]
            total += weight.detach().view(kind).sum(dtype=torch.int64)
    return int(sum_over_model(total, run.layout, over_replicas=shards).item())


@dataclass(frozen=True, eq=False)
class _OnePass:
    """All rows of a dataset once, followed by the first rows again until the last batch is full."""

    dataset: PreferenceDataset
    batch: int

    def __len__(self) -> int:
        return -(-self.dataset.packing.rows // self.batch) * self.batch

    def __getitem__(self, i: int) -> Sample:
        row = i % self.dataset.packing.rows
        return {**self.dataset[row], "id": row}


@torch.no_grad()
def compute_reference(run: Run, dataset: PreferenceDataset) -> NDArray[np.float64]:
    """Return the log-probabilities of a dataset's answers under the run's current weights, [P, 2].

    The columns are those of the chosen and the rejected answers. Collective.
    """
    sums = np.zeros((dataset.pairs, 3))  # chosen, rejected, and how many times they were computed

    def forward(
        part: Any,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | dict[str, Tensor]:
        result = run_documents(part, batch, hidden, tokenizer, layout)
        if isinstance(result, Tensor):
            return result
        pair_indices = np.concatenate([dataset.row(row) for row in batch["id"].tolist()])
        first = values_at_segments(batch, PAIRS).nonzero().squeeze(1)
        values = result.log_probs[torch.stack((first, first + 1), dim=1)].cpu().numpy()
        sums[pair_indices, :2] += values
        sums[pair_indices, 2] += 1
        return {"loss": result.log_probs.sum().float()}

    for part in run.parts:
        part.eval()
    rows = _OnePass(dataset, run.batches.global_batch)
    batches = batches_from(run, rows, consumed=0)
    for _ in range(len(rows) // run.batches.global_batch):
        count = run.batches.global_batch // run.batches.samples_per_pass
        Passes(run, batches, count, forward=DirectForward(forward)).forward()
    total = torch.from_numpy(sums).to(run.device.torch_device)
    reduced: NDArray[np.float64] = all_reduce(total, run.layout.world).cpu().numpy()
    return reduced[:, :2] / reduced[:, 2:]


def _read_shared(
    run: Run, path: Path | None, data: str, weights: str, pairs: int
) -> NDArray[np.float64] | None:
    """Return the values that rank 0 reads from a file, or `None` if they do not match the run."""
    log_probs = _read(path, data, weights, pairs) if run.layout.world.rank == 0 else None
    device = run.device.torch_device
    is_usable = torch.tensor([log_probs is not None], dtype=torch.int64, device=device)
    if not broadcast(is_usable, run.layout.world).item():
        return None
    values = torch.zeros(pairs, 2, dtype=torch.float64, device=device)
    if log_probs is not None:
        values.copy_(torch.from_numpy(log_probs))
    shared: NDArray[np.float64] = broadcast(values, run.layout.world).cpu().numpy()
    return shared


def _read(path: Path | None, data: str, weights: str, pairs: int) -> NDArray[np.float64] | None:
    if path is None or not path.exists():
        return None
    stored = _load(path)
    if stored is None:
        if path.name != FILE_NAME and not _is_damaged(path):
            raise ConfigError(
                f"{_FLAG} {path}: not a file of log-probabilities, and it is not replaced: name "
                "another file, or remove this one"
            )
        print_line(f"WARNING: {path}: not a file of log-probabilities; it will be replaced")
        return None
    fits = stored.values.shape == (pairs, 2) and stored.values.dtype == np.float64
    if not fits or stored.data != data or (weights and stored.weights != weights):
        print_line(f"  {path} is for other data or weights; it will be replaced")
        return None
    return stored.values


class _StoredLogProbs(NamedTuple):
    """The contents of a file: the log-probabilities, and the checksums of data and weights."""

    values: NDArray[np.float64]
    data: str
    weights: str


def _load(path: Path) -> _StoredLogProbs | None:
    """Return the contents of a file, or `None` if it is not a file of log-probabilities."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return _StoredLogProbs(file["values"], str(file["data"]), str(file["weights"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _is_damaged(path: Path) -> bool:
    """Return whether a file that cannot be read may be a damaged file of log-probabilities."""
    try:
        with path.open("rb") as file:
            return file.read(2) in (b"", b"PK")  # the beginning of every npz file
    except OSError:
        return False


def _write(path: Path, values: NDArray[np.float64], data: str, weights: str) -> None:
    file = io.BytesIO()
    np.savez(file, values=values, data=np.array(data), weights=np.array(weights))
    with writing_to(_FLAG, path):
        replace_file(path, file.getvalue())
