"""Finetuning samples: examples that are packed into rows of s tokens.

The first s tokens of a sample's `text` are the examples of a row, one after the other, followed by
padding, which forms a separate segment. `TRAINED` is 1 where the label counts in the loss. It is 0
where the next token begins another example, and in the padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron.config.data import TokenizerConfig
from megatron.config.finetuning import FinetuningConfig
from megatron.data.blend import BlendedDataset, JoinedDataset
from megatron.data.conversations import (
    ConversationEncoder,
    ConversationOptions,
    TokenizedExamples,
    load_examples,
)
from megatron.data.datasets import DataRequest, DatasetPart, Datasets, build_datasets
from megatron.data.packing import Packing, describe_rows, one_per_row, pack
from megatron.data.sample import SEGMENT_ENDS, TRAINED, Sample, SampleDataset
from megatron.errors import ConfigError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat_template import find_template

Kind = TypeVar("Kind")


@dataclass(frozen=True, eq=False)
class ExampleSource:
    """A source of examples that --split can divide and a blend can draw from."""

    examples: TokenizedExamples

    @property
    def prefix(self) -> str:
        """The path, as given in the flag."""
        return self.examples.name

    @property
    def size(self) -> int:
        """The number of tokens: this source's weight in a blend without explicit weights."""
        return int(self.examples.lengths.sum())

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)


@dataclass(eq=False)
class PackedDataset:
    """Rows of packed examples.

    A sample contains `text`, `[s + 1]`; `TRAINED`, `[s]`; `SEGMENT_ENDS`, `[segments]`; and `id`.

    Attributes:
        examples: The examples of the whole file.
        first: The index of the first example of this split.
        packing: The assignment of the split's examples to rows.
        num_samples: The number of samples that the run needs. Rows are repeated as often as needed.
        seed: The seed for the order of rows.
        padding_id: The id that pads rows.
    """

    examples: TokenizedExamples
    first: int
    packing: Packing
    num_samples: int
    seed: int
    padding_id: int

    @property
    def description(self) -> str:
        """Text that names the data and the settings of the samples."""
        packing = self.packing
        return (
            f"Packed examples\n\n{self.examples.summary()}\n"
            f"Examples {self.first} to {self.first + len(packing.lengths)}\n"
            f"Rows {packing.rows} of {packing.seq_length}\nRandom seed {self.seed}\n"
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Return sample `i`."""
        length = self.packing.seq_length
        text, trained = np.full(length + 1, self.padding_id, np.int64), np.zeros(length, np.int64)
        ends, start = [], 0
        for example in self.packing.row(i, self.seed):
            tokens, is_trained = self.examples[self.first + int(example)]
            end = start + len(tokens)
            text[start:end] = tokens
            trained[start : end - 1] = is_trained[1:]  # labels are one token ahead
            ends.append(end)
            start = end
        if start < length:
            ends.append(length)
        return {"text": text, TRAINED: trained, SEGMENT_ENDS: np.array(ends), "id": i}


def build_packed_datasets(
    request: DataRequest,
    open_examples: Callable[[str, str], TokenizedExamples],
    *,
    seq_length: int,
    padding_id: int,
    packs: bool,
) -> Datasets:
    """Build the packed datasets that the flags name. Collective.

    Args:
        request: The data that the run needs.
        open_examples: A function that reads and tokenizes the file that a flag names.
        seq_length: The number of tokens in a row, s.
        padding_id: The id that pads rows.
        packs: Whether several examples share a row.

    Raises:
        ConfigError: No data is named, or --data-path or --split cannot be parsed.
        DataError: A file is missing, or its examples cannot be used.
    """

    def open_source(prefix: str, flag: str) -> ExampleSource:
        return ExampleSource(open_examples(prefix, flag))

    def build_part(part: DatasetPart) -> PackedDataset:
        examples: TokenizedExamples = part.data.examples
        lengths = examples.lengths[slice(*part.bounds)]
        packing = (pack if packs else one_per_row)(lengths, seq_length)
        first = part.bounds[0]
        return PackedDataset(examples, first, packing, part.num_samples, request.seed, padding_id)

    def epoch_samples(source: ExampleSource, bounds: tuple[int, int]) -> int:
        lengths = source.examples.lengths[slice(*bounds)]
        return (pack if packs else one_per_row)(lengths, seq_length).rows

    return build_datasets(request, build_part, open_source=open_source, epoch_samples=epoch_samples)


def build_chat_datasets(
    request: DataRequest,
    options: FinetuningConfig,
    *,
    seq_length: int,
    tokenizer: tuple[TokenizerConfig, Tokenizer],
) -> Datasets:
    """Build samples from the conversations that the flags name. Collective.

    Args:
        request: The data that the run needs.
        options: The finetuning flags.
        seq_length: The number of tokens in a row, s.
        tokenizer: The tokenizer's flags, and the tokenizer built from them.

    Raises:
        ConfigError: No data is named, or the template cannot be used.
        DataError: A file has errors, or its examples cannot be used.
    """
    return build_packed_datasets(
        request,
        conversation_reader(request, options, seq_length=seq_length, tokenizer=tokenizer),
        seq_length=seq_length,
        padding_id=padding_token(tokenizer[1]),
        packs=options.packing,
    )


def conversation_reader(
    request: DataRequest,
    options: FinetuningConfig,
    *,
    seq_length: int,
    tokenizer: tuple[TokenizerConfig, Tokenizer],
    preferences: bool = False,
    labels: bool = False,
) -> Callable[[str, str], TokenizedExamples]:
    """Return a function that reads and tokenizes the file that a flag names.

    The function raises a ConfigError for an indexed dataset, and the errors of `load_examples`.

    Args:
        request: The data that the run needs.
        options: The finetuning flags.
        seq_length: The maximum number of tokens in an example.
        tokenizer: The tokenizer's flags, and the tokenizer built from them.
        preferences: Whether each record has a chosen and a rejected answer.
        labels: Whether records say which answers are desirable.

    Raises:
        ConfigError: The template cannot be used.
    """
    flags, built_tokenizer = tokenizer
    encoder = ConversationEncoder(
        ConversationOptions(
            flags,
            find_template(flags.chat_template, flags.tokenizer_model),
            seq_length,
            options.truncation,
            options.train_on_inputs,
            options.last_turn_only,
            preferences,
            labels,
        ),
        built_tokenizer,
    )

    def open_examples(prefix: str, flag: str) -> TokenizedExamples:
        if os.path.isfile(f"{prefix}.idx"):
            raise ConfigError(
                f"{flag} {prefix}: this is an indexed dataset of documents, but --sft reads "
                "JSON lines with conversations: name such a file, or give --no-sft"
            )
        cache = request.cache(Path(prefix).parent / "index-cache")
        skips = request.data.skip_bad_lines
        return load_examples(prefix, encoder, cache, flag=flag, skip_bad_lines=skips)

    return open_examples


def padding_token(tokenizer: Tokenizer) -> int:
    """Return the id used for padding: the padding or end-of-document token, or 0 without both."""
    return next(iter(tokenizer.special_ids("pad") or tokenizer.special_ids("eod") or (0,)))


def members_of(dataset: SampleDataset | None, kind: type[Kind]) -> list[Kind]:
    """Return the datasets of one kind in a split, in the order of the blend if it is a blend."""
    if isinstance(dataset, BlendedDataset | JoinedDataset):
        return [member for each in dataset.datasets for member in members_of(each, kind)]
    return [dataset] if isinstance(dataset, kind) else []


def rows_per_epoch(dataset: SampleDataset | None) -> int:
    """Return the number of rows in one pass over a split; 0 if its samples are not packed."""
    return sum(member.packing.rows for member in members_of(dataset, PackedDataset))


def describe_packing(dataset: SampleDataset | None) -> str:
    """Describe how full the rows of a split are, for the start-up panel; "" if there are none."""
    members = members_of(dataset, PackedDataset)
    return describe_rows([member.packing for member in members], "example") if members else ""
