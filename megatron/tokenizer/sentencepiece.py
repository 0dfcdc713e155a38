"""SentencePiece models, in the three ways Megatron-LM uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import VocabularyFile, digest, extra_ids, find_sentinels
from megatron.tokenizer.library import Library


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
