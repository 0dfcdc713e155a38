from __future__ import annotations

import hashlib
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron.corpora import words
from megatron.corpora.minhash import MinHash, group_duplicates, sign, similar_pairs
from megatron.corpora.words import hash_ngrams, split_words
from megatron.errors import ConfigError

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
        ("ไทย a", ["ไ", "ท", "ย", "a"]),
    ],
)
def test_words_are_found_where_a_reader_would(text: str, expected: list[str]) -> None:
    data = text.encode()
    found = split_words([b"before", data, b"", b"after"])
    spans = zip(found.starts, found.ends, found.documents, strict=True)
    assert [data[a:b].decode() for a, b, document in spans if document == 1] == expected
    assert found.batch == 4


def test_hashes_are_those_of_the_words_wherever_they_are() -> None:
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


_RECORDED = ["Zebra_9, naïve 你好 z\u2014Y 😀A".encode(), b"", b"a b c a b d"]


def test_words_and_ngrams_of_a_version_are_those_of_the_next() -> None:
    found = split_words(_RECORDED)
    a, b = 0xAC62ED3C7549B674, 0x66F6A845720D6B67
    assert found.hashes.tolist() == [
        *(0x40DE7A1D698FE4CA, 0x6D84BE7B81B72413, 0x982F86B9EB7F703E, 0x9F4D7F3C039FC7E3),
        *(0x7FCB4990C961F6A8, 0xFBAC05AF3AB0D544, 0xC7BB791DB725232D, a),
        *(a, b, 0xE6BE2C94A54A2C62, a, b, 0x48EDFC3F88802EA4),
    ]
    assert found.starts.tolist() == [0, 9, 16, 19, 23, 27, 29, 33, 0, 2, 4, 6, 8, 10]
    assert found.ends.tolist() == [7, 15, 19, 22, 24, 28, 33, 34, 1, 3, 5, 7, 9, 11]
    assert found.documents.tolist() == [0] * 8 + [2] * 6
    hashes, whole = hash_ngrams(found, 3)
    assert hashes[:3].tolist() == [0xAED60BBBBDAC852F, 0x2C0ECE71070FDE86, 0xFB16B117CDA07E91]
    assert hashes[-3:].tolist() == [0xB1DEC32D7BDA3004, 0xAE22BB22172C3C14, 0x5FFD0B557F22111F]
    assert whole.tolist() == [True] * 6 + [False] * 2 + [True] * 4 + [False] * 2
    assert words.count_words(_RECORDED).tolist() == [8, 0, 6]


def test_signatures_of_a_version_are_those_of_the_next() -> None:
    settings = MinHash(ngram=2, bands=2, rows=3)
    assert sign(_RECORDED, settings).T.tolist() == [
        [57728, 57728, 35565, 50148, 22535, 41612],
        [0] * 6,
        [27784, 27784, 15530, 63642, 45441, 45441],
    ]
    assert sign(_RECORDED, replace(settings, seed=7)).T.tolist() == [
        [56452, 29516, 10364, 47430, 36861, 13317],
        [0] * 6,
        [49899, 12782, 564, 9008, 564, 564],
    ]
    texts = [" ".join(f"w{i * j % 17}" for i in range(40)).encode() for j in range(1, 8)]
    digest = hashlib.sha256(sign([*texts, *_RECORDED], MinHash()).tobytes()).hexdigest()
    assert digest == "2867584e1c03a654a3e9b2775a68e5b00084cc90ce19bba562983793939b8c9b"


def test_pairs_connect_the_documents_of_a_group() -> None:
    settings = MinHash(bands=2, rows=2, similarity=0.75)
    signatures = np.array(
        [
            [1, 1, 1, 1, 0, 0, 1],
            [2, 2, 2, 3, 0, 0, 2],
            [3, 3, 9, 3, 0, 0, 3],
            [4, 5, 9, 4, 0, 0, 4],
        ],
        np.uint16,
    )
    # Documents 0 and 1 share three of four values, and 0 and 2 only two; 4 and 5 have no words.
    first, second = similar_pairs(signatures, settings)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [
        *((0, 1), (0, 3), (0, 6), (3, 6))
    ]
    assert group_duplicates(signatures, settings).tolist() == [0, 0, 2, 0, 4, 5, 0]
    strict = replace(settings, similarity=0.76)
    assert group_duplicates(signatures, strict).tolist() == [0, 1, 2, 3, 4, 5, 0]
    empty = np.empty((4, 0), np.uint16)
    assert [len(part) for part in similar_pairs(empty, settings)] == [0, 0]


@pytest.mark.parametrize("name", ["ngram", "bands", "rows"])
def test_settings_are_at_least_1(name: str) -> None:
    MinHash(**{name: 1})
    with pytest.raises(ConfigError, match=f"steps.duplicates.{name} 0: give at least 1"):
        MinHash(**{name: 0})


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
