"""Text that already is ids: numbers between spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import digest


class NullTokenizer(Tokenizer):
    """`--vocab-size` ids, and one more that ends a document.

    Raises:
        ConfigError: --vocab-size is missing or not positive.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        size = config.vocab_size
        if size is None or size < 1:
            raise ConfigError(
                f"--tokenizer-type NullTokenizer needs --vocab-size (given: {size}); "
                "give the number of ids in your data"
            )
        self._size = size
        super().__init__("NullTokenizer", digest(str(size)), {"eod": size, "eos": size})

    @property
    def vocab_size(self) -> int:
        """`--vocab-size` and the end-of-document id."""
        return self._size + 1

    @property
    def vocab(self) -> Mapping[str, int]:
        """Every number stands for itself."""
        return {str(i): i for i in range(self.vocab_size)}

    def tokenize(self, text: str) -> list[int]:
        """Numbers of `text`; as in Megatron-LM, they may lie above the vocabulary.

        Raises:
            DataError: a word is not a number, or one that the dataset cannot hold.
        """
        limit = 1 << 16 if self.vocab_size < 65500 else 1 << 31
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < limit):
                raise DataError(
                    f"NullTokenizer reads numbers from 0 to {limit - 1} between spaces, "
                    f"found {word[:40]!r}"
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, with spaces between."""
        return " ".join(str(i) for i in ids)
