"""Samples for finetuning: examples that are packed into rows of s tokens.

A sample holds the examples of a row one after the other in the first s tokens of `text`, then
padding, which is a segment of its own. `TRAINED` is 1 where the label counts: never where the next
token begins another example, and never in the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.config.data import TokenizerConfig
from megatron.config.finetuning import FinetuningConfig
from megatron.data.conversations import (
    ConversationEncoder,
    ConversationOptions,
    TokenizedExamples,
    load_examples,
)
from megatron.data.datasets import (
    BlendedDataset,
    DataRequest,
    DatasetPart,
    Datasets,
    build_datasets,
)
from megatron.data.packing import EpochPlan, Packing, one_each, pack
from megatron.data.sample import SEGMENT_ENDS, TRAINED, Sample, SampleDataset
from megatron.errors import ConfigError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat_template import find_template


@dataclass(frozen=True, eq=False)
class ExampleSource:
    """Examples as a source of data, which --split divides and a blend draws from."""

    examples: TokenizedExamples

    @property
    def prefix(self) -> str:
        """The path that a flag names."""
        return self.examples.name

    @property
    def size(self) -> int:
        """The number of tokens, which decides its share of a blend without weights."""
        return int(self.examples.lengths.sum())

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)


@dataclass(eq=False)
class PackedDataset:
    """Rows of packed examples: `text`, `[s + 1]`, `TRAINED`, `[s]`, `SEGMENT_ENDS`, and `id`.

    Attributes:
        examples: The examples of the whole file.
        first: The first example of this split.
        packing: How the split's examples share rows.
        num_samples: The number of samples that the run needs; the rows repeat as often as needed.
        seed: The seed of the order of rows.
        filler: The id in the padding.
    """

    examples: TokenizedExamples
    first: int
    packing: Packing
    num_samples: int
    seed: int
    filler: int
    _plans: dict[int, EpochPlan] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """A text that differs whenever the samples differ."""
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
        epoch, row = divmod(i, self.packing.rows)
        if epoch not in self._plans:
            self._plans.clear()  # samples are read in order, and a plan is large
            self._plans[epoch] = self.packing.epoch(epoch, self.seed)
        length = self.packing.seq_length
        text, trained = np.full(length + 1, self.filler, np.int64), np.zeros(length, np.int64)
        ends, at = [], 0
        for number in self._plans[epoch].row(row):
            tokens, counts = self.examples[self.first + int(number)]
            end = at + len(tokens)
            text[at:end] = tokens
            trained[at : end - 1] = counts[1:]  # labels are one token ahead
            ends.append(end)
            at = end
        if at < length:
            ends.append(length)
        return {"text": text, TRAINED: trained, SEGMENT_ENDS: np.array(ends), "id": i}


def build_packed_datasets(
    request: DataRequest,
    open_examples: Callable[[str, str], TokenizedExamples],
    *,
    seq_length: int,
    filler: int,
    packs: bool = True,
) -> Datasets:
    """Build the samples that the flags name. Every process calls this function.

    Args:
        request: The data that the run needs.
        open_examples: A function that reads the file that a flag names, and tokenizes it.
        seq_length: The number of tokens of a row, s.
        filler: The id in the padding.
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
        packing = (pack if packs else one_each)(lengths, seq_length)
        first = part.bounds[0]
        return PackedDataset(examples, first, packing, part.num_samples, request.seed, filler)

    def refuse_mock(count: int, split: int) -> SampleDataset:
        raise AssertionError("a rule refuses --mock-data")

    return build_datasets(request, build_part, refuse_mock, open_source=open_source)


def build_chat_datasets(
    request: DataRequest,
    options: FinetuningConfig,
    *,
    seq_length: int,
    tokenizer: tuple[TokenizerConfig, Tokenizer],
) -> Datasets:
    """Build samples of the conversations that the flags name. Every process calls this function.

    Args:
        request: The data that the run needs.
        options: The flags of finetuning.
        seq_length: The number of tokens of a row, s.
        tokenizer: The tokenizer's flags, and the tokenizer.

    Raises:
        ConfigError: A flag names no file, or the template cannot be used.
        DataError: A file has mistakes, or its examples cannot be used.
    """
    return build_packed_datasets(
        request,
        conversation_reader(request, options, seq_length=seq_length, tokenizer=tokenizer),
        seq_length=seq_length,
        filler=padding_token(tokenizer[1]),
        packs=options.packing,
    )


def conversation_reader(
    request: DataRequest,
    options: FinetuningConfig,
    *,
    seq_length: int,
    tokenizer: tuple[TokenizerConfig, Tokenizer],
    preferences: bool = False,
) -> Callable[[str, str], TokenizedExamples]:
    """Return a function that reads the file that a flag names, and tokenizes it.

    Args:
        request: The data that the run needs.
        options: The flags of finetuning.
        seq_length: The number of tokens that an example may have.
        tokenizer: The tokenizer's flags, and the tokenizer.
        preferences: Whether each record has a chosen and a rejected answer.

    Raises:
        ConfigError: The template cannot be used.
    """
    flags, used = tokenizer
    encoder = ConversationEncoder(
        ConversationOptions(
            flags,
            find_template(flags.chat_template, flags.tokenizer_model),
            seq_length,
            options.truncation,
            options.train_on_inputs,
            options.last_turn_only,
            preferences,
        ),
        used,
    )

    def open_examples(prefix: str, flag: str) -> TokenizedExamples:
        if Path(f"{prefix}.idx").is_file():
            raise ConfigError(
                f"{flag} {prefix}: this is an indexed dataset of documents, and --sft reads "
                "JSON lines with conversations: name such a file, or give --no-sft"
            )
        cache = request.cache(Path(prefix).parent / "index-cache")
        skips = request.data.skip_bad_lines
        return load_examples(prefix, encoder, cache, flag=flag, skip_bad_lines=skips)

    return open_examples


def padding_token(tokenizer: Tokenizer) -> int:
    """Return the id that fills rows up."""
    return next(iter(tokenizer.special_ids("pad") or tokenizer.special_ids("eod") or (0,)))


def packed_members(dataset: SampleDataset | None) -> list[PackedDataset]:
    """Return the packed datasets of a split, which may be a blend; none for other samples."""
    if isinstance(dataset, BlendedDataset):
        return [found for member in dataset.datasets for found in packed_members(member)]
    return [dataset] if isinstance(dataset, PackedDataset) else []


def rows_per_epoch(dataset: SampleDataset | None) -> int:
    """Return the number of samples that hold every example of a split once."""
    return sum(member.packing.rows for member in packed_members(dataset))


def describe_packing(dataset: SampleDataset | None) -> str:
    """Return how full the rows of a split are, for the start-up panel."""
    members = packed_members(dataset)
    if not members:
        return ""
    packings = [member.packing for member in members]
    examples = sum(len(packing.lengths) for packing in packings)
    rows = sum(packing.rows for packing in packings)
    tokens = sum(int(packing.lengths.sum()) for packing in packings)
    full = tokens / (rows * packings[0].seq_length)
    return f"{examples:,} examples in {rows:,} rows per epoch, {full:.1%} full"
