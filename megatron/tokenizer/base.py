"""The interface of every tokenizer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _SpecialId:
    """A read-only attribute that is the id of the special token of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tokenizer: Tokenizer, owner: type) -> int:
        return tokenizer.special_id(self.name)


class Tokenizer(ABC):
    """The base class of tokenizers, which convert text to token ids and back.

    Reading the id of a special token that the tokenizer does not have raises a ConfigError.

    Args:
        kind: The `--tokenizer-type` of the tokenizer, with aliases resolved.
        digest: The digest of everything that determines the ids (files and options).
        special_ids: The ids of the tokenizer's special tokens by name: any of `eod`, `bos`, `eos`,
            `cls`, `sep`, `pad` and `mask`.
        vocab_size: The largest id plus 1, including the ids of appended entries.
        sentinels: The ids of T5's sentinels, `<extra_id_0>` first.

    Attributes:
        vocab_size: The largest id plus 1, including the ids of appended entries but no padding.
            Some ids below it may have no entry.
        text_vocab_size: For BERT's WordPiece, the number of entries in the file, without appended
            ones. For other tokenizers, the same as `vocab_size`.
        appended_ids: The ids that `tokenize` appends to every text, such as `</s>`.
        additional_special_tokens_ids: The ids of T5's sentinels, whether appended or not.
        special_spacing: A description of any setting that changes the ids of
            `tokenize_with_special` but is not covered by `fingerprint`, or "".
        has_t5_sentinels: Whether the sentinels are those of T5's vocabulary rather than Megatron's.
            If so, the other special tokens are also used as in T5: the decoder begins with padding,
            and encoder and decoder sequences end with `eos`.
        eod: The id that ends a document.
        bos: The id that begins a sequence.
        eos: The id that ends a sequence.
        cls: The id of BERT's classification token.
        sep: The id between the two segments of a BERT sample.
        pad: The id that pads a sequence to its full length.
        mask: The id that replaces a masked token.
    """

    _special_token_hint = ""  # appended to error messages: where else special tokens are set
    _vocab: Mapping[str, int]
    appended_ids: tuple[int, ...] = ()
    has_t5_sentinels = False
    special_spacing = ""
    eod, bos, eos = _SpecialId(), _SpecialId(), _SpecialId()
    cls, sep, pad, mask = _SpecialId(), _SpecialId(), _SpecialId(), _SpecialId()

    def __init__(
        self,
        kind: str,
        digest: str,
        special_ids: Mapping[str, int],
        vocab_size: int,
        sentinels: Sequence[int] = (),
    ) -> None:
        """Store the name, the digest, the special ids and the size."""
        self.kind = kind
        self.vocab_size = self.text_vocab_size = vocab_size
        self.additional_special_tokens_ids = list(sentinels)
        self._digest = digest
        self._special_ids = dict(special_ids)

    @property
    def vocab(self) -> Mapping[str, int]:
        """The map from entries to ids, special tokens included."""
        return self._vocab

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """The map from ids to entries."""
        return {index: entry for entry, index in self.vocab.items()}

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            DataError: The tokenizer rejects the text.
        """

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text. Bytes that are not valid UTF-8 become U+FFFD."""

    def tokenize_unterminated(self, text: str) -> list[int]:
        """Return the token ids of a text to continue or to score, without `appended_ids`."""
        ids = self.tokenize(text)
        return ids[: len(ids) - len(self.appended_ids)]

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the token ids of a text that spells out its special tokens, without adding any."""
        return self.tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of each text with the tokenizer's fastest method."""
        import numpy as np

        return [np.array(self.tokenize(text), np.int64) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the token ids of each sentence, without special tokens around the sentences.

        Llama2Tokenizer puts `<s>` before each sentence.
        """
        return self.tokenize_batch(texts)

    def tokenize_spans(self, text: str) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Tokenize a text like `tokenize_with_special`, and find the characters of each token.

        Returns:
            The token ids, and the start and end (exclusive) of each token in characters,
            `[tokens, 2]`.

        Raises:
            ConfigError: This kind of tokenizer does not report the positions of its tokens.
        """
        raise ConfigError(
            f"--tokenizer-type {self.kind} does not report the positions of its tokens in a text, "
            "which conversations need: use HuggingFaceTokenizer, GPT2BPETokenizer, TikTokenizer or "
            "a SentencePiece model (GPTSentencePieceTokenizer, Llama2Tokenizer)"
        )

    def text_growth(self) -> int:
        """Return an upper bound on the length of a text relative to the total length of its tokens.

        The time that `detokenize` takes is proportional to the length of the text.

        Raises:
            DataError: There is no bound.
        """
        return 2  # an entry and a separator

    @property
    def decoder_start(self) -> int:
        """The first input id of a T5 decoder."""
        return self.pad if self.has_t5_sentinels else self.bos

    @property
    def encoder_end(self) -> list[int]:
        """The ids that follow the text in a T5 encoder's input."""
        return [self.eos] if self.has_t5_sentinels else []

    def fingerprint(self) -> str:
        """Return a string that identifies the files and options, as stored in checkpoints."""
        return f"{self.kind}:{self._digest}"

    def special_ids(self, *names: str) -> frozenset[int]:
        """Return the ids of the named special tokens, without those that the tokenizer lacks."""
        return frozenset(self._special_ids[name] for name in names if name in self._special_ids)

    def special_id(self, name: str) -> int:
        """Return the id of a special token.

        Raises:
            ConfigError: The tokenizer does not have this token.
        """
        if name not in self._special_ids:
            known = ", ".join(sorted(self._special_ids)) or "none"
            raise ConfigError(
                f"--tokenizer-type {self.kind} has no {name} token (it has: {known}); choose a "
                "tokenizer with one, for example BertWordPieceLowerCase for cls, sep, pad, mask"
                f"{self._special_token_hint}"
            )
        return self._special_ids[name]


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids encode the bytes of a text without loss."""

    @abstractmethod
    def bytes_of(self, index: int) -> bytes:
        """Return the bytes that a token id stands for."""

    @property
    @abstractmethod
    def special_texts(self) -> Mapping[str, int]:
        """The map from special tokens, as written in a text, to their ids."""

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_texts, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def tokenize_with_special(self, text: str) -> list[int]:
        """Return the token ids of a text that spells out its special tokens, without adding any."""
        ids: list[int] = []
        # With one group, split() returns text and special tokens alternately.
        for index, part in enumerate(self._special_pattern.split(text)):
            ids += [self.special_texts[part]] if index % 2 else self.tokenize(part)
        return ids

    def tokenize_spans(self, text: str) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Return the ids from `tokenize_with_special` and their character spans, `[tokens, 2]`."""
        import numpy as np

        ids = self.tokenize_with_special(text)
        lengths = np.array([len(self.bytes_of(index)) for index in ids], np.int64)
        ends = np.cumsum(lengths)
        data = np.frombuffer(text.encode(), np.uint8)
        # The number of characters that begin up to each byte (10xxxxxx continues a character).
        characters_begun = np.cumsum(data & 0xC0 != 0x80)
        starts = characters_begun[ends - lengths] - 1
        return ids, np.stack([starts, characters_begun[ends - 1]], 1)
