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

# Of a corpus, as flags and files of data name them.
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
        "Kind of tokenizer. Unset, with --vocab-file: GPT2BPETokenizer for a GPT, "
        "BertWordPieceLowerCase for a BERT or T5.",
        choices=TOKENIZER_TYPES,
        is_common=True,
        required="required",
    )
    tokenizer_model: str | None = flag(
        None,
        "Model file: SentencePiece .model, tokenizer.json (or its folder), tiktoken ranks.",
        is_common=True,
    )
    vocab_file: str | None = flag(
        None, "Vocabulary file (GPT-2 json or WordPiece text).", is_common=True
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
        "How TikTokenizer cuts text into words: v1 and v2 as in Megatron, gpt2, cl100k. Default: "
        "v2 for .json, by name for OpenAI's files, otherwise cl100k.",
        choices=("v1", "v2", "gpt2", "cl100k"),
        needs=_TIKTOKEN,
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        "Ids that a TikTokenizer .json reserves for special tokens.",
        unit="entries",
        at_most=2**20,
        needs=_TIKTOKEN,
    )
    tokenizer_special_tokens: tuple[str, ...] | None = flag(
        None,
        "Special tokens of TikTokenizer. Default: <unk> <s> </s> for .json, otherwise "
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
        "Shares of documents for training, validation and test with --data-path.",
        is_common=True,
        needs=_WHOLE_CORPUS,
    )
    train_data_path: tuple[str, ...] | None = flag(
        None, "As --data-path, training only.", many=True
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "As --data-path, validation only.", many=True
    )
    test_data_path: tuple[str, ...] | None = flag(None, "As --data-path, test only.", many=True)
    data_args_path: str | None = flag(
        None, "Text file with the words of --data-path, where a command line cannot hold them."
    )
    per_split_data_args_path: str | None = flag(
        None,
        "JSON file with the words of --train-data-path, --valid-data-path and --test-data-path "
        "under the keys train, valid and test: lists, texts, or null for no data.",
    )
    data_cache_path: str | None = flag(
        None, "Folder for index caches. Default: beside the dataset."
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
        None, "Sequence length of a T5's decoder.", unit="tokens", at_least=1, at_most=MOST_IDS
    )
    mmap_warmup: bool = flag(False, "Read the data files once at the start.")
    num_workers: int = flag(
        2,
        "Loader processes of each rank. 0: load in the training process.",
        unit="processes",
        at_least=0,
        at_most=1024,
    )
    data_impl: str = flag(
        "infer",
        "Format of the dataset: memory-mapped .bin and .idx in both cases.",
        choices=("mmap", "infer"),
    )
    dataloader_type: str | None = flag(
        None,
        "Sample order: one global stream, or reshuffled every epoch. Default: single.",
        choices=("single", "cyclic"),
    )
    data_sharding: bool = flag(
        True,
        "With cyclic: each process shuffles its own share.",
        off="--no-data-sharding",
        needs=_CYCLIC,
    )
    reset_position_ids: bool = flag(False, "Restart positions after each end of document.")
    reset_attention_mask: bool = flag(False, "No attention across an end of document.")
    eod_mask_loss: bool = flag(False, "No loss on end-of-document tokens.")
    mask_prob: float = flag(
        0.15, "Share of tokens that BERT and T5 are to find.", unit="0 to 1", at_least=0, at_most=1
    )
    short_seq_prob: float = flag(
        0.1,
        "Share of BERT's and T5's samples that are made shorter.",
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
