"""From the flags to a tokenizer."""

from __future__ import annotations

from megatron.config.data import APPENDS_SENTINELS, TOKENIZER_TYPES, TokenizerConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.vocabulary import padded_vocab_size

_VOCAB_FILE = ("vocab_file",)
_BOTH_FILES = ("vocab_file", "merge_file")
_MODEL = ("tokenizer_model",)
# The file flags each kind needs.
_NEEDS: dict[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": _VOCAB_FILE,
    "BertWordPieceCase": _VOCAB_FILE,
    "GPT2BPETokenizer": _BOTH_FILES,
    "SentencePieceTokenizer": _MODEL,
    "GPTSentencePieceTokenizer": _MODEL,
    "Llama2Tokenizer": _MODEL,
    "HuggingFaceTokenizer": _MODEL,
    "PretrainedFromHF": _MODEL,
    "TikTokenizer": _MODEL,
    "NullTokenizer": (),
}
_WHAT = {
    "vocab_file": "a vocabulary file",
    "merge_file": "a BPE merges file",
    "tokenizer_model": "a model file",
}


def files_of(config: TokenizerConfig) -> tuple[str, ...]:
    """The fields of the files that the named kind reads; none where no kind is named."""
    return _NEEDS.get(config.tokenizer_type or "", ())


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `--tokenizer-type` names, from its files.

    Raises:
        ConfigError: the type is missing or unknown, or a flag it needs is missing.
        DataError: a file is missing or damaged.
    """
    kind = config.tokenizer_type
    if kind not in _NEEDS:
        raise ConfigError(f"--tokenizer-type {kind}: choose one of {', '.join(TOKENIZER_TYPES)}")
    missing = [field for field in _NEEDS[kind] if not getattr(config, field)]
    if missing:
        raise ConfigError(
            [
                f"--tokenizer-type {kind} needs {_WHAT[field]}: give --{field.replace('_', '-')}"
                for field in missing
            ]
        )
    if config.vocab_extra_ids and kind not in APPENDS_SENTINELS:
        raise ConfigError(
            f"--vocab-extra-ids {config.vocab_extra_ids}: --tokenizer-type {kind} takes no further "
            "entries: drop it"
        )
    return _construct(kind, config)


def padded_vocabulary(config: RunConfig) -> int:
    """Rows of a run's word embedding: the entries of its tokenizer, and what pads them.

    Raises:
        ConfigError, DataError: see `build_tokenizer`.
    """
    return padded_vocab_size(
        build_tokenizer(config.tokenizer).vocab_size,
        config.model.make_vocab_size_divisible_by,
        config.parallel.tensor_model_parallel_size,
    )


def _construct(kind: str, config: TokenizerConfig) -> Tokenizer:
    # Imports stay here so that one kind does not pay for the libraries of the others.
    match kind:
        case "GPT2BPETokenizer":
            from megatron.tokenizer.gpt2 import GPT2Tokenizer

            return GPT2Tokenizer(config)
        case "BertWordPieceLowerCase" | "BertWordPieceCase":
            from megatron.tokenizer.wordpiece import WordPieceTokenizer

            return WordPieceTokenizer(config)
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            from megatron.tokenizer import sentencepiece

            kinds: tuple[type[sentencepiece.GPTSentencePieceTokenizer], ...] = (
                sentencepiece.SentencePieceTokenizer,
                sentencepiece.GPTSentencePieceTokenizer,
                sentencepiece.Llama2Tokenizer,
            )
            return next(cls for cls in kinds if cls.kind_name == kind)(config)
        case "HuggingFaceTokenizer" | "PretrainedFromHF":
            from megatron.tokenizer.huggingface import HuggingFaceTokenizer

            return HuggingFaceTokenizer(config)
        case "TikTokenizer":
            from megatron.tokenizer.tiktoken import TikTokenizer

            return TikTokenizer(config)
    from megatron.tokenizer.null import NullTokenizer

    return NullTokenizer(config)
