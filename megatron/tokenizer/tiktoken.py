"""tiktoken's rank files, and JSON vocabularies in the style of Mistral's Tekken."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fast_bpe import GPT2_SPLIT
from megatron.tokenizer.files import digest, parse_json, read_bytes

_END = "<|endoftext|>"
_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_TEKKEN_SPECIAL = ("<unk>", "<s>", "</s>")
_TEKKEN_VOCAB_SIZE = 1 << 17
_ENDS = (_END, "<|end_of_text|>", "</s>", "<eos>")

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
_KNOWN_FILES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "r50k_base": ("gpt2", {_END: 50256}),
    "cl100k_base": (
        "cl100k",
        {_END: 100257, **{t: 100258 + i for i, t in enumerate(_FIM)}, "<|endofprompt|>": 100276},
    ),
}


class _Definition(NamedTuple):
    """The pieces, special tokens and split that tiktoken needs, and the vocabulary size."""

    ranks: dict[bytes, int]
    special: dict[str, int]
    split: str
    vocab_size: int


class TikTokenizer(Tokenizer):
    """TikTokenizer: `--tokenizer-model` is a rank file (base64 lines) or a Tekken-style .json.

    In a rank file, the ranks are the ids. r50k_base and cl100k_base are recognized by name. Any
    other file gets the `cl100k` split (or `--tiktoken-pattern`) and `--tokenizer-special-tokens`
    (default `<|endoftext|>`) after the last rank.
    In a Tekken json, `--tiktoken-num-special-tokens` special ids come first (`<unk> <s> </s>` and
    fillers), followed by as many pieces as `--vocab-size` (default 131072) leaves room for. The
    split is `v2` unless `--tiktoken-pattern` is given.

    Raises:
        ConfigError: The flags do not fit the file.
        DataError: The file is missing or damaged.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file and find its special tokens."""
        import tiktoken

        assert config.tokenizer_model is not None
        path = config.tokenizer_model
        data = read_bytes("--tokenizer-model", path)
        read = _read_tekken if path.endswith(".json") else _read_ranks
        ranks, special, split, self._vocab_size = read(config, data)
        self._encoding = tiktoken.Encoding(
            Path(path).stem, pat_str=SPLITS[split], mergeable_ranks=ranks, special_tokens=special
        )
        self._ranks, self._special_tokens = ranks, special
        self._used_ids = frozenset((*ranks.values(), *special.values()))
        ids = {name: special[t] for name, t in (("bos", "<s>"), ("eos", "</s>")) if t in special}
        end = next((special[t] for t in _ENDS if t in special), min(special.values()))
        super().__init__(
            "TikTokenizer",
            digest(data, split, repr(sorted(special.items())), str(self._vocab_size)),
            {**ids, "eod": end},
        )

    @property
    def vocab_size(self) -> int:
        """The number of ids, special tokens included."""
        return self._vocab_size

    @property
    def vocab(self) -> Mapping[str, int]:
        """The map from pieces to ids, special tokens included; non-UTF-8 bytes are escaped."""
        pieces = {p.decode("utf-8", "backslashreplace"): i for p, i in self._ranks.items()}
        return {**pieces, **self._special_tokens}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text; special tokens in it are ordinary text."""
        return self._encoding.encode_ordinary(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without unused ids."""
        return self._encoding.decode([int(i) for i in ids if int(i) in self._used_ids])


def _read_ranks(config: TokenizerConfig, data: bytes) -> _Definition:
    """Read lines `base64 rank`."""
    assert config.tokenizer_model is not None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"--tokenizer-model {config.tokenizer_model}:{number + 1}: expected a line "
                f"`base64 rank` (or a file that ends in .json), found {line[:40]!r}"
            ) from None
    _check_bytes(config.tokenizer_model, ranks)
    split, special = _KNOWN_FILES.get(Path(config.tokenizer_model).stem, ("cl100k", {}))
    if config.tokenizer_special_tokens or not special:
        first = max(ranks.values()) + 1
        names = config.tokenizer_special_tokens or (_END,)
        special = {name: first + i for i, name in enumerate(names)}
    size = max(*ranks.values(), *special.values()) + 1
    return _Definition(ranks, dict(special), config.tiktoken_pattern or split, size)


def _read_tekken(config: TokenizerConfig, data: bytes) -> _Definition:
    """Read a list of {rank, token_bytes, token_str}, or an object that holds it as `vocab`."""
    path = config.tokenizer_model
    assert path is not None
    entries = parse_json("--tokenizer-model", path, data)
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
            f"--tokenizer-model {path}: expected a list of objects with rank (0, 1, 2 ...), "
            f"token_bytes and token_str ({error})"
        ) from error
    if len(ranks) + reserved != size:
        raise ConfigError(
            f"--tokenizer-model {path} has {len(ranks)} distinct pieces; with {reserved} special "
            f"tokens these do not make --vocab-size {size}: give --vocab-size "
            f"{len(ranks) + reserved}"
        )
    _check_bytes(path, ranks)
    return _Definition(ranks, special, config.tiktoken_pattern or "v2", size)


def _tekken_special(config: TokenizerConfig, reserved: int) -> dict[str, int]:
    names = list(config.tokenizer_special_tokens or _TEKKEN_SPECIAL)
    missing = [name for name in _TEKKEN_SPECIAL if name not in names]
    if missing or len(set(names)) != len(names) or len(names) > reserved:
        raise ConfigError(
            f"--tokenizer-special-tokens {' '.join(names)}: give {' '.join(_TEKKEN_SPECIAL)}, each "
            f"once, and at most {reserved} tokens in total (--tiktoken-num-special-tokens)"
        )
    names += [f"<SPECIAL_{i}>" for i in range(len(names), reserved)]
    return {name: i for i, name in enumerate(names)}


def _check_bytes(path: str, ranks: Mapping[bytes, Any]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"--tokenizer-model {path}: no piece for byte {missing[0]} ({len(missing)} bytes are "
            "missing); a rank file has all 256 bytes: this one is truncated or of another kind"
        )
