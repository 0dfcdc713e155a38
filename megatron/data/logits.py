"""Files with a teacher's most likely tokens for every training sample.

A folder holds `logits.json`, which names the teacher, data and settings of the logits, and one
safetensors file per `samples_per_file` samples, in the order of training. The files do not depend
on the layout of the processes that write or read them. With n samples of s tokens, and m entries
in total:

    ids     [m]         int16 (its bits are uint16), or int32 for vocabularies above 65536
    values  [m]         fp16, bf16 or fp32   log-probabilities of these ids
    counts  [n, s]      int32                number of entries at each position
    starts  [n + 1]     int64                first entry of each sample, followed by m
    rest    [n, s]      fp32                 log-probability of all other tokens together
    tokens  [n]         int64                digest of each sample's tokens
    checks  [n]         int64                digest of each sample's logits, as stored

A file gets its final name only when it is complete, so an interrupted run continues with the files
that are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.sample import Sample, SampleDataset
from megatron.data.text_stream import WrappedDataset
from megatron.durable import replace_file, storage_errors
from megatron.errors import DataError, warn
from megatron.tokenizer.base import Tokenizer

# The fields of a sample that contain a teacher's logits: ids [s, k], values [s, k] and rest [s].
TOP_IDS, TOP_VALUES, TOP_REST = "top_ids", "top_values", "top_rest"
HEADER = "logits.json"
FORMAT = "megatron-top-logits-1"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_ENTRIES_PER_FILE = 2**24  # about 100 MB
_SHORT_IDS = 2**16


@dataclass(frozen=True, kw_only=True)
class LogitsHeader:
    """The content of `logits.json`: the teacher, data and settings of the logits in a folder.

    Attributes:
        seed: --seed, which determines the order of samples.
        seq_length: The number of tokens in a sample, s.
        tokenizer: The tokenizer's fingerprint.
        vocab_size: The number of entries in the vocabulary.
        separates_documents: Whether tokens attend only within their document, and whether positions
            are counted from 0 in each document.
        temperature: The temperature by which logits were divided.
        top_k: The maximum number of entries at a position.
        top_p: The cumulative probability after which further entries are omitted, or `None`.
        top_p_min_k: The number of entries that are kept regardless of `top_p`.
        dtype: The number format of the log-probabilities.
        samples: The number of samples.
        samples_per_file: The number of samples in every file except the last.
        teacher: The teacher's checkpoint.
        format: The version of the format.
    """

    seed: int
    seq_length: int
    tokenizer: str
    vocab_size: int
    separates_documents: list[bool]
    temperature: float
    top_k: int
    top_p: float | None
    top_p_min_k: int
    dtype: str
    samples: int
    samples_per_file: int
    teacher: str
    format: str = FORMAT

    def files(self) -> list[range]:
        """Return the range of samples that each file contains."""
        starts = range(0, self.samples, self.samples_per_file)
        return [range(i, min(i + self.samples_per_file, self.samples)) for i in starts]

    def path(self, folder: Path, sample: int) -> Path:
        """Return the path of the file in `folder` that holds a sample."""
        first = sample - sample % self.samples_per_file
        return folder / f"logits-{first:012d}.safetensors"


_SETTING_FLAGS = {  # the names of the fields of `sample_settings` in messages
    "seed": "--seed",
    "seq_length": "--seq-length",
    "tokenizer": "the tokenizer",
    "vocab_size": "the tokenizer's size",
    "separates_documents": "--reset-attention-mask and --reset-position-ids",
    "temperature": "--kd-temperature",
}


def sample_settings(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the header fields that must match between the runs that write and read logits."""
    data = config.data
    return {
        "seed": config.training.seed,
        "seq_length": data.seq_length,
        "tokenizer": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "separates_documents": [data.reset_attention_mask, data.reset_position_ids],
        "temperature": config.distillation.kd_temperature,
    }


def new_header(
    config: RunConfig, tokenizer: Tokenizer, *, samples: int, teacher: str
) -> LogitsHeader:
    """Return a header for the folder of logits that a run writes.

    Args:
        config: The run's configuration.
        tokenizer: The run's tokenizer.
        samples: The number of training samples.
        teacher: The teacher's checkpoint.
    """
    options, settings = config.distillation, sample_settings(config, tokenizer)
    assert options.logits_save_top_k is not None, "a rule requires it"
    top_k = min(options.logits_save_top_k, tokenizer.vocab_size)
    return LogitsHeader(
        **settings,
        top_k=top_k,
        top_p=options.logits_save_top_p,
        top_p_min_k=options.logits_save_top_p_min_k,
        dtype=options.logits_save_dtype,
        samples=samples,
        samples_per_file=max(1, min(256, _ENTRIES_PER_FILE // (config.data.seq_length * top_k))),
        teacher=teacher,
    )


def read_header(folder: Path, flag: str) -> LogitsHeader:
    """Read the header of a folder of logits.

    Args:
        folder: The folder that contains the header.
        flag: The flag that names the folder, for messages.

    Raises:
        DataError: The folder does not hold logits, or its header is damaged or cannot be read.
    """
    path = folder / HEADER
    remedy = "delete the folder and write it again with --logits-save-dir"
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if next(folder.glob("cp*_dp*__*.tar"), None) is not None:
            raise DataError(
                f"{flag} {folder}: holds Megatron Core's tar files, whose order depends on Core's "
                "processes: write the logits again with --logits-save-dir"
            ) from None
        raise DataError(
            f"{flag} {folder}: there is no {HEADER}: give a folder that --logits-save-dir wrote"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}): make it readable, or write the "
            "logits again"
        ) from error
    try:
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"the format is not {FORMAT}")
        header = LogitsHeader(**values)
        numbers = (header.seq_length, header.samples, header.samples_per_file, header.top_k)
        if (
            any(type(number) is not int or number < 1 for number in numbers)
            or header.dtype not in DTYPES
        ):
            raise ValueError("a value has the wrong type")
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {remedy}") from None
    return header


def begin_folder(folder: Path, header: LogitsHeader) -> None:
    """Write the header of a folder, or compare it with an existing header.

    Args:
        folder: The folder in --logits-save-dir. It is created if necessary.
        header: The header of the logits that this run writes.

    Raises:
        DataError: The folder holds different logits, or its header is damaged or cannot be read.
        StorageError: The header cannot be written.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / HEADER).exists():
            text = json.dumps(asdict(header), indent=2) + "\n"
            replace_file(folder / HEADER, text.encode())
            return
    existing = read_header(folder, "--logits-save-dir")
    differing = [
        f"{entry.name} {getattr(existing, entry.name)} (here {getattr(header, entry.name)})"
        for entry in fields(header)
        if getattr(existing, entry.name) != getattr(header, entry.name)
    ]
    if differing:
        raise DataError(
            f"--logits-save-dir {folder}: already holds logits with {', '.join(differing)}: give "
            "the same flags to add to them, or name another folder"
        )


def write_file(
    path: Path, header: LogitsHeader, samples: Sequence[Mapping[str, Tensor]], digests: list[int]
) -> None:
    """Write the logits of consecutive samples to a file.

    Args:
        path: The file.
        header: The folder's header.
        samples: The fields `TOP_IDS` [s, k] (-1 where there is no entry), `TOP_VALUES` [s, k] and
            `TOP_REST` [s] of each sample, on the CPU.
        digests: The `digest_of_tokens` of each sample.

    Raises:
        StorageError: The file cannot be written.
    """
    from safetensors.torch import save  # only distillation needs it

    masks = [sample[TOP_IDS] >= 0 for sample in samples]
    ids = torch.cat([sample[TOP_IDS][mask] for sample, mask in zip(samples, masks, strict=True)])
    values = torch.cat(
        [sample[TOP_VALUES][mask] for sample, mask in zip(samples, masks, strict=True)]
    )
    sizes = torch.tensor([0, *(int(mask.sum()) for mask in masks)])
    stored = ids.to(torch.int32)
    if header.vocab_size <= _SHORT_IDS:  # as int16, because old safetensors have no uint16
        stored = stored.to(torch.uint16).view(torch.int16)
    tensors = {
        "ids": stored,
        "values": values.to(DTYPES[header.dtype]),
        "counts": torch.stack([mask.sum(1) for mask in masks]).to(torch.int32),
        "starts": sizes.cumsum(0),
        "rest": torch.stack([sample[TOP_REST] for sample in samples]).float(),
        "tokens": torch.tensor(digests, dtype=torch.int64),
    }
    stored_samples = (_sample_tensors(tensors, i) for i in range(len(samples)))
    tensors["checks"] = torch.tensor([_digest(*parts) for parts in stored_samples])
    with storage_errors(path):
        replace_file(path, save(tensors))


def digest_of_tokens(sample: Sample) -> int:
    """Return a 64-bit digest of a sample's tokens."""
    return _digest(torch.from_numpy(np.asarray(sample["text"], dtype=np.int64)))


def _digest(*tensors: Tensor) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _sample_tensors(file: Mapping[str, Any], index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the counts [s], ids [m], values [m] and rest [s] of a sample in a file, as stored."""
    start, end = file["starts"][index : index + 2].tolist()
    return (
        file["counts"][index],
        file["ids"][start:end],
        file["values"][start:end],
        file["rest"][index],
    )


@dataclass(eq=False)
class TeacherLogitsDataset(WrappedDataset):
    """A dataset whose samples have a teacher's logits in addition to their tokens.

    Attributes:
        dataset: The samples.
        folder: The folder of logits.
        header: The header of the folder.
        ignores_errors: Whether to continue without the logits that cannot be read. The first sample
            without them is reported.
    """

    folder: Path
    header: LogitsHeader
    ignores_errors: bool = False
    _open_files: dict[Path, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _has_warned: bool = False

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i` with `TOP_IDS`, `TOP_VALUES` and `TOP_REST`.

        Raises:
            DataError: The logits are missing, damaged, or belong to different tokens, and
                `ignores_errors` is False.
        """
        sample: Sample = self.dataset[i]
        try:
            return {**sample, **self._logits(i, digest_of_tokens(sample))}
        except DataError as error:
            if not self.ignores_errors:
                raise
            if not self._has_warned:
                self._has_warned = True
                warn(f"{error} (--logits-load-ignore-errors: only the sample's tokens are used)")
            # Without logits, all of the probability belongs to the remaining tokens.
            counts = np.zeros(self.header.seq_length, np.int32)
            rest = np.zeros(self.header.seq_length, np.float32)
            return {**sample, **self._padded(counts, counts[:0], rest[:0], rest)}

    def _logits(self, i: int, digest: int) -> dict[str, NDArray[Any]]:
        if i >= self.header.samples:
            raise DataError(
                f"--logits-load-dir {self.folder}: has the logits of {self.header.samples} "
                f"samples, but sample {i} is needed: train on fewer samples, or write more logits"
            )
        path, index = self.header.path(self.folder, i), i % self.header.samples_per_file
        remedy = "delete it and write it again with --logits-save-dir"
        try:
            file = self._file(path)
            if int(file["tokens"][index : index + 1]) != digest:
                raise DataError(
                    f"--logits-load-dir {self.folder}: sample {i} has different tokens than when "
                    "its logits were written: give the same data, --split, --seed and number of "
                    "training samples, or write the logits again"
                )
            parts = _sample_tensors(file, index)
            if _digest(*parts) != int(file["checks"][index : index + 1]):
                raise ValueError(f"the digest of the logits of sample {i} does not match")
            counts, rest = parts[0].numpy(), parts[3].numpy()
            ids, values = parts[1].to(torch.int32).numpy(), parts[2].float().numpy()
            if parts[1].dtype == torch.int16:
                ids = ids & 0xFFFF
            if len(counts) != self.header.seq_length or len(rest) != len(counts):
                raise ValueError(
                    f"{len(counts)} tokens and {len(rest)} remainders, "
                    f"expected {self.header.seq_length}"
                )
            if counts.min() < 0 or counts.sum() != len(ids):
                raise ValueError("the numbers of entries do not add up")
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.header.vocab_size:
                raise ValueError("an id is outside the vocabulary")
            return self._padded(counts, ids, values, rest)
        except FileNotFoundError:
            raise DataError(
                f"{path} is missing: run the command with --logits-save-dir again, which continues "
                "where it stopped"
            ) from None
        except DataError:
            raise
        except Exception as error:  # safetensors raises its own kinds of errors
            raise DataError(f"{path} is damaged ({error}): {remedy}") from error

    def _padded(
        self,
        counts: NDArray[np.int32],
        ids: NDArray[np.int32],
        values: NDArray[np.float32],
        rest: NDArray[np.float32],
    ) -> dict[str, NDArray[Any]]:
        width = min(self.header.top_k, self.header.vocab_size)
        is_entry = np.arange(width) < counts[:, None]
        all_ids = np.full(is_entry.shape, -1, np.int32)
        all_values = np.full(is_entry.shape, -np.inf, np.float32)
        all_ids[is_entry], all_values[is_entry] = ids, values
        return {TOP_IDS: all_ids, TOP_VALUES: all_values, TOP_REST: rest}

    def _file(self, path: Path) -> Mapping[str, Any]:
        """Return the tensors of a file by name, as slices that are read on demand."""
        if path not in self._open_files:
            from safetensors import safe_open

            if not path.is_file():
                raise FileNotFoundError(path)
            self._open_files.clear()  # samples are read in order
            file = safe_open(path, framework="pt")
            self._open_files[path] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return self._open_files[path]


def with_logits(
    dataset: SampleDataset, config: RunConfig, tokenizer: Tokenizer
) -> TeacherLogitsDataset:
    """Return a dataset with the logits in --logits-load-dir, which must belong to its samples.

    Args:
        dataset: The training samples.
        config: The run's configuration.
        tokenizer: The run's tokenizer.

    Raises:
        DataError: The folder is missing, damaged or made from different data, or it is incomplete
            and --logits-load-ignore-errors is not given.
    """
    options = config.distillation
    assert options.logits_load_dir is not None
    folder = Path(options.logits_load_dir)
    header = read_header(folder, "--logits-load-dir")
    differing = [
        f"{_SETTING_FLAGS[name]} was {getattr(header, name)}, now {value}"
        for name, value in sample_settings(config, tokenizer).items()
        if getattr(header, name) != value
    ]
    if differing:
        raise DataError(
            f"--logits-load-dir {folder}: written for other samples: {'; '.join(differing)}: use "
            "the settings of the run that wrote it, or write the logits again"
        )
    missing = list(missing_files(folder, header))
    if missing and not options.logits_load_ignore_errors:
        raise DataError(
            f"--logits-load-dir {folder}: {len(missing)} of {len(header.files())} files are "
            "missing: run the command with --logits-save-dir again, which continues where it "
            "stopped"
        )
    result = TeacherLogitsDataset(dataset, folder, header, options.logits_load_ignore_errors)
    _ = result[0]  # fail now if the logits belong to other samples
    return result


def missing_files(folder: Path, header: LogitsHeader) -> Iterator[range]:
    """Yield the range of samples of each file that has not been written yet."""
    for samples in header.files():
        if not header.path(folder, samples.start).exists():
            yield samples
