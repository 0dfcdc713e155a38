"""The interface of every tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _SpecialId:
    """A property of a tokenizer: the id of the special token that has the property's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tokenizer: Tokenizer, owner: type) -> int:
        return tokenizer.special_id(self.name)


class Tokenizer(ABC):
    """Text to ids and back.

    Reading the id of a special token that the tokenizer does not have raises a ConfigError.

    Args:
        kind: The `--tokenizer-type` it was built as.
        digest: Digest of everything that decides the ids (files and options).
        special_ids: Ids of `eod`, `bos`, `eos`, `cls`, `sep`, `pad`, `mask`, if it has them.

    Attributes:
        eod: Id that ends a document.
        bos: Id that begins a sequence.
        eos: Id that ends a sequence.
        cls: Id of BERT's classification token.
        sep: Id between the two segments of a BERT sample.
        pad: Id that fills a sequence up.
        mask: Id that stands for a hidden token.
    """

    _where_named = ""  # in a message: where else a special token may come from
    _sentinels: Sequence[int] = ()
    _vocab: Mapping[str, int]
    eod, bos, eos = _SpecialId(), _SpecialId(), _SpecialId()
    cls, sep, pad, mask = _SpecialId(), _SpecialId(), _SpecialId(), _SpecialId()

    def __init__(self, kind: str, digest: str, special_ids: Mapping[str, int]) -> None:
        """Keep the name, the digest and the special ids."""
        self.kind = kind
        self._digest = digest
        self._special_ids = dict(special_ids)

    @property
    def vocab_size(self) -> int:
        """Number of entries, including appended ones; it fixes the padded vocabulary."""
        return len(self._vocab)

    @property
    def text_vocab_size(self) -> int:
        """Number of entries that text can become; later ones were appended to the files' own."""
        return self.vocab_size

    @property
    def vocab(self) -> Mapping[str, int]:
        """Entry to id, special tokens included."""
        return self._vocab

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Id to entry."""
        return {index: entry for entry, index in self.vocab.items()}

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids; what is not valid UTF-8 becomes U+FFFD."""

    @property
    def appended_ids(self) -> tuple[int, ...]:
        """The ids that `tokenize` appends to every text, such as `</s>`."""
        return ()

    def tokenize_open(self, text: str) -> list[int]:
        """Return the ids of a text that will be continued or scored, without `appended_ids`."""
        ids = self.tokenize(text)
        return ids[: len(ids) - len(self.appended_ids)]

    def tokenize_spelled(self, text: str) -> list[int]:
        """Return the ids of a text that spells its special tokens out, so that none are added."""
        return self.tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of many texts, one array per text, as fast as the tokenizer can."""
        import numpy as np

        return [np.array(self.tokenize(text), np.int64) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of many parts of a text, with no special tokens around each."""
        return self.tokenize_batch(texts)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of T5's sentinels, `<extra_id_0>` first, from the vocabulary or appended to it."""
        return list(self._sentinels)

    @property
    def has_t5_sentinels(self) -> bool:
        """Whether the sentinels are those of T5's own vocabulary, not appended by Megatron.

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
        """Ids after the text that a T5's encoder reads."""
        return [self.eos] if self.has_t5_sentinels else []

    def fingerprint(self) -> str:
        """Return kind and digest of everything that decides the ids, to compare checkpoints."""
        return f"{self.kind}:{self._digest}"

    def special_ids(self, *names: str) -> frozenset[int]:
        """Return the ids of the named special tokens, without those the tokenizer lacks."""
        return frozenset(self._special_ids[name] for name in names if name in self._special_ids)

    def special_id(self, name: str) -> int:
        """Return the id of a special token.

        Raises:
            ConfigError: The tokenizer does not have it.
        """
        if name not in self._special_ids:
            known = ", ".join(sorted(self._special_ids)) or "none"
            raise ConfigError(
                f"--tokenizer-type {self.kind} has no {name} token (it has: {known}); choose a "
                "tokenizer with one, for example BertWordPieceLowerCase for cls, sep, pad, mask"
                f"{self._where_named}"
            )
        return self._special_ids[name]
