"""Tokenizers that match the longest vocabulary entry: BERT's WordPiece and Yuan's tokenizer.

Before matching, BERT's tokenizer splits a text on spaces and punctuation, and the tokenizer of the
Chinese Yuan models segments it with jieba.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from megatron.config.data import TokenizerConfig
from megatron.environment import private_cache
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import VocabularyFile, digest, extra_ids
from megatron.tokenizer.library import Library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_REQUIRED = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_UNKNOWN = "[UNK]"
_MAX_WORD_LENGTH = 200  # characters; longer words are unknown, as in Google's BERT and in Yuan

_YUAN_UNKNOWN, _SPACE, _NEWLINE, _CONTINUES = "<unk>", "\u2582", "\u2583", "##"
_WHITE = str.maketrans(" \n", _SPACE + _NEWLINE)
_YUAN_SPECIAL = {name: f"<{name}>" for name in ("sep", "pad", "mask", "eod")}
_YUAN_SPECIAL |= {"bos": "<s>", "eos": "</s>"}
_YUAN_REQUIRED = (_YUAN_UNKNOWN, "<pad>", "<eod>", _SPACE, _NEWLINE)
_CACHED_WORDS = 1 << 16  # the number of words whose ids are cached


class WordPieceTokenizer(Tokenizer):
    """BERT's WordPiece tokenizer, for BertWordPieceLowerCase and BertWordPieceCase.

    `--vocab-file` has one entry per line. [BOS], [EOS] and `--vocab-extra-ids` sentinels are
    appended if the file lacks them. BertWordPieceTokenizer, the name used in 2019, means
    BertWordPieceCase if the file has capitalized words and BertWordPieceLowerCase otherwise.

    Raises:
        DataError: The file is missing or damaged, or lacks an entry that BERT needs.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file, and append the entries that it lacks."""
        file = VocabularyFile.read("--vocab-file", config.vocab_file)
        vocab = self._vocab = _parse_vocab(
            file, (*_REQUIRED.values(), _UNKNOWN), "a BERT vocabulary"
        )
        kind = config.tokenizer_type or ""
        if kind == "BertWordPieceTokenizer":
            is_cased = any(entry.isascii() and entry.istitle() for entry in vocab)
            kind = "BertWordPieceCase" if is_cased else "BertWordPieceLowerCase"
        num_entries = len(vocab)
        build = partial(wordpiece_pipeline, vocab, lower_case="LowerCase" in kind)
        self._tokenizer = Library(file, "a BERT vocabulary", build)
        sentinels = extra_ids(config.vocab_extra_ids)
        for entry in ("[BOS]", "[EOS]", *sentinels):
            vocab.setdefault(entry, len(vocab))
        names = {**_REQUIRED, "bos": "[BOS]", "eos": "[EOS]", "eod": "[EOS]"}
        special = {name: vocab[entry] for name, entry in names.items()}
        key = digest(file.data, str(config.vocab_extra_ids))
        super().__init__(kind, key, special, len(vocab), [vocab[entry] for entry in sentinels])
        self.text_vocab_size = num_entries

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without [CLS] and [SEP]."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of each text, computed on all cores."""
        import numpy as np

        encodings = self._tokenizer.encode_batch_fast(list(texts))
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to words separated by single spaces. The original spacing is lost."""
        entries = self.inv_vocab
        return " ".join(entries.get(int(i), _UNKNOWN) for i in ids).replace(" ##", "")


def wordpiece_pipeline(vocab: Mapping[str, int], *, lower_case: bool) -> Any:
    """Build BERT's pipeline with the `tokenizers` library.

    Args:
        vocab: The map from entries to ids.
        lower_case: Whether to convert text to lower case.
    """
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    model = WordPiece(dict(vocab), unk_token=_UNKNOWN, max_input_chars_per_word=_MAX_WORD_LENGTH)
    pipeline = Pipeline(model)
    pipeline.normalizer = BertNormalizer(lowercase=lower_case)
    pipeline.pre_tokenizer = BertPreTokenizer()
    return pipeline


class EncDecTokenizer(Tokenizer):
    """The tokenizer of Yuan 1.0. `--vocab-file` has one entry per line (53,228 in Yuan's own).

    jieba splits a text into words. Each word is then split into the longest matching entries, from
    left to right. An entry without Chinese characters begins with `##` unless it is at the start of
    a word. A space becomes the entry U+2582, except between two entries without Chinese characters,
    where it is omitted. A newline, or `<n>` in the text, becomes the entry U+2583.

    Raises:
        DataError: The file is not such a vocabulary.
        ConfigError: jieba is not installed.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the vocabulary and jieba's dictionary."""
        file = VocabularyFile.read("--vocab-file", config.vocab_file)
        vocab = self._vocab = _parse_vocab(file, _YUAN_REQUIRED, "the vocabulary of a Yuan model")
        self._cut = _segmenter()
        self._space = vocab[_SPACE]
        self._is_latin = [not _has_chinese(entry) and entry != _SPACE for entry in vocab]
        # Words repeat, and a cache lookup takes a twentieth of the time of matching a word.
        self._ids_of = lru_cache(_CACHED_WORDS)(self._match)
        special = {name: vocab[entry] for name, entry in _YUAN_SPECIAL.items() if entry in vocab}
        count = next(i for i in itertools.count() if f"<s_{i}>" not in vocab)
        sentinels = [vocab[f"<s_{i}>"] for i in range(count)]
        super().__init__("EncDecTokenizer", digest(file.data), special, len(vocab), sentinels)

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids = [
            index
            for word in self._cut(text.replace("<n>", "\n"))
            for index in self._ids_of(word.translate(_WHITE))
        ]
        latin, space = self._is_latin, self._space
        last = len(ids) - 1
        return [
            index
            for i, index in enumerate(ids)
            if index != space or not 0 < i < last or not (latin[ids[i - 1]] and latin[ids[i + 1]])
        ]

    def _match(self, word: str) -> tuple[int, ...]:
        """Split a word into the longest matching entries, from left to right; return their ids."""
        if len(word) > _MAX_WORD_LENGTH:
            return (self._vocab[_YUAN_UNKNOWN],)
        ids, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end]
                if start and not _has_chinese(piece):
                    piece = _CONTINUES + piece
                if piece in self._vocab:
                    break
            else:
                piece, end = _YUAN_UNKNOWN, start + 1
            ids.append(self._vocab[piece])
            start = end
        return tuple(ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, with spaces between words except next to Chinese characters."""
        return "".join(self._spaced_entries([int(i) for i in ids])).translate(
            str.maketrans(_SPACE + _NEWLINE, " \n")
        )

    def _spaced_entries(self, ids: Sequence[int]) -> Iterator[str]:
        entries, latin = self.inv_vocab, self._is_latin
        follows_latin = False  # whether the previous entry has no Chinese characters
        for index in ids:
            entry = entries.get(index, _YUAN_UNKNOWN)
            is_latin = entry != _NEWLINE and (index not in entries or latin[index])
            if follows_latin and entry.startswith(_CONTINUES):
                yield entry[len(_CONTINUES) :]
            else:
                yield f" {entry}" if follows_latin and is_latin else entry
            follows_latin = is_latin


def _has_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def _parse_vocab(file: VocabularyFile, required: Sequence[str], expected: str) -> dict[str, int]:
    """Parse a vocabulary file and check that it has the required entries.

    Raises:
        DataError: A required entry is missing, or the file is not a vocabulary.
    """
    vocab = file.entries()
    missing = [entry for entry in required if entry not in vocab]
    if missing:
        raise DataError(
            f"{file}: no entry {', '.join(missing)}; give {expected} (text, one entry per line)"
        )
    return vocab


@lru_cache(1)
def _segmenter() -> Any:
    """Return jieba's function that splits a text into words.

    Raises:
        ConfigError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise ConfigError(
            "--tokenizer-type EncDecTokenizer needs jieba: pip install jieba"
        ) from error
    jieba.setLogLevel(logging.CRITICAL)  # jieba logs a traceback if it cannot write its cache
    segmenter = jieba.Tokenizer()
    # jieba caches its dictionary as a file of Python objects, by default in a folder where other
    # users can write.
    try:
        segmenter.tmp_dir = str(private_cache("jieba"))
    except (OSError, RuntimeError):  # the cache is optional
        segmenter.tmp_dir = os.devnull  # not a folder, so nothing is cached
    library = Library("jieba", "its dictionary", lambda: segmenter)
    library.initialize()
    return library.lcut
