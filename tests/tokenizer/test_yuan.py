"""EncDecTokenizer of the Yuan models: the original code's ids, spelling, damaged vocabularies."""

from __future__ import annotations

import errno
import logging
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron.environment import private_cache
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import wordpiece
from tests.tokenizer.test_kinds import build

_ENTRIES = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<eod>", "\u2582"]
_ENTRIES += ["a", "b", "##b", "abc", "##d", "中", "国", "中国", "<s_0>", "<s_1>", "[EOS]"]


@pytest.fixture
def small(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(_ENTRIES))
    return str(tmp_path / "vocab.txt")


# Computed by src/megatron/tokenizer/tokenization_enc_dec.py of Yuan-1.0, commit f36cb6d.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Hello world, this is GPT-3! 2021年发布的unbelievable模型",
            [
                21992,
                12950,
                9,
                7738,
                3253,
                9851,
                52910,
                54,
                95,
                51,
                48686,
                44,
                1392,
                11,
                46744,
                2281,
            ],
        ),
        ("第一<n>第二", [181, 3, 287]),
    ],
)
def test_ids_of_the_original(shared_data, text, ids):
    pytest.importorskip("jieba")
    vocab = str(shared_data / "tokenizers" / "zh" / "yuan1.0-vocab.txt")
    tokenizer = build("EncDecTokenizer", vocab_file=vocab)
    assert (tokenizer.vocab_size, tokenizer.pad, tokenizer.eod, tokenizer.mask) == (53228, 5, 7, 6)
    assert tokenizer.tokenize(text) == ids


@pytest.mark.parametrize(
    ("text", "entries", "spelled"),
    [
        ("a b", "a b", "a b"),  # spaces between words without Chinese characters are dropped
        ("ab", "a ##b", "ab"),
        ("abcd", "abc ##d", "abcd"),
        ("a 中", "a \u2582 中", "a 中"),
        (" a", "\u2582 a", " a"),
        ("中国a\nb", "中国 a \u2583 b", "中国a\nb"),
        ("中国中", "中国 中", "中国中"),
        ("中文", "中 <unk>", "中<unk>"),
        ("b" * 201, "<unk>", "<unk>"),
        ("", "", ""),
    ],
)
def test_pieces(small, text, entries, spelled):
    pytest.importorskip("jieba")
    tokenizer = build("EncDecTokenizer", vocab_file=small)
    ids = tokenizer.tokenize(text)
    assert [tokenizer.inv_vocab[i] for i in ids] == entries.split()
    assert tokenizer.detokenize(ids) == spelled
    assert tokenizer.additional_special_tokens_ids == [17, 18]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a b", "a b"),
        (" a b", "\u2582 a b"),
        ("a b ", "a b \u2582"),
        (" ", "\u2582"),
        ("中 a", "中 \u2582 a"),
        ("a 中", "a \u2582 中"),
    ],
)
def test_only_spaces_between_words_are_dropped(small, text, entries, monkeypatch):
    """A stand-in for jieba splits the text at spaces."""
    monkeypatch.setattr(wordpiece, "_segmenter", lambda: lambda text: re.findall(r"\s|\S+", text))
    tokenizer = build("EncDecTokenizer", vocab_file=small)
    assert [tokenizer.inv_vocab[i] for i in tokenizer.tokenize(text)] == entries.split()


def test_the_dictionary_is_loaded_at_once_and_without_a_word(tmp_path, monkeypatch):
    jieba = pytest.importorskip("jieba")
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    jieba.setLogLevel(logging.DEBUG)
    wordpiece._segmenter.cache_clear()
    cut = wordpiece._segmenter()
    assert len(list(private_cache("jieba").iterdir())) == 1
    assert not jieba.default_logger.isEnabledFor(logging.INFO)
    assert cut("中国 a") == ["中国", " ", "a"]


@pytest.mark.parametrize("cache", ["file", "file/home", "folder"])
def test_an_unwritable_cache_is_not_needed(cache, tmp_path, monkeypatch, caplog, capsys):
    jieba = pytest.importorskip("jieba")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / cache))
    if cache == "folder":  # it exists, but its disk is full
        fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr(jieba.tempfile, "mkstemp", fail)
    wordpiece._segmenter.cache_clear()
    assert wordpiece._segmenter()("中国 a") == ["中国", " ", "a"]
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


def test_a_missing_library_is_named(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    wordpiece._segmenter.cache_clear()
    with pytest.raises(ConfigError, match="needs jieba: pip install jieba"):
        build("EncDecTokenizer", vocab_file=small)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([*_ENTRIES, "a"], "vocab.txt:21: entry 'a' is already on line 10"),
        (
            ["[PAD]", "[UNK]"],
            "vocab.txt: no entry <unk>, <pad>, .*vocabulary of a Yuan",
        ),
    ],
)
def test_damaged_vocabularies(small, entries, message):
    Path(small).write_text("\n".join(entries))
    with pytest.raises(DataError, match=message):
        build("EncDecTokenizer", vocab_file=small)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ("abc ##d", "abcd"),
        ("a abc", "a abc"),
        ("a \u2583 b", "a\nb"),  # no spaces around a newline
        ("a \u2582 中 国", "a 中国"),
        ("中 ##b a", "中##b a"),
        ("a ? b", "a <unk> b"),  # an id outside the vocabulary
    ],
)
def test_words_of_letters_are_separated(small, entries, text, monkeypatch):
    monkeypatch.setattr(wordpiece, "_segmenter", lambda: str.split)
    tokenizer = build("EncDecTokenizer", vocab_file=small)
    ids = [_ENTRIES.index(entry) if entry in _ENTRIES else 99 for entry in entries.split()]
    assert tokenizer.detokenize(ids) == text


@pytest.mark.parametrize("count", [0, 1, 3])
def test_sentinels_are_those_of_the_vocabulary(small, count, monkeypatch):
    monkeypatch.setattr(wordpiece, "_segmenter", lambda: str.split)
    entries = _ENTRIES[: _ENTRIES.index("<s_0>")] + [f"<s_{i}>" for i in range(count)]
    Path(small).write_text("\n".join(entries))
    tokenizer = build("EncDecTokenizer", vocab_file=small)
    assert tokenizer.additional_special_tokens_ids == [*range(17, 17 + count)]


def test_the_longest_word_and_the_ends_of_texts(small, monkeypatch):
    monkeypatch.setattr(wordpiece, "_segmenter", lambda: str.split)
    tokenizer = build("EncDecTokenizer", vocab_file=small)
    entries = [tokenizer.inv_vocab[i] for i in tokenizer.tokenize("b" * 200)]
    assert entries == ["b", *["##b"] * 199]
    assert tokenizer.tokenize("b" * 201) == [_ENTRIES.index("<unk>")]
    assert tokenizer.tokenize("文文中") == [0, 0, _ENTRIES.index("中")]
    assert (tokenizer.bos, tokenizer.eos) == (_ENTRIES.index("<s>"), _ENTRIES.index("</s>"))


@pytest.mark.parametrize("entry", ["中b", "\u4e00b", "\u9fffb"])  # and first and last ones
def test_an_entry_with_any_chinese_character_has_no_mark_within_a_word(small, monkeypatch, entry):
    monkeypatch.setattr(wordpiece, "_segmenter", lambda: str.split)
    Path(small).write_text("\n".join([*_ENTRIES, entry]))
    tokenizer = build("EncDecTokenizer", vocab_file=small)
    assert [tokenizer.inv_vocab[i] for i in tokenizer.tokenize(f"a{entry}")] == ["a", entry]
