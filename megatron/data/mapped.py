"""Sentences for BERT and T5 from one split of one indexed dataset, by a cached map."""

from __future__ import annotations

from megatron.data.indexed import IndexedDataset
from megatron.data.members import Member
from megatron.data.sentence_cache import describe_sentence_map, load_or_build_sentence_map
from megatron.data.sentence_map import (
    LONGEST_SENTENCE,
    SentenceMapPlan,
    build_sentence_map,
    is_sound_sentence_map,
    overlong_documents,
    usable_documents,
)
from megatron.data.sentence_source import MappedSentences
from megatron.errors import DataError, warn


def count_documents(data: IndexedDataset) -> int:
    """Documents of the dataset, each a run of sentences."""
    return len(data.document_indices) - 1


def map_sentences(
    name: str,
    member: Member,
    plan: SentenceMapPlan,
    *,
    vocab_size: int,
    data_cache_path: str | None,
    warns: bool,
) -> MappedSentences:
    """Load or build the map of a member's documents.

    Args:
        name: train, valid or test; part of the map's name.
        vocab_size: token ids from here on are refused.
        data_cache_path: folder for the map; None: beside the dataset.
        warns: whether this process reports documents that are left out.

    Raises:
        DataError: no document can be used.
    """
    data, (start, end) = member.data, member.bounds
    documents, lengths = data.document_indices[start : end + 1], data.sequence_lengths
    usable = int(usable_documents(documents, lengths, plan.min_sentences).sum())
    if usable == 0:
        raise _nothing_usable(name, member, plan)
    _report_long(name, member, warns=warns)
    description = describe_sentence_map(plan, name, member.bounds, len(data), data.num_tokens)
    rows = load_or_build_sentence_map(
        data.prefix,
        name,
        plan,
        description,
        lambda: build_sentence_map(plan, documents, lengths),
        is_sound=lambda rows: is_sound_sentence_map(plan, rows, documents, lengths),
        data_cache_path=data_cache_path,
        warns=warns,
    )
    return MappedSentences(
        data, rows, description=f"Data prefix {data.prefix}\n{description}", vocab_size=vocab_size
    )


def _report_long(name: str, member: Member, *, warns: bool) -> None:
    """Say how much is lost to overlong sentences, which Megatron leaves out silently."""
    start, end = member.bounds
    documents = member.data.document_indices[start : end + 1]
    lost = int(overlong_documents(documents, member.data.sequence_lengths).sum())
    if warns and lost:
        warn(
            f"{member.data.prefix}: {lost} of the {end - start} {name} documents are left out, "
            f"because they hold a sentence of more than {LONGEST_SENTENCE} tokens: split sentences "
            "more finely when preprocessing to keep them"
        )


def _nothing_usable(name: str, member: Member, plan: SentenceMapPlan) -> DataError:
    start, end = member.bounds
    need = (
        "at least two sentences in a document (or --bert-no-binary-head)"
        if plan.min_sentences > 1
        else "a sentence in a document"
    )
    return DataError(
        f"{member.data.prefix}: no sample can be made of the {name} documents {start} to "
        f"{end - 1}: this takes {need}, none of them over {LONGEST_SENTENCE} tokens. Preprocess "
        "the text with --split-sentences, change --split or give more data"
    )
