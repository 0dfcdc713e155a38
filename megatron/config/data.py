"""Options for data: tokenizer, corpus, splits and sample order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.config.fields import CYCLIC, MAX_IDS, SAVES, Requirement, flag
from megatron.config.retro import RetroDataOptions

# Kinds of tokenizers, with the fields that each is built from: its files, or its size.
TOKENIZER_NEEDS: Mapping[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "BertWordPieceTokenizer": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "PretrainedFromHF": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "EncDecTokenizer": ("vocab_file",),
    "CharacterLevelTokenizer": (),
    "NullTokenizer": ("vocab_size",),
}
TOKENIZER_TYPES = tuple(TOKENIZER_NEEDS)

# Tokenizers to which --vocab-extra-ids appends sentinels, and tokenizers whose files may contain
# sentinels.
APPENDS_SENTINELS = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "BertWordPieceTokenizer",
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


def is_number(word: str) -> bool:
    """Return whether a word of --data-path is a number, and may therefore be a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True


# Conditions for the flags below, used as their `needs` or `requires`.
_TIKTOKEN = Requirement(
    lambda run: run.tokenizer.tokenizer_type == "TikTokenizer",
    "--tokenizer-type TikTokenizer",
)
_APPENDS = Requirement(
    lambda run: run.tokenizer.tokenizer_type in APPENDS_SENTINELS,
    "a WordPiece or SentencePiece vocabulary",
)
SPLIT_ROUNDINGS = ("sizes", "bounds")
_WHOLE_CORPUS = Requirement(lambda run: run.data.data_path is not None, "--data-path")
_BLEND = Requirement(
    lambda run: len(run.data.train_data_path or run.data.data_path or ()) > 1, "several datasets"
)
_FIM = Requirement(lambda run: run.data.fim_data, "--fim-data")
_FRAGMENTS = Requirement(lambda run: run.data.fim_split_sample is not None, "--fim-split-sample")
_FRAGMENT_RATE = Requirement(
    lambda run: run.data.fim_fragment_rate is not None, "--fim-fragment-rate"
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer.

    Attributes:
        tokenizer_type: Tokenizer type. Default with --vocab-file: GPT2BPETokenizer for GPT and
            Retro, otherwise BertWordPieceLowerCase.
        tokenizer_model: Tokenizer model file: SentencePiece .model, tokenizer.json (or its folder,
            or the name of a model in Hugging Face's cache), or tiktoken ranks.
        vocab_file: Vocabulary file (GPT-2 JSON or WordPiece text).
        merge_file: GPT-2 BPE merges file.
        vocab_size: Vocabulary size of NullTokenizer, or of a TikTokenizer .json.
        vocab_extra_ids: Additional sentinel entries at the end of the vocabulary.
        tiktoken_pattern: How TikTokenizer splits text into words: v1 and v2 as in Megatron, gpt2,
            or cl100k. Default: v2 for .json, by file name for OpenAI's files, otherwise cl100k.
        tiktoken_num_special_tokens: Number of ids reserved for special tokens in a TikTokenizer
            .json.
        tokenizer_special_tokens: Special tokens for TikTokenizer. Default: <unk> <s> </s> for
            .json, otherwise <|endoftext|>.
        chat_template: Jinja file with the template that turns conversations into text, for
            finetuning and for the server's chats. Default: the one next to the tokenizer.
    """

    tokenizer_type: str | None = flag(None, choices=TOKENIZER_TYPES, required="required")
    tokenizer_model: str | None = flag(
        None, names="--tokenizer-model --tokenizer-name-or-path", is_common=True
    )
    vocab_file: str | None = flag(None, is_common=True)
    merge_file: str | None = None
    vocab_size: int | None = flag(None, unit="entries", at_least=1, at_most=MAX_IDS)
    vocab_extra_ids: int = flag(0, unit="entries", at_least=0, at_most=2**20, needs=_APPENDS)
    tiktoken_pattern: str | None = flag(
        None, choices=("v1", "v2", "gpt2", "cl100k"), needs=_TIKTOKEN
    )
    tiktoken_num_special_tokens: int = flag(1000, unit="entries", at_most=2**20, needs=_TIKTOKEN)
    tokenizer_special_tokens: tuple[str, ...] | None = flag(
        None, names="--tokenizer-special-tokens --tiktoken-special-tokens", needs=_TIKTOKEN
    )
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataOptions(RetroDataOptions):
    """Data.

    Attributes:
        data_path: Indexed dataset prefix (or, for GPT, text files), or WEIGHT PREFIX WEIGHT
            PREFIX ...
        text_key: The key of a document's text in JSON lines, or the column in parquet files, when
            --data-path names text files.
        skip_bad_lines: Skip lines of text files that do not contain a document. The first bad lines
            of each file are reported, and the total number at the end of the run.
        blend_schedule: Weights of the training datasets that change during the run: for each phase
            START:WEIGHT,WEIGHT,... with a weight for each dataset. START counts iterations with
            --train-iters, otherwise samples.
        split: Relative shares of the documents in --data-path for training, validation and test.
        split_rounding: How --split is rounded to whole documents: sizes, as in Megatron-LM 23.08,
            or bounds, as in Megatron Core. Default: as in the run whose checkpoint is loaded,
            otherwise sizes.
        train_data_path: Training data, in the format of --data-path.
        valid_data_path: Validation data, in the format of --data-path.
        test_data_path: Test data, in the format of --data-path.
        data_args_path: Text file with the values of --data-path, for blends too long for a command
            line.
        per_split_data_args_path: JSON file with the values of --train-data-path, --valid-data-path
            and --test-data-path under the keys train, valid and test. Each value is a list, a
            string, or null for no data.
        data_cache_path: Folder for index caches, and for copies of data in object storage. Default:
            next to the dataset.
        mock_data: Train on generated tokens instead of a corpus.
        seq_length: Sequence length.
        decoder_seq_length: Sequence length of the T5 decoder.
        mmap_warmup: Read the data files once at startup to warm the page cache.
        num_workers: Data loader processes per rank. 0 loads in the training process.
        data_impl: Dataset format. All values have the same effect: .bin and .idx files are read in
            the format that they have.
        dataloader_type: Sample order: single reads one global stream, cyclic reshuffles every
            epoch. Default: single.
        data_sharding: With --dataloader-type cyclic, have each process shuffle its own share of the
            data.
        reset_position_ids: Restart position ids after each end-of-document token.
        reset_attention_mask: Prevent attention across document boundaries.
        eod_mask_loss: Exclude the token after each end-of-document token from the loss.
        fim_data: Rearrange samples for fill-in-the-middle training.
        fim_rate: Probability of rearranging a document.
        fim_spm_rate: Probability of the order suffix, prefix, middle instead of prefix, suffix,
            middle.
        fim_split_sample: Token that divides documents into fragments, such as the files of a
            repository. Fragments are rearranged one by one.
        fim_fragment_rate: Probability of rearranging a fragment of a document that was chosen by
            --fim-rate.
        fim_no_prefix: Do not rearrange texts that begin with this string.
        fim_prefix_token: Token before the prefix.
        fim_middle_token: Token before the middle.
        fim_suffix_token: Token before the suffix.
        fim_pad_token: Token that pads samples shortened by the rearrangement.
        fim_eod_token: Token that ends documents. Default: the tokenizer's end-of-document token.
        mask_prob: Fraction of tokens to mask for BERT and T5.
        short_seq_prob: Fraction of BERT and T5 samples that are shortened.
        log_sample_ids: Append each iteration's sample ids to samples.jsonl in the --save folder.
    """

    data_path: tuple[str, ...] | None = flag(None, required="required unless --mock-data is given")
    text_key: str = flag("text", only_for=("gpt",))
    skip_bad_lines: bool = flag(False, only_for=("gpt",))
    blend_schedule: tuple[str, ...] | None = flag(None, needs=_BLEND)
    split: str = flag("969, 30, 1", is_common=True, needs=_WHOLE_CORPUS)
    split_rounding: str | None = flag(None, choices=SPLIT_ROUNDINGS, needs=_WHOLE_CORPUS)
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    data_args_path: str | None = None
    per_split_data_args_path: str | None = None
    data_cache_path: str | None = None
    mock_data: bool = flag(False, is_common=True)
    seq_length: int | None = flag(
        None,
        unit="tokens",
        names="--seq-length --encoder-seq-length",
        required="required",
        at_least=1,
        at_most=MAX_IDS,
    )
    decoder_seq_length: int | None = flag(
        None, unit="tokens", at_least=1, at_most=MAX_IDS, only_for=("t5",)
    )
    mmap_warmup: bool = False
    num_workers: int = flag(2, unit="processes", at_least=0, at_most=1024)
    data_impl: str = flag("infer", choices=("mmap", "infer", "lazy", "cached"))
    dataloader_type: str | None = flag(None, choices=("single", "cyclic"))
    data_sharding: bool = flag(True, needs=CYCLIC)
    reset_position_ids: bool = flag(False, only_for=("gpt", "retro"))
    reset_attention_mask: bool = flag(False, only_for=("gpt",))
    eod_mask_loss: bool = flag(False, only_for=("gpt", "retro"))
    fim_data: bool = flag(False, only_for=("gpt",))
    fim_rate: float = flag(0.5, unit="0 to 1", at_least=0, at_most=1, needs=_FIM)
    fim_spm_rate: float = flag(0.5, unit="0 to 1", at_least=0, at_most=1, needs=_FIM)
    fim_split_sample: str | None = flag(None, needs=_FIM, requires=_FRAGMENT_RATE)
    fim_fragment_rate: float | None = flag(
        None, unit="0 to 1", at_least=0, at_most=1, needs=_FRAGMENTS
    )
    fim_no_prefix: str | None = flag(None, needs=_FIM)
    fim_prefix_token: str = flag("<fim_prefix>", needs=_FIM)
    fim_middle_token: str = flag("<fim_middle>", needs=_FIM)
    fim_suffix_token: str = flag("<fim_suffix>", needs=_FIM)
    fim_pad_token: str = flag("<fim_pad>", needs=_FIM)
    fim_eod_token: str | None = flag(None, needs=_FIM)
    mask_prob: float = flag(0.15, unit="0 to 1", at_least=0, at_most=1, only_for=("bert", "t5"))
    short_seq_prob: float = flag(0.1, unit="0 to 1", at_least=0, at_most=1, only_for=("bert", "t5"))
    log_sample_ids: bool = flag(False, requires=SAVES)


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions):
    """Data options after `resolve`, when the length and order of samples are known."""

    seq_length: int = field()
    dataloader_type: str = "single"

    @property
    def decoder_tokens(self) -> int:
        """Number of tokens per sample that T5's decoder reads. It is 0 for other networks."""
        return self.decoder_seq_length or 0

    @property
    def sample_tokens(self) -> int:
        """Number of tokens per sample that the model reads, in encoder and decoder together."""
        return self.seq_length + self.decoder_tokens
