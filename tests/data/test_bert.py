"""BERT samples: segments, types, masked tokens, padding; the same for the same seed."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data.bert import BertDataset, build_bert_datasets, truncate
from megatron.data.datasets import Datasets
from megatron.data.indexed import IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from tests.data.corpus import VOCABULARY, request_for, write_sentences, write_vocabulary

KEYS = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask", "id"]


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt")
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(path))
    )


def build(config: DataConfig, tokenizer: Tokenizer, **changes: object) -> Datasets:
    arguments: dict = {
        "seed": 1234,
        "seq_length": 64,
        "samples": (300, 20, 10),
        "binary_head": True,
        **changes,
    }
    return build_bert_datasets(request_for(config, arguments), tokenizer=tokenizer, **arguments)


def train(config: DataConfig, tokenizer: Tokenizer, **changes: object) -> BertDataset:
    dataset = build(config, tokenizer, **changes).train
    assert isinstance(dataset, BertDataset)
    return dataset


def on_file(prefix: Path, **changes: object) -> DataConfig:
    return DataConfig(seq_length=16, data_path=(str(prefix),), split="1", **changes)  # type: ignore[arg-type]


def original(sample: dict) -> list[int]:
    """Return the tokens before any was masked, without padding."""
    text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
    return text[sample["padding_mask"] == 1].tolist()


def segments(sample: dict, tokenizer: Tokenizer) -> list[list[int]]:
    """Return A and B, found by their special tokens."""
    text = original(sample)
    assert text[0] == tokenizer.cls
    assert text[-1] == tokenizer.sep
    ends = [i for i, token in enumerate(text) if token == tokenizer.sep]
    return [text[a + 1 : b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def test_a_sample_is_two_segments_of_its_sentences(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = train(on_file(write_sentences(tmp_path / "x")), tokenizer)
    assert len(dataset) >= 300
    swapped = 0
    for i in range(len(dataset)):
        sample, (sentences, target) = dataset[i], dataset.source[i]
        assert list(sample) == KEYS
        assert sample["id"] == i
        a, b = segments(sample, tokenizer)  # type: ignore[arg-type]
        tokens = int(sample["padding_mask"].sum())
        assert tokens == len(a) + len(b) + 3 <= target + 3 <= 64
        assert sample["types"].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (
            64 - tokens
        )
        assert (sample["text"][tokens:] == tokenizer.pad).all()
        whole = np.concatenate(sentences).tolist()
        if len(whole) <= target:
            assert (b + a if sample["is_random"] else a + b) == whole
        swapped += sample["is_random"]
        for name in ("text", "types", "labels", "loss_mask", "padding_mask"):
            assert sample[name].shape == (64,)  # type: ignore[literal-required]
            assert sample[name].dtype == np.int64  # type: ignore[literal-required]
    assert 0.4 < swapped / len(dataset) < 0.6


def test_without_the_binary_head_there_is_one_segment(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = train(on_file(write_sentences(tmp_path / "x")), tokenizer, binary_head=False)
    for i in range(100):
        sample, (sentences, target) = dataset[i], dataset.source[i]
        (a,) = segments(sample, tokenizer)  # type: ignore[arg-type]
        whole = np.concatenate(sentences).tolist()
        start = next(k for k in range(len(whole)) if whole[k : k + len(a)] == a)
        assert start == 0 or len(whole) > target
        assert sample["is_random"] == sample["types"].sum() == 0
        assert sample["padding_mask"].sum() == len(a) + 2


def test_fifteen_percent_are_hidden_eight_tenths_of_them_by_mask(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = on_file(write_sentences(tmp_path / "x", documents=300))
    dataset = train(config, tokenizer, samples=(900, 0, 0))
    tokens = hidden = masked = kept = 0
    for i in range(len(dataset)):
        sample = dataset[i]
        at = sample["loss_mask"] == 1
        assert ((sample["labels"] == -1) == ~at).all()
        assert not np.isin(sample["labels"][at], [tokenizer.cls, tokenizer.sep]).any()
        tokens += int(sample["padding_mask"].sum())
        hidden += int(at.sum())
        masked += int((sample["text"][at] == tokenizer.mask).sum())
        kept += int((sample["text"][at] == sample["labels"][at]).sum())
    assert hidden > 3000
    assert 0.13 < hidden / tokens < 0.155
    assert 0.78 < masked / hidden < 0.82
    assert 0.085 < kept / hidden < 0.115


def test_words_are_hidden_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = train(on_file(write_sentences(tmp_path / "x")), tokenizer)
    pieces = 0
    for i in range(len(dataset)):
        sample = dataset[i]
        text, hidden = original(sample), sample["loss_mask"].tolist()  # type: ignore[arg-type]
        for position in range(2, len(text)):
            continues = tokenizer.inv_vocab[text[position]].startswith("##")
            if continues and text[position - 1] not in (tokenizer.cls, tokenizer.sep):
                assert hidden[position] == hidden[position - 1]
                pieces += hidden[position]
    assert pieces > 500


def test_samples_depend_on_seed_and_number_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = on_file(write_sentences(tmp_path / "x"))
    first, again = train(config, tokenizer), train(config, tokenizer)
    backwards = [again[i]["text"].tolist() for i in reversed(range(50))]
    assert [first[i]["text"].tolist() for i in range(50)] == backwards[::-1]
    there = pickle.loads(pickle.dumps(first))
    assert there[7]["text"].tolist() == first[7]["text"].tolist()
    other = train(config, tokenizer, seed=5)
    assert [other[i]["text"].tolist() for i in range(50)] != backwards[::-1]


def test_tokens_go_from_the_longer_segment() -> None:
    """Compare with removing them one by one."""
    for seed in range(300):
        random = np.random.RandomState(seed)
        a, b = np.arange(random.randint(1, 40)), 100 + np.arange(random.randint(0, 40))
        most = int(random.randint(2, 50))
        plain, left, right = np.random.RandomState(seed), a.tolist(), b.tolist()
        while len(left) + len(right) > most:
            longer = left if len(left) > len(right) else right
            longer.pop(0 if plain.random_sample() < 0.5 else -1)
        got = truncate(a, b, most, np.random.RandomState(seed))
        assert [segment.tolist() for segment in got] == [left, right]


def write_lengths(prefix: Path, documents: list[list[int]]) -> Path:
    lengths = np.array([size for document in documents for size in document], int)
    tokens = np.arange(lengths.sum()) % 200 + len(VOCABULARY)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, lengths, np.array([len(d) for d in documents]))
    return prefix


def test_documents_of_one_sentence_serve_without_the_binary_head_only(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = on_file(write_lengths(tmp_path / "x", [[9], [], [2000], [1]]))
    with pytest.raises(DataError, match="--bert-no-binary-head.*--split-sentences"):
        train(config, tokenizer)
    dataset = train(config, tokenizer, binary_head=False)
    lengths = {int(dataset[i]["padding_mask"].sum()) for i in range(len(dataset))}
    assert {3, 63} <= lengths  # there is room for a second [SEP]
    assert max(lengths) == 63


def test_a_document_with_an_overlong_sentence_is_left_out_loudly(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on_file(write_lengths(tmp_path / "x", [[9, 9], [10, 513, 10], [20, 512]]))
    dataset = train(config, tokenizer)
    assert "1 of the 3 train documents are dropped" in capsys.readouterr().err
    assert {tuple(row[:2]) for row in dataset.source.rows.tolist()} == {(0, 2), (5, 7)}  # type: ignore[attr-defined]


def test_empty_sentences_are_no_harm(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = train(on_file(write_lengths(tmp_path / "x", [[0, 5], [0, 0], [5, 0, 3]])), tokenizer)
    for i in range(len(dataset)):
        assert dataset[i]["padding_mask"].sum() <= 64


def test_another_tokenizers_data_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prefix = write_sentences(tmp_path / "x", vocab_size=5000)
    with pytest.raises(DataError, match=r"x\.bin: sentence \d+ holds the token id .* 407 entries"):
        train(on_file(prefix), tokenizer)


def test_a_sequence_without_room_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = on_file(write_sentences(tmp_path / "x"))
    with pytest.raises(ConfigError, match="--seq-length 4: .* give at least 5"):
        train(config, tokenizer, seq_length=4)
    assert train(config, tokenizer, seq_length=5)[0]["text"].shape == (5,)


def test_splits_paths_and_blends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a, b = (str(write_sentences(tmp_path / name, seed=seed)) for seed, name in enumerate("ab"))
    split = build(DataConfig(seq_length=16, data_path=(a,), split="80,20"), tokenizer)
    assert split.test is None
    ends = [int(d.source.rows[:, 1].max()) for d in split[:2]]  # type: ignore[union-attr]
    assert ends[0] < int(split.valid.source.rows[:, 0].min()) + 1  # type: ignore[union-attr]
    own = build(DataConfig(seq_length=16, train_data_path=(a,), valid_data_path=(b,)), tokenizer)
    assert own.valid.source.data.prefix == b  # type: ignore[union-attr]
    blended = build(
        DataConfig(seq_length=16, data_path=("3", a, "1", b), split="1"), tokenizer
    ).train
    assert blended is not None
    single = build(
        DataConfig(seq_length=16, data_path=(a,), split="1"), tokenizer, samples=(227, 0, 0)
    ).train
    assert single is not None
    assert blended[0]["text"].tolist() == single[0]["text"].tolist()  # ceil(300 * 3/4 * 1.005)
    assert [blended[i]["id"] for i in range(300)] == [*range(300)]


def test_generated_sentences(tokenizer: Tokenizer) -> None:
    dataset = train(DataConfig(seq_length=16, mock_data=True), tokenizer, samples=(50, 0, 0))
    for i in range(len(dataset)):
        a, b = (segment for segment in split_generated(dataset[i]))
        joined = b + a if dataset[i]["is_random"] else a + b
        assert len(set((np.diff(joined) % 256).tolist())) == 1  # counts up, so it can be learned


def split_generated(sample: object) -> tuple[list[int], list[int]]:
    text = original(sample)  # type: ignore[arg-type]
    assert text[0] == 1  # the generated [CLS]; 2 is [SEP]
    middle = text.index(2)
    return text[1:middle], text[middle + 1 : -1]


def test_samples_are_those_that_gave_the_golden_losses(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the checkpoint's weights, these give the losses of iteration 21 to within 1e-4."""
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(golden / "data" / "bert-5000-vocab.txt"),
        )
    )
    config = DataConfig(
        seq_length=16,
        data_path=(str(golden / "data" / "bert_text_sentence"),),
        split="949,50,1",
        data_cache_path=str(tmp_path),
    )
    dataset = train(config, tokenizer, seq_length=128, samples=(640, 0, 0))
    assert "1 of the 475 train documents" in capsys.readouterr().err
    digest = hashlib.md5(usedforsecurity=False)
    for i in range(320, 336):
        sample = dataset[i]
        for name in KEYS[:-1]:
            digest.update(np.asarray(sample[name]).tobytes())  # type: ignore[literal-required]
    assert digest.hexdigest() == "169dd1f1913aa5f317d26e4f2db9ce39"
