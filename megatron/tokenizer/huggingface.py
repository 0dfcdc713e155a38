"""Tokenizers from a tokenizer.json, read by the `tokenizers` library. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import decode, digest, find_sentinels, parse_json, read_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The entries that may end a document if no tokenizer_config.json names one.
_COMMON_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")


class HuggingFaceTokenizer(Tokenizer):
    """HuggingFaceTokenizer: `--tokenizer-model` is a tokenizer.json or a folder that holds one.

    A tokenizer_config.json in the same folder names the special tokens. The file's own
    post-processing applies, so a model that begins texts with a special token gets it here too.

    Raises:
        ConfigError: There is no such file.
        DataError: The file is damaged.
    """

    _where_named = ", or name it in a tokenizer_config.json beside --tokenizer-model"

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file and find its special tokens."""
        assert config.tokenizer_model is not None
        path = Path(config.tokenizer_model)
        if path.is_dir():
            path /= "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"--tokenizer-model {config.tokenizer_model}: there is no tokenizer.json; give a "
                "local file or folder (nothing is downloaded)"
            )
        data = read_bytes("--tokenizer-model", path)
        self._tokenizer = _load(path, data)
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._sentinels = find_sentinels(self._vocab)
        special = self._find_special_ids(path.with_name("tokenizer_config.json"))
        super().__init__(
            "HuggingFaceTokenizer", digest(data, repr(sorted(special.items()))), special
        )

    def _find_special_ids(self, path: Path) -> dict[str, int]:
        flag, settings = "--tokenizer-model", {}
        if path.is_file():
            settings = parse_json(flag, path, read_bytes(flag, path))
            if not isinstance(settings, dict):
                raise DataError(f"{flag} {path}: expected a JSON object")
        ids = {}
        for name in ("bos", "eos", "cls", "sep", "pad", "mask"):
            entry = settings.get(f"{name}_token")
            entry = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(entry, str) and entry in self._vocab:
                ids[name] = self._vocab[entry]
        ends = [ids[name] for name in ("eos",) if name in ids]
        ends += [self._vocab[entry] for entry in _COMMON_ENDS if entry in self._vocab]
        return {**ids, "eod": ends[0]} if ends else ids

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included."""
        return max(self._vocab.values()) + 1

    @property
    def has_t5_sentinels(self) -> bool:
        """Whether the file has any sentinels."""
        return bool(self._sentinels)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text, after the file's post-processing."""
        return self._tokenizer.encode(text).ids

    @cached_property
    def appended_ids(self) -> tuple[int, ...]:
        """The ids that the file's post-processing appends to every text."""
        for text in "a0.":  # use the first text that normalization does not remove
            encoded = self._tokenizer.encode(text)
            if not all(encoded.special_tokens_mask):
                count = encoded.special_tokens_mask[::-1].index(0)
                return tuple(encoded.ids[len(encoded.ids) - count :])
        return ()

    def tokenize_spelled(self, text: str) -> list[int]:
        """Return the ids of a text, without the file's post-processing."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_sentences(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of parts of a text, without the file's post-processing."""
        import numpy as np

        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens spelled out."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def _load(path: Path, data: bytes) -> Any:
    from tokenizers import Tokenizer as Pipeline

    text = decode("--tokenizer-model", path, data)
    try:
        pipeline = Pipeline.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"--tokenizer-model {path}: not a tokenizer.json in Hugging Face's format ({error}): "
            "give another file"
        ) from error
    # A corpus is neither truncated nor padded, even if the file says so.
    pipeline.no_truncation()
    pipeline.no_padding()
    return pipeline
