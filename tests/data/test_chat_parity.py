"""Conversations become the same ids and labels as in TRL, one by one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.data.conversations import ConversationEncoder, ConversationOptions
from tests.data.chat_parity import (
    FORMS,
    RECORD,
    STYLES,
    digests,
    prepared_by_trl,
    records,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STYLES)
def test_ids_and_labels_are_those_of_trl(
    name: str, form: str, record: dict[str, Any], tmp_path: Path
) -> None:
    style = STYLES[name]
    write_tokenizer(tmp_path, style.kind, record["merges"][style.kind])
    tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)
    )
    template = style.marked if form == "messages" else style.plain
    options = ConversationOptions(tokenizer, template, 1 << 20, preferences=form == "preference")
    encoder = ConversationEncoder(options)
    lines = [json.dumps(each).encode() for each in records(form)]
    examples = [found for line in lines for found in encoder.encode_record(line, Counter())]
    expected = record["styles"][name][form]
    for (ids, trained), known in zip(examples, expected["first"], strict=False):
        assert ids.tolist() == known["ids"]
        assert trained.astype(int).tolist() == known["trained"]
    assert digests(examples) == expected["digests"]
    if form == "messages":  # without marks, what the template adds for each turn is trained
        unmarked = ConversationEncoder(ConversationOptions(tokenizer, style.plain, 1 << 20))
        for line, (ids, trained) in zip(lines, examples, strict=True):
            ((same_ids, same_trained),) = unmarked.encode_record(line, Counter())
            assert np.array_equal(same_ids, ids)
            assert np.array_equal(same_trained, trained)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STYLES)
def test_the_record_is_what_trl_prepares(
    name: str, form: str, record: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason="needs the extra [parity]")
    style = STYLES[name]
    write_tokenizer(tmp_path, style.kind, record["merges"][style.kind])
    template = style.marked if form == "messages" else style.plain
    examples = prepared_by_trl(tmp_path, template, form)
    assert digests(examples) == record["styles"][name][form]["digests"]
