"""What every tokenizer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Tokenizer(ABC):
    """Text to ids and back.

    Args:
        kind: the `--tokenizer-type` it was built as.
        digest: digest of everything that decides the ids (files and options).
        special_ids: ids of `eod`, `bos`, `eos`, `cls`, `sep`, `pad`, `mask`, where it has them.
    """

    _where_named = ""  # in a message: where else a special token may come from
    _sentinels: Sequence[int] = ()

    def __init__(self, kind: str, digest: str, special_ids: Mapping[str, int]) -> None:
        self.kind = kind
        self._digest = digest
        self._special_ids = dict(special_ids)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Entries, appended special tokens and extra ids included; fixes the padded vocabulary."""

    @property
    def text_vocab_size(self) -> int:
        """Entries that text can become; those behind were appended to the files' own."""
        return self.vocab_size

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""

    @property
    def appended_ids(self) -> tuple[int, ...]:
        """The ids that `tokenize` appends to every text, such as `</s>`."""
        return ()

    def tokenize_open(self, text: str) -> list[int]:
        """Return the ids of a text that will be continued or scored, without `appended_ids`."""
        ids = self.tokenize(text)
        return ids[: len(ids) - len(self.appended_ids)]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; what is not valid UTF-8 becomes U+FFFD."""

    @property
    @abstractmethod
    def vocab(self) -> Mapping[str, int]:
        """Entry to id, special tokens included."""

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id to entry."""
        return {index: entry for entry, index in self.vocab.items()}

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Ids of many texts, one array a text; the fast way where there is one."""
        import numpy as np

        return [np.array(self.tokenize(text), np.int64) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """As `tokenize_batch`, of parts of a text: with no special token around each."""
        return self.tokenize_batch(texts)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of T5's sentinels, `<extra_id_0>` first, of the vocabulary or appended to it."""
        return list(self._sentinels)

    @property
    def has_t5_sentinels(self) -> bool:
        """Whether they stand as in T5's own vocabulary, not where Megatron appends them.

        Then the other special tokens are T5's too: the decoder begins with padding, and both texts
        end with `eos`.
        """
        return False

    @property
    def decoder_start(self) -> int:
        """Id that a T5's decoder reads first."""
        return self.pad if self.has_t5_sentinels else self.bos

    @property
    def encoder_end(self) -> list[int]:
        """Ids behind the text that a T5's encoder reads."""
        return [self.eos] if self.has_t5_sentinels else []

    def fingerprint(self) -> str:
        """Kind and digest of everything that decides the ids, to compare with a checkpoint's."""
        return f"{self.kind}:{self._digest}"

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        return self._special("eod")

    @property
    def bos(self) -> int:
        """Id that begins a sequence."""
        return self._special("bos")

    @property
    def eos(self) -> int:
        """Id that ends a sequence."""
        return self._special("eos")

    @property
    def cls(self) -> int:
        """Id of BERT's classification token."""
        return self._special("cls")

    @property
    def sep(self) -> int:
        """Id between the two segments of a BERT sample."""
        return self._special("sep")

    @property
    def pad(self) -> int:
        """Id that fills a sequence up."""
        return self._special("pad")

    @property
    def mask(self) -> int:
        """Id that stands for a hidden token."""
        return self._special("mask")

    def special_ids(self, *names: str) -> frozenset[int]:
        """Ids of those of the named special tokens that this tokenizer has."""
        return frozenset(self._special_ids[name] for name in names if name in self._special_ids)

    def tokenize_spelled(self, text: str) -> list[int]:
        """Ids of a text that spells its special tokens out, so that none are added."""
        return self.tokenize(text)

    def _special(self, name: str) -> int:
        if name not in self._special_ids:
            known = ", ".join(sorted(self._special_ids)) or "none"
            raise ConfigError(
                f"--tokenizer-type {self.kind} has no {name} token (it has: {known}); choose a "
                "tokenizer with one, for example BertWordPieceLowerCase for cls, sep, pad, mask"
                f"{self._where_named}"
            )
        return self._special_ids[name]
