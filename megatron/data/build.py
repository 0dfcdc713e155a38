"""From flags to the datasets of training, validation and test."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.data import DataConfig
from megatron.data.bert import ADDED_TOKENS as BERT_ADDED_TOKENS
from megatron.data.bert import BertDataset, BertOptions
from megatron.data.cache import builder_first
from megatron.data.gpt import GPTDataset, build_gpt_dataset
from megatron.data.mapped import count_documents, map_sentences
from megatron.data.masking import SpecialIds
from megatron.data.members import Datasets, Member, build_splits
from megatron.data.mock import MockDataset
from megatron.data.sentence_map import SentenceMapPlan
from megatron.tokenizer.base import Tokenizer


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
    ids = SpecialIds.of(tokenizer)

    def build_member(name: str, member: Member, num_samples: int) -> BertDataset:
        plan = SentenceMapPlan(
            num_samples=num_samples,
            max_length=seq_length - BERT_ADDED_TOKENS,
            short_seq_prob=data.short_seq_prob,
            seed=seed,
            min_sentences=2 if binary_head else 1,
        )
        sentences = map_sentences(
            name,
            member,
            plan,
            vocab_size=ids.size,
            data_cache_path=data.data_cache_path,
            warns=is_builder,
        )
        dataset = BertDataset(sentences, ids, options)
        _ = dataset[0]  # another tokenizer's dataset is found out here, not at some later step
        return dataset

    with builder_first(is_builder, barrier):
        return build_splits(
            data, samples, build_member, count_documents=count_documents, warns=is_builder
        )
