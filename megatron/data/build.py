"""From flags to the datasets of training, validation and test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron.config.data import DataConfig
from megatron.data.bert import ADDED_TOKENS as BERT_ADDED_TOKENS
from megatron.data.bert import BertDataset, BertOptions
from megatron.data.cache import builder_first
from megatron.data.gpt import GPTDataset, build_gpt_dataset
from megatron.data.mapped import count_documents, map_sentences
from megatron.data.masking import SpecialIds
from megatron.data.members import Datasets, Member, build_splits
from megatron.data.mock import MockDataset, MockSentences
from megatron.data.sentence_map import SentenceMapPlan
from megatron.data.sentence_source import SentenceSource
from megatron.data.t5 import RESERVED_TOKENS as T5_RESERVED_TOKENS
from megatron.data.t5 import T5Dataset, T5Options
from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer

_SHORTEST = 2  # tokens of text in a sample


def build_gpt_datasets(
    data: DataConfig,
    *,
    seed: int,
    seq_length: int,
    samples: tuple[int, int, int],
    vocab_size: int,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Datasets:
    """Build the datasets that the flags name. Every process calls this.

    Args:
        samples: numbers of training, validation and test samples that the run takes.
        vocab_size: entries of the tokenizer; larger ids in the data are refused.
        is_builder: true in one process, which writes the index caches before the others look.
        barrier: waits until every process has called it; called once.

    Raises:
        ConfigError: no data is named, or --data-path or --split cannot be read.
        DataError: a dataset is missing, damaged, too small or of another tokenizer.
    """
    if data.mock_data:
        return Datasets(
            *(
                MockDataset(count, seq_length=seq_length, vocab_size=vocab_size, seed=seed, split=i)
                if count
                else None
                for i, count in enumerate(samples)
            )
        )

    def build_member(name: str, member: Member, num_samples: int) -> GPTDataset:
        return build_gpt_dataset(
            member.data,
            member.bounds,
            name=name,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            split=data.split,
            vocab_size=vocab_size,
            data_cache_path=data.data_cache_path,
            warns=is_builder,
        )

    with builder_first(is_builder, barrier):
        # As in Megatron, each sequence counts as a document.
        return build_splits(data, samples, build_member, count_documents=len, warns=is_builder)


def build_bert_datasets(
    data: DataConfig,
    *,
    seed: int,
    seq_length: int,
    samples: tuple[int, int, int],
    tokenizer: Tokenizer,
    binary_head: bool,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Datasets:
    """Build BERT's datasets that the flags name, of `BertSample`s. Every process calls this.

    Args:
        seq_length: tokens of a sample, [CLS] and [SEP] counted.
        binary_head: whether samples have two segments, in order or swapped.
        samples: as for `build_gpt_datasets`; also is_builder, barrier and what is raised.
    """
    options = BertOptions(seq_length, data.mask_prob, seed, binary_head)
    plan = _plan(data, "--seq-length", seq_length, BERT_ADDED_TOKENS, seed, 2 if binary_head else 1)
    ids = _special_ids(data, tokenizer, SpecialIds.of_bert)

    def build(sentences: SentenceSource) -> BertDataset:
        return BertDataset(sentences, ids, options)

    return _build_on_sentences(data, plan, samples, ids, build, is_builder, barrier)


def build_t5_datasets(
    data: DataConfig,
    *,
    seed: int,
    encoder_seq_length: int,
    decoder_seq_length: int,
    samples: tuple[int, int, int],
    tokenizer: Tokenizer,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Datasets:
    """Build T5's datasets that the flags name, of `T5Sample`s. Every process calls this.

    Args:
        encoder_seq_length: tokens that the encoder reads.
        decoder_seq_length: tokens that the decoder reads.
        samples: as for `build_gpt_datasets`; also is_builder, barrier and what is raised.

    Raises:
        ConfigError: the vocabulary has no sentinels.
    """
    options = T5Options(encoder_seq_length, decoder_seq_length, data.mask_prob, seed)
    plan = _plan(data, "--encoder-seq-length", encoder_seq_length, T5_RESERVED_TOKENS, seed, 1)
    ids = _special_ids(data, tokenizer, SpecialIds.of_t5)

    def build(sentences: SentenceSource) -> T5Dataset:
        return T5Dataset(sentences, ids, options)

    return _build_on_sentences(data, plan, samples, ids, build, is_builder, barrier)


def _plan(
    data: DataConfig, flag: str, length: int, reserved: int, seed: int, min_sentences: int
) -> SentenceMapPlan:
    """What all splits' maps have in common; each split and member has its own number of samples.

    Raises:
        ConfigError: the sequence has no room for text.
    """
    if length < reserved + _SHORTEST:
        raise ConfigError(
            f"{flag} {length}: {reserved} tokens are kept for special ones: give at least "
            f"{reserved + _SHORTEST}"
        )
    return SentenceMapPlan(
        num_samples=0,
        max_length=length - reserved,
        short_seq_prob=data.short_seq_prob,
        seed=seed,
        min_sentences=min_sentences,
    )


def _special_ids(
    data: DataConfig, tokenizer: Tokenizer, find: Callable[[Tokenizer], SpecialIds]
) -> SpecialIds:
    return SpecialIds.generated(tokenizer.vocab_size) if data.mock_data else find(tokenizer)


def _build_on_sentences(
    data: DataConfig,
    plan: SentenceMapPlan,
    samples: tuple[int, int, int],
    ids: SpecialIds,
    build: Callable[[SentenceSource], BertDataset | T5Dataset],
    is_builder: bool,
    barrier: Callable[[], None],
) -> Datasets:
    """Datasets that `build` makes of sentences, by `plan` with each split's number of samples."""
    if data.mock_data:
        return Datasets(
            *(
                build(MockSentences(count, plan, ids, split=i)) if count else None
                for i, count in enumerate(samples)
            )
        )

    def build_member(name: str, member: Member, num_samples: int) -> BertDataset | T5Dataset:
        sentences = map_sentences(
            name,
            member,
            dataclasses.replace(plan, num_samples=num_samples),
            vocab_size=ids.size,
            data_cache_path=data.data_cache_path,
            warns=is_builder,
        )
        dataset = build(sentences)
        _ = dataset[0]  # another tokenizer's dataset is found out here, not at some later step
        return dataset

    with builder_first(is_builder, barrier):
        return build_splits(
            data, samples, build_member, count_documents=count_documents, warns=is_builder
        )
