"""From the flags to a tokenizer."""

from __future__ import annotations

from megatron.config.data import TOKENIZER_NEEDS, TokenizerConfig
from megatron.config.rules_data import tokenizer_misfits
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.vocabulary import padded_vocab_size


def files_of(config: TokenizerConfig) -> tuple[str, ...]:
    """The fields of the files that the named kind reads; none where no kind is named."""
    needs = TOKENIZER_NEEDS.get(config.tokenizer_type or "", ())
    return tuple(field for field in needs if field != "vocab_size")


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `--tokenizer-type` names, from its files.

    Raises:
        ConfigError: the type is missing or unknown, or its flags are not those it needs.
        DataError: a file is missing or damaged.
    """
    kind = config.tokenizer_type
    if kind is None or kind not in TOKENIZER_NEEDS:
        raise ConfigError(f"--tokenizer-type {kind}: choose one of {', '.join(TOKENIZER_NEEDS)}")
    misfits = list(tokenizer_misfits(config))
    if misfits:
        raise ConfigError(misfits)
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
