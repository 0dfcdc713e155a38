"""GPT-2's byte-level BPE, defined by a vocabulary (JSON) and its merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.errors import DataError
from megatron.tokenizer.base import ByteTokenizer
from megatron.tokenizer.fast_bpe import Encoder, build_encoder, byte_of_character, compiled_encoder
from megatron.tokenizer.files import VocabularyFile, digest
from megatron.tokenizer.library import Library

_END = "<|endoftext|>"
_UNKNOWN = "\ufffd".encode()


class GPT2Tokenizer(ByteTokenizer):
    """GPT-2's byte-level BPE, read from `--vocab-file` (JSON) and `--merge-file`.

    Special tokens in a document are ordinary text: `<|endoftext|>` is split like any other word.
    In a conversation, or any text passed to `tokenize_with_special`, it is a special token.

    Raises:
        DataError: A file is missing or damaged, or the files do not belong together.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the files, and build the encoder if no compiled one is cached."""
        self._file = VocabularyFile.read("--vocab-file", config.vocab_file)
        merge_file = VocabularyFile.read("--merge-file", config.merge_file)
        key = digest(self._file.data, merge_file.data)
        self._encoder = Library(
            self._file, "GPT-2's vocab.json", partial(self._load, merge_file, key)
        )
        size, end = self._size_and_end
        super().__init__("GPT2BPETokenizer", key, {"eod": end, "eos": end}, size)

    def _load(self, merge_file: VocabularyFile, key: str) -> Encoder:
        compiled = compiled_encoder(key)
        if compiled is not None:  # the files were checked when they were compiled
            encoder, *self._size_and_end = compiled
            return encoder
        merges = _parse_merges(merge_file)
        _check(self._file, self.vocab, merge_file, merges)
        end = self.vocab[_END]
        self._size_and_end = [len(self.vocab), end]
        return build_encoder(self.vocab, merges, end, key)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The map from entries, with bytes written as in `byte_of_character`, to ids.

        The file is parsed on first use, which saves 15 ms if only a compiled encoder is needed.
        """
        vocab: dict[str, int] = self._file.json()
        return vocab

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._encoder.encode([text])[0].tolist()
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of each text."""
        arrays: list[NDArray[np.integer]] = self._encoder.encode(texts)
        return arrays

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text. Ids outside the vocabulary become U+FFFD."""
        entry_bytes = self._bytes_of_entry
        return b"".join([entry_bytes.get(int(i), _UNKNOWN) for i in ids]).decode("utf-8", "replace")

    def bytes_of(self, index: int) -> bytes:
        """Return the bytes that a token id stands for."""
        return self._bytes_of_entry[index]

    @property
    def special_texts(self) -> Mapping[str, int]:
        """The token that ends a document, and its id."""
        return {_END: self.eod}

    @cached_property
    def _bytes_of_entry(self) -> dict[int, bytes]:
        table = byte_of_character()
        # Characters outside the byte table only occur in special entries, which are plain text.
        return {
            i: b"".join(
                bytes([table[character]]) if character in table else character.encode()
                for character in entry
            )
            for entry, i in self.vocab.items()
        }


def _parse_merges(file: VocabularyFile) -> list[str]:
    """Return the merges as lines `left right`, without the version line."""
    merges = [line.rstrip("\r") for line in file.text().split("\n")]
    if merges[0].startswith("#version"):
        del merges[0]
    while merges and not merges[-1]:
        merges.pop()
    for index, line in enumerate(merges):
        if line.count(" ") != 1:
            raise DataError(
                f"{file}: merge {index + 1} is {line[:40]!r}; expected two pieces separated by a "
                "space (GPT-2's merges.txt)"
            )
    return merges


def _check(
    vocab_file: VocabularyFile, vocab: Any, merge_file: VocabularyFile, merges: list[str]
) -> None:
    """Check that the vocabulary's ids are consecutive and that no required entry is missing."""
    file = vocab_file
    if not isinstance(vocab, dict) or not all(type(index) is int for index in vocab.values()):
        raise DataError(f"{file}: expected a JSON object of entries and ids (GPT-2's vocab.json)")
    if _END not in vocab:
        raise DataError(f"{file}: there is no entry {_END}, which ends documents; add it")
    if set(vocab.values()) != set(range(len(vocab))):
        raise DataError(
            f"{file}: each id from 0 to {len(vocab) - 1} must appear exactly once; fix the file"
        )
    missing = [merge for merge in merges if merge.replace(" ", "") not in vocab]
    missing += [character for character in byte_of_character() if character not in vocab]
    if missing:
        raise DataError(
            f"{vocab_file} has no entry for {missing[0]!r}, which {merge_file} needs "
            f"({len(missing)} entries are missing); give two files of the same tokenizer"
        )
