"""SentencePiece models, with Megatron-LM's three conventions for special tokens."""

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

# The field of a model file that means "put no space before a text". The last such field wins.
_NO_PREFIX = b"\x1a\x02\x18\x00"


class GPTSentencePieceTokenizer(Tokenizer):
    """A tokenizer with the pieces of a SentencePiece model. `</s>` ends documents.

    `--vocab-extra-ids` appends sentinels as T5 does, in descending order. Appending 100 of them to
    T5's model gives T5's vocabulary.

    Raises:
        DataError: `--tokenizer-model` is missing or not a SentencePiece model, or a
            tokenizer_config.json in its folder cannot be read or is not JSON.
        ConfigError: `--vocab-extra-ids` is given for a model that has its own sentinels.
    """

    _vocab: dict[str, int]

    def __init__(self, config: TokenizerConfig) -> None:
        """Load the model, and append sentinels and special tokens."""
        from sentencepiece import SentencePieceProcessor

        file = VocabularyFile.read("--tokenizer-model", config.tokenizer_model)
        build = partial(SentencePieceProcessor, model_proto=file.data)
        model = self._model = Library(file, "a SentencePiece model (.model)", build)
        self._file = file
        settings_path = Path(config.tokenizer_model or "").parent / "tokenizer_config.json"
        if settings_path.is_file():
            settings = VocabularyFile.read("--tokenizer-model", str(settings_path)).json()
            if isinstance(settings, dict) and settings.get("legacy") is True:
                self.special_spacing = "a space after special tokens"
        # Whether tokens preserve every space of a text, as in Llama's model.
        self._keeps_spaces = bool(model.encode_as_ids("   "))
        self._num_pieces: int = model.get_piece_size()
        vocab = self._vocab = {model.id_to_piece(i): i for i in range(self._num_pieces)}
        model_sentinels, extra_sentinels = find_sentinels(vocab), extra_ids(config.vocab_extra_ids)
        self._appended_entries: dict[int, str] = {}  # entries recognized in text, by id
        special = self._find_special_ids(file, model_sentinels, extra_sentinels)
        self._appended_pattern = re.compile(
            "(" + "|".join(map(re.escape, self._appended_entries.values())) + ")"
        )
        key = digest(file.data, str(len(extra_sentinels)))
        sentinels = [vocab[entry] for entry in extra_sentinels] or model_sentinels
        super().__init__(type(self).__name__, key, special, len(vocab), sentinels)
        self.has_t5_sentinels = bool(sentinels)

    def _find_special_ids(
        self, file: VocabularyFile, model_sentinels: list[int], extra_sentinels: list[str]
    ) -> dict[str, int]:
        if extra_sentinels and model_sentinels:
            raise ConfigError(
                f"--vocab-extra-ids {len(extra_sentinels)}: {file} has its own "
                f"{len(model_sentinels)} sentinels: drop --vocab-extra-ids"
            )
        if extra_sentinels:
            self._append(extra_sentinels[::-1])
        ids = self._model_special_ids()
        return {**ids, "eod": ids["eos"]} if "eos" in ids else ids

    def _model_special_ids(self) -> dict[str, int]:
        """Return the ids of the model's `pad`, `bos` and `eos` tokens, except any that it lacks."""
        model = self._model
        ids = {"pad": model.pad_id(), "bos": model.bos_id(), "eos": model.eos_id()}
        return {name: index for name, index in ids.items() if index >= 0}

    def _append(self, entries: list[str]) -> None:
        """Add entries that the vocabulary lacks, and recognize all of the entries in text."""
        for entry in entries:
            self._vocab.setdefault(entry, len(self._vocab))
        self._appended_entries = {self._vocab[entry]: entry for entry in entries}

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, recognizing appended special tokens."""
        if not self._appended_entries:
            plain: list[int] = self._model.encode_as_ids(text)
            return plain
        ids: list[int] = []
        # With one group, split() returns text and special tokens alternately.
        for i, part in enumerate(self._appended_pattern.split(text)):
            ids += [self._vocab[part]] if i % 2 else self._model.encode_as_ids(part)
        return ids

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the token ids of a text that spells out its special tokens, without adding any."""
        return list(self.tokenize_spans(text)[0])

    def tokenize_spans(self, text: str) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Return the ids from `tokenize_with_special` and their character spans, `[tokens, 2]`.

        The segments between special tokens are tokenized as in `transformers` 5. The model puts a
        space before the text unless it already begins with one. If tokenizer_config.json has
        `"legacy": true`, the model does the same for every segment. A model that removes spaces,
        such as T5's, always puts a space before each segment.
        """
        import numpy as np

        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        begin = 0
        # With one group, split() returns text and special tokens alternately.
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                ids.append(self._vocab[part])
                spans.append((begin, begin + len(part)))
            elif part:
                may_prefix = index == 0 or bool(self.special_spacing)
                is_prefixed = may_prefix and not part.startswith(" ")
                uses_prefix = is_prefixed or not self._keeps_spaces
                pieces = _pieces_of(self._model if uses_prefix else self._without_prefix, part)
                ids += [piece.id for piece in pieces]
                # Models that remove spaces omit leading spaces.
                position = begin + max(part.find("".join(piece.surface for piece in pieces)), 0)
                for piece in pieces:
                    spans.append((position, position + len(piece.surface)))
                    position += len(piece.surface)
            begin += len(part)
        bounds = np.array(spans, np.int64).reshape(len(spans), 2)
        starts, ends = bounds[:, 0], bounds[:, 1]
        # A token for one byte of a character, or for a space that the model added, covers no
        # characters. Its span ends where that of the next token with characters ends.
        covering = np.minimum(np.searchsorted(ends, starts, "right"), len(ends) - 1)
        return ids, np.stack([starts, ends[covering]], 1)

    @cached_property
    def _without_prefix(self) -> Library:
        """The same model without the space that it puts before a text."""
        from sentencepiece import SentencePieceProcessor

        build = partial(SentencePieceProcessor, model_proto=self._file.data + _NO_PREFIX)
        return Library(self._file, "a SentencePiece model (.model)", build)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """A pattern that matches every special token, both the model's own and appended ones."""
        model = self._model
        special_ids = (
            i for i in range(self._num_pieces) if model.is_control(i) or model.is_unknown(i)
        )
        entries = {*map(model.id_to_piece, special_ids), *self._appended_entries.values()}
        return re.compile("(" + "|".join(map(re.escape, sorted(entries, key=len)[::-1])) + ")")

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, skipping ids outside the vocabulary.

        Appended special tokens are included, with spaces around them.
        """
        if not self._appended_entries:
            ids = [int(i) for i in ids if int(i) < self._num_pieces]
            plain: str = self._model.decode_ids(ids)
            return plain
        text = ""
        pending: list[int] = []
        for i in map(int, ids):
            if i in self._appended_entries:
                text += f"{self._model.decode_ids(pending)} {self._appended_entries[i]} "
                pending = []
            elif i < self._num_pieces:
                pending.append(i)
        return f"{text}{self._model.decode_ids(pending)}"


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A GPTSentencePieceTokenizer that puts `<s>` before each text.

    As in Megatron-LM, it also puts `<s>` before each sentence (`tokenize_sentences`), and thus
    before each part of a text for fill-in-the-middle.

    Raises:
        DataError: The model has no beginning-of-sequence token, or `GPTSentencePieceTokenizer`
            rejects it.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Load the model and check that it has a beginning-of-sequence token."""
        super().__init__(config)
        if self._model.bos_id() < 0:
            raise DataError(
                f"--tokenizer-model {config.tokenizer_model} has no begin token, which "
                "Llama2Tokenizer puts before each text: use GPTSentencePieceTokenizer"
            )

    def tokenize(self, text: str) -> list[int]:
        """Return `<s>` and the token ids of a text, without an end token."""
        return [self.bos, *super().tokenize(text)]


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """A tokenizer with a SentencePiece model's pieces and Megatron's tokens for BERT and T5.

    `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>` and the padding, beginning-of-sequence and end-of-sequence
    tokens are appended if the model lacks them, followed by the `--vocab-extra-ids` sentinels in
    order. All of these tokens are recognized in text.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Load the model, and append sentinels and special tokens."""
        super().__init__(config)
        if config.vocab_extra_ids:  # these are Megatron's sentinels
            self.has_t5_sentinels = False

    def _find_special_ids(
        self, file: VocabularyFile, model_sentinels: list[int], extra_sentinels: list[str]
    ) -> dict[str, int]:
        names = ("cls", "sep", "eod", "mask", "pad", "bos", "eos")
        entries = {name: f"<{name.upper()}>" for name in names}
        entries |= {
            name: self._model.id_to_piece(i) for name, i in self._model_special_ids().items()
        }
        self._append([*entries.values(), *extra_sentinels])
        return {name: self._vocab[entry] for name, entry in entries.items()}


def _pieces_of(model: Library, text: str) -> Sequence[Any]:
    """Return the pieces of a text, each with its `id` and the text that it covers (`surface`)."""
    from sentencepiece import SentencePieceProcessor

    # Versions before 0.2.2 have only the longer name.
    is_new = hasattr(SentencePieceProcessor, "encode_as_proto")
    encode = model.encode_as_proto if is_new else model.encode_as_immutable_proto
    pieces: Sequence[Any] = encode(text).pieces
    return pieces
