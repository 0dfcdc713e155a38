"""Packed samples of examples: their tokens, which of them are trained, and several files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.finetuning import FinetuningConfig
from megatron.data.chat import (
    PackedDataset,
    build_chat_datasets,
    build_packed_datasets,
    describe_packing,
    members_of,
    padding_token,
    rows_per_epoch,
)
from megatron.data.conversations import TokenizedExamples
from megatron.data.datasets import DataRequest
from megatron.data.gpt import make_loss_mask
from megatron.data.loader import FilledDataset, collate
from megatron.data.sample import SEGMENT_ENDS, TRAINED
from megatron.errors import ConfigError
from megatron.tokenizer import build_tokenizer
from tests.inference.server.live import write_tokenizer

_PAD = 9999


def _examples(name: str, lengths: list[int], first: int) -> TokenizedExamples:
    """Return examples of tokens that count up, every third of which is trained."""
    sizes = np.array(lengths, np.int64)
    tokens = np.arange(first, first + sizes.sum(), dtype=np.int32)
    starts = np.cumsum(sizes) - sizes
    return TokenizedExamples(name, tokens, tokens % 3 == 0, sizes, starts, Counter())


_FILES = {
    "a": _examples("a", [5, 16, 3, 9, 2, 7, 11, 6] * 5, 0),
    "b": _examples("b", [4, 8, 15, 10] * 10, 1000),
}


def _build(
    *words: str,
    samples: tuple[int, int | None, int],
    packs: bool = True,
    split: str = "80,20,0",
) -> tuple[PackedDataset | None, ...]:
    data = DataConfig(data_path=words, split=split, seq_length=16)
    return build_packed_datasets(
        DataRequest(data, 7, samples),
        lambda name, flag: _FILES[name],
        seq_length=16,
        padding_id=_PAD,
        packs=packs,
    )


@pytest.mark.parametrize("packs", [True, False])
def test_every_example_is_in_an_epoch_once_with_its_labels(packs: bool) -> None:
    train = _build("a", samples=(100, 0, 0), packs=packs, split="100,0,0")[0]
    rows = rows_per_epoch(train)
    found = []
    for number in range(rows):
        sample = train[number]
        text, trained, ends = sample["text"], sample[TRAINED], sample[SEGMENT_ENDS]
        assert (text.shape, trained.shape, ends[-1]) == ((17,), (16,), 16)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            tokens = text[start:end]
            if (tokens == _PAD).all():
                assert not trained[start:].any()
                assert end == 16
                continue
            assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
            assert np.array_equal(trained[start : end - 1], tokens[1:] % 3 == 0)
            assert not trained[end - 1], "the next token belongs to another example"
            found += tokens.tolist()
    assert sorted(found) == _FILES["a"].tokens.tolist()
    assert rows == 40 if not packs else rows < 25
    assert f"{59 / 16 / (40 if not packs else rows) * 5:.1%} full" in describe_packing(train)


def test_samples_depend_on_their_number_alone() -> None:
    one, other = (_build("a", samples=(100, 0, 0))[0] for _ in range(2))
    for number in (70, 3, 41, 99, 0):
        for part, value in one[number].items():
            assert np.array_equal(value, other[number][part])
    rows = rows_per_epoch(one)
    orders = [[one[epoch * rows + i]["text"].tolist() for i in range(rows)] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_splits_and_blends() -> None:
    train, valid, test = _build("3", "a", "1", "b", samples=(40, 8, 0))
    members = members_of(train, PackedDataset)
    assert [len(member.packing.lengths) for member in members] == [32, 32]
    assert [member.first for member in members_of(valid, PackedDataset)] == [32, 32]
    assert test is None
    from_a = sum(int(train[i]["text"][0]) < 1000 for i in range(40))
    assert from_a == 30
    assert rows_per_epoch(train) == sum(member.packing.rows for member in members)


def test_full_validation_reads_every_example_once_and_then_fills() -> None:
    valid = _build("a", "b", samples=(1, None, 0), split="50,50,0")[1]
    assert valid is not None
    filled = FilledDataset(valid, 16)
    assert len(filled) % 16 == 0 < len(filled) - len(valid) < 16
    batch = collate([filled[i] for i in range(len(filled))])
    tokens = batch["text"][: len(valid)]
    expected = [_FILES[name].tokens[-total:] for name, total in {"a": 144, "b": 185}.items()]
    assert sorted(tokens[tokens != _PAD].tolist()) == np.concatenate(expected).tolist()
    mask = make_loss_mask(batch, eod=_PAD, eod_mask_loss=False)
    assert torch.equal(mask[: len(valid)], batch[TRAINED][: len(valid)].float())
    assert not mask[len(valid) :].any()
    assert batch[TRAINED][len(valid) :].any()


def test_rows_are_padded_with_a_token_that_is_no_text() -> None:
    def tokenizer(**ids: tuple[int, ...]) -> Any:
        return SimpleNamespace(special_ids=lambda name: ids.get(name, ()))

    assert padding_token(tokenizer(pad=(3,), eod=(5,))) == 3
    assert padding_token(tokenizer(eod=(5, 6))) == 5
    assert padding_token(tokenizer()) == 0


def test_files_of_conversations(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    template = tmp_path / "chatml.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    flags = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(tmp_path / "tokenizer.json"),
        chat_template=str(template),
    )
    tokenizer = build_tokenizer(flags)
    data = DataConfig(train_data_path=(str(chats),), seq_length=32)

    def build(**options: object) -> PackedDataset:
        return build_chat_datasets(
            DataRequest(data, 1, (1, 0, 0)),
            FinetuningConfig(sft=True, **options),  # type: ignore[arg-type]
            seq_length=32,
            tokenizer=(flags, tokenizer),
        ).train

    sample = build()[0]
    labels = sample["text"][1:]
    assert tokenizer.detokenize(labels[sample[TRAINED] == 1]) == "Two.<|endoftext|>"
    sample = build(train_on_inputs=True)[0]
    assert sample[TRAINED].sum() == sample[SEGMENT_ENDS][0] - 1

    (tmp_path / "indexed.idx").touch()
    data = DataConfig(train_data_path=(str(tmp_path / "indexed"),), seq_length=32)
    with pytest.raises(ConfigError, match=r"indexed dataset of documents.*give --no-sft"):
        build()
