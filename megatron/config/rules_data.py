"""Rules for corpora and tokenizers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from megatron.config.data import (
    APPENDS_SENTINELS,
    MAY_HAVE_SENTINELS,
    SPLIT_NAMES,
    TOKENIZER_NEEDS,
    DataOptions,
    TokenizerConfig,
    is_number,
)
from megatron.config.fields import text_to
from megatron.config.run import RunOptions

_WORD = re.compile(r"\S+")


def tokenizer_files(tokenizer_type: str | None) -> tuple[str, ...]:
    """Return the fields that a tokenizer of this type is built from: files or a size, if any."""
    also = ("vocab_size",) if tokenizer_type == "TikTokenizer" else ()
    return (*TOKENIZER_NEEDS.get(tokenizer_type or "", ()), *also)


def _given(data: DataOptions) -> dict[str, tuple[str, ...]]:
    """Return the words that name corpora, by the field that contains them."""
    fields = ("data_path", *(f"{split}_data_path" for split in SPLIT_NAMES))
    words = {field: getattr(data, field) for field in fields}
    return {field: given for field, given in words.items() if given is not None}


def _flag_source(data: DataOptions, field: str) -> str:
    """Return the source of a field's corpora, for messages: a flag, or a flag and its file."""
    flag, file = "--data-args-path", data.data_args_path
    if field != "data_path":
        flag, file = "--per-split-data-args-path", data.per_split_data_args_path
    return f"{flag} {file}" if file else f"--{field.replace('_', '-')}"


def sources(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the choice of corpora."""
    data, given = config.data, _given(config.data)
    whole = [_flag_source(data, field) for field in given if field == "data_path"]
    per_split = list(
        dict.fromkeys(_flag_source(data, field) for field in given if field != "data_path")
    )
    # Retro reads the corpus of its working folder, which another rule requires.
    if not whole and not per_split and not data.mock_data and config.model.architecture != "retro":
        yield "no corpus: give --data-path PREFIX, or --mock-data to train on generated tokens"
    if (whole or per_split) and data.mock_data:
        flags = ", ".join([*whole, *per_split])
        yield f"--mock-data and {flags} cannot be combined: use one of them"
    if whole and per_split:
        yield (
            f"{whole[0]} is split by --split and cannot be combined with {', '.join(per_split)}: "
            "use one kind of path"
        )
    if per_split and "train_data_path" not in given and not config.training.skip_train:
        without = "'train'" if data.per_split_data_args_path else "--train-data-path"
        yield f"{', '.join(per_split)} without {without} leaves nothing to train on: add it"


def blends(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each blend that is neither prefixes nor pairs of a weight and a prefix.

    Weights must be above 0.
    """
    data = config.data
    for field, values in _given(data).items():
        name = _flag_source(data, field)
        if field != "data_path" and data.per_split_data_args_path:
            name = f"{name}: {field.partition('_')[0]!r}"
        if not values:
            yield f"{name}: give a prefix, or WEIGHT PREFIX WEIGHT PREFIX ..."
        elif not all(value.strip() for value in values):
            yield f"{name}: contains an empty word, perhaps from an unset variable: give a prefix"
        elif len(values) == 1 or not any(map(is_number, values)):
            continue
        elif len(values) % 2:
            yield (
                f"{name} has {len(values)} words: give one prefix, or pairs WEIGHT PREFIX "
                "WEIGHT PREFIX ..."
            )
        elif invalid := [
            repr(value)
            for value in values[::2]
            if not (is_number(value) and 0 < float(value) < math.inf)
        ]:
            yield (
                f"{name}: {', '.join(invalid)} must be a weight above 0: give pairs WEIGHT "
                "PREFIX WEIGHT PREFIX ..."
            )


def validation_sets(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for data that --full-validation or --multiple-validation-sets cannot use."""
    data, evaluation = config.data, config.evaluation
    if evaluation.full_validation and data.mock_data:
        yield "--full-validation cannot be combined with --mock-data, which has no end: drop it"
    elif evaluation.full_validation:
        given = _given(data)
        field = "data_path" if "data_path" in given else "valid_data_path"
        words = given.get(field, ())
        if given and not words:
            yield "--full-validation requires validation data: give --valid-data-path, or drop it"
        elif len(words) > 1 and is_number(words[0]):
            remedy = "give prefixes alone"
            if field == "data_path":
                remedy = "give --train-data-path, and --valid-data-path without weights"
            yield (
                f"--full-validation uses every sample of all datasets, but "
                f"{_flag_source(data, field)} has weights: {remedy}, or drop --full-validation"
            )
    paths, names = data.valid_data_path, evaluation.validation_set_names
    if evaluation.multiple_validation_sets and paths is None:
        yield (
            "--multiple-validation-sets evaluates each dataset of --valid-data-path: give "
            "--train-data-path and --valid-data-path, or drop the flag"
        )
    if names is None or paths is None:
        return
    flag = f"--validation-set-names {' '.join(names)}"
    if len(names) != len(paths):
        yield f"{flag}: --valid-data-path has {len(paths)} datasets: give a name for each"
    elif len(set(names)) < len(names) or not all(map(_WORD.fullmatch, names)):
        yield f"{flag}: give different names without spaces, because they are part of tags"


def split(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if --split is not valid."""
    text = config.data.split
    separator = "," if "," in text else "/"
    try:
        shares = [text_to(float, share_text) for share_text in text.split(separator)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or min(shares) < 0 or sum(shares) <= 0:
        yield (
            f"--split {text!r}: expected up to three shares of at least 0, not all 0, such as "
            "'969, 30, 1'"
        )


def tokenizer(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each reason why no tokenizer can be built."""
    if config.tokenizer.tokenizer_type is None:
        yield (
            "--tokenizer-type is required: for example HuggingFaceTokenizer with "
            "--tokenizer-model tokenizer.json, or NullTokenizer with --vocab-size"
        )
        return
    yield from tokenizer_problems(config.tokenizer)


def tokenizer_problems(tokenizer: TokenizerConfig) -> Iterator[str]:
    """Yield an error for each missing flag of a tokenizer, and for one that it does not support.

    Args:
        tokenizer: The tokenizer's flags, including its type.
    """
    kind, count = tokenizer.tokenizer_type or "", tokenizer.vocab_extra_ids
    for field in TOKENIZER_NEEDS[kind]:
        if getattr(tokenizer, field) in (None, ""):
            yield f"--tokenizer-type {kind} requires --{field.replace('_', '-')}: add it"
    if count > 0 and kind not in APPENDS_SENTINELS:
        yield (
            f"--vocab-extra-ids {count}: --tokenizer-type {kind} does not support extra entries: "
            "drop it"
        )


def sentinels(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if T5's tokenizer has no sentinels."""
    kind, count = config.tokenizer.tokenizer_type, config.tokenizer.vocab_extra_ids
    if kind is None:
        return
    if config.model.architecture != "t5" or config.data.mock_data or count > 0:
        return
    if kind in APPENDS_SENTINELS and kind not in MAY_HAVE_SENTINELS:
        yield (
            f"--tokenizer-type {kind} without --vocab-extra-ids has no sentinels for the spans "
            "that T5 masks: add --vocab-extra-ids 100"
        )
    elif kind not in MAY_HAVE_SENTINELS:
        yield (
            f"--tokenizer-type {kind} has no sentinels for the spans that T5 masks: use "
            "HuggingFaceTokenizer with the tokenizer.json of a T5, or one that supports "
            f"--vocab-extra-ids 100: {', '.join(APPENDS_SENTINELS)}"
        )
