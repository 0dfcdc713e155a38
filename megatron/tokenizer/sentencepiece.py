"""SentencePiece models, in the three ways Megatron-LM uses them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import digest, read_bytes
from megatron.tokenizer.vocabulary import append_entries, extra_ids, find_sentinels

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


class GPTSentencePieceTokenizer(Tokenizer):
    """GPTSentencePieceTokenizer: the model's own pieces; `</s>` ends documents.

    `--vocab-extra-ids` appends sentinels as T5 does, the last one first: to T5's model 100, which
    makes T5's vocabulary.

    Raises:
        DataError: `--tokenizer-model` is missing or no SentencePiece model.
        ConfigError: sentinels are to be appended to a model that has its own.
    """

    kind_name = "GPTSentencePieceTokenizer"

    def __init__(self, config: TokenizerConfig) -> None:
        assert config.tokenizer_model is not None
        data = read_bytes("--tokenizer-model", config.tokenizer_model)
        self._model = _load(config.tokenizer_model, data)
        self._vocab = {self._model.id_to_piece(i): i for i in range(len(self._model))}
        self._own_sentinels = find_sentinels(self._vocab)
        self._sentinels = self._own_sentinels
        self._entry_of: dict[int, str] = {}  # what is found in the text beside the model's pieces
        special = self._find_special_ids(config)
        self._pattern = re.compile("(" + "|".join(map(re.escape, self._entry_of.values())) + ")")
        super().__init__(self.kind_name, digest(data, str(config.vocab_extra_ids)), special)

    def _find_special_ids(self, config: TokenizerConfig) -> dict[str, int]:
        model, count = self._model, config.vocab_extra_ids
        if count and self._own_sentinels:
            raise ConfigError(
                f"--vocab-extra-ids {count}: --tokenizer-model {config.tokenizer_model} has its "
                f"own {len(self._own_sentinels)} sentinels: drop it"
            )
        if count:
            self._append(extra_ids(count)[::-1])
            self._sentinels = find_sentinels(self._vocab)
        ids = {"bos": model.bos_id(), "eos": model.eos_id(), "pad": model.pad_id()}
        # -1 is SentencePiece's "there is none".
        return {name: i for name, i in {**ids, "eod": model.eos_id()}.items() if i >= 0}

    def _append(self, entries: list[str]) -> None:
        """Those that the model lacks; all are found in the text."""
        append_entries(self._vocab, entries)
        self._entry_of = {self._vocab[entry]: entry for entry in entries}

    @property
    def vocab_size(self) -> int:
        """Pieces of the model, and appended special tokens where there are any."""
        return len(self._vocab)

    @property
    def vocab(self) -> Mapping[str, int]:
        """Piece to id (U+2581 stands for a space)."""
        return self._vocab

    @property
    def has_t5_sentinels(self) -> bool:
        """Whether there are any."""
        return bool(self._sentinels)

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text; special tokens in it that were appended become their ids."""
        if not self._entry_of:
            return self._model.encode_as_ids(text)
        ids: list[int] = []
        # With one group, split() gives text and special token in turn.
        for i, part in enumerate(self._pattern.split(text)):
            ids += [self._vocab[part]] if i % 2 else self._model.encode_as_ids(part)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; padding ids above the vocabulary are left out, and special tokens that were
        appended are spelt out, with spaces around them."""
        if not self._entry_of:
            return self._model.decode_ids([int(i) for i in ids if int(i) < len(self._model)])
        text = ""
        pending: list[int] = []
        for i in map(int, ids):
            if i in self._entry_of:
                text += f"{self._model.decode_ids(pending)} {self._entry_of[i]} "
                pending = []
            elif i < len(self._model):
                pending.append(i)
        return text + self._model.decode_ids(pending)


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """Llama2Tokenizer: as GPTSentencePieceTokenizer, with `<s>` before each text."""

    kind_name = "Llama2Tokenizer"

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__(config)
        if self._model.bos_id() < 0:
            raise DataError(
                f"--tokenizer-model {config.tokenizer_model} has no begin token, which "
                "Llama2Tokenizer puts before each text: use GPTSentencePieceTokenizer"
            )

    def tokenize(self, text: str) -> list[int]:
        """`<s>` and the ids of one text; no end token."""
        return [self.bos, *super().tokenize(text)]


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """SentencePieceTokenizer: with Megatron's tokens for BERT and T5, found in the text too.

    `<CLS> <SEP> <EOD> <MASK>`, padding, begin and end are appended where the model lacks them,
    then the `--vocab-extra-ids` sentinels, in order.
    """

    kind_name = "SentencePieceTokenizer"

    def _find_special_ids(self, config: TokenizerConfig) -> dict[str, int]:
        model = self._model
        entries = {
            "cls": "<CLS>",
            "sep": "<SEP>",
            "eod": "<EOD>",
            "mask": "<MASK>",
            "pad": self._piece(model.pad_id(), "<PAD>"),
            "bos": self._piece(model.bos_id(), "<BOS>"),
            "eos": self._piece(model.eos_id(), "<EOS>"),
        }
        sentinels = extra_ids(config.vocab_extra_ids)
        self._append([*entries.values(), *sentinels])
        if sentinels:
            self._sentinels = [self._vocab[entry] for entry in sentinels]
        return {name: self._vocab[entry] for name, entry in entries.items()}

    def _piece(self, index: int, otherwise: str) -> str:
        return self._model.id_to_piece(index) if index >= 0 else otherwise

    @property
    def has_t5_sentinels(self) -> bool:
        """Whether the model has its own, and none are asked for."""
        return bool(self._sentinels) and self._sentinels is self._own_sentinels


def _load(path: str, data: bytes) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise DataError(
            f"--tokenizer-model {path}: not a SentencePiece model: give its .model file"
        ) from error
