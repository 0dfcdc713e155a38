"""Which tokens are masked: whole words, within the budget, in BERT's proportions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import WordPiece

from megatron.config.data import TokenizerConfig
from megatron.data.masking import SpecialIds, choose_spans, masking_budget, whole_words
from megatron.errors import ConfigError
from megatron.tokenizer.build import build_tokenizer
from tests.data.corpus import write_vocabulary

PAD, _, CLS, SEP, MASK = range(5)
WORD, PIECE = 5, 205  # the first id of each kind


@pytest.fixture(name="ids", scope="module")
def _ids(tmp_path_factory: pytest.TempPathFactory) -> SpecialIds:
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt")
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="BertWordPieceLowerCase", vocab_file=str(path), vocab_extra_ids=3
        )
    )
    return SpecialIds.for_t5(tokenizer)


def test_special_ids_are_the_tokenizers(ids: SpecialIds) -> None:
    assert (ids.pad, ids.cls, ids.sep, ids.mask) == (PAD, CLS, SEP, MASK)
    assert (ids.bos, ids.eos, ids.sentinels, ids.size) == (405, 406, (407, 408, 409), 410)
    assert np.flatnonzero(ids.continues).tolist() == list(range(PIECE, 405))


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    with pytest.raises(ConfigError, match="BertWordPieceLowerCase"):
        SpecialIds.for_bert(tokenizer)


def test_a_bert_needs_no_begin_and_end(tmp_path: Path) -> None:
    """Hugging Face's BERT tokenizers do not define them."""
    vocab = {entry: i for i, entry in enumerate(("[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"))}
    Pipeline(WordPiece(vocab, unk_token="[PAD]")).save(str(tmp_path / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    kind = "HuggingFaceTokenizer"
    flags = TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(tmp_path))
    ids = SpecialIds.for_bert(build_tokenizer(flags))
    assert (ids.pad, ids.cls, ids.sep, ids.mask) == (0, 1, 2, 3)
    assert ids.continues.tolist() == [False] * 5 + [True]


def words_of(tokens: list[int], ids: SpecialIds) -> list[list[int]]:
    return whole_words(np.array(tokens, np.int64), ids)


def test_pieces_belong_to_their_word(ids: SpecialIds) -> None:
    tokens = [CLS, WORD, PIECE, PIECE + 1, WORD + 1, SEP, WORD + 2, PIECE, SEP]
    assert words_of(tokens, ids) == [[1, 2, 3], [4], [6, 7]]
    cut = [CLS, PIECE, WORD, SEP, PIECE, PIECE, WORD, SEP]  # both segments lost their front
    assert words_of(cut, ids) == [[1], [2, 4, 5], [6]]
    assert words_of([CLS, SEP], ids) == []


def test_spans_are_whole_words_apart_and_within_the_budget(ids: SpecialIds) -> None:
    random = np.random.RandomState(0)
    for _ in range(200):
        tokens = random.randint(WORD, 405, random.randint(1, 80))
        words = whole_words(tokens, ids)
        whole = {position: k for k, word in enumerate(words) for position in word}
        budget = float(random.choice([0, 0.5, 1, 7.5, 20]))
        spans = list(choose_spans(words, budget, lambda: random.randint(1, 5), random))
        hidden = [position for span in spans for position in span]
        assert len(hidden) == len(set(hidden)) <= budget
        touched = {whole[position] for position in hidden}
        assert sorted(hidden) == sorted(p for k in touched for p in words[k])


def test_ids_of_generated_tokens_are_the_first_of_the_vocabulary() -> None:
    for size, count in ((16, 5), (21, 7), (205, 99), (206, 100), (300, 100)):
        ids = SpecialIds.generated(size)
        assert (ids.pad, ids.cls, ids.sep, ids.mask, ids.bos, ids.eos) == (0, 1, 2, 3, 4, 5)
        assert ids.sentinels == tuple(range(6, 6 + count))
        assert (ids.size, ids.encoder_end) == (size, ())
        assert ids.continues.tolist() == [False] * size
    with pytest.raises(ConfigError, match="a vocabulary of 15 entries has no room for special"):
        SpecialIds.generated(15)
    missing = SpecialIds(9, ids.continues, 0)
    assert [missing.cls, missing.sep, missing.mask, missing.bos, missing.eos] == [-1] * 5


def test_spans_fill_the_budget_exactly() -> None:
    words = [[0, 1], [2], [3, 4, 5], [6, 7]]
    for budget in range(9):
        for seed in range(10):
            random = np.random.RandomState(seed)
            order = np.arange(4)
            np.random.RandomState(seed).shuffle(order)
            expected, left = [], budget
            for first in order:  # each word that still fits
                if len(words[first]) <= left:
                    expected.append(words[first])
                    left -= len(words[first])
            assert list(choose_spans(words, budget, lambda: 1, random)) == expected


def test_a_span_is_shortened_to_fit() -> None:
    ids = SpecialIds.generated(100)
    words = whole_words(np.arange(50, 60), ids)
    spans = list(choose_spans(words, 3, lambda: 10, np.random.RandomState(1)))
    assert sum(map(len, spans)) == 3


def test_the_caller_draws_between_spans() -> None:
    """A span is yielded before the next one is drawn."""
    words = whole_words(np.arange(50, 60), SpecialIds.generated(100))
    events: list[str] = []

    def draw() -> int:
        events.append("draw")
        return 1

    for _ in choose_spans(words, 2, draw, np.random.RandomState(1)):
        events.append("span")
    assert events == ["draw", "span", "draw", "span"]


def test_budget() -> None:
    assert masking_budget(0.15, 128, 125) == 0.15 * 125  # a fraction, as in Megatron
    assert masking_budget(0.15, 100, 125) == 15
    assert masking_budget(0.15, 10, 125) == 2  # 1.5 rounds to even
    assert masking_budget(0.15, 4, 125) == 1
    assert masking_budget(0.15, 3, 125) == 1  # 0.45 would round to none
    assert masking_budget(0.15, 5, 2) == 0.3  # none fits
    assert masking_budget(0, 128, 125) == 0


def test_every_word_is_as_likely_as_any_other() -> None:
    ids = SpecialIds.generated(100)
    words = whole_words(np.arange(50, 70), ids)
    random = np.random.RandomState(5)
    counts = Counter(
        position
        for _ in range(4000)
        for span in choose_spans(words, 3, lambda: 1, random)
        for position in span
    )
    assert sorted(counts) == list(range(20))
    assert max(abs(count / 600 - 1) for count in counts.values()) < 0.15  # 4000 * 3 / 20 = 600


def test_generated_words_need_a_vocabulary_of_16_entries() -> None:
    ids = SpecialIds.generated(16)
    assert ids.sentinels == (6, 7, 8, 9, 10)
    assert len(SpecialIds.generated(1000).sentinels) == 100
    with pytest.raises(ConfigError, match="of 15 entries .* give one with at least 16 entries"):
        SpecialIds.generated(15)
