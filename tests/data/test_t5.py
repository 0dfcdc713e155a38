"""T5 samples: spans removed, sentinels in their place, nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data.sample import Sample
from megatron.data.t5 import T5Dataset, build_t5_datasets, replace_spans
from megatron.errors import ConfigError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from tests.data.corpus import request_for, write_sentences, write_vocabulary
from tests.tokenizer.t5 import SENTINELS, SIZE, WORDS, t5_tokenizer


@pytest.fixture(name="vocabulary", scope="module")
def _vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt")


def tokenizer_with(vocabulary: Path, sentinels: int) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(vocabulary),
            vocab_extra_ids=sentinels,
        )
    )


def train(config: DataConfig, tokenizer: Tokenizer, **changes: object) -> T5Dataset:
    arguments: dict = {
        "seed": 1234,
        "encoder_seq_length": 128,
        "decoder_seq_length": 64,
        "samples": (200, 0, 0),
        **changes,
    }
    dataset = build_t5_datasets(
        request_for(config, arguments), tokenizer=tokenizer, **arguments
    ).train
    assert isinstance(dataset, T5Dataset)
    return dataset


def on_file(prefix: Path) -> DataConfig:
    return DataConfig(seq_length=16, data_path=(str(prefix),), split="1")


def put_back(sample: Sample, ids: object) -> tuple[list[int], list[list[int]]]:
    """Return the text of a sample, and the spans that were removed from it."""
    encoder = sample["text_enc"][sample["enc_mask"] == 1].tolist()
    labels = sample["labels"][sample["loss_mask"] == 1].tolist()
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token in ids.sentinels:  # type: ignore[attr-defined]
            spans[token] = []
        else:
            spans[[*spans][-1]].append(token)
    assert list(spans) == list(ids.sentinels[: len(spans)])  # type: ignore[attr-defined]
    text: list[int] = []
    for token in encoder:
        text += spans.get(token, [token])
    return text, list(spans.values())


def test_what_is_taken_out_and_what_is_left_make_the_text(tmp_path: Path, vocabulary: Path) -> None:
    dataset = train(on_file(write_sentences(tmp_path / "x")), tokenizer_with(vocabulary, 50))
    hidden = tokens = 0
    for i in range(len(dataset)):
        sample, (sentences, target) = dataset[i], dataset.source[i]
        text, spans = put_back(sample, dataset.ids)
        assert text == np.concatenate(sentences)[:target].tolist()
        assert sample["id"] == i
        count = int(sample["dec_mask"].sum())
        decoder, labels = sample["text_dec"].tolist(), sample["labels"].tolist()
        assert decoder[:count] == [dataset.ids.bos, *labels[: count - 1]]
        assert labels[count - 1] == dataset.ids.eos
        assert labels[count:] == [-1] * (64 - count)
        assert sample["loss_mask"].tolist() == [1] * count + [0] * (64 - count)
        assert (sample["text_enc"][sample["enc_mask"] == 0] == dataset.ids.pad).all()
        assert [sample[key].dtype for key in sample if key != "id"] == [np.int64] * 6  # type: ignore[literal-required]
        hidden, tokens = hidden + sum(map(len, spans)), tokens + len(text)
    assert 0.13 < hidden / tokens <= 0.155


def test_words_are_taken_out_whole(tmp_path: Path, vocabulary: Path) -> None:
    tokenizer = tokenizer_with(vocabulary, 50)
    dataset = train(on_file(write_sentences(tmp_path / "x")), tokenizer)
    spans_seen = 0
    for i in range(len(dataset)):
        sample = dataset[i]
        encoder = sample["text_enc"].tolist()
        for before, after in zip(encoder[:-1], encoder[1:], strict=True):
            if before in dataset.ids.sentinels:
                assert not dataset.ids.continues[after]
        for span in put_back(sample, dataset.ids)[1]:
            starts = sum(not dataset.ids.continues[token] for token in span)
            assert starts <= 10
            spans_seen += len(span) > 3
    assert spans_seen > 50


def test_a_t5s_own_tokenizer(tmp_path: Path) -> None:
    """Sentinels count down, padding starts the decoder, and an end token ends both texts."""
    tokenizer = t5_tokenizer(tmp_path / "t5")
    prefix = write_sentences(tmp_path / "x", vocab_size=3 + WORDS)
    dataset = train(on_file(prefix), tokenizer)
    assert dataset.ids.sentinels == tuple(range(SIZE - 1, SIZE - 1 - SENTINELS, -1))
    hidden = 0
    for i in range(len(dataset)):
        sample, (sentences, target) = dataset[i], dataset.source[i]
        text, spans = put_back(sample, dataset.ids)
        assert text == [*np.concatenate(sentences)[:target].tolist(), tokenizer.eos]
        count = int(sample["dec_mask"].sum())
        labels = sample["labels"][:count].tolist()
        assert sample["text_dec"].tolist() == [0, *labels[:-1], *[0] * (64 - count)]
        assert labels[-1] == tokenizer.eos
        hidden += len(spans)
    assert hidden > 500


def test_replace_spans() -> None:
    text = np.arange(10, 20)
    left, taken_out = replace_spans(text, [[0, 1], [5], [9]], (90, 91, 92, 93))
    assert left == [90, 12, 13, 14, 91, 16, 17, 18, 92]
    assert taken_out == [90, 10, 11, 91, 15, 92, 19]
    assert replace_spans(text, [], (90,)) == (text.tolist(), [])


@pytest.mark.parametrize(("sentinels", "decoder", "spans"), [(2, 64, 2), (50, 7, 3), (9, 1, 0)])
def test_spans_without_a_sentinel_or_room_stay_in_the_text(
    tmp_path: Path, vocabulary: Path, sentinels: int, decoder: int, spans: int
) -> None:
    prefix = write_sentences(tmp_path / "x")
    tokenizer = tokenizer_with(vocabulary, sentinels)
    dataset = train(on_file(prefix), tokenizer, decoder_seq_length=decoder)
    most = 0
    for i in range(len(dataset)):
        sample, (sentences, target) = dataset[i], dataset.source[i]
        text, taken_out = put_back(sample, dataset.ids)
        assert text == np.concatenate(sentences)[:target].tolist()
        most = max(most, len(taken_out))
    assert most == spans


def test_without_sentinels_it_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    prefix = write_sentences(tmp_path / "x")
    with pytest.raises(ConfigError, match="--vocab-extra-ids 100"):
        train(on_file(prefix), tokenizer_with(vocabulary, 0))


def test_generated_sentences(vocabulary: Path) -> None:
    dataset = train(DataConfig(seq_length=16, mock_data=True), tokenizer_with(vocabulary, 0))
    for i in range(20):
        text, spans = put_back(dataset[i], dataset.ids)
        assert len(set((np.diff(text) % 256).tolist())) == 1  # counts up, so it can be learned
        assert spans
    assert dataset[0]["text_enc"].tolist() == dataset[0]["text_enc"].tolist()
