"""T5's sentinels: appended as in Megatron, appended as in T5, or the files' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.files import find_sentinels
from tests.tokenizer.t5 import SENTINELS, SIZE, t5_tokenizer


def build(kind: str, **flags: object) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **flags))


def test_a_t5s_tokenizer_json_has_its_own(tmp_path: Path) -> None:
    tokenizer = t5_tokenizer(tmp_path)
    assert tokenizer.vocab_size == SIZE
    # <extra_id_0> has the highest id.
    assert tokenizer.additional_special_tokens_ids == [SIZE - 1 - i for i in range(SENTINELS)]
    assert tokenizer.has_t5_sentinels
    assert (tokenizer.decoder_start, tokenizer.encoder_end) == (tokenizer.pad, [tokenizer.eos])
    # Whole texts end as the file says; parts of a text do not.
    assert tokenizer.tokenize("w0 <extra_id_0> w1") == [3, SIZE - 1, 4, 1]
    assert [ids.tolist() for ids in tokenizer.tokenize_sentences(["w0 w1", ""])] == [[3, 4], []]


def test_what_the_settings_do_not_name_is_asked_for(tmp_path: Path) -> None:
    t5_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(ConfigError, match="no pad token .* name it in a tokenizer_config.json"):
        _ = tokenizer.decoder_start


def test_t5s_model_gets_t5s_vocabulary(shared_data: Path) -> None:
    model = str(shared_data / "tokenizers" / "t5" / "spiece.model")
    plain = build("GPTSentencePieceTokenizer", tokenizer_model=model)
    assert (plain.vocab_size, plain.additional_special_tokens_ids) == (32000, [])
    assert not plain.has_t5_sentinels
    tokenizer = build("GPTSentencePieceTokenizer", tokenizer_model=model, vocab_extra_ids=100)
    assert tokenizer.vocab_size == 32100
    assert tokenizer.additional_special_tokens_ids == list(range(32099, 31999, -1))
    assert (tokenizer.decoder_start, tokenizer.encoder_end) == (0, [1])
    # As transformers encodes it, except for the end.
    ids = [8774, 32099, 296, 5]
    assert tokenizer.tokenize("Hello <extra_id_0> world.") == ids
    assert tokenizer.detokenize(ids) == "Hello <extra_id_0> world."
    assert tokenizer.tokenize("Hello world.") == plain.tokenize("Hello world.") == [8774, 296, 5]


def test_megatrons_stay_behind_its_own_tokens(shared_data: Path) -> None:
    model = str(shared_data / "tokenizers" / "t5" / "spiece.model")
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=model, vocab_extra_ids=100)
    assert tokenizer.additional_special_tokens_ids == list(range(32005, 32105))
    assert not tokenizer.has_t5_sentinels
    assert (tokenizer.decoder_start, tokenizer.encoder_end) == (tokenizer.bos, [])


@pytest.fixture(name="own", scope="module")
def _own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a SentencePiece model with three sentinels of its own."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text").write_text("the cat sat on the mat and that was that\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "own"),
        vocab_size=40,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=[f"<extra_id_{i}>" for i in (2, 1, 0)],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return str(folder / "own.model")


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "SentencePieceTokenizer"])
def test_a_sentencepiece_model_with_its_own(own: str, kind: str) -> None:
    tokenizer = build(kind, tokenizer_model=own)
    assert tokenizer.additional_special_tokens_ids == [5, 4, 3]
    assert tokenizer.has_t5_sentinels
    assert (tokenizer.decoder_start, tokenizer.encoder_end) == (0, [1])
    assert 5 in tokenizer.tokenize("the <extra_id_0> sat")


def test_more_sentinels_than_a_models_own(own: str) -> None:
    with pytest.raises(ConfigError, match="has its own 3 sentinels: drop --vocab-extra-ids"):
        build("GPTSentencePieceTokenizer", tokenizer_model=own, vocab_extra_ids=100)
    # Megatron appends the missing ones, so its samples do not change.
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=own, vocab_extra_ids=4)
    assert tokenizer.additional_special_tokens_ids == [5, 4, 3, tokenizer.vocab_size - 1]
    assert not tokenizer.has_t5_sentinels


def test_ids_beyond_a_model_are_left_out(own: str) -> None:
    for kind in ("GPTSentencePieceTokenizer", "SentencePieceTokenizer"):
        tokenizer = build(kind, tokenizer_model=own)
        ids = tokenizer.tokenize("the cat")
        assert tokenizer.detokenize([*ids, 9999, *ids]).split() == ["the", "cat"] * 2
    assert tokenizer.detokenize([tokenizer.cls, *ids]) == " <CLS> the cat"
    assert tokenizer.tokenize("<CLS>the cat") == [tokenizer.cls, *ids]


def test_a_model_without_a_begin_token_is_no_llama_s(own: str) -> None:
    with pytest.raises(DataError, match="has no begin token, .* use GPTSentencePieceTokenizer"):
        build("Llama2Tokenizer", tokenizer_model=own)


def test_sentinels_are_found_up_to_the_first_that_is_missing() -> None:
    assert find_sentinels({"<extra_id_1>": 1}) == []
    assert find_sentinels({"<extra_id_0>": 9, "\u2581<extra_id_1>": 8, "<extra_id_3>": 7}) == [9, 8]


def test_a_tokenizer_that_takes_none_says_so(tmp_path: Path) -> None:
    t5_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="HuggingFaceTokenizer does not support extra entries"):
        build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path), vocab_extra_ids=100)
