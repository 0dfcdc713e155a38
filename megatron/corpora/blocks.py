"""The steps of a plan as datatrove blocks, which datatrove's executors run on pieces of the input.

A step does not remove the documents that it drops. It marks them with the reason and passes them
on, so the last block can count everything in one place. A file gets its final name only when it is
complete, so a killed task is repeated and a finished task is not.

datatrove measures the time spent in each block (`track_time`) and writes it to files, from which
the speed table is made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from megatron.corpora import cleaning
from megatron.corpora.minhash import group_duplicates, sign
from megatron.corpora.overlaps import TaskNgrams, cut_out
from megatron.corpora.plan import (
    CorpusPlan,
    DuplicatesStep,
    ExtractStep,
    FixStep,
    LanguageStep,
    QualityStep,
    TasksStep,
    TokenizeStep,
    UrlStep,
)
from megatron.corpora.records import dump_record
from megatron.corpora.sources import Piece, read_piece
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.data.preprocess import BlockEncoder, EncodingOptions, preprocess
from megatron.data.text_input import load_line
from megatron.durable import TEMPORARY, atomic_file, writing_to
from megatron.errors import DataError
from megatron.extras import packages_of

with packages_of("corpora"):
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep

_SAMPLES = 3  # samples per reason and piece
_SAMPLE_CHARACTERS = 300
_BATCH = 512  # the number of documents in a batch
_BATCH_CHARACTERS = 16 << 20  # the number of characters at which a batch also ends
_EMPTY_LINES = re.compile(r"\n{3,}")

Documents = Iterable[Document]


class Mark(Enum):
    """Metadata keys that blocks set on documents.

    The input's own fields have strings as keys, so these keys cannot collide with them.
    """

    DROPPED = "(step, reason, detail) if the document is dropped"
    CHANGED = "the steps that changed the document"
    CUT = "(name of the whole document, text that was cut out)"
    HTML = "whether the document's text is HTML"


def shard(folder: Path, rank: int, suffix: str) -> Path:
    """Return the path of the file for piece number `rank` in a folder."""
    return folder / f"{rank:05d}{suffix}"


@contextmanager
def output(path: Path) -> Iterator[BinaryIO]:
    """Open a file that gets its final name on success, after removing leftovers of killed tasks.

    Raises:
        StorageError: The file cannot be written.
    """
    with writing_to("--output", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f"{path.name}{TEMPORARY}*"):
            leftover.unlink()
        with atomic_file(path) as file:
            yield file


def _drop(document: Document, step: str, reason: str, detail: str = "") -> None:
    document.metadata[Mark.DROPPED] = (step, reason, detail)


class CorpusBlock(PipelineStep):
    """The base class of the blocks. datatrove calls a block once per task."""

    type = "corpora"

    def __init__(self, name: str) -> None:
        """Set the name that datatrove's log and the speed table show."""
        self.name = name
        super().__init__()

    def run(self, data: Any, rank: int, world_size: int) -> Any:
        """Process the documents of a task.

        Args:
            data: The documents from the previous block. The first block of a stage ignores it.
            rank: The index of the task. If each piece has a task, it is the index of the piece.
            world_size: The number of tasks.

        Returns:
            The documents for the next block. Documents to drop are only marked.
        """
        raise NotImplementedError


class PieceReader(CorpusBlock):
    """Reads the documents in one piece of the input.

    Args:
        pieces: All pieces of the input.
        plan: The plan, which sets the keys of a document's text and name, and whether to skip
            bad lines.
    """

    def __init__(self, pieces: list[Piece], plan: CorpusPlan) -> None:
        """Store the pieces and the plan."""
        super().__init__("read")
        self.pieces, self.plan = pieces, plan

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Document]:
        """Yield the documents of a piece.

        Raises:
            DataError: A file is damaged, or a line is not a document and the plan says "stop".
        """
        records = read_piece(self.pieces[rank], self.plan)
        while True:
            with self.track_time():
                raw = next(records, None)
            if raw is None:
                return
            document = Document(raw.text, raw.name, metadata=raw.fields)
            if raw.problem:
                if self.plan.on_error == "stop":
                    remedy = "fix the line, or skip bad lines with --on-error skip"
                    raise DataError(f"--input {raw.location}: {raw.problem}: {remedy}")
                _drop(document, "read", "bad line", raw.problem)
            if raw.excess:
                _drop(document, "read", "page too long", raw.excess)
            if raw.is_html:
                document.metadata[Mark.HTML] = True
            yield document


class PerDocument(CorpusBlock):
    """Changes or drops documents, one at a time.

    Args:
        name: The name of the step.
        change: A function that may change the text of a document. It returns the reason to drop the
            document, or "" to keep it.
    """

    def __init__(self, name: str, change: Callable[[Document], str]) -> None:
        """Store the function."""
        super().__init__(name)
        self.change = change

    def run(self, data: Documents, rank: int, world_size: int) -> Iterator[Document]:
        """Yield all documents, marking those to drop."""
        for document in data:
            if Mark.DROPPED not in document.metadata:
                with self.track_time():
                    before = document.text
                    reason = self.change(document)
                if reason:
                    _drop(document, self.name, reason)
                elif document.text != before:
                    document.metadata.setdefault(Mark.CHANGED, []).append(self.name)
            yield document


def _clean(step: Any, document: Document) -> str:
    """Apply a step to a document. Return the reason to drop the document, or ""."""
    reason = ""
    match step:
        case UrlStep():
            url = document.metadata.get("url")
            if isinstance(url, str) and url:
                reason = cleaning.judge_url(url, step)
        case ExtractStep():
            if document.metadata.pop(Mark.HTML, False):
                reason = cleaning.judge_nesting(document.text)
                if not reason:
                    document.text = cleaning.extract_page(document.text)
                    reason = "no main text" if len(document.text) < step.min_characters else ""
        case FixStep():
            document.text = cleaning.fix_text(document.text)
            if step.newlines:
                document.text = _EMPTY_LINES.sub("\n\n", document.text)
        case LanguageStep():
            reason = cleaning.judge_language(document.text, step)
        case QualityStep():
            reason = cleaning.judge_quality(document.text, step)
    return reason


def cleaning_blocks(plan: CorpusPlan) -> list[CorpusBlock]:
    """Return the blocks for the plan's steps that process each document on its own."""
    return [
        PerDocument(name, partial(_clean, plan.steps[name]))
        for name in ("urls", "extract", "fix", "language", "quality")
        if name in plan.steps
    ]


def _batched(data: Documents) -> Iterator[tuple[list[Document], list[Document]]]:
    """Yield batches of documents, each with a list of its documents that are not dropped."""
    batch: list[Document] = []
    kept: list[Document] = []
    size = 0
    for document in data:
        batch.append(document)
        if Mark.DROPPED not in document.metadata:
            kept.append(document)
        size += len(document.text)
        if len(batch) == _BATCH or size >= _BATCH_CHARACTERS:
            yield batch, kept
            batch, kept, size = [], [], 0
    yield batch, kept


class SignatureWriter(CorpusBlock):
    """Writes the MinHash signatures of a piece's documents, except those to drop.

    Args:
        folder: The folder of the signatures.
        step: The settings of the signatures.
    """

    def __init__(self, folder: Path, step: DuplicatesStep) -> None:
        """Store the settings."""
        super().__init__("signatures")
        self.folder, self.step = folder, step

    def run(self, data: Documents, rank: int, world_size: int) -> Iterator[Document]:
        """Yield the documents, and write the signatures at the end."""
        signatures = [np.empty((self.step.values, 0), np.uint16)]
        for batch, kept in _batched(data):
            with self.track_time():
                signatures.append(sign([document.text.encode() for document in kept], self.step))
            yield from batch
        with self.track_time(), output(shard(self.folder, rank, ".npy")) as file:
            np.save(file, np.concatenate(signatures, axis=1), allow_pickle=False)


class GroupFinder(CorpusBlock):
    """Finds the groups of near-duplicates among all documents.

    The signatures of all documents are loaded into memory, by default 400 bytes per document.

    Args:
        signatures: The folder of the signatures.
        groups: The output folder, which gets an array `[2, documents]` for each piece. Row 0 has
            the index of each document, and row 1 the index of the first document in its group.
            Documents are numbered across all pieces.
        step: The settings of the signatures.
        pieces: The number of pieces.
    """

    def __init__(self, signatures: Path, groups: Path, step: DuplicatesStep, pieces: int) -> None:
        """Store the settings."""
        super().__init__("duplicates")
        self.signatures, self.groups, self.step, self.pieces = signatures, groups, step, pieces

    def run(self, data: Any, rank: int, world_size: int) -> list[Document]:
        """Write the groups, one file per piece."""
        with self.track_time():
            files = [shard(self.signatures, piece, ".npy") for piece in range(self.pieces)]
            signatures = [np.load(file, mmap_mode="r") for file in files]
            bounds = np.cumsum([0, *(array.shape[1] for array in signatures)])
            roots = group_duplicates(np.concatenate(signatures, axis=1), self.step)
            for piece, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
                with output(shard(self.groups, piece, ".npy")) as file:
                    table = np.stack([np.arange(first, last), roots[first:last]])
                    np.save(file, table, allow_pickle=False)
        return []


class ShardReader(CorpusBlock):
    """Reads the documents that an earlier stage wrote for a piece.

    Args:
        folder: The folder of the documents.
    """

    def __init__(self, folder: Path) -> None:
        """Store the folder."""
        super().__init__("read again")
        self.folder = folder

    def run(self, data: Any, rank: int, world_size: int) -> Iterator[Document]:
        """Yield the documents of a piece."""
        with open(shard(self.folder, rank, ".jsonl"), "rb") as file:
            for line in file:
                with self.track_time():
                    record = load_line(line)
                    document = Document(record.pop("text"), record.pop("id"), metadata=record)
                yield document


class DuplicateDropper(CorpusBlock):
    """Drops every document of a group except the first.

    Args:
        groups: The folder of the groups.
    """

    def __init__(self, groups: Path) -> None:
        """Store the folder."""
        super().__init__("duplicates")
        self.groups = groups

    def run(self, data: Documents, rank: int, world_size: int) -> Iterator[Document]:
        """Yield all documents, marking the duplicates."""
        numbers, roots = np.load(shard(self.groups, rank, ".npy")).tolist()
        for document, number, root in zip(data, numbers, roots, strict=True):
            if number != root:
                _drop(document, "duplicates", "near-duplicate", f"of document {root}")
            yield document


class OverlapCutter(CorpusBlock):
    """Cuts out passages that also occur in a task.

    Args:
        file: The file with the n-grams of the tasks.
        step: The margin of a cut, and the limits on the remaining parts.
    """

    def __init__(self, file: Path, step: TasksStep) -> None:
        """Store the settings."""
        super().__init__("tasks")
        self.file, self.step = file, step

    def run(self, data: Documents, rank: int, world_size: int) -> Iterator[Document]:
        """Yield all documents, split at the cuts.

        A document is marked as dropped if no parts, or too many parts, remain.
        """
        with np.load(self.file) as stored:
            ngrams = TaskNgrams({int(size): stored[size] for size in stored.files})
        for batch, kept in _batched(data):
            with self.track_time():
                matches = iter(ngrams.find([document.text for document in kept]))
                results = []
                for document in batch:
                    overlaps = [] if Mark.DROPPED in document.metadata else next(matches)
                    results += self._cut(document, overlaps) if overlaps else [document]
            yield from results

    def _cut(self, document: Document, overlaps: Any) -> list[Document]:
        parts = cut_out(document.text, overlaps, self.step)
        overlap = document.text[overlaps[0].start : overlaps[0].end]
        if not 0 < len(parts) <= self.step.max_parts:
            reason = "too many overlaps" if parts else "overlap, nothing left"
            _drop(document, self.name, reason, overlap)
            return [document]
        name = document.id
        cut = {
            Mark.CHANGED: [*document.metadata.get(Mark.CHANGED, ()), self.name],
            Mark.CUT: (name, overlap),
        }
        return [
            Document(
                part,
                f"{name}#{i}" if len(parts) > 1 else name,
                metadata={**document.metadata, **(cut if i == 0 else {})},
            )
            for i, part in enumerate(parts)
        ]


class ShardWriter(CorpusBlock):
    """Writes the documents of a piece, and a ledger of those that were dropped or cut.

    Args:
        folder: The folder of the documents, with one JSON lines file per piece.
        ledger: The folder of the ledger. For each piece, a JSON file contains counts and samples,
            and a JSON lines file contains the names of the documents that were dropped or cut.
    """

    def __init__(self, folder: Path, ledger: Path) -> None:
        """Store the folders."""
        super().__init__("write")
        self.folder, self.ledger = folder, ledger

    def run(self, data: Documents, rank: int, world_size: int) -> list[Document]:
        """Write the documents and the ledger."""
        read, kept = Counter[str](), Counter[str]()
        changed = Counter[str]()
        dropped: dict[tuple[str, str], Counter[str]] = {}
        samples: list[dict[str, str]] = []
        with (
            output(shard(self.folder, rank, ".jsonl")) as file,
            output(shard(self.ledger, rank, ".jsonl")) as names_file,
        ):
            for document in data:
                with self.track_time():
                    size = len(document.text.encode())
                    mark = document.metadata.get(Mark.DROPPED)
                    if Mark.CUT in document.metadata:
                        name, overlap = document.metadata[Mark.CUT]
                        names_file.write(_entry(name, "tasks", "cut", overlap))
                    changed.update(document.metadata.get(Mark.CHANGED, ()))
                    read.update(documents=1)
                    if mark is None:
                        kept.update(documents=1, bytes=size)
                        file.write(_json_line(document))
                        continue
                    step, reason, detail = mark
                    counts = dropped.setdefault((step, reason), Counter())
                    counts.update(documents=1, bytes=size)
                    names_file.write(_entry(document.id, step, reason, detail))
                    if counts["documents"] <= _SAMPLES:
                        sample = {"step": step, "reason": reason, "id": document.id}
                        text = document.text[:_SAMPLE_CHARACTERS]
                        samples.append({**sample, "detail": detail, "text": text})
        entries = [
            {"step": step, "reason": reason, **counts}
            for (step, reason), counts in sorted(dropped.items())
        ]
        totals = {"read": read, "kept": kept, "changed": changed}
        with output(shard(self.ledger, rank, ".json")) as file:
            file.write(orjson.dumps({**totals, "dropped": entries, "samples": samples}))
        return []


def _entry(name: str, step: str, reason: str, detail: str) -> bytes:
    entry = {"id": name, "step": step, "reason": reason, "detail": detail}
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def _json_line(document: Document) -> bytes:
    hidden = (*Mark, "text", "id")
    fields = {key: value for key, value in document.metadata.items() if key not in hidden}
    record = {"text": document.text, "id": document.id, **fields}
    return dump_record(record)


@cache
def _encoder(step: TokenizeStep) -> BlockEncoder:
    """Return the encoder for a step, building it once per process."""
    return BlockEncoder(EncodingOptions(step.tokenizer, ("text",), step.append_eod))


class ShardEncoder(CorpusBlock):
    """Encodes the documents of a piece as a dataset.

    Args:
        folder: The folder of the documents.
        tokens: The folder of the datasets.
        step: The settings, including the tokenizer.
    """

    def __init__(self, folder: Path, tokens: Path, step: TokenizeStep) -> None:
        """Store the settings."""
        super().__init__("tokenize")
        self.folder, self.tokens, self.step = folder, tokens, step

    def run(self, data: Any, rank: int, world_size: int) -> list[Document]:
        """Write the dataset."""
        prefix = shard(self.tokens, rank, "")
        for leftover in self.tokens.glob(f"{prefix.name}.*{TEMPORARY}*"):
            leftover.unlink()
        with self.track_time():
            preprocess(
                [str(shard(self.folder, rank, ".jsonl"))],
                [str(prefix)],
                _encoder(self.step),
                workers=0,
                on_block=lambda *_: None,
                on_bad_line=None,
            )
        return []


class DatasetJoiner(CorpusBlock):
    """Joins the datasets of all pieces.

    Args:
        tokens: The folder of the datasets.
        prefix: The path of the whole dataset, without `.bin` or `.idx`.
        pieces: The number of pieces.
    """

    def __init__(self, tokens: Path, prefix: Path, pieces: int) -> None:
        """Store the settings."""
        super().__init__("join")
        self.tokens, self.prefix, self.pieces = tokens, prefix, pieces

    def run(self, data: Any, rank: int, world_size: int) -> list[Document]:
        """Write the whole dataset."""
        for leftover in self.prefix.parent.glob(f"{self.prefix.name}.*{TEMPORARY}*"):
            leftover.unlink()
        with self.track_time():
            prefixes = [shard(self.tokens, piece, "") for piece in range(self.pieces)]
            with IndexedDatasetBuilder(self.prefix, IndexedDataset(prefixes[0]).dtype) as builder:
                for prefix in prefixes:
                    builder.add_index(prefix)
        return []
