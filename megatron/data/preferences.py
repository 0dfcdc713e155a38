"""Packed rows of pairs: a chosen and a rejected answer to the same prompt.

Example 2i of a file is the chosen answer of pair i with its prompt, and example 2i + 1 is the
rejected one. Both answers of a pair are in the same row, so a row has everything that its losses
need.

KTO does not compare answers, but its loss needs the log-probability of answers to other prompts.
Each answer shares a row with the same prompt followed by an answer to another prompt, which takes
the place of a rejected answer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.config.finetuning import FinetuningConfig
from megatron.data.chat import conversation_reader, members_of, padding_token
from megatron.data.conversations import TokenizedExamples
from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.packing import Packing, describe_rows, one_per_row, pack
from megatron.data.sample import SEGMENT_ENDS, TRAINED, Sample, SampleDataset
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

# A field of a sample of pairs, `[s]`: 1 at the first token of each pair, otherwise 0.
PAIRS = "pairs"
# A field of a sample of pairs, `[s]` float64: each answer's log-probability under the reference
# model, stored at the first token of the answer's prompt.
REFERENCE = "reference"
# A field of a sample of answers, `[s]`: 1 at the start of each desirable answer, otherwise 0.
DESIRABLE = "desirable"


class FittedPairs:
    """The pairs of one file, fitted into rows.

    Args:
        examples: The answers, alternately chosen and rejected.
        seq_length: The number of tokens in a row, s.
        truncation: The value of --truncation, which determines what to do with longer pairs.

    Attributes:
        prefix: The path, as given in the flag.
        limits: The number of tokens to keep from each answer in each pair, `[P, 2]`.
        dropped: The number of pairs that were dropped.
        shortened: The number of pairs that lost tokens.

    Raises:
        DataError: Pairs are too long and --truncation is error, or no pairs remain.
    """

    noun = "pair"  # for messages
    holds = "both answers"  # what must fit into a row

    def __init__(self, examples: TokenizedExamples, seq_length: int, truncation: str) -> None:
        """Choose the pairs to keep."""
        self.prefix, self._examples = examples.name, examples
        self._keeps_end = truncation == "keep-end"
        lengths = self._lengths()
        totals = lengths.sum(axis=1)
        long = np.flatnonzero(totals > seq_length)
        if len(long) and truncation == "error":
            raise DataError(
                f"{self.prefix}: {len(long):,} of {len(lengths):,} {self.noun}s have more tokens "
                f"than --seq-length {seq_length}, which must hold {self.holds} (first: "
                f"{self.noun} {int(long[0]) + 1}; the longest has {int(totals.max())} tokens): "
                "raise --seq-length, or choose --truncation drop, keep-start or keep-end"
            )
        self._pair_indices = np.arange(len(lengths))
        if truncation == "drop":
            self._pair_indices = np.delete(self._pair_indices, long)
        if not len(self._pair_indices):
            raise DataError(
                f"{self.prefix}: none of the {len(lengths):,} {self.noun}s fits into --seq-length "
                f"{seq_length}: raise it, or choose --truncation keep-start"
            )
        self.limits = pair_limits(lengths, seq_length)[self._pair_indices]
        self.dropped = len(lengths) - len(self._pair_indices)
        self.shortened = len(long) - self.dropped

    def _lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each answer of each pair, prompt included, `[P, 2]`."""
        return np.asarray(self._examples.lengths).reshape(-1, 2)

    def desirable(self, i: int) -> bool:
        """Return whether the first answer of a pair is desirable. A chosen answer always is."""
        return True

    def digest(self) -> str:
        """Return a digest of all answers and of their training masks."""
        digest, examples = hashlib.sha256(), self._examples
        for array in (
            examples.tokens,
            examples.trained,
            examples.lengths,
            self._pair_indices,
            self.limits,
        ):
            digest.update(np.ascontiguousarray(array).data)
        return f"{digest.hexdigest()} {'ends' if self._keeps_end else 'starts'}"

    @property
    def size(self) -> int:
        """The number of tokens: this source's weight in a blend without explicit weights."""
        return int(self.limits.sum())

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pair_indices)

    def answer(self, i: int, side: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the tokens of a prompt and an answer, and whether to train on each, `[tokens]`.

        Args:
            i: The index of the pair.
            side: 0 for the chosen answer, 1 for the rejected answer.
        """
        return self._cut(i, side, *self._examples[2 * int(self._pair_indices[i]) + side])

    def _cut(
        self, i: int, side: int, tokens: NDArray[Any], trained: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the tokens and the mask of an answer, cut to its limit."""
        limit = int(self.limits[i, side])
        part = slice(len(tokens) - limit, None) if self._keeps_end else slice(limit)
        return tokens[part], trained[part]


class FittedAnswers(FittedPairs):
    """The answers of one file, each paired with the answer to another prompt, fitted into rows.

    The other answer is half a file away, so that the chosen and the rejected answer to a prompt,
    which are neighbors, are not paired if the file has at least four answers. The arguments and
    attributes are those of `FittedPairs`, with answers in place of pairs.

    Raises:
        DataError: As for `FittedPairs`, or there are fewer than two answers.
    """

    noun = "answer"
    holds = "an answer and the same prompt with another answer"

    def _lengths(self) -> NDArray[np.int64]:
        """Return each prompt's length in tokens with its own answer and with another, `[P, 2]`."""
        examples = self._examples
        lengths = np.asarray(examples.lengths)
        if len(lengths) < 2:
            raise DataError(
                f"{self.prefix}: one answer, but KTO also needs answers to other "
                "prompts: give at least two"
            )
        # Only the end of an example is trained on; its first token is never a label.
        counts = np.add.reduceat(np.asarray(examples.trained), examples.starts, dtype=np.int64)
        labels = np.asarray(examples.trained)[examples.starts]
        self._prompts = lengths - (counts - labels)
        answers = lengths - self._prompts
        return np.stack((lengths, self._prompts + answers[self._other(np.arange(len(lengths)))]), 1)

    def _other(self, example: Any) -> Any:
        """Return the index of the example whose answer is paired with the prompt of `example`."""
        count = len(self._examples)
        return (example + count // 2) % count

    def desirable(self, i: int) -> bool:
        """Return whether an answer is desirable."""
        return bool(self._examples[int(self._pair_indices[i])][1][0])

    def answer(self, i: int, side: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the tokens of a prompt and an answer, and whether to train on each, `[tokens]`.

        Args:
            i: The index of the answer.
            side: 0 for the prompt's own answer, 1 for the answer to another prompt.
        """
        example = int(self._pair_indices[i])
        tokens, prompt = self._examples[example][0], int(self._prompts[example])
        if side:
            other = int(self._other(example))
            tokens = np.concatenate(
                (tokens[:prompt], self._examples[other][0][int(self._prompts[other]) :])
            )
        return self._cut(i, side, tokens, np.arange(len(tokens)) >= prompt)


def pair_limits(lengths: NDArray[np.int64], seq_length: int) -> NDArray[np.int64]:
    """Return the number of tokens to keep from each answer so that pairs fit in a row, `[P, 2]`.

    The longer answer is cut first, until both have the same length.

    Args:
        lengths: The number of tokens in the chosen and in the rejected answers, `[P, 2]`.
        seq_length: The number of tokens in a row.
    """
    room = seq_length - lengths[:, ::-1]
    return np.minimum(lengths, np.maximum(seq_length // 2, room))


@dataclass(eq=False)
class PreferenceDataset:
    """Rows of packed pairs.

    Attributes:
        source: The pairs of all splits.
        first: The index of the first pair of this split.
        packing: The assignment of the split's pairs to rows.
        num_samples: The number of samples that the run needs. Rows are repeated as often as needed.
        seed: The seed for the order of rows.
        padding_id: The id that pads rows.
        reference: The log-probabilities of the reference model, `[P, 2]`. `None` until they have
            been computed, or if no loss needs them.
    """

    source: FittedPairs
    first: int
    packing: Packing
    num_samples: int
    seed: int
    padding_id: int
    reference: NDArray[np.float64] | None = None

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""
        packing, last = self.packing, self.first + self.pairs
        return (
            f"Packed pairs\n\n{self.source.prefix}\nPairs {self.first} to {last}\n"
            f"Rows {packing.rows} of {packing.seq_length}\nRandom seed {self.seed}\n"
        )

    @property
    def pairs(self) -> int:
        """The number of pairs, P."""
        return len(self.packing.lengths)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def row(self, i: int) -> NDArray[np.int64]:
        """Return the indexes of the pairs in sample `i`."""
        return self.packing.row(i, self.seed)

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`.

        It contains `text`, `[s + 1]`; `TRAINED`, `PAIRS`, `REFERENCE` and `DESIRABLE`, `[s]` each;
        `SEGMENT_ENDS`, `[segments]`; and `id`.
        """
        length = self.packing.seq_length
        text, trained = np.full(length + 1, self.padding_id, np.int64), np.zeros(length, np.int64)
        pairs, reference = np.zeros(length, np.int64), np.zeros(length)
        desirable = np.zeros(length, np.int64)
        ends, end = [], 0
        for pair in self.row(i):
            pairs[end] = 1
            desirable[end] = self.source.desirable(self.first + int(pair))
            for side in (0, 1):
                tokens, is_trained = self.source.answer(self.first + int(pair), side)
                start, end = end, end + len(tokens)
                text[start:end] = tokens
                trained[start : end - 1] = is_trained[1:]  # labels are one token ahead
                if self.reference is not None:
                    reference[start] = self.reference[pair, side]
                ends.append(end)
        if end < length:
            ends.append(length)
        parts: dict[str, Any] = {TRAINED: trained, PAIRS: pairs, REFERENCE: reference}
        parts[DESIRABLE] = desirable
        return {"text": text, **parts, SEGMENT_ENDS: np.array(ends), "id": i}


def build_preference_datasets(
    request: DataRequest,
    options: FinetuningConfig,
    *,
    seq_length: int,
    tokenizer: tuple[TokenizerConfig, Tokenizer],
    labels: bool = False,
) -> Datasets:
    """Build rows from the pairs that the flags name. Collective.

    Args:
        request: The data that the run needs.
        options: The finetuning flags.
        seq_length: The number of tokens in a row, s.
        tokenizer: The tokenizer's flags, and the tokenizer built from them.
        labels: Whether to read single answers, labeled desirable or not, instead of pairs.

    Raises:
        ConfigError: No data is named, --full-validation is given, or the template cannot be used.
        DataError: A file has errors, or its pairs cannot be used.
    """
    reader = conversation_reader(
        request,
        options,
        seq_length=seq_length,
        tokenizer=tokenizer,
        preferences=not labels,
        labels=labels,
    )
    fitted = FittedAnswers if labels else FittedPairs
    padding_id = padding_token(tokenizer[1])

    def open_source(prefix: str, flag: str) -> FittedPairs:
        return fitted(reader(prefix, flag), seq_length, options.truncation)

    def build_part(part: DatasetPart) -> PreferenceDataset:
        totals = part.data.limits[slice(*part.bounds)].sum(axis=1)
        packing = (pack if options.packing else one_per_row)(totals, seq_length)
        arguments = (part.data, part.bounds[0], packing, part.num_samples, request.seed)
        return PreferenceDataset(*arguments, padding_id)

    return build_datasets(request, build_part, open_source=open_source)


def describe_pairs(dataset: SampleDataset | None) -> str:
    """Describe how full the rows of a split are and how many pairs were dropped or cut.

    The text is for the start-up panel, and empty if the split has no pairs.
    """
    members = members_of(dataset, PreferenceDataset)
    if not members:
        return ""
    noun = members[0].source.noun
    text = describe_rows([member.packing for member in members], noun)
    sources = dict.fromkeys(member.source for member in members)
    for count, what in (
        (sum(source.dropped for source in sources), "dropped (--truncation drop)"),
        (sum(source.shortened for source in sources), "shortened (--truncation)"),
    ):
        text += f"; {count:,} longer {noun}s {what}" if count else ""
    return text
