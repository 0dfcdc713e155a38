"""GPT samples from text files that the loading processes tokenize during training.

A corpus is divided into pieces that can be read independently: 1 KiB to 1 MiB of a plain JSON
lines file, or a whole file of any other kind. The pieces of a split are distributed in turn over up
to 128 streams, in a different random order in each epoch. A stream reads its pieces one after the
other, shuffles the documents within each block of text, concatenates their tokens, and cuts rows as
in `gpt`: row k covers the tokens from `k * S` to `(k + 1) * S` inclusive.

    sample i  =  row i // streams of stream i % streams

A piece in which no line begins is empty. In a small corpus, a stream may get only empty pieces in
an epoch. It then continues with the next epoch, in which it gets other pieces. A split without any
tokens is rejected.

Neighboring samples thus come from many parts of the corpus. A sample depends only on the seed, the
text and the sample's index, not on the number of processes. The data-parallel processes and their
loading processes take samples in turn, so each usually reads only its own share of the streams.

The beginning of a row depends on the lengths of all documents before it. Each sample therefore
records the position at which the next row of its stream begins. The training process stores these
positions. Loading processes that start later begin there, and so does a run that continues from a
checkpoint. Without a stored position, a stream is read from its beginning, which takes longer and
gives the same samples.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.data.sample import ROW_POSITION, Sample, SampleDataset
from megatron.errors import DataError, warn
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Axis

if TYPE_CHECKING:  # most runs read no text and need not import the parsers
    from megatron.data.preprocess import BlockEncoder, EncodedBlock
    from megatron.data.text_input import BadLine, TextBlock

_PIECES = 1024  # pieces of a small corpus: enough to divide it into splits
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 10, 1 << 20
_PROBE = 1 << 12  # bytes of text to read at a time until the first token is found
_STREAMS = 128  # each stream holds the tokens of a block, at most a few MB
_MAX_REPORTED = 3  # bad lines of each file that a loading process reports
# Maximum number of stored positions: more than the samples that are loaded during an update.
_MAX_POSITIONS = 8192


class RowPosition(NamedTuple):
    """The position in a stream at which a row begins.

    Attributes:
        row: The index of the row in the stream.
        visit: The number of pieces that the stream has completed, over all epochs.
        block: The index of the block in the current piece.
        token: The index of the token in the block, after shuffling.
        bad: The number of bad lines skipped so far, including those in this block.
    """

    row: int = 0
    visit: int = 0
    block: int = 0
    token: int = 0
    bad: int = 0


class NoTokensError(DataError):
    """Raised when a corpus, or a split of it, contains no tokens."""


class TextCorpus:
    """The text files named by an entry of --data-path or a similar flag, divided into pieces.

    Args:
        name: A file, folder or glob, as for `find_inputs`.
        key: The key of a document's text in a line of JSON.
        flag: The flag that names the text, for messages.

    Raises:
        DataError: A file does not exist, its format is unknown, or the text is empty.
    """

    def __init__(self, name: str, key: str, flag: str = "--data-path") -> None:
        """List the files and count their pieces."""
        from megatron.data.text_input import find_inputs, is_splittable

        self.prefix = name
        self.key = key
        self.flag = flag
        with _named_as_in_training(flag):
            self.files = find_inputs([name])
        self.sizes = [os.path.getsize(path) for path in self.files]
        self.size = sum(self.sizes)  # in bytes
        if not self.size:
            raise DataError(f"{flag} {name}: the text is empty: give more text")
        self.piece_bytes = min(max(self.size // _PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        # The cumulative number of pieces after each file.
        self._ends = np.cumsum(
            [
                max(1, -(-size // self.piece_bytes)) if is_splittable(path) else 1
                for path, size in zip(self.files, self.sizes, strict=True)
            ]
        )

    def __len__(self) -> int:
        """Return the number of pieces."""
        return int(self._ends[-1])

    def piece_sizes(self) -> NDArray[np.int64]:
        """Return the number of bytes of each piece on disk, `[pieces]`."""
        sizes = np.full(len(self), self.piece_bytes)
        counts = np.diff(self._ends, prepend=0)
        # The last piece of a file is the rest of it. A file that cannot be divided has no other.
        sizes[self._ends - 1] = np.array(self.sizes) - (counts - 1) * self.piece_bytes
        return sizes

    def read(self, piece: int, encoder: BlockEncoder, *, first: int) -> Iterator[EncodedBlock]:
        """Yield the encoded blocks of a piece.

        Args:
            piece: The index of the piece.
            encoder: The encoder, which turns text into ids.
            first: The index of the first block to yield.

        Raises:
            DataError: A file cannot be read, has shrunk or is damaged.
        """
        with _named_as_in_training(self.flag):
            for number, block in enumerate(self._blocks(piece, _MAX_PIECE_BYTES)):
                if number >= first:
                    yield encoder(block)

    def texts(self, piece: int) -> Iterator[tuple[list[BadLine], TextBlock, list[str]]]:
        """Yield (bad lines, block, texts) for each small block (4 KiB) of a piece."""
        from megatron.data.text_input import parse_block

        with _named_as_in_training(self.flag):
            for block in self._blocks(piece, _PROBE):
                documents = parse_block(block, (self.key,))
                values = [value for (value,) in documents.values]
                yield (
                    documents.bad,
                    block,
                    [value if isinstance(value, str) else "".join(value) for value in values],
                )

    def _blocks(self, piece: int, block_bytes: int) -> Iterable[TextBlock]:
        from megatron.data.text_input import is_splittable, read_blocks

        file = int(np.searchsorted(self._ends, piece, side="right"))
        path = self.files[file]
        if not is_splittable(path):
            return read_blocks([path], (self.key,), block_bytes)
        start = (piece - (int(self._ends[file - 1]) if file else 0)) * self.piece_bytes
        bounds = start, min(start + self.piece_bytes, self.sizes[file])
        # These blocks contain only positions, so no file stays open between samples.
        return list(read_blocks([path], (self.key,), block_bytes, bounds=bounds))


@dataclass(eq=False)
class TextDataset:
    """The samples of one split of a corpus.

    Each sample contains `text` (the tokens, `[s + 1]`), `id` and `ROW_POSITION`.

    Attributes:
        corpus: The text.
        pieces: The half-open range of the split's pieces.
        num_samples: The number of samples that the run needs. Text is repeated as often as needed.
        seq_length: The number of tokens in a sample, not counting the last label, s.
        seed: The seed of all shuffles.
        encoder: The encoder, which turns text into ids.
        skip_bad_lines: Whether to skip lines without a document. The first such lines of each file
            are reported, and the positions count all of them.
        number: The index of this dataset in its blend.
    """

    corpus: TextCorpus
    pieces: tuple[int, int]
    num_samples: int
    seq_length: int
    seed: int
    encoder: BlockEncoder
    skip_bad_lines: bool = False
    number: int = 0
    _positions: dict[int, deque[RowPosition]] = field(default_factory=dict)
    _reported: dict[str, set[int]] = field(default_factory=dict)
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    _readers: dict[int, tuple[int, Iterator[tuple[NDArray[np.int64], RowPosition]]]] = field(
        default_factory=dict
    )

    @functools.cached_property
    def streams(self) -> int:
        """The number of streams: a power of two, at most 128 and at most the number of pieces."""
        return min(_STREAMS, 1 << ((self.pieces[1] - self.pieces[0]).bit_length() - 1))

    @property
    def imbalance(self) -> float:
        """The bytes of the largest stream divided by those of the average one, in one epoch.

        Streams advance at the same speed, so the average stream reads its text this many times
        while the largest one reads its own once.
        """
        order = self._order(0)
        sizes = self.corpus.piece_sizes()[order]
        stream_sizes = np.bincount(np.arange(len(order)) % self.streams, weights=sizes)
        return float(stream_sizes.max() / max(stream_sizes.mean(), 1))

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""
        names = [os.path.basename(path) for path in self.corpus.files]
        files = "".join(
            f"{name} {size}\n" for name, size in zip(names, self.corpus.sizes, strict=True)
        )
        return (
            f"Text\n\n{files}Key {self.corpus.key}\nPieces {self.pieces} of "
            f"{self.corpus.piece_bytes} bytes\nStreams {self.streams}\n"
            f"Sequence length {self.seq_length}\nRandom seed {self.seed}\n"
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`. Reading in ascending order is fast; going back is slow.

        Raises:
            DataError: A line has no document and bad lines are not skipped, a file cannot be read,
                or there are no tokens.
        """
        row, stream = divmod(i, self.streams)
        next_row, rows = self._readers.get(stream, (row + 1, None))
        if rows is None or next_row > row:
            begin = self._last_position(stream, row)
            next_row, rows = begin.row, self._rows(stream, begin)
        while True:
            text, next_position = next(rows)
            next_row += 1
            if next_row > row:
                break
        self._readers[stream] = next_row, rows
        return {
            "text": text,
            "id": i,
            ROW_POSITION: np.array([self.number, stream, *next_position]),
        }

    def require_tokens(self) -> None:
        """Check that the split has tokens, by reading until the first one.

        Raises:
            NoTokensError: The split has no tokens.
            DataError: A line before the first token has no document and bad lines are not skipped,
                or a file cannot be read.
        """
        corpus = self.corpus
        for piece in range(*self.pieces):
            for bad, block, texts in corpus.texts(piece):
                self._report(bad, block)
                # Documents may be long, and the first words are usually enough.
                if any(self._has_ids(text[:_PROBE]) or self._has_ids(text) for text in texts):
                    return
        if self.pieces == (0, len(corpus)):
            problem = "the text has no tokens: give more text"
        else:
            first, end = self.pieces
            several = end - first > 1
            parts = f"parts {first + 1} to {end}" if several else f"part {end}"
            problem = (
                f"{parts} of {len(corpus)}, which --split assigns to one split, "
                f"{'have' if several else 'has'} no tokens: give more text, enlarge this share, or "
                "give each split its own text with --train-data-path, --valid-data-path and "
                "--test-data-path"
            )
        raise NoTokensError(f"{corpus.flag} {corpus.prefix}: {problem}")

    def _has_ids(self, text: str) -> bool:
        try:
            return bool(self.encoder.tokenizer.tokenize(text))
        except DataError:  # a bad line, which is reported or skipped when it is read later
            return False

    def _last_position(self, stream: int, row: int) -> RowPosition:
        """Return the last known position in a stream at or before the given row."""
        known = (position for position in self._positions.get(stream, ()) if position.row <= row)
        return max(known, default=RowPosition())

    def store_position(self, stream: int, position: RowPosition) -> None:
        """Store the position at which a row of a stream begins.

        Args:
            stream: The index of the stream.
            position: The position, which contains the index of the row.
        """
        max_stored = max(64, _MAX_POSITIONS // self.streams)
        self._positions.setdefault(stream, deque(maxlen=max_stored)).append(position)

    def positions_after(self, samples: int) -> list[RowPosition]:
        """Return the last known position in each stream, at or before its next row.

        Args:
            samples: The number of samples consumed so far. The next row of a stream is the first
                row that is not among them.
        """
        return [
            self._last_position(stream, -(-(samples - stream) // self.streams))
            for stream in range(self.streams)
        ]

    def text_members(self, samples: int) -> list[tuple[TextDataset, int]]:
        """Return this dataset and the number of samples (see `ReadsText`)."""
        return [(self, samples)]

    def _rows(
        self, stream: int, position: RowPosition
    ) -> Iterator[tuple[NDArray[np.int64], RowPosition]]:
        """Yield rows `[s + 1]` of a stream from `position` onward, each with the next position."""
        row, begin = position.row, position
        # The blocks with unused tokens, and the number of these tokens.
        buffered: deque[tuple[RowPosition, NDArray[Any]]] = deque()
        num_buffered = 0
        for block_position, tokens in self._blocks(stream, position):
            unread = tokens[begin.token :] if block_position[1:3] == begin[1:3] else tokens
            if not len(unread):
                continue
            buffered.append((block_position._replace(token=len(tokens) - len(unread)), unread))
            num_buffered += len(unread)
            while num_buffered > self.seq_length:
                parts, missing = [], self.seq_length + 1
                for _, part in buffered:
                    parts.append(part[:missing])
                    missing -= len(parts[-1])
                    if not missing:
                        break
                consumed = self.seq_length
                while consumed >= len(buffered[0][1]):
                    consumed -= len(buffered.popleft()[1])
                first, part = buffered[0]
                buffered[0] = first._replace(token=first.token + consumed), part[consumed:]
                num_buffered -= self.seq_length
                row += 1
                yield np.concatenate(parts, dtype=np.int64), buffered[0][0]._replace(row=row)

    def _blocks(
        self, stream: int, position: RowPosition
    ) -> Iterator[tuple[RowPosition, NDArray[Any]]]:
        """Yield the position and the tokens of each block of a stream, with shuffled documents.

        The blocks repeat endlessly, epoch by epoch.
        """
        visit, block, bad = position.visit, position.block, position.bad
        pieces = -(-(self.pieces[1] - self.pieces[0] - stream) // self.streams)
        num_empty = 0
        while True:
            epoch, turn = divmod(visit, pieces)
            piece = int(self._order(epoch)[turn * self.streams + stream])
            has_tokens = False
            for number, encoded in enumerate(
                self.corpus.read(piece, self.encoder, first=block), start=block
            ):
                self._report(encoded.bad, encoded.block)
                if not position.row or (visit, number) != (position.visit, position.block):
                    bad += len(encoded.bad)
                random = np.random.RandomState([self.seed, epoch, piece, number])
                tokens, lengths, sequences = encoded.columns[0]
                ends = np.concatenate([[0], np.cumsum(lengths)])[np.cumsum(sequences)]
                documents = np.split(tokens, ends[:-1])
                shuffled = [documents[i] for i in random.permutation(len(documents))]
                tokens = np.concatenate([tokens[:0], *shuffled])
                has_tokens = has_tokens or len(tokens) > 0
                yield RowPosition(0, visit, number, 0, bad), tokens
            num_empty = 0 if has_tokens or block else num_empty + 1
            if num_empty == pieces:
                # In a small corpus, lines may be longer than pieces, so a stream may get only
                # pieces in which no line begins. It gets other pieces in the next epoch.
                self.require_tokens()
            visit, block = visit + 1, 0

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the pieces of the split in the order of an epoch, `[pieces]`."""
        if epoch not in self._orders:
            if len(self._orders) > 2:  # streams are at most one epoch apart
                self._orders.clear()
            random = np.random.RandomState([self.seed, epoch])
            self._orders[epoch] = self.pieces[0] + random.permutation(
                self.pieces[1] - self.pieces[0]
            )
        return self._orders[epoch]

    def _report(self, lines: Sequence[BadLine], block: TextBlock) -> None:
        """Raise an error for bad lines or, if they are skipped, warn about the first of a file."""
        path = block.path
        reported = self._reported.setdefault(path, set())
        for bad in lines:
            offset = block.offset + bad.offset
            message = f"{self.corpus.flag} {path}: {bad.reason} (line starts at byte {offset})"
            if not self.skip_bad_lines:
                raise DataError(f"{message}: fix the line, or skip bad lines with --skip-bad-lines")
            if offset not in reported and len(reported) < _MAX_REPORTED:
                reported.add(offset)
                last = "; further bad lines of this file are only counted"
                warn(f"{message}: line skipped{last if len(reported) == _MAX_REPORTED else ''}")


@contextmanager
def _named_as_in_training(flag: str) -> Iterator[None]:
    """Replace the flags of tools with those of training in the errors of shared readers."""
    try:
        yield
    except DataError as error:
        text = str(error).replace("--input ", f"{flag} ").replace("--json-keys ", "--text-key ")
        raise DataError(text) from error


def is_text(name: str) -> bool:
    """Return whether an entry of --data-path names text files rather than an indexed dataset."""
    return not os.path.exists(f"{name}.idx") and (
        os.path.exists(name) or any(glob.iglob(name, recursive=True))
    )


@runtime_checkable
class ReadsText(Protocol):
    """A dataset that is, or contains, a `TextDataset`."""

    def text_members(self, samples: int) -> list[tuple[TextDataset, int]]:
        """Return each text dataset and the number of its samples among the first `samples`."""


@dataclass(eq=False)
class WrappedDataset:
    """The base class of datasets that change the samples of another dataset.

    Attributes:
        dataset: The wrapped dataset.
    """

    dataset: SampleDataset

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def text_members(self, samples: int) -> list[tuple[TextDataset, int]]:
        """Return the text datasets, each with its number of samples (see `ReadsText`)."""
        return text_members(self.dataset, samples)


def text_members(dataset: SampleDataset | None, samples: int) -> list[tuple[TextDataset, int]]:
    """Return the text datasets in a dataset, if any, each with its number of samples."""
    return dataset.text_members(samples) if isinstance(dataset, ReadsText) else []


def extract_positions(batch: dict[str, Tensor], dataset: SampleDataset) -> dict[str, Tensor]:
    """Move the positions in a batch to the text datasets, and return the batch without them."""
    positions = batch.pop(ROW_POSITION, None)
    if positions is not None:
        members = {member.number: member for member, _ in text_members(dataset, 0)}
        for number, stream, *position in positions.tolist():
            members[number].store_position(stream, RowPosition(*position))
    return batch


def positions_state(
    dataset: SampleDataset | None, samples: int, world: Axis
) -> dict[str, Any] | None:
    """Return the position in every stream after `samples` samples, as JSON. Collective.

    Args:
        dataset: The training or validation data.
        samples: The number of samples that all processes together have consumed.
        world: All processes. Each has recorded positions only in the streams of its own samples.

    Returns:
        A digest of everything that determines the meaning of positions, and the positions in the
        streams of each text dataset, `[members, streams, 5]`. `None` if there is no text.
    """
    members = text_members(dataset, samples)
    if not members:
        return None
    return {"plan": _plan_digest(members), "places": _all_positions(members, world)}


def count_bad_lines(dataset: SampleDataset | None, samples: int, world: Axis) -> int:
    """Return the number of bad lines skipped in the first `samples` samples. Collective.

    The arguments are the same as for `positions_state`. A line that is skipped in several epochs
    counts several times.
    """
    positions = _all_positions(text_members(dataset, samples), world)
    return sum(RowPosition(*position).bad for streams in positions for position in streams)


def _all_positions(
    members: Sequence[tuple[TextDataset, int]], world: Axis
) -> list[list[list[int]]]:
    """Return the last position that any process has recorded in each stream. Collective."""
    positions = []
    for member, count in members:
        latest = torch.tensor(member.positions_after(count), dtype=torch.int64)
        rows = all_reduce(latest[:, 0].clone(), world, ReduceOp.MAX)
        latest[latest[:, 0] < rows] = -1  # another process has a later position
        positions.append(all_reduce(latest, world, ReduceOp.MAX).tolist())
    return positions


def restore_positions(dataset: SampleDataset | None, saved: Mapping[str, Any] | None) -> bool:
    """Restore the positions saved in a checkpoint.

    Args:
        dataset: The training or validation data.
        saved: The result of `positions_state`, from the checkpoint.

    Returns:
        False if the data is text but the positions are missing or belong to different text.
    """
    members = text_members(dataset, 0)
    if not members or saved is None or saved["plan"] != _plan_digest(members):
        return not members
    for (member, _), positions in zip(members, saved["places"], strict=False):
        for stream, position in enumerate(positions):
            if -1 not in position:
                member.store_position(stream, RowPosition(*position))
    return True


def _plan_digest(members: Sequence[tuple[TextDataset, int]]) -> str:
    text = "\n".join(member.description for member, _ in members)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
