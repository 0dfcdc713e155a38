"""GPT samples: `sequence length + 1` tokens each, cut from concatenated documents.

The tokens of sample k are a pure function of lengths, seed and counts. All documents of a split
are repeated for as many epochs as the run needs, shuffled, and concatenated. With S the sequence
length, row k covers the tokens from `k * S` to `(k + 1) * S` inclusive: S inputs and, shifted by
one, S labels. The last token of a row is the first token of the next. A second shuffle then
determines the order in which rows are trained on. Three arrays hold the plan:

    documents [E * D]   int32         the document at each position, shuffled
    samples   [N + 1, 2] int32        index in `documents` and token offset where each row starts
    shuffle   [N]       uint32/int64  the row of sample k

The order of random draws and the array types are the same as in Megatron-LM, so both build
identical files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.data import TokenizerConfig
from megatron.data.cache import ArraySpec
from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.fill_in_middle import FillInMiddle, FillInMiddleDataset
from megatron.data.indexed import IndexedDataset, bin_path, idx_path
from megatron.data.mock import MockDataset
from megatron.data.sample import (
    COUNTED,
    LONGEST_SEGMENT,
    SEGMENT_ENDS,
    TRAINED,
    Sample,
    outside_vocabulary,
)
from megatron.data.text_stream import TextCorpus, TextDataset, WrappedDataset
from megatron.errors import DataError, warn
from megatron.parallel.context.split import TokenBatch
from megatron.tokenizer.base import Tokenizer

_INT32_MAX = np.iinfo(np.int32).max
# Positions per step, so that the work fits in a processor cache and memory stays flat.
_CHUNK = 1 << 16
# Streams with files of about the same size differ by less than this factor from the average.
_MAX_IMBALANCE = 4


class GPTIndex(NamedTuple):
    """The three arrays of a GPT index, which the docstring of this module describes."""

    documents: NDArray[np.int32]
    samples: NDArray[np.int32]
    shuffle: NDArray[Any]


class GPTIndexPlan(NamedTuple):
    """The sizes of an index's arrays, and the shuffling of its last epoch.

    Attributes:
        num_documents: The number of documents in the split.
        seq_length: The sequence length S in tokens.
        epochs: The number of passes over the split's documents.
        samples: The number of rows in the sample index, at least as many as requested.
        samples_before_last_epoch: The row at which the separately shuffled last epoch starts. It
            equals `samples` if the last epoch is not shuffled separately.
    """

    num_documents: int
    seq_length: int
    epochs: int
    samples: int
    samples_before_last_epoch: int

    @property
    def separate_last_epoch(self) -> bool:
        """Whether the last epoch is shuffled separately, because only a part of it is used."""
        return self.samples_before_last_epoch < self.samples

    @property
    def specs(self) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        """The name, type and shape of each array of `GPTIndex`."""
        wide = self.samples >= np.iinfo(np.uint32).max - 1
        return (
            ArraySpec("doc_idx", np.dtype("i4"), (self.epochs * self.num_documents,)),
            ArraySpec("sample_idx", np.dtype("i4"), (self.samples + 1, 2)),
            ArraySpec("shuffle_idx", np.dtype("i8" if wide else "u4"), (self.samples,)),
        )


def plan_gpt_index(
    num_documents: int, tokens: int, num_samples: int, seq_length: int
) -> GPTIndexPlan:
    """Plan the index for `num_samples` samples of `seq_length` tokens.

    Args:
        num_documents: The number of documents in the split.
        tokens: The number of tokens in one epoch, at least one.
        num_samples: The number of samples that the run needs.
        seq_length: The sequence length S, in tokens.

    Raises:
        DataError: The split is so small that its repetitions cannot be counted in 32 bits.
    """
    assert tokens > 0, "an empty split has no index"
    # The smallest E with (E * tokens - 1) // S >= n.
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    if epochs * num_documents > _INT32_MAX:
        raise DataError(
            f"{num_samples} samples of {seq_length} tokens need {epochs} epochs of the split's "
            f"{num_documents} documents ({tokens} tokens), which makes more than {_INT32_MAX} "
            "documents in total: request fewer samples, give more data, or divide the dataset"
        )
    samples_shuffled_together = samples = (epochs * tokens - 1) // seq_length
    if epochs > 1:  # if less than 80% of the last epoch is used, it is shuffled separately
        before = ((epochs - 1) * tokens - 1) // seq_length
        if num_samples - before < int(0.80 * ((tokens - 1) // seq_length)):
            samples_shuffled_together = before
    return GPTIndexPlan(num_documents, seq_length, epochs, samples, samples_shuffled_together)


def build_gpt_index(
    plan: GPTIndexPlan, lengths: NDArray[np.int32], first_document: int, seed: int
) -> GPTIndex:
    """Build the three arrays of the index.

    Args:
        plan: The plan of the split that starts at `first_document`.
        lengths: The number of tokens in each sequence of the dataset, `[sequences]`.
        first_document: The first document of the split.
        seed: The seed of the random stream from which both shuffles draw, documents first.
    """
    random = np.random.RandomState(seed)
    epoch_documents = np.arange(first_document, first_document + plan.num_documents, dtype=np.int32)
    documents = np.tile(epoch_documents, plan.epochs)
    order = np.arange(plan.samples, dtype=plan.specs[2].dtype)
    for array, cut in ((documents, -plan.num_documents), (order, plan.samples_before_last_epoch)):
        for part in np.split(array, [cut] if plan.separate_last_epoch else []):
            random.shuffle(part)
    samples = build_sample_index(lengths, documents, plan.samples, plan.seq_length)
    return GPTIndex(documents, samples, order)


def build_sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], num_samples: int, seq_length: int
) -> NDArray[np.int32]:
    """Return the start of each row: its index in `documents` and the offset there, `[N + 1, 2]`.

    Row k starts at token `k * S` of the concatenated documents. A document that covers the tokens
    `[a, b)` therefore contains the starts of rows `ceil(a / S)` to `ceil(b / S)`, the latter
    excluded. No search is needed, and an empty document contains no start.

    Args:
        lengths: The number of tokens in each sequence, `[sequences]`.
        documents: The sequence at each position, `[positions]`.
        num_samples: The number of rows N. The documents hold at least `N * S + 1` tokens.
        seq_length: The sequence length S, in tokens.
    """
    samples = np.empty((num_samples + 1, 2), np.int32)
    token = row = 0
    for first in range(0, len(documents), _CHUNK):
        sizes = lengths[documents[first : first + _CHUNK]].astype(np.int64)
        ends = token + np.cumsum(sizes)
        next_rows = np.minimum((ends + seq_length - 1) // seq_length, num_samples + 1)
        indices = np.repeat(np.arange(len(sizes)), np.diff(next_rows, prepend=row))
        end_row = row + len(indices)
        starts = np.arange(row, end_row) * seq_length
        samples[row:end_row, 0] = indices + first
        samples[row:end_row, 1] = starts - (ends - sizes)[indices]
        row, token = end_row, int(ends[-1])
    assert row == num_samples + 1, "fewer tokens than the samples need"
    samples[0] = 0  # as in Megatron, the first row starts before any leading empty documents
    return samples


@dataclass(eq=False)
class GPTDataset:
    """The samples of one part of an indexed dataset: `text`, the tokens `[s + 1]`, and `id`.

    Attributes:
        data: The indexed dataset that holds the tokens.
        index: The index, which determines the tokens of each sample.
        seq_length: The number of tokens in a sample, not counting the last label, s.
        description: The text from which Megatron derives the index's file names.
        vocab_size: The size of the vocabulary. Token ids at or above it are rejected.
    """

    data: IndexedDataset
    index: GPTIndex
    seq_length: int
    description: str
    vocab_size: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.index.shuffle)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`: the tokens from the start of its row to the start of the next one.

        Raises:
            DataError: A token id is outside the vocabulary, or index and data do not match.
        """
        row = int(self.index.shuffle[i])
        (first, offset), (last, end) = self.index.samples[row : row + 2].tolist()
        parts = []
        for document_index in range(first, last + 1):
            start = offset if document_index == first else 0
            length = end + 1 - start if document_index == last else None
            try:
                parts.append(
                    self.data.get(int(self.index.documents[document_index]), start, length)
                )
            except IndexError as error:
                raise self._mismatch(document_index, str(error)) from None
        text = np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)
        if len(text) != self.seq_length + 1:
            raise self._mismatch(i, f"{len(text)} tokens, expected {self.seq_length + 1}")
        if int(text.max()) >= self.vocab_size:
            for document in self.index.documents[first : last + 1].tolist():
                largest = int(self.data.get(document).max(initial=0))
                if largest >= self.vocab_size:
                    where = f"{bin_path(self.data.prefix)}: document {document}"
                    raise outside_vocabulary(where, largest, self.vocab_size)
        return {"text": text, "id": i}

    def _mismatch(self, index: int, problem: str) -> DataError:
        return DataError(
            f"{self.data.prefix}: the index does not match the data at {index}: {problem}; delete "
            "the index cache (index-cache next to the dataset, or --data-cache-path), so that it "
            "is rebuilt"
        )


def build_gpt_part(
    part: DatasetPart, request: DataRequest, *, seq_length: int, vocab_size: int
) -> GPTDataset:
    """Load or build the index of one part of a dataset, and load the first sample as a check.

    Args:
        part: The documents of the split, and the number of samples.
        request: The data that the run needs.
        seq_length: The number of tokens in a sample, not counting the last label.
        vocab_size: The number of entries in the vocabulary.

    Raises:
        DataError: The documents hold no tokens, too few tokens for the requested samples, or, in
            the first sample, ids outside the vocabulary. Or the index does not fit in memory.
    """
    data, (start, end), count = part.data, part.bounds, part.num_samples
    tokens = int(data.sequence_lengths[start:end].sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(
            f"{data.prefix}: the {part.split} split consists of documents {start} to {end - 1} of "
            f"{len(data)}, which hold no tokens, but {count} samples of {seq_length} tokens are "
            "requested: change --split or give more data"
        )
    plan = plan_gpt_index(end - start, tokens, count, seq_length)
    # Megatron's description, whose md5 names the cached arrays. It contains the path and --split
    # exactly as the user gave them.
    description = (
        f"GPT Dataset\n\nData prefix {data.prefix}\nDataset name {part.split}\n"
        f"Number of samples {count}\nSequence length {seq_length}\n"
        f"Random seed {request.seed}\nSplit {request.data.split}\n"
    )
    if request.data.split_rounding == "bounds":  # Megatron-LM 23.08 never caches this split
        description += "Split rounding bounds\n"
    arrays = request.cache(Path(data.prefix).parent / "index-cache").load_or_build(
        description,
        plan.specs,
        lambda: build_gpt_index(plan, data.sequence_lengths, start, request.seed),
        inputs=(np.array(part.bounds), data.sequence_lengths[start:end]),
        source=idx_path(data.prefix),
    )
    dataset = GPTDataset(data, GPTIndex(*arrays), seq_length, description, vocab_size)
    _ = dataset[0]  # fail now rather than at a later step if another tokenizer made the dataset
    return dataset


def build_gpt_datasets(
    request: DataRequest,
    *,
    seq_length: int,
    vocab_size: int,
    tokenizer: tuple[TokenizerConfig, Tokenizer] | None = None,
) -> Datasets:
    """Build the GPT datasets that the flags name. Collective.

    Args:
        request: The data that the run needs.
        seq_length: The number of tokens in a sample, not counting the last label.
        vocab_size: The number of entries in the vocabulary. Token ids at or above it are rejected.
        tokenizer: The tokenizer's flags, and the tokenizer built from them. Without it, text is
            rejected, and --fim-data and --reset-attention-mask have no effect.

    Raises:
        ConfigError: No data is named, --data-path, --split or --blend-schedule cannot be parsed or
            does not fit the datasets, or the tokenizer lacks a token of the --fim-* flags.
        DataError: A dataset is missing, damaged, too small or made with a different tokenizer.
    """

    def build_part(part: DatasetPart) -> GPTDataset:
        return build_gpt_part(part, request, seq_length=seq_length, vocab_size=vocab_size)

    def build_text(
        corpus: TextCorpus, pieces: tuple[int, int], count: int, dataset_index: int
    ) -> TextDataset:
        from megatron.data.preprocess import BlockEncoder, EncodingOptions  # see text_stream

        assert tokenizer is not None, "without a tokenizer, text is refused"
        options = EncodingOptions(tokenizer[0], (request.data.text_key,), append_eod=True)
        encoder = BlockEncoder(options, tokenizer[1])
        skip = request.data.skip_bad_lines
        text = TextDataset(
            corpus, pieces, count, seq_length, request.seed, encoder, skip, dataset_index
        )
        text.require_tokens()  # fail now rather than at a later evaluation
        # The first split of a corpus warns for the others.
        if request.is_builder and pieces[0] == 0 and text.imbalance >= _MAX_IMBALANCE:
            warn(
                f"{corpus.flag} {corpus.prefix}: its files differ in size, and compressed, parquet "
                f"and .txt files are not divided: other text is read up to about "
                f"{text.imbalance:.0f} times before the largest files have been read once: name "
                "them separately, with weights (0.8 LARGE 0.2 SMALL), store them as plain .jsonl, "
                "or use tools/preprocess_data.py"
            )
        return text

    def build_mock(count: int, split: int) -> MockDataset:
        return MockDataset(count, seq_length, vocab_size, request.seed, split)

    def epoch_samples(data: IndexedDataset, bounds: tuple[int, int]) -> int:
        tokens = int(data.sequence_lengths[slice(*bounds)].sum(dtype=np.int64))
        return (tokens - 1) // seq_length

    splits = build_datasets(
        request,
        build_part,
        build_mock,
        build_text=None if tokenizer is None else build_text,
        epoch_samples=epoch_samples,
    )
    data = request.data
    if tokenizer is not None and data.fim_data:
        fim = FillInMiddle.from_config(data, tokenizer[1])
        splits = splits.map(lambda split: FillInMiddleDataset(split, fim, request.seed))
    if tokenizer is not None and data.reset_attention_mask:
        eod = tokenizer[1].eod
        splits = splits.map(lambda split: DocumentEnds(split, eod))
    return splits


@dataclass(eq=False)
class DocumentEnds(WrappedDataset):
    """A dataset whose samples also hold the ends of the documents in their inputs.

    The ends are stored as `SEGMENT_ENDS`, and the last one is s. An end-of-document token belongs
    to the document that it ends.

    Attributes:
        dataset: The dataset, whose samples have `text`, `[s + 1]`.
        eod: The id of the end-of-document token.
    """

    eod: int

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i` with its `SEGMENT_ENDS`."""
        sample: Sample = self.dataset[i]
        text = np.asarray(sample["text"])
        length = len(text) - 1
        ends = np.flatnonzero(text[: length - 1] == self.eod) + 1
        return {**sample, SEGMENT_ENDS: np.append(ends, length)}


def make_batch(
    batch: Mapping[str, Tensor],
    *,
    eod: int,
    reset_position_ids: bool = False,
    eod_mask_loss: bool = False,
) -> TokenBatch:
    """Split text into inputs and labels, and number the positions.

    An end-of-document token belongs to the document that it ends. Finetuning samples, which have
    `TRAINED`, list the ends of their examples, and positions are counted from 0 in each example.

    Args:
        batch: The micro-batch: `text`, `[b, s + 1]`, in finetuning samples also `TRAINED`,
            `[b, s]`, and `SEGMENT_ENDS`, and in evaluation samples optionally `COUNTED`, `[b]`.
        eod: The id of the end-of-document token.
        reset_position_ids: Whether to count positions from 0 in every document. Finetuning samples
            ignore this and `eod_mask_loss`.
        eod_mask_loss: Whether to exclude the token after each end-of-document token from the loss.
    """
    text = batch["text"]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if TRAINED in batch:
        ends = batch[SEGMENT_ENDS]
        token_indices = torch.arange(tokens.numel(), device=tokens.device)
        segment = torch.searchsorted(ends[1:].contiguous(), token_indices, right=True)
        positions = (token_indices - ends[segment]).view_as(tokens)
    elif reset_position_ids:
        positions = document_positions(tokens, eod)
    loss_mask = make_loss_mask(batch, eod=eod, eod_mask_loss=eod_mask_loss)
    return TokenBatch(tokens, labels, loss_mask, positions)


def document_positions(tokens: Tensor, eod: int) -> Tensor:
    """Return the position of each token in its document, counted from 0, in the shape of `tokens`.

    Args:
        tokens: Token ids, `[..., s]`. A document ends with an end-of-document token.
        eod: The id of the end-of-document token.
    """
    positions = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
    is_start = torch.nn.functional.pad((tokens == eod)[..., :-1], (1, 0))
    return positions - torch.where(is_start, positions, 0).cummax(dim=-1).values


def longest_segment(batch: Mapping[str, Tensor]) -> int | None:
    """Return an upper bound on the length of a segment in tokens; `None` means a sample's length.

    Args:
        batch: The micro-batch. In a recorded pass, it has no `LONGEST_SEGMENT`.
    """
    return len(batch[LONGEST_SEGMENT]) if LONGEST_SEGMENT in batch else None


def shorten(batch: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return a micro-batch with its samples shortened to their first tokens.

    Args:
        batch: The micro-batch, with `text`, `[b, s + 1]`, and optionally `SEGMENT_ENDS` and
            `TRAINED`.
        length: The number of tokens to keep from each sample. The next token is kept as a label.
    """
    shorter = dict(batch, text=batch["text"][:, : length + 1])
    if TRAINED in batch:
        shorter[TRAINED] = batch[TRAINED][:, :length]
    if SEGMENT_ENDS in batch:
        full_length, ends = batch["text"].shape[1] - 1, batch[SEGMENT_ENDS]
        sample = torch.div(ends - 1, full_length, rounding_mode="floor")
        # Documents that begin beyond the length become empty segments.
        shorter[SEGMENT_ENDS] = sample * length + (ends - sample * full_length).clamp(max=length)
        if LONGEST_SEGMENT in batch:
            shorter[LONGEST_SEGMENT] = batch[LONGEST_SEGMENT][:length]
    return shorter


def make_loss_mask(batch: Mapping[str, Tensor], *, eod: int, eod_mask_loss: bool) -> Tensor:
    """Return the loss mask, `[b, s]` float32: 1 for labels that count, otherwise 0.

    The arguments are the same as for `make_batch`.
    """
    tokens = batch["text"][:, :-1]
    mask = torch.ones_like(tokens, dtype=torch.float)
    if TRAINED in batch:
        mask = batch[TRAINED].float()
    elif eod_mask_loss:
        mask = (tokens != eod).float()
    return mask * batch[COUNTED][:, None] if COUNTED in batch else mask
