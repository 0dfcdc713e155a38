"""BERT's WordPiece: text is cleaned and split into words, and words into the longest pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.config.data import TokenizerConfig
from megatron.errors import DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import VocabularyFile, digest, extra_ids
from megatron.tokenizer.library import Library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_REQUIRED = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_UNKNOWN = "[UNK]"
# Longer words are unknown, as in Google's BERT.
_LONGEST_WORD = 200


class WordPieceTokenizer(Tokenizer):
    """BertWordPieceLowerCase and BertWordPieceCase: `--vocab-file`, one entry per line.

    [BOS], [EOS] and `--vocab-extra-ids` sentinels are appended if the file lacks them.
    BertWordPieceTokenizer, the name of 2019, is the second if the file has capitalized words.

    Raises:
        DataError: The file is missing, or lacks an entry that BERT needs.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file, and append the entries that it lacks."""
        file = VocabularyFile.read("--vocab-file", config.vocab_file)
        vocab = self._vocab = _parse_vocab(file)
        kind = config.tokenizer_type or ""
        if kind == "BertWordPieceTokenizer":
            is_cased = any(entry.isascii() and entry.istitle() for entry in vocab)
            kind = "BertWordPieceCase" if is_cased else "BertWordPieceLowerCase"
        entries = len(vocab)
        make = partial(wordpiece_pipeline, vocab, lower_case="LowerCase" in kind)
        self._tokenizer = Library(file, "a BERT vocabulary", make)
        sentinels = extra_ids(config.vocab_extra_ids)
        for entry in ("[BOS]", "[EOS]", *sentinels):
            vocab.setdefault(entry, len(vocab))
        names = {**_REQUIRED, "bos": "[BOS]", "eos": "[EOS]", "eod": "[EOS]"}
        special = {name: vocab[entry] for name, entry in names.items()}
        key = digest(file.data, str(config.vocab_extra_ids))
        super().__init__(kind, key, special, len(vocab), [vocab[entry] for entry in sentinels])
        self.text_vocab_size = entries

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text, without [CLS] and [SEP]."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """Return the ids of many texts, one array per text, computed on all cores."""
        import numpy as np

        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the words separated by single spaces; the original spacing is lost."""
        entries = self.inv_vocab
        return " ".join(entries.get(int(i), _UNKNOWN) for i in ids).replace(" ##", "")


def _parse_vocab(file: VocabularyFile) -> dict[str, int]:
    vocab = file.entries()
    missing = [entry for entry in (*_REQUIRED.values(), _UNKNOWN) if entry not in vocab]
    if missing:
        raise DataError(
            f"{file}: no entry {', '.join(missing)}; give a BERT vocabulary (text, one entry per "
            "line)"
        )
    return vocab


def wordpiece_pipeline(vocab: Mapping[str, int], *, lower_case: bool) -> Any:
    """Build BERT's pipeline in the `tokenizers` library with these entries."""
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    model = WordPiece(dict(vocab), unk_token=_UNKNOWN, max_input_chars_per_word=_LONGEST_WORD)
    pipeline = Pipeline(model)
    pipeline.normalizer = BertNormalizer(lowercase=lower_case)
    pipeline.pre_tokenizer = BertPreTokenizer()
    return pipeline
