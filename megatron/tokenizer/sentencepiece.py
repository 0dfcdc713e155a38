"""SentencePiece models, in the three ways Megatron-LM uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import VocabularyFile, digest, extra_ids, find_sentinels
from megatron.tokenizer.library import Library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A field of a model's file, of which the last one counts: no space is put before texts.
_NO_PREFIX = b"\x1a\x02\x18\x00"


class GPTSentencePieceTokenizer(Tokenizer):
    """GPTSentencePieceTokenizer: the model's own pieces; `</s>` ends documents.

    `--vocab-extra-ids` appends sentinels as T5 does, the last one first. With T5's model, 100 of
    them result in T5's vocabulary.

    Raises:
        DataError: `--tokenizer-model` is missing or not a SentencePiece model.
        ConfigError: `--vocab-extra-ids` is given for a model that has its own sentinels.
    """

    _vocab: dict[str, int]

    def __init__(self, config: TokenizerConfig) -> None:
        """Load the model, and append sentinels and special tokens."""
        from sentencepiece import SentencePieceProcessor

        file = VocabularyFile.read("--tokenizer-model", config.tokenizer_model)
        make = partial(SentencePieceProcessor, model_proto=file.data)
        model = self._model = Library(file, "a SentencePiece model (.model)", make)
        self._file = file
        if _is_legacy(config.tokenizer_model):
            self.spelling = "a space after special tokens"
        self._pieces: int = model.get_piece_size()
        vocab = self._vocab = {model.id_to_piece(i): i for i in range(self._pieces)}
        own, extra = find_sentinels(vocab), extra_ids(config.vocab_extra_ids)
        self._entry_of: dict[int, str] = {}  # entries found in text in addition to the pieces
        special = self._find_special_ids(file, own, extra)
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._entry_of.values())) + ")")
        key = digest(file.data, str(len(extra)))
        sentinels = [vocab[entry] for entry in extra] or own
        super().__init__(type(self).__name__, key, special, len(vocab), sentinels)
        self.has_t5_sentinels = bool(sentinels)

    def _find_special_ids(
        self, file: VocabularyFile, own: list[int], extra: list[str]
    ) -> dict[str, int]:
        if extra and own:
            raise ConfigError(
                f"--vocab-extra-ids {len(extra)}: {file} has its own {len(own)} sentinels: drop "
                "--vocab-extra-ids"
            )
        if extra:
            self._append(extra[::-1])
        ids = self._own_ids()
        return {**ids, "eod": ids["eos"]} if "eos" in ids else ids

    def _own_ids(self) -> dict[str, int]:
        """Return the model's ids of `pad`, `bos` and `eos`, without those it lacks."""
        model = self._model
        ids = {"pad": model.pad_id(), "bos": model.bos_id(), "eos": model.eos_id()}
        return {name: index for name, index in ids.items() if index >= 0}

    def _append(self, entries: list[str]) -> None:
        """Append the entries that the model lacks, and recognize all of them in text."""
        for entry in entries:
            self._vocab.setdefault(entry, len(self._vocab))
        self._entry_of = {self._vocab[entry]: entry for entry in entries}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text, in which appended special tokens are recognized."""
        if not self._entry_of:
            whole: list[int] = self._model.encode_as_ids(text)
            return whole
        ids: list[int] = []
        # With one group, split() returns text and special tokens alternately.
        for i, part in enumerate(self._pattern.split(text)):
            ids += [self._vocab[part]] if i % 2 else self._model.encode_as_ids(part)
        return ids

    def tokenize_spelled(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are spelled out."""
        return list(self.tokenize_spans(text)[0])

    def tokenize_spans(self, text: str) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Return the ids of `tokenize_spelled`, and the characters that each stands for.

        Parts between special tokens are tokenized as by `transformers` 5: the model puts a space
        before the beginning of a text, and with `"legacy": true` in tokenizer_config.json before
        each part, unless there is one. A model that removes spaces (T5's) always puts one there.
        """
        import numpy as np

        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        begin = 0
        # With one group, split() returns text and special tokens alternately.
        for number, part in enumerate(self._spelled.split(text)):
            if number % 2:
                ids.append(self._vocab[part])
                spans.append((begin, begin + len(part)))
            elif part:
                is_prefixed = (number == 0 or bool(self.spelling)) and not part.startswith(" ")
                uses_prefix = is_prefixed or not self._keeps_spaces
                pieces = _pieces_of(self._model if uses_prefix else self._without_prefix, part)
                ids += [piece.id for piece in pieces]
                # Models that remove spaces leave out those at the beginning.
                at = begin + max(part.find("".join(piece.surface for piece in pieces)), 0)
                for piece in pieces:
                    spans.append((at, at + len(piece.surface)))
                    at += len(piece.surface)
            begin += len(part)
        bounds = np.array(spans, np.int64).reshape(-1, 2)
        starts, ends = bounds[:, 0], bounds[:, 1]
        # The bytes of a character, and a space that the model adds, stand for what follows them.
        through = np.minimum(np.searchsorted(ends, starts, "right"), max(len(ends) - 1, 0))
        return ids, np.stack([starts, ends[through]], 1)

    @cached_property
    def _keeps_spaces(self) -> bool:
        """Whether every space of a text becomes a part of a token, as in Llama's model."""
        return len(self._model.encode_as_ids("   ")) > 0

    @cached_property
    def _without_prefix(self) -> Library:
        """The model, but without the space that it puts before texts."""
        from sentencepiece import SentencePieceProcessor

        make = partial(SentencePieceProcessor, model_proto=self._file.data + _NO_PREFIX)
        return Library(self._file, "a SentencePiece model (.model)", make)

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """A pattern of every special token, the model's own and those that are appended."""
        model = self._model
        own = (i for i in range(self._pieces) if model.is_control(i) or model.is_unknown(i))
        entries = {*map(model.id_to_piece, own), *self._entry_of.values()}
        return re.compile("(" + "|".join(map(re.escape, sorted(entries, key=len)[::-1])) + ")")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; padding ids outside the vocabulary are left out.

        Appended special tokens are included, with spaces around them.
        """
        if not self._entry_of:
            ids = [int(i) for i in ids if int(i) < self._pieces]
            plain: str = self._model.decode_ids(ids)
            return plain
        text = ""
        pending: list[int] = []
        for i in map(int, ids):
            if i in self._entry_of:
                text += f"{self._model.decode_ids(pending)} {self._entry_of[i]} "
                pending = []
            elif i < self._pieces:
                pending.append(i)
        return f"{text}{self._model.decode_ids(pending)}"


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """Llama2Tokenizer: GPTSentencePieceTokenizer with `<s>` before each text.

    Raises:
        DataError: The model has no begin token.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Load the model and check that it has a begin token."""
        super().__init__(config)
        if self._model.bos_id() < 0:
            raise DataError(
                f"--tokenizer-model {config.tokenizer_model} has no begin token, which "
                "Llama2Tokenizer puts before each text: use GPTSentencePieceTokenizer"
            )

    def tokenize(self, text: str) -> list[int]:
        """Return `<s>` and the ids of one text, without an end token."""
        return [self.bos, *super().tokenize(text)]


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """SentencePieceTokenizer: the model's pieces and Megatron's tokens for BERT and T5.

    `<CLS> <SEP> <EOD> <MASK>` and the padding, begin and end tokens are appended if the model lacks
    them, followed by the `--vocab-extra-ids` sentinels in order. All are recognized in text.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Load the model, and append sentinels and special tokens."""
        super().__init__(config)
        if config.vocab_extra_ids:  # these are Megatron's sentinels
            self.has_t5_sentinels = False

    def _find_special_ids(
        self, file: VocabularyFile, own: list[int], extra: list[str]
    ) -> dict[str, int]:
        names = ("cls", "sep", "eod", "mask", "pad", "bos", "eos")
        entries = {name: f"<{name.upper()}>" for name in names}
        entries |= {name: self._model.id_to_piece(i) for name, i in self._own_ids().items()}
        self._append([*entries.values(), *extra])
        return {name: self._vocab[entry] for name, entry in entries.items()}


def _is_legacy(tokenizer_model: str | None) -> bool:
    """Return whether the model also puts a space before text that follows a special token."""
    path = Path(tokenizer_model or "").parent / "tokenizer_config.json"
    if not path.is_file():
        return False
    settings = VocabularyFile.read("--tokenizer-model", str(path)).json()
    return isinstance(settings, dict) and settings.get("legacy") is True


def _pieces_of(model: Library, text: str) -> Sequence[Any]:
    """Return the pieces of a text, each with its `id` and the text that it stands for, `surface`.

    The method has another name before sentencepiece 0.2.2.
    """
    from sentencepiece import SentencePieceProcessor

    is_new = hasattr(SentencePieceProcessor, "encode_as_proto")
    encode = model.encode_as_proto if is_new else model.encode_as_immutable_proto
    pieces: Sequence[Any] = encode(text).pieces
    return pieces
