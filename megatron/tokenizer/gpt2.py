"""GPT-2's byte-level BPE: a vocabulary (json) and the merges that build it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from megatron.config.data import TokenizerConfig
from megatron.errors import DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fast_bpe import build_encoder, byte_of_character, compiled_encoder
from megatron.tokenizer.files import decode, digest, parse_json, read_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_END = "<|endoftext|>"


class GPT2Tokenizer(Tokenizer):
    """GPT2BPETokenizer: `--vocab-file` (json) and `--merge-file`.

    Special tokens in the text are ordinary text: `<|endoftext|>` inside a document is split like
    any other word.

    Raises:
        DataError: A file is missing, damaged, or does not fit the other.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the files, and compile them if they are new."""
        assert config.vocab_file is not None
        assert config.merge_file is not None
        vocab_bytes = read_bytes("--vocab-file", config.vocab_file)
        merge_bytes = read_bytes("--merge-file", config.merge_file)
        key = digest(vocab_bytes, merge_bytes)
        self._parse_vocab = partial(parse_json, "--vocab-file", config.vocab_file, vocab_bytes)
        compiled = compiled_encoder(key)
        if compiled is not None:  # the files were checked when they were compiled
            self._encoder, self._vocab_size, end = compiled
        else:
            _check_vocab(config.vocab_file, self.vocab)
            merges = _parse_merges(config.merge_file, merge_bytes)
            _check_merges(config, self.vocab, merges)
            end, self._vocab_size = self.vocab[_END], len(self.vocab)
            self._encoder = build_encoder(self.vocab, merges, end, key)
        super().__init__("GPT2BPETokenizer", key, {"eod": end, "eos": end})

    @property
    def vocab_size(self) -> int:
        """The number of entries in the vocabulary file."""
        return self._vocab_size

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The map from entries, in GPT-2's printable spelling of bytes, to ids.

        It is parsed at first use, which saves 15 ms if a compiled vocabulary only encodes.
        """
        return self._parse_vocab()

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self._encoder.encode([text])[0].tolist()

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of many texts, one array per text."""
        return self._encoder.encode(texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; padding ids outside the vocabulary become U+FFFD."""
        entries = self.inv_vocab
        table = byte_of_character()
        # Characters outside the byte table only occur in special entries, which are plain text.
        return b"".join(
            bytes([table[character]]) if character in table else character.encode()
            for i in ids
            for character in entries.get(int(i), "\ufffd")
        ).decode("utf-8", errors="replace")


def _check_vocab(path: str, vocab: Any) -> None:
    if not isinstance(vocab, dict) or not all(type(index) is int for index in vocab.values()):
        raise DataError(
            f"--vocab-file {path}: expected a JSON object of entries and their ids (GPT-2's "
            "vocab.json)"
        )
    if _END not in vocab:
        raise DataError(
            f"--vocab-file {path}: there is no entry {_END}, which ends documents; add it"
        )
    if set(vocab.values()) != set(range(len(vocab))):
        raise DataError(
            f"--vocab-file {path}: the ids must be 0 to {len(vocab) - 1}, each once; fix the file"
        )


def _parse_merges(path: str, data: bytes) -> list[str]:
    """Return the lines `left right`, without the version line."""
    lines = decode("--merge-file", path, data).split("\n")
    if lines and lines[0].startswith("#version"):
        lines = lines[1:]
    merges = [line.rstrip("\r") for line in lines]
    while merges and not merges[-1]:
        merges.pop()
    for number, line in enumerate(merges):
        if line.count(" ") != 1:
            raise DataError(
                f"--merge-file {path}: merge {number + 1} is {line[:40]!r}, expected two pieces "
                "separated by a space (GPT-2's merges.txt)"
            )
    return merges


def _check_merges(config: TokenizerConfig, vocab: dict[str, int], merges: list[str]) -> None:
    missing = [merge for merge in merges if merge.replace(" ", "") not in vocab]
    missing += [character for character in byte_of_character() if character not in vocab]
    if missing:
        raise DataError(
            f"--vocab-file {config.vocab_file} has no entry for {missing[0]!r}, which "
            f"--merge-file {config.merge_file} needs ({len(missing)} entries are missing); "
            "give two files of the same tokenizer"
        )
