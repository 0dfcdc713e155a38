"""Special tokens and sentinels of small SentencePiece models."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatron.errors import ConfigError, DataError
from tests.tokenizer.test_kinds import build


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models with T5's special tokens, Llama's, Megatron's, and without an end.

    Megatron's model also has the tokens of BERT.
    """
    folder = tmp_path_factory.mktemp("models")
    ids = {
        "t5": (0, -1, 1, 2),
        "llama": (-1, 1, 2, 0),
        "megatron": (0, 1, 2, 3),
        "endless": (0, 1, -1, 2),
        "first": (-1, 0, 1, 2),
    }
    symbols = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    for name, (pad, bos, eos, unk) in ids.items():
        control = [*symbols, "<CLS>>"] if name == "megatron" else []
        settings = {"pad_id": pad, "bos_id": bos, "eos_id": eos, "unk_id": unk}
        _train(folder / f"{name}.model", **settings, control_symbols=control)
    return folder


def _train(path: Path, **settings: Any) -> None:
    """Write a model that was trained on a sentence."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello world, hello"] * 9),
        model_writer=model,
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    path.write_bytes(model.getvalue())


def _pieces(path: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=path)


def test_documents_end_with_the_model_s_end(models: Path) -> None:
    tokenizer = build("GPTSentencePieceTokenizer", tokenizer_model=str(models / "t5.model"))
    assert (tokenizer.pad, tokenizer.eos, tokenizer.eod) == (0, 1, 1)
    with pytest.raises(ConfigError, match="has no bos token"):
        _ = tokenizer.bos
    path = str(models / "endless.model")
    tokenizer = build("GPTSentencePieceTokenizer", tokenizer_model=path)
    assert (tokenizer.pad, tokenizer.bos) == (0, 1)
    with pytest.raises(ConfigError, match="has no eod token"):
        _ = tokenizer.eod


def test_spans_leave_out_the_spaces_that_a_model_removes(models: Path) -> None:
    tokenizer = build("GPTSentencePieceTokenizer", tokenizer_model=str(models / "t5.model"))
    ids, spans = tokenizer.tokenize_spans("   Hello</s>  he")
    end = ids.index(tokenizer.eos)
    assert (spans[0, 0], spans[end - 1, 1]) == (3, 8)
    assert spans[end].tolist() == [8, 12]
    assert ids[:end] == tokenizer.tokenize("Hello")
    assert ids[end + 1 :] == tokenizer.tokenize("he")
    assert (spans[end + 1, 0], spans[-1, 1]) == (14, 16)


def test_llama_s_texts_begin_with_the_begin_token(models: Path) -> None:
    path = str(models / "llama.model")
    tokenizer = build("Llama2Tokenizer", tokenizer_model=path)
    ids = _pieces(path).encode_as_ids("Hello world")
    assert tokenizer.tokenize("Hello world") == [1, *ids]
    assert tokenizer.detokenize([1, *ids, tokenizer.vocab_size]) == "Hello world"
    with pytest.raises(DataError, match="has no begin token"):
        build("Llama2Tokenizer", tokenizer_model=str(models / "t5.model"))


def test_the_begin_token_may_be_the_first_piece(models: Path) -> None:
    tokenizer = build("Llama2Tokenizer", tokenizer_model=str(models / "first.model"))
    assert tokenizer.tokenize("Hello")[0] == tokenizer.bos == 0


def test_a_space_that_a_model_adds_at_the_end_covers_nothing(tmp_path: Path) -> None:
    _train(tmp_path / "suffix.model", treat_whitespace_as_suffix=True)
    path = str(tmp_path / "suffix.model")
    tokenizer = build("GPTSentencePieceTokenizer", tokenizer_model=path)
    ids, spans = tokenizer.tokenize_spans("Held")
    assert tokenizer.inv_vocab[ids[-1]] == "\u2581"
    assert spans[-1].tolist() == [4, 4]


def test_sentinels_follow_the_pieces_as_in_t5(models: Path) -> None:
    path = str(models / "t5.model")
    size, hello = _pieces(path).get_piece_size(), _pieces(path).encode_as_ids("Hello")
    tokenizer = build("GPTSentencePieceTokenizer", tokenizer_model=path, vocab_extra_ids=3)
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.additional_special_tokens_ids == [size + 2, size + 1, size]
    assert tokenizer.has_t5_sentinels
    assert tokenizer.tokenize("Hello<extra_id_0>Hello") == [*hello, size + 2, *hello]
    assert tokenizer.inv_vocab[size] == "<extra_id_2>"


def test_megatron_s_tokens_follow_the_pieces(models: Path) -> None:
    path = str(models / "t5.model")
    size, hello = _pieces(path).get_piece_size(), _pieces(path).encode_as_ids("Hello")
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=path, vocab_extra_ids=2)
    special = (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask, tokenizer.bos)
    assert special == tuple(range(size, size + 5))
    assert (tokenizer.pad, tokenizer.eos) == (0, 1)  # the model's own
    assert tokenizer.additional_special_tokens_ids == [size + 5, size + 6]
    assert not tokenizer.has_t5_sentinels
    ids = tokenizer.tokenize("<CLS>Hello<extra_id_1>")
    assert ids == [size, *hello, size + 6]
    # Ids that pad the embedding have no text.
    assert tokenizer.detokenize([*ids, tokenizer.vocab_size]) == " <CLS> Hello <extra_id_1> "


def test_nothing_follows_the_pieces_of_a_model_with_all_of_megatron_s_tokens(models: Path) -> None:
    path = str(models / "megatron.model")
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=path)
    assert tokenizer.vocab_size == _pieces(path).get_piece_size()
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.cls) == (0, 1, 2, 4)
    ids = tokenizer.tokenize("<CLS>Hello")
    assert tokenizer.detokenize([*ids, tokenizer.vocab_size]) == " <CLS> Hello"
    longest = tokenizer.vocab["<CLS>>"]
    assert tokenizer.tokenize_with_special("<CLS>><CLS>") == [longest, tokenizer.cls]
