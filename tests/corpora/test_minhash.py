from __future__ import annotations

import random
import re

import numpy as np
import pytest

from megatron.corpora import words
from megatron.corpora.minhash import MinHash, group_duplicates, sign
from megatron.corpora.words import hash_ngrams, split_words

_VOCABULARY = [f"word{number}" for number in range(2000)]


def _document(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices(_VOCABULARY, k=count))


def _changed(text: str, generator: random.Random, share: float) -> str:
    return " ".join(
        generator.choice(_VOCABULARY) if generator.random() < share else word
        for word in text.split()
    )


def _jaccard(one: str, other: str, size: int) -> float:
    sets = [
        {tuple(text.split()[i : i + size]) for i in range(len(text.split()))}
        for text in (one, other)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" ... -- ", []),
        ("Hello, World_1! it's", ["Hello", "World_1", "it", "s"]),
        ("naïve Привет", ["naïve", "Привет"]),
        ("“quoted”—dash…end", ["quoted", "dash", "end"]),
        ("你好abc吗 d😀e", ["你", "好", "abc", "吗", "d", "😀", "e"]),
    ],
)
def test_words_are_found_where_a_reader_would(text: str, expected: list[str]) -> None:
    data = text.encode()
    found = split_words([b"before", data, b"", b"after"])
    spans = zip(found.starts, found.ends, found.documents, strict=True)
    assert [data[a:b].decode() for a, b, document in spans if document == 1] == expected
    assert found.batch == 4


def test_hashes_are_those_of_the_words_wherever_they_stand() -> None:
    texts = ["The cat, the dog; THE END.", "x " * 50, "end of the cat"]
    found = split_words([text.encode() for text in texts])
    plain = [word for text in texts for word in re.findall(r"\w+", text.lower())]
    by_word: dict[str, set[int]] = {}
    for word, value in zip(plain, found.hashes.tolist(), strict=True):
        by_word.setdefault(word, set()).add(value)
    assert all(len(values) == 1 for values in by_word.values())
    assert len({value for values in by_word.values() for value in values}) == len(by_word)


def test_ngrams_end_with_their_document() -> None:
    found = split_words([b"a b c d", b"c d", b"a b"])
    hashes, whole = hash_ngrams(found, 3)
    assert whole.tolist() == [True, True, False, False, False, False, False, False]
    assert hashes[2] == hashes[4]  # "c d" at the end of the first and of the second document
    assert hashes[0] != hashes[6]  # "a b c" and "a b"
    single, whole = hash_ngrams(found, 1)
    assert (single[[0, 1, 2]] == single[[6, 7, 4]]).all()
    assert len(set(single.tolist())) == 4
    assert whole.all()


def test_a_document_larger_than_a_batch_has_the_same_words(monkeypatch) -> None:
    text = _document(random.Random(1), 5000).encode()
    normal = split_words([text])
    monkeypatch.setattr(words, "_BATCH_BYTES", 1000)
    assert (split_words([text]).hashes == normal.hashes).all()


def test_documents_are_split_into_batches_of_a_limited_size(monkeypatch) -> None:
    monkeypatch.setattr(words, "_BATCH_BYTES", 10)
    texts = [b"x" * size for size in (3, 4, 2, 2, 30, 1, 1)]  # each takes one byte more
    assert words.batches(texts) == [(0, 2), (2, 4), (4, 5), (5, 7)]
    assert words.batches([]) == []


def test_values_are_mixed_as_in_murmurhash3() -> None:
    """A corpus may be finished by a later version, whose hashes must be the same."""
    assert words.mix(np.array([0, 1], np.uint64)).tolist() == [0, 0xB456BCFC34C2CB2C]


def test_every_bit_of_a_value_changes_every_bit_of_its_hash() -> None:
    values = np.random.default_rng(5).integers(2**64, size=2000, dtype=np.uint64)
    places = np.arange(64, dtype=np.uint64)
    for bit in places:
        changed = words.mix(values) ^ words.mix(values ^ (np.uint64(1) << bit))
        shares = ((changed[:, None] >> places) & np.uint64(1)).mean(axis=0)
        assert (abs(shares - 0.5) < 0.1).all(), bit


def test_the_default_bands_find_the_share_of_pairs_that_is_promised() -> None:
    settings = MinHash()
    for similarity, found in ((0.5, 0.72), (0.6, 0.96), (0.7, 0.999)):
        share = 1 - (1 - similarity**settings.rows) ** settings.bands
        assert share == pytest.approx(found, abs=0.005)
    assert settings.values == 200


def test_estimates_are_those_of_the_jaccard_similarity() -> None:
    generator = random.Random(2)
    settings = MinHash()
    originals = [_document(generator, generator.choice([30, 200, 800])) for _ in range(150)]
    changed = [_changed(text, generator, generator.choice([0.02, 0.1])) for text in originals]
    one, other = (sign([t.encode() for t in texts], settings) for texts in (originals, changed))
    estimates = (one == other).mean(axis=0)
    true = [_jaccard(a, b, settings.ngram) for a, b in zip(originals, changed, strict=True)]
    errors = estimates - true
    assert abs(errors.mean()) < 0.01
    assert np.sqrt((errors**2).mean()) < 0.05


def test_signatures_do_not_depend_on_batches_and_depend_on_the_seed(monkeypatch) -> None:
    generator = random.Random(3)
    texts = [_document(generator, generator.randrange(200)).encode() for _ in range(200)]
    whole = sign(texts, MinHash())
    assert (sign(texts, MinHash(seed=5)) != whole).mean() > 0.9
    monkeypatch.setattr(words, "_BATCH_BYTES", 2000)
    assert (sign(texts, MinHash()) == whole).all()


def test_groups_are_found_through_a_chain_and_keep_the_first() -> None:
    generator = random.Random(4)
    base = _document(generator, 400).split()
    # Each link shares 87% with the next one, but the last shares little with the first.
    chain = [" ".join(base[i * 25 : i * 25 + 200]) for i in range(9)]
    others = [_document(generator, 200) for _ in range(50)]
    texts = [*others[:25], *chain, *others[25:], "", "..."]
    settings = MinHash(similarity=0.55)
    roots = group_duplicates(sign([text.encode() for text in texts], settings), settings)
    expected = np.arange(len(texts))
    expected[25:34] = 25
    assert roots.tolist() == expected.tolist()


def test_short_documents_are_duplicates_only_if_they_are_equal() -> None:
    texts = [b"hello world", b"Hello, world!", b"hello there", b"", b"", b"one", b"one"]
    roots = group_duplicates(sign(texts, MinHash()), MinHash())
    assert roots.tolist() == [0, 0, 2, 3, 4, 5, 5]


def test_a_million_equal_documents_are_one_group() -> None:
    settings = MinHash(bands=2, rows=2)
    signatures = np.full((4, 1_000_000), 7, np.uint16)
    assert (group_duplicates(signatures, settings) == 0).all()


def test_the_ngrams_of_a_long_document_fill_all_values() -> None:
    text = " ".join(f"w{number}" for number in range(20_000)).encode()
    values = sign([text], MinHash())[:, 0]
    assert len(set(values.tolist())) > 0.95 * len(values)
