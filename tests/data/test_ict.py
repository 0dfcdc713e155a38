"""Samples of the inverse cloze task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.retriever import RetrieverConfig
from megatron.data.ict import build_ict_datasets
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import build_tokenizer
from tests.data.corpus import request_for, write_vocabulary

PAD, CLS, SEP = 0, 2, 3
LENGTH = 48


def write(prefix: Path, documents: list[list[list[int]]]) -> str:
    """Write a dataset of documents of sentences."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for sentences in documents:
            tokens = np.array([token for sentence in sentences for token in sentence], int)
            lengths = np.array([len(sentence) for sentence in sentences], int)
            builder.add_documents(tokens, lengths, np.array([len(sentences)]))
    return str(prefix)


@pytest.fixture(name="corpus")
def make_corpus(tmp_path):
    """Write 20 documents of 1 to 6 sentences. A document's tokens and title reveal its number."""
    random = np.random.RandomState(5)
    texts = [[[10 + d] * int(n) for n in random.randint(1, 12, 1 + d % 6)] for d in range(20)]
    titles = [[[200 + d, 201 + d]] if d % 3 else [[200 + d], [201 + d]] for d in range(20)]
    return write(tmp_path / "text", texts), write(tmp_path / "title", titles)


def build(tmp_path, corpus, *, samples=(40, 8, 0), length=LENGTH, **flags):
    text, titles = corpus
    names = {"seed": 7, "samples": samples}
    data = DataConfig(data_path=(text,), seq_length=length, split="60,40,0")
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(write_vocabulary(tmp_path / "vocab.txt")),
        )
    )
    retriever = RetrieverConfig(titles_data_path=titles, **flags)
    return build_ict_datasets(
        request_for(data, names), retriever, seq_length=length, tokenizer=tokenizer
    )


def words(sample, part):
    mask = sample[f"{part}_pad_mask"].astype(bool)
    tokens = sample[f"{part}_tokens"]
    assert (tokens[~mask] == PAD).all()
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)
    return tokens[mask].tolist()


def test_query_title_and_block_are_of_one_document(tmp_path, corpus):
    """This also holds in validation, whose documents do not start with the dataset's first."""
    train, valid, test = build(tmp_path, corpus, query_in_block_prob=0.0)
    assert test is None
    data = IndexedDataset(corpus[0])
    seen = {"train": set(), "valid": set()}
    for name, split in (("train", train), ("valid", valid)):
        for i in range(len(split)):
            sample = split[i]
            first, end, document, _ = sample["block_data"].tolist()
            seen[name].add(document)
            query, context = words(sample, "query"), words(sample, "context")
            assert query[0] == CLS
            assert query[-1] == SEP
            assert context[:4] == [CLS, 200 + document, 201 + document, SEP]
            assert context[-1] == SEP
            assert set(query[1:-1]) == {10 + document}
            lengths = [len(data.get(number)) for number in range(first, end)]
            assert len(query) - 2 in lengths
            assert len(context) - 5 == min(sum(lengths) - (len(query) - 2), LENGTH - 5)
    assert max(seen["train"]) < 12 <= min(seen["valid"])


def test_the_share_of_queries_that_stay(tmp_path, corpus):
    dataset, _, _ = build(tmp_path, corpus, query_in_block_prob=0.3, samples=(600, 0, 0))
    data, stays = IndexedDataset(corpus[0]), 0
    for i in range(len(dataset)):
        first, end, *_ = dataset[i]["block_data"].tolist()
        whole = sum(len(data.get(number)) for number in range(first, end))
        stays += len(words(dataset[i], "context")) - 5 == whole
    assert stays / len(dataset) == pytest.approx(0.3, abs=0.06)


def test_a_sample_depends_only_on_its_number(tmp_path, corpus):
    one, _, _ = build(tmp_path, corpus)
    backwards = [one[i] for i in reversed(range(10))][::-1]
    again, _, _ = build(tmp_path, corpus)  # from the map on disk
    for i in range(10):
        for key, value in one[i].items():
            assert np.array_equal(value, backwards[i][key])
            assert np.array_equal(value, again[i][key])
    assert one.description == again.description


def test_seeds_start_again_after_32_bits(tmp_path, corpus):
    dataset, _, _ = build(tmp_path, corpus)
    for seed, index, same in ((2**32, 3, 3), (2**32 - 2, 3, 1)):
        first = replace(dataset, options=dataset.options._replace(seed=seed))
        # Blocks are those of an index, so only the draws of the query are compared.
        second = replace(
            dataset,
            source=[dataset.source[index]] * 9,
            options=dataset.options._replace(seed=0),
        )
        assert first[index]["query_tokens"].tolist() == second[same]["query_tokens"].tolist()
        assert first[index]["context_tokens"].tolist() == second[same]["context_tokens"].tolist()


def test_the_map_has_megatrons_name(tmp_path, corpus):
    build(tmp_path, corpus)
    assert np.load(tmp_path / f"text_train_indexmap_40mns_{LENGTH}msl_7s.npy").shape[1] == 4
    build(tmp_path, corpus, use_one_sent_docs=True)
    assert (tmp_path / f"text_train_indexmap_40mns_{LENGTH}msl_7s_1sentok.npy").exists()


def test_documents_of_one_sentence(tmp_path, corpus):
    with_them, _, _ = build(tmp_path, corpus, use_one_sent_docs=True, samples=(200, 0, 0))
    without, _, _ = build(tmp_path, corpus, samples=(200, 0, 0))

    def documents(dataset):
        return {int(dataset[i]["block_data"][2]) for i in range(len(dataset))}

    assert documents(with_them) - documents(without) == {0, 6}


def test_long_titles_and_queries_are_cut(tmp_path):
    text = write(tmp_path / "text", [[[10] * 30, [11] * 30]])
    corpus = text, write(tmp_path / "title", [[[20] * 40]])
    dataset, _, _ = build(tmp_path, corpus, length=16, samples=(4, 0, 0))
    for i in range(4):
        assert len(words(dataset[i], "query")) == 16
        context = words(dataset[i], "context")
        assert len(context) == 16
        assert context.count(20) == 11
        assert context[-1] == SEP


def test_titles_of_another_dataset_are_refused(tmp_path, corpus):
    other = write(tmp_path / "other", [[[20]]] * 19)
    with pytest.raises(DataError, match="19 titles for the 20 documents"):
        build(tmp_path, (corpus[0], other))


def test_what_cannot_give_blocks_is_refused(tmp_path):
    corpus = write(tmp_path / "text", [[[10]]] * 4), write(tmp_path / "title", [[[20]]] * 4)
    with pytest.raises(DataError, match="--use-one-sent-docs"):
        build(tmp_path, corpus)
    with pytest.raises(ConfigError, match="--seq-length 4"):
        build(tmp_path, corpus, length=4)
