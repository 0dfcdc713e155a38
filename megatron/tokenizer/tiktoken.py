"""tiktoken's rank files, and JSON vocabularies in the format of Mistral's Tekken."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import ByteTokenizer
from megatron.tokenizer.fast_bpe import GPT2_SPLIT
from megatron.tokenizer.files import VocabularyFile, digest
from megatron.tokenizer.library import Library

_END = "<|endoftext|>"
_TEKKEN_SPECIAL = ("<unk>", "<s>", "</s>")
_TEKKEN_VOCAB_SIZE = 1 << 17
_END_TOKENS = (_END, "<|end_of_text|>", "</s>", "<eos>")

# The pattern that splits text into words, for each value of --tiktoken-pattern.
SPLITS: Mapping[str, str] = {
    "gpt2": GPT2_SPLIT,
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "v1": (r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
# The split and the special tokens of OpenAI's own files, which are recognized by their names.
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_KNOWN_FILES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "r50k_base": ("gpt2", {_END: 50256}),
    "cl100k_base": ("cl100k", {_END: 100257, **_FIM, "<|endofprompt|>": 100276}),
}


# The pieces, special tokens and split pattern that tiktoken needs, and the vocabulary size.
_Definition = tuple[dict[bytes, int], dict[str, int], str, int]


class TikTokenizer(ByteTokenizer):
    """A byte-level BPE, read from a file in tiktoken's or Tekken's format.

    `--tokenizer-model` is a rank file (base64 lines) or a Tekken-style .json. In a rank file, the
    ranks are the token ids. r50k_base and cl100k_base are recognized by their file names. For any
    other file, text is split by the pattern `cl100k` (or `--tiktoken-pattern`), and the special
    tokens (`--tokenizer-special-tokens`, by default `<|endoftext|>`) follow the last rank.

    In a Tekken JSON file, `--tiktoken-num-special-tokens` special ids come first (`<unk>`, `<s>`,
    `</s>` and placeholders), followed by as many pieces as fit into `--vocab-size` (default
    131072). The split pattern is `v2` unless `--tiktoken-pattern` is given.

    Raises:
        ConfigError: The flags do not match the file.
        DataError: The file is missing or damaged.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file and find its special tokens."""
        import tiktoken

        file = VocabularyFile.read("--tokenizer-model", config.tokenizer_model)
        reader = _read_tekken if file.path.endswith(".json") else _read_ranks
        ranks, special, split, size = reader(config, file)
        build = partial(
            tiktoken.Encoding,
            file.path,
            pat_str=SPLITS[split],
            mergeable_ranks=ranks,
            special_tokens=special,
        )
        self._encoding = Library(file, "a rank file or Tekken json", build)
        self._ranks, self._special_tokens = ranks, special
        self._used_ids = frozenset((*ranks.values(), *special.values()))
        ids = {name: special[t] for name, t in (("bos", "<s>"), ("eos", "</s>")) if t in special}
        ids["eod"] = next((special[t] for t in _END_TOKENS if t in special), min(special.values()))
        key = digest(file.data, split, repr(sorted(special.items())), str(size))
        super().__init__("TikTokenizer", key, ids, size)

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        """The map from pieces, with non-UTF-8 bytes escaped, and special tokens to ids."""
        pieces = {p.decode("utf-8", "backslashreplace"): i for p, i in self._ranks.items()}
        return {**pieces, **self._special_tokens}

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, treating special tokens in it as ordinary text."""
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def bytes_of(self, index: int) -> bytes:
        """Return the bytes that a token id stands for."""
        piece: bytes = self._encoding.decode_single_token_bytes(index)
        return piece

    @property
    def special_texts(self) -> Mapping[str, int]:
        """The map from special tokens to their ids."""
        return self._special_tokens

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, skipping unused ids."""
        text: str = self._encoding.decode([int(i) for i in ids if int(i) in self._used_ids])
        return text


def _read_ranks(config: TokenizerConfig, file: VocabularyFile) -> _Definition:
    """Parse a rank file, which has a line `base64 rank` for each piece."""
    ranks: dict[bytes, int] = {}
    for index, line in enumerate(file.data.splitlines()):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError:  # or binascii.Error, which is a ValueError
            raise DataError(
                f"{file}:{index + 1}: expected a line `base64 rank` (or a file that ends in "
                f".json), found {line[:40]!r}"
            ) from None
    _check_bytes(file, ranks)
    split, special = _KNOWN_FILES.get(Path(file.path).stem, ("cl100k", {}))
    if config.tokenizer_special_tokens or not special:
        first = max(ranks.values()) + 1
        names = config.tokenizer_special_tokens or (_END,)
        special = {name: first + i for i, name in enumerate(names)}
    size = max(*ranks.values(), *special.values()) + 1
    return ranks, dict(special), config.tiktoken_pattern or split, size


def _read_tekken(config: TokenizerConfig, file: VocabularyFile) -> _Definition:
    """Parse a list of {rank, token_bytes, token_str}, or an object whose `vocab` is such a list."""
    entries = file.json()
    entries = entries.get("vocab") if isinstance(entries, dict) else entries
    size = config.vocab_size or _TEKKEN_VOCAB_SIZE
    reserved = config.tiktoken_num_special_tokens
    special = _tekken_special(config, reserved)
    if not reserved < size:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {reserved} leaves no room for pieces in --vocab-size "
            f"{size}: give fewer special tokens or a larger vocabulary"
        )
    ranks: dict[bytes, int] = {}
    try:
        for position, entry in enumerate((entries or [])[: size - reserved]):
            if entry["rank"] != position:
                raise ValueError(f"entry {position} has rank {entry['rank']}")
            ranks[base64.b64decode(entry["token_bytes"], validate=True)] = reserved + position
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{file}: expected a list of objects with rank (0, 1, 2 ...), token_bytes and "
            f"token_str ({error})"
        ) from error
    if len(ranks) + reserved != size:
        raise ConfigError(
            f"{file} has {len(ranks)} distinct pieces, which together with {reserved} special "
            f"tokens do not add up to --vocab-size {size}: give --vocab-size "
            f"{len(ranks) + reserved}"
        )
    _check_bytes(file, ranks)
    return ranks, special, config.tiktoken_pattern or "v2", size


def _tekken_special(config: TokenizerConfig, reserved: int) -> dict[str, int]:
    names = list(config.tokenizer_special_tokens or _TEKKEN_SPECIAL)
    if not set(_TEKKEN_SPECIAL) <= set(names) or not len(set(names)) == len(names) <= reserved:
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(names)}: give {' '.join(_TEKKEN_SPECIAL)}, each "
            f"once, and at most {reserved} tokens in total (--tiktoken-num-special-tokens)"
        )
    names += [f"<SPECIAL_{i}>" for i in range(len(names), reserved)]
    return {name: i for i, name in enumerate(names)}


def _check_bytes(file: VocabularyFile, ranks: Mapping[bytes, int]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{file}: no piece for byte {missing[0]} ({len(missing)} bytes are missing); a rank "
            "file has pieces for all 256 bytes: this one is truncated or in another format"
        )
