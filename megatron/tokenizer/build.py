"""Construction of tokenizers from flags, and simple tokenizers for numbers and characters."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from megatron.config.data import TOKENIZER_NEEDS, TokenizerConfig
from megatron.config.rules_data import tokenizer_problems
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import digest

_MAX_TENSOR_PARALLEL = 64  # the largest tensor-parallel size for which a vocabulary is padded
# The module and class of each tokenizer type. A module is imported only when its type is built, so
# no type loads the libraries of the others.
_CLASSES = {
    "GPT2BPETokenizer": ("gpt2", "GPT2Tokenizer"),
    "BertWordPieceLowerCase": ("wordpiece", "WordPieceTokenizer"),
    "BertWordPieceCase": ("wordpiece", "WordPieceTokenizer"),
    "BertWordPieceTokenizer": ("wordpiece", "WordPieceTokenizer"),
    "SentencePieceTokenizer": ("sentencepiece", "SentencePieceTokenizer"),
    "GPTSentencePieceTokenizer": ("sentencepiece", "GPTSentencePieceTokenizer"),
    "Llama2Tokenizer": ("sentencepiece", "Llama2Tokenizer"),
    "HuggingFaceTokenizer": ("huggingface", "HuggingFaceTokenizer"),
    "PretrainedFromHF": ("huggingface", "HuggingFaceTokenizer"),
    "TikTokenizer": ("tiktoken", "TikTokenizer"),
    "EncDecTokenizer": ("wordpiece", "EncDecTokenizer"),
    "CharacterLevelTokenizer": ("build", "CharacterLevelTokenizer"),
    "NullTokenizer": ("build", "NullTokenizer"),
}


def files_of(config: TokenizerConfig) -> tuple[str, ...]:
    """Return the names of the config fields that contain the paths of the tokenizer's files.

    Args:
        config: The tokenizer's configuration. Without a `tokenizer_type`, the result is empty.
    """
    needs = TOKENIZER_NEEDS.get(config.tokenizer_type or "", ())
    return tuple(field for field in needs if field != "vocab_size")


def with_file(config: TokenizerConfig) -> TokenizerConfig:
    """Return the settings of a tokenizer with the path of its tokenizer.json, if it has one.

    `--tokenizer-model` may also name the folder of this file, or a model in Hugging Face's cache.
    If there is no such file, the settings do not change.
    """
    module, _ = _CLASSES.get(config.tokenizer_type or "", ("", ""))
    if module != "huggingface" or config.tokenizer_model is None:
        return config
    from megatron.tokenizer.huggingface import find_file

    with contextlib.suppress(ConfigError, ImportError):
        return replace(config, tokenizer_model=str(find_file(config.tokenizer_model)))
    return config


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that `--tokenizer-type` names from its files.

    Raises:
        ConfigError: The type is missing or unknown, other flags do not match the type or its files,
            or the type needs a tokenizer.json or a package that is missing.
        DataError: A file is missing or damaged.
    """
    kind = config.tokenizer_type
    if kind is None or kind not in TOKENIZER_NEEDS:
        raise ConfigError(f"--tokenizer-type {kind}: choose one of {', '.join(TOKENIZER_NEEDS)}")
    problems = list(tokenizer_problems(config))
    if problems:
        raise ConfigError(problems)
    module, name = _CLASSES[kind]
    imported = importlib.import_module(f"megatron.tokenizer.{module}")
    tokenizer: Tokenizer = getattr(imported, name)(config)
    return tokenizer


def padded_vocabulary(config: RunConfig) -> int:
    """Return the number of rows in a run's word embedding, including padding.

    Raises:
        ConfigError: The tokenizer's flags are missing or invalid (`build_tokenizer`).
        DataError: A file of the tokenizer is missing or damaged.
    """
    size = build_tokenizer(config.tokenizer).vocab_size
    tensor = config.parallel.tensor_model_parallel_size
    return padded_vocab_size(size, config.model.make_vocab_size_divisible_by, tensor)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Return the number of rows in a word embedding of `vocab_size` entries, including padding.

    The result is a multiple of the least common multiple of `divisible_by` and the tensor-parallel
    size. With the default of 128, it is the same for every tensor-parallel size that divides 128.
    This keeps losses independent of the layout, because padding rows take part in the softmax.
    Megatron-LM pads to a multiple of the product instead. Its checkpoints can still be read
    (`checkpoint.reader`).

    Args:
        vocab_size: The number of entries of the tokenizer.
        divisible_by: The value of `--make-vocab-size-divisible-by`.
        tensor_parallel_size: The number of tensor-parallel ranks.
    """
    multiple = math.lcm(divisible_by, tensor_parallel_size)
    return -(-vocab_size // multiple) * multiple


def vocabulary_multiple(rows: int) -> int:
    """Return the `--make-vocab-size-divisible-by` that preserves an embedding's number of rows.

    Missing or additional rows would change the softmax. A Hugging Face folder does not say how
    many entries its tokenizer has. If the number of rows is a multiple of 64, some of them may be
    padding, and the result is the number of rows. Otherwise it is the largest power of two that
    divides them, because smaller multiples are also used for padding: 16 in Mamba-2 (50,288 rows
    for 50,277 entries), 8 or 32 in `resize_token_embeddings`.

    Args:
        rows: The number of rows in the word embedding.
    """
    return rows if rows % _MAX_TENSOR_PARALLEL == 0 else rows & -rows


class NullTokenizer(Tokenizer):
    """A tokenizer for texts that spell out token ids, as numbers below `--vocab-size`.

    The id `--vocab-size` ends a document.

    Raises:
        ConfigError: --vocab-size is missing or not positive.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Check the size and store it."""
        size = config.vocab_size
        if size is None or size < 1:
            raise ConfigError(
                f"--tokenizer-type NullTokenizer needs a positive --vocab-size (given: {size}); "
                "give the number of ids in your data"
            )
        super().__init__("NullTokenizer", digest(str(size)), {"eod": size, "eos": size}, size + 1)

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        """The map from each id, written as text, to the id."""
        return {str(i): i for i in range(self.vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in `text`. As in Megatron-LM, they may be outside the vocabulary.

        Raises:
            DataError: A word is not a number, or is a number that the dataset cannot store.
        """
        limit = 1 << 16 if self.vocab_size < 65500 else 1 << 31
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < limit):
                raise DataError(
                    f"NullTokenizer reads numbers from 0 to {limit - 1} separated by spaces, but "
                    f"found {word[:40]!r}: fix the text or choose another --tokenizer-type"
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(str(i) for i in ids)


class CharacterLevelTokenizer(Tokenizer):
    """Megatron-LM's tokenizer of 2019: 8 special entries, then the 256 characters of Latin-1."""

    _SPECIAL = ("pad", "eos", "bos", "unk", "sep", "L2R", "ENC", "MASK")

    def __init__(self, config: TokenizerConfig) -> None:
        """Build the vocabulary."""
        first = len(self._SPECIAL)
        self._vocab = {f"<{name}>": i for i, name in enumerate(self._SPECIAL)}
        self._vocab |= {chr(i): first + i for i in range(256)}
        ids = {name: self._vocab[f"<{name}>"] for name in ("pad", "eos", "bos", "sep")}
        ids |= {"eod": ids["eos"], "cls": self._vocab["<ENC>"], "mask": self._vocab["<MASK>"]}
        super().__init__("CharacterLevelTokenizer", digest(), ids, len(self._vocab))

    def tokenize(self, text: str) -> list[int]:
        """Return one id per character.

        Raises:
            DataError: A character is not in Latin-1.
        """
        try:
            return [len(self._SPECIAL) + code for code in text.encode("latin-1")]
        except UnicodeEncodeError as error:
            raise DataError(
                f"CharacterLevelTokenizer knows the 256 characters of Latin-1, but found "
                f"{text[error.start]!r} (U+{ord(text[error.start]):04X}): leave the text out or "
                "choose another --tokenizer-type"
            ) from None

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode ids to characters, with special entries spelled out."""
        return "".join(self.inv_vocab.get(int(i), "<unk>") for i in ids)
