"""Text in, samples out: tokenizer, corpus, splits, sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config.fields import MOST_IDS, Need, flag

# Kinds of tokenizers, with the fields that say what each is made of: its files, or its size.
TOKENIZER_NEEDS: Mapping[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "PretrainedFromHF": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
TOKENIZER_TYPES = tuple(TOKENIZER_NEEDS)

# Those to which --vocab-extra-ids appends sentinels, and those whose files may have their own.
APPENDS_SENTINELS = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
)
MAY_HAVE_SENTINELS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
)

# Splits of a corpus, as named by flags and data files.
SPLIT_NAMES = ("train", "valid", "test")


# What some flags change nothing without.
_TIKTOKEN = Need(
    lambda run: run.tokenizer.tokenizer_type == "TikTokenizer",
    "without --tokenizer-type TikTokenizer",
)
_APPENDS = Need(
    lambda run: run.tokenizer.tokenizer_type in APPENDS_SENTINELS,
    "without a WordPiece or SentencePiece vocabulary",
)
_WHOLE_CORPUS = Need(lambda run: run.data.data_path is not None, "without --data-path")
_CYCLIC = Need(lambda run: run.data.dataloader_type == "cyclic", "without --dataloader-type cyclic")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: str | None = flag(
        None,
        "Tokenizer type. Default with --vocab-file: GPT2BPETokenizer for GPT, "
        "BertWordPieceLowerCase for BERT and T5.",
        choices=TOKENIZER_TYPES,
        is_common=True,
        required="required",
    )
    tokenizer_model: str | None = flag(
        None,
        "Tokenizer model file: SentencePiece .model, tokenizer.json (or its folder), or tiktoken "
        "ranks.",
        is_common=True,
    )
    vocab_file: str | None = flag(
        None, "Vocabulary file (GPT-2 JSON or WordPiece text).", is_common=True
    )
    merge_file: str | None = flag(None, "GPT-2 BPE merges file.")
    vocab_size: int | None = flag(
        None,
        "Vocabulary size of NullTokenizer, or of a TikTokenizer .json.",
        unit="entries",
        at_least=1,
        at_most=MOST_IDS,
    )
    vocab_extra_ids: int = flag(
        0,
        "Additional sentinel entries at the end of the vocabulary.",
        unit="entries",
        at_least=0,
        at_most=2**20,
        needs=_APPENDS,
    )
    tiktoken_pattern: str | None = flag(
        None,
        "How TikTokenizer splits text into words: v1 and v2 as in Megatron, gpt2, or cl100k. "
        "Default: v2 for .json, by file name for OpenAI's files, otherwise cl100k.",
        choices=("v1", "v2", "gpt2", "cl100k"),
        needs=_TIKTOKEN,
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        "Number of ids reserved for special tokens in a TikTokenizer .json.",
        unit="entries",
        at_most=2**20,
        needs=_TIKTOKEN,
    )
    tokenizer_special_tokens: tuple[str, ...] | None = flag(
        None,
        "Special tokens for TikTokenizer. Default: <unk> <s> </s> for .json, otherwise "
        "<|endoftext|>.",
        names=("--tokenizer-special-tokens", "--tiktoken-special-tokens"),
        many=True,
        needs=_TIKTOKEN,
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data."""

    data_path: tuple[str, ...] | None = flag(
        None,
        "Indexed dataset prefix, or WEIGHT PREFIX WEIGHT PREFIX ...",
        many=True,
        is_common=True,
        required="required unless --mock-data is given",
    )
    split: str = flag(
        "969, 30, 1",
        "Relative shares of the documents in --data-path for training, validation and test.",
        is_common=True,
        needs=_WHOLE_CORPUS,
    )
    train_data_path: tuple[str, ...] | None = flag(
        None, "Training data, in the format of --data-path.", many=True
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "Validation data, in the format of --data-path.", many=True
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "Test data, in the format of --data-path.", many=True
    )
    data_args_path: str | None = flag(
        None, "Text file with the words of --data-path, for blends too long for a command line."
    )
    per_split_data_args_path: str | None = flag(
        None,
        "JSON file with the words of --train-data-path, --valid-data-path and --test-data-path "
        "under the keys train, valid and test. Each value is a list, a string, or null for no "
        "data.",
    )
    data_cache_path: str | None = flag(
        None, "Folder for index caches. Default: next to the dataset."
    )
    mock_data: bool = flag(False, "Train on generated tokens instead of a corpus.", is_common=True)
    seq_length: int | None = flag(
        None,
        "Sequence length.",
        unit="tokens",
        names=("--seq-length", "--encoder-seq-length"),
        is_common=True,
        required="required",
        at_least=1,
        at_most=MOST_IDS,
    )
    decoder_seq_length: int | None = flag(
        None, "Sequence length of the T5 decoder.", unit="tokens", at_least=1, at_most=MOST_IDS
    )
    mmap_warmup: bool = flag(False, "Read the data files once at startup to warm the page cache.")
    num_workers: int = flag(
        2,
        "Data loader processes per rank. 0 loads in the training process.",
        unit="processes",
        at_least=0,
        at_most=1024,
    )
    data_impl: str = flag(
        "infer",
        "Dataset format. Both values read memory-mapped .bin and .idx files.",
        choices=("mmap", "infer"),
    )
    dataloader_type: str | None = flag(
        None,
        "Sample order: single reads one global stream, cyclic reshuffles every epoch. Default: "
        "single.",
        choices=("single", "cyclic"),
    )
    data_sharding: bool = flag(
        True,
        "With --dataloader-type cyclic, let each process shuffle its own share of the data.",
        off="--no-data-sharding",
        needs=_CYCLIC,
    )
    reset_position_ids: bool = flag(False, "Restart position ids after each end-of-document token.")
    reset_attention_mask: bool = flag(False, "Prevent attention across document boundaries.")
    eod_mask_loss: bool = flag(False, "Exclude end-of-document tokens from the loss.")
    mask_prob: float = flag(
        0.15, "Fraction of tokens to mask for BERT and T5.", unit="0 to 1", at_least=0, at_most=1
    )
    short_seq_prob: float = flag(
        0.1,
        "Fraction of BERT and T5 samples that are shortened.",
        unit="0 to 1",
        at_least=0,
        at_most=1,
    )
    log_sample_ids: bool = flag(
        False, "Append each iteration's sample ids to samples.jsonl in the --save folder."
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions):
    """Data as resolved: the length of a sample and the sample order are known."""

    seq_length: int = field()
    dataloader_type: str = "single"

    @property
    def decoder_tokens(self) -> int:
        """Tokens of a sample that a T5's decoder reads; 0 in any other network."""
        return self.decoder_seq_length or 0

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample that the model reads, of encoder and decoder together."""
        return self.seq_length + self.decoder_tokens
