"""Tokenizers stored in a tokenizer.json, read by the `tokenizers` library without downloads."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import VocabularyFile, digest, find_sentinels
from megatron.tokenizer.library import Library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The entries to try as the end of a document if no tokenizer_config.json names one.
_COMMON_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face tokenizer, read from the tokenizer.json in `--tokenizer-model`.

    The flag names the file or its folder. It also accepts the name of a model, such as
    bigscience/bloom, if the model's files are already in Hugging Face's cache. Nothing is
    downloaded, and no code of a model is run.

    A tokenizer_config.json in the same folder names the special tokens. `tokenize` applies the
    post-processing that the tokenizer.json defines, which may add special tokens to a text.

    Raises:
        ConfigError: There is no such file.
        DataError: The file, or the tokenizer_config.json, is damaged.
    """

    _special_token_hint = ", or name it in a tokenizer_config.json next to --tokenizer-model"

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file and find its special tokens."""
        from tokenizers import Tokenizer as Pipeline

        path = find_file(config.tokenizer_model or "")
        file = VocabularyFile.read("--tokenizer-model", str(path))
        build = partial(Pipeline.from_str, file.text())
        self._tokenizer = Library(file, "a Hugging Face tokenizer.json", build)
        # Texts are never truncated or padded, even if the file says so.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        special = self._find_special_ids(path.with_name("tokenizer_config.json"))
        key = digest(file.data, repr(sorted(special.items())))
        size, sentinels = max(self._vocab.values()) + 1, find_sentinels(self._vocab)
        super().__init__("HuggingFaceTokenizer", key, special, size, sentinels)
        self.has_t5_sentinels = bool(sentinels)
        for text in "a0.":  # use the first text that normalization does not remove
            encoded = self._tokenizer.encode(text)
            if not all(encoded.special_tokens_mask):
                appended = encoded.special_tokens_mask[::-1].index(0)
                self.appended_ids = tuple(encoded.ids[len(encoded.ids) - appended :])
                break

    def _find_special_ids(self, path: Path) -> dict[str, int]:
        settings = {}
        if path.is_file():
            file = VocabularyFile.read("--tokenizer-model", str(path))
            settings = file.json()
            if not isinstance(settings, dict):
                raise DataError(f"{file}: expected a JSON object")
        ids = {}
        for name in ("bos", "eos", "cls", "sep", "pad", "mask"):
            entry = settings.get(f"{name}_token")
            entry = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(entry, str) and entry in self._vocab:
                ids[name] = self._vocab[entry]
        common = next(
            (self._vocab[entry] for entry in _COMMON_END_TOKENS if entry in self._vocab), None
        )
        end = ids.get("eos", common)
        return ids if end is None else {**ids, "eod": end}

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, with the file's post-processing."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the token ids of a text that spells out its special tokens, without adding any."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def tokenize_spans(self, text: str) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Return the ids from `tokenize_with_special` and their character spans, `[tokens, 2]`."""
        import numpy as np

        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, np.array(encoded.offsets, np.int64).reshape(len(encoded.ids), 2)

    def tokenize_sentences(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of each sentence, without the file's post-processing."""
        import numpy as np

        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, with special tokens spelled out."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def text_growth(self) -> int:
        """Return an upper bound on the length of a text relative to the total length of its tokens.

        Raises:
            DataError: The file's decoder uses a regular expression, which may take an unbounded
                amount of time.
        """
        decoder = self._tokenizer.attribute("decoder")
        return 2 if decoder is None else _growth(json.loads(decoder.__getstate__()))


def find_file(name: str) -> Path:
    """Return the path of the tokenizer.json for the name of a file, a folder or a cached model.

    Raises:
        ConfigError: There is no such file.
    """
    path = Path(name)
    if os.path.isdir(path):
        path /= "tokenizer.json"
    elif not os.path.exists(path):
        from huggingface_hub import try_to_load_from_cache  # offline; `tokenizers` requires it
        from huggingface_hub.utils import HFValidationError

        with contextlib.suppress(HFValidationError):
            cached_path = try_to_load_from_cache(name, "tokenizer.json")
            path = Path(cached_path) if isinstance(cached_path, str) else path
    if not os.path.isfile(path):
        raise ConfigError(
            f"--tokenizer-model {name}: there is no tokenizer.json; give a local file or folder, "
            "or the name of a model in Hugging Face's cache (nothing is downloaded; "
            "`hf download NAME tokenizer.json tokenizer_config.json` fills the cache)"
        )
    return path


def _growth(decoder: dict[str, Any]) -> int:
    """Return the factor by which a decoder may increase the length of a text, at least 2.

    The factor also bounds the decoder's time. For a sequence of decoders, it is the product of
    their factors.
    """
    if decoder["type"] == "Sequence":
        return math.prod(map(_growth, decoder["decoders"]))
    if decoder["type"] != "Replace":
        return 2
    if "String" not in decoder["pattern"]:
        raise DataError(
            "the decoder in --tokenizer-model replaces a regular expression, which may take an "
            "unbounded amount of time: give a tokenizer.json whose decoder replaces only fixed "
            "strings"
        )
    # At each position of the text, the search for a fixed string may compare its whole length.
    return 1 + max(len(decoder["content"]), len(decoder["pattern"]["String"]))
