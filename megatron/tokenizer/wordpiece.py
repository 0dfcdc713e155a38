"""BERT's WordPiece: text is cleaned and split into words, and words into the longest pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.errors import DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.files import append_entries, decode, digest, extra_ids, read_bytes

_REQUIRED = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_UNKNOWN = "[UNK]"
# Longer words are unknown, as in Google's BERT.
_LONGEST_WORD = 200


class WordPieceTokenizer(Tokenizer):
    """BertWordPieceLowerCase and BertWordPieceCase: `--vocab-file`, one entry per line.

    [BOS], [EOS] and `--vocab-extra-ids` sentinels are appended if the file lacks them.

    Raises:
        DataError: The file is missing, or lacks an entry that BERT needs.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Read the file, and append the entries that it lacks."""
        assert config.vocab_file is not None
        assert config.tokenizer_type is not None
        data = read_bytes("--vocab-file", config.vocab_file)
        self._vocab: dict[str, int] = _parse_vocab(config.vocab_file, data)
        self._file_entries = len(self._vocab)
        self._tokenizer = wordpiece_pipeline(
            self._vocab, lower_case="LowerCase" in config.tokenizer_type
        )
        sentinels = extra_ids(config.vocab_extra_ids)
        append_entries(self._vocab, ["[BOS]", "[EOS]", *sentinels])
        self._sentinels = [self._vocab[entry] for entry in sentinels]
        special = {name: self._vocab[entry] for name, entry in _REQUIRED.items()}
        bos, eos = self._vocab["[BOS]"], self._vocab["[EOS]"]
        super().__init__(
            config.tokenizer_type,
            digest(data, str(config.vocab_extra_ids)),
            {**special, "bos": bos, "eos": eos, "eod": eos},
        )

    @property
    def text_vocab_size(self) -> int:
        """The number of entries in the file."""
        return self._file_entries

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of one text, without [CLS] and [SEP]."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the words separated by single spaces; the original spacing is lost."""
        entries = self.inv_vocab
        return " ".join(entries.get(int(i), _UNKNOWN) for i in ids).replace(" ##", "")


def _parse_vocab(path: str, data: bytes) -> dict[str, int]:
    lines = decode("--vocab-file", path, data).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    vocab: dict[str, int] = {}
    for number, line in enumerate(lines):
        entry = line.strip()
        if entry in vocab:
            raise DataError(
                f"--vocab-file {path}:{number + 1}: entry {entry!r} is already on line "
                f"{vocab[entry] + 1}; remove one of the two"
            )
        vocab[entry] = number
    missing = [entry for entry in (*_REQUIRED.values(), _UNKNOWN) if entry not in vocab]
    if missing:
        raise DataError(
            f"--vocab-file {path}: no entry {', '.join(missing)}; "
            "give a BERT vocabulary (text, one entry per line)"
        )
    return vocab


def wordpiece_pipeline(vocab: Mapping[str, int], *, lower_case: bool) -> Any:
    """Return BERT's pipeline in the `tokenizers` library, with these entries."""
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    model = WordPiece(dict(vocab), unk_token=_UNKNOWN, max_input_chars_per_word=_LONGEST_WORD)
    pipeline = Pipeline(model)
    pipeline.normalizer = BertNormalizer(lowercase=lower_case)
    pipeline.pre_tokenizer = BertPreTokenizer()
    return pipeline
