"""Samples of generated sentences, as recorded.

A run that continues with a later version must read the same samples. Those of real data are in
../shared, which is not next to every checkout.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.retriever import RetrieverConfig
from megatron.data.bert import BertDataset, BertOptions
from megatron.data.datasets import DataRequest
from megatron.data.ict import build_ict_datasets
from megatron.data.masking import SpecialIds
from megatron.data.mock import MockDataset, MockSentences
from megatron.data.sentence_map import SentenceMapPlan
from megatron.data.t5 import T5Dataset, T5Options
from megatron.tokenizer import build_tokenizer


def _sentences(length: int) -> tuple[MockSentences, SpecialIds]:
    ids = SpecialIds.generated(61)
    ids = ids._replace(continues=np.arange(61) % 4 == 3)  # every fourth token continues a word
    plan = SentenceMapPlan(0, length, 0.3, 7, 2)
    return MockSentences(60, plan, ids, 1), ids


def _bert(two: bool) -> BertDataset:
    source, ids = _sentences(29)
    return BertDataset(source, ids, BertOptions(32, 0.2, 2**32 - 5, two))


def _t5() -> T5Dataset:
    source, ids = _sentences(30)
    return T5Dataset(source, ids, T5Options(32, 12, 0.3, 11))


def _ict() -> Any:
    data = DataConfig(mock_data=True, seq_length=40)
    flags = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=60)
    return build_ict_datasets(
        DataRequest(data, 5, (60, 0, 0)),
        RetrieverConfig(query_in_block_prob=0.3),
        seq_length=40,
        tokenizer=build_tokenizer(flags),
    ).train


def _digest(dataset: Any) -> str:
    digest = hashlib.sha256()
    for i in range(60):
        for name, value in dataset[i].items():
            array = np.asarray(value, np.int64)
            digest.update(f"{name} {array.shape} {array.tolist()}\n".encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("dataset", "digest"),
    [
        (_bert(True), "1a0812c900860aac"),
        (_bert(False), "b43a7c26ba04907b"),
        (_t5(), "e03627c96fc1439f"),
        (_ict(), "051ff3d91a394ef9"),
        (MockDataset(60, 9, 100, 3, 1), "f8db104cedbc0e94"),
        (MockDataset(60, 9, 300, 3, 2), "3db43e13ec4b71ca"),
    ],
)
def test_all_samples(dataset: Any, digest: str) -> None:
    assert _digest(dataset) == digest


def test_a_sample_of_bert() -> None:
    """Text counts up from 39 to 60, then from 33. Ids below 5 are special, and 3 is [MASK]."""
    sample = {name: np.asarray(value).tolist() for name, value in _bert(True)[3].items()}
    a = [39, 40, 41, 3, 3, *range(44, 49), 3, 50, 3, 52, 53]  # 50 was chosen, and stays
    b = [*range(54, 61), *range(33, 40)]
    hidden = {4: 42, 5: 43, 11: 49, 12: 50, 13: 51}
    assert sample == {
        "text": [1, *a, 2, *b, 2],
        "types": [0] * 17 + [1] * 15,
        "labels": [hidden.get(i, -1) for i in range(32)],
        "is_random": 0,
        "loss_mask": [int(i in hidden) for i in range(32)],
        "padding_mask": [1] * 32,
        "id": 3,
    }


def test_a_sample_of_t5() -> None:
    sample = {name: np.asarray(value).tolist() for name, value in _t5()[0].items()}
    text = [57, 58, 59, 60, 33, 34, 35, 36, 6, 38, 39, 40, 41, 7, *range(44, 57), 8]
    removed = [6, 37, 7, 42, 43, 8, 57, 58]
    assert sample == {
        "text_enc": [*text, 0, 0, 0, 0],
        "text_dec": [4, *removed, 0, 0, 0],
        "labels": [*removed, 5, -1, -1, -1],
        "loss_mask": [1] * 9 + [0] * 3,
        "enc_mask": [1] * 28 + [0] * 4,
        "dec_mask": [1] * 9 + [0] * 3,
        "id": 0,
    }
