"""The tokenizer of the Yuan models: Chinese word segmentation, then the longest pieces."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.environment import private_cache
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import VocabularyFile, digest
from megatron.tokenizer.library import Library

_UNKNOWN, _SPACE, _NEWLINE, _CONTINUES = "<unk>", "\u2582", "\u2583", "##"
_WHITE = str.maketrans(" \n", _SPACE + _NEWLINE)
_SPECIAL = {
    "bos": "<s>",
    "eos": "</s>",
    "sep": "<sep>",
    "pad": "<pad>",
    "mask": "<mask>",
    "eod": "<eod>",
}
_REQUIRED = (_UNKNOWN, "<pad>", "<eod>", _SPACE, _NEWLINE)
_LONGEST_WORD = 200  # characters; a longer word is unknown
_WORDS = 1 << 16  # words whose ids are cached


class EncDecTokenizer(Tokenizer):
    """EncDecTokenizer of Yuan 1.0: `--vocab-file` has one entry per line, 53,228 in Yuan's own.

    jieba cuts a text into words, and each word becomes the longest entries from left to right. An
    entry without a Chinese character that is not at the start of a word begins with `##`. Spaces
    are the entry U+2582, and are left out between two entries without Chinese characters. Newlines,
    and `<n>` in the text, are the entry U+2583.

    Raises:
        DataError: The file is not such a vocabulary.
        ConfigError: jieba is not installed.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the vocabulary and jieba's dictionary."""
        file = VocabularyFile.read("--vocab-file", config.vocab_file)
        vocab = self._vocab = _parse_vocab(file)
        self._cut = _segmenter()
        self._space = vocab[_SPACE]
        self._is_latin = [not _has_chinese(entry) and entry != _SPACE for entry in vocab]
        # Words repeat, and looking a word up takes a twentieth of the time of matching its pieces.
        self._ids_of = lru_cache(_WORDS)(self._match)
        special = {name: vocab[entry] for name, entry in _SPECIAL.items() if entry in vocab}
        count = next(i for i in range(len(vocab) + 1) if f"<s_{i}>" not in vocab)
        sentinels = [vocab[f"<s_{i}>"] for i in range(count)]
        super().__init__("EncDecTokenizer", digest(file.data), special, len(vocab), sentinels)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text."""
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
        """Return the ids of a word's longest entries, from left to right."""
        if len(word) > _LONGEST_WORD:
            return (self._vocab[_UNKNOWN],)
        ids, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end]
                if start and not _has_chinese(piece):
                    piece = _CONTINUES + piece
                if piece in self._vocab:
                    break
            else:
                piece, end = _UNKNOWN, start + 1
            ids.append(self._vocab[piece])
            start = end
        return tuple(ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with a space between two words without Chinese characters."""
        return "".join(self._spelled([int(i) for i in ids])).translate(
            str.maketrans(_SPACE + _NEWLINE, " \n")
        )

    def _spelled(self, ids: Sequence[int]) -> Iterator[str]:
        entries, latin = self.inv_vocab, self._is_latin
        before = False  # whether the entry before has no Chinese character
        for index in ids:
            entry = entries.get(index, _UNKNOWN)
            is_latin = entry != _NEWLINE and (index not in entries or latin[index])
            if before and entry.startswith(_CONTINUES):
                yield entry[len(_CONTINUES) :]
            else:
                yield f" {entry}" if before and is_latin else entry
            before = is_latin


def _has_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def _parse_vocab(file: VocabularyFile) -> dict[str, int]:
    vocab = file.entries()
    missing = [entry for entry in _REQUIRED if entry not in vocab]
    if missing:
        raise DataError(
            f"{file}: no entry {', '.join(missing)}; give the vocabulary of a Yuan model (text, "
            "one entry per line)"
        )
    return vocab


@lru_cache(1)
def _segmenter() -> Any:
    """Return jieba's function that cuts a text into words.

    Raises:
        ConfigError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise ConfigError(
            "--tokenizer-type EncDecTokenizer needs jieba: pip install jieba"
        ) from error
    jieba.setLogLevel(logging.WARNING)
    segmenter = jieba.Tokenizer()
    # jieba caches its dictionary as a file of Python objects, by default where other users may
    # write.
    segmenter.tmp_dir = str(private_cache("jieba"))
    library = Library("jieba", "its dictionary", lambda: segmenter)
    library.initialize()
    return partial(library.lcut, cut_all=False)
