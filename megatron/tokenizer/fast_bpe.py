"""Encoders for byte-level BPE in bulk: gigatoken where it is installed, else tiktoken.

Both give GPT-2's ids. On one core gigatoken reaches about 150 MB/s, tiktoken 10 MB/s.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron.tokenizer import rank_cache
from megatron.tokenizer.byte_level import byte_of_character

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Contractions, words, numbers, punctuation (each with the space before it), then white space.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# gigatoken remembers every distinct word for good: about 20 MB after 75 MB of English, but eight
# times the input for random letters. Starting over costs 0.2 s, 5% at this interval.
_FORGET_AFTER = 256 << 20


class Encoder(Protocol):
    """Turns texts into ids."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""


def build_encoder(vocab: Mapping[str, int], merges: Sequence[str], end: int, key: str) -> Encoder:
    """The fastest encoder that is installed; kept compiled where it can be.

    Args:
        vocab: entry in GPT-2's spelling of bytes to id.
        merges: lines `left right`, first merge first.
        end: id that ends a document.
        key: digest of all three.
    """
    if importlib.util.find_spec("gigatoken") is None:
        return TiktokenEncoder(vocab, merges)
    from gigatoken.gigatoken_rs import load_hf_json

    encoder = GigatokenEncoder(partial(load_hf_json, _tokenizer_json(vocab, merges)))
    rank_cache.store(key, vocab, merges, end, encoder.backend)
    return encoder


class CompiledEncoder(NamedTuple):
    """An encoder with the size of its vocabulary and the id that ends a document."""

    encoder: Encoder
    vocab_size: int
    end: int


def compiled_encoder(key: str) -> CompiledEncoder | None:
    """What an earlier `build_encoder` with this key compiled, or None."""
    found = rank_cache.find(key) if importlib.util.find_spec("gigatoken") is not None else None
    if found is None:
        return None
    encoder = GigatokenEncoder(partial(rank_cache.load, found.path))
    return CompiledEncoder(encoder, found.vocab_size, found.end)


class GigatokenEncoder:
    """gigatoken over GPT-2's split; safe to call from several threads, one at a time.

    Args:
        load: makes a fresh encoder.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._characters = 0
        self.backend = load()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""
        with self._lock:
            if self._characters > _FORGET_AFTER:
                self.backend = self._load()
                self._characters = 0
            self._characters += sum(map(len, texts))
            encode = self.backend.encode
            return [encode(text) for text in texts]


class TiktokenEncoder:
    """tiktoken over the same merges: its ranks are positions of merges, so ids are looked up."""

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[str]) -> None:
        import numpy as np
        import tiktoken

        table = byte_of_character()
        ranks = {bytes([byte]): rank for rank, byte in enumerate(table.values())}
        ids = [vocab[character] for character in table]
        for merge in merges:
            entry = merge.replace(" ", "")
            piece = bytes(table[character] for character in entry)
            if ranks.setdefault(piece, len(ranks)) == len(ids):
                ids.append(vocab[entry])
        self._ids = np.array(ids, np.uint32)
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of each text."""
        return [self._ids[self._encoding.encode_ordinary(text)] for text in texts]


def _tokenizer_json(vocab: Mapping[str, int], merges: Sequence[str]) -> bytes:
    """The tokenizer in the tokenizer.json format, without special tokens."""
    import orjson

    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": merges,
    }
    return orjson.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )
