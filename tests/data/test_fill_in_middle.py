"""Documents rearranged so that their middle comes last."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.data.fill_in_middle import FillInMiddle, FillInMiddleDataset
from megatron.data.sample import Sample
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.tokenizer import build_tokenizer
from tests.config.command import command
from tests.data.corpus import write_vocabulary
from tests.training import toy

IDS = {"prefix": 1, "middle": 2, "suffix": 3, "pad": 4, "eod": 5}
FRAGMENT_END = 6


class Letters:
    """A tokenizer whose ids are character codes."""

    def tokenize_sentences(self, texts: Sequence[str]) -> list[Any]:
        return [np.array([ord(letter) for letter in text], np.int64) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        assert min(ids, default=7) > 6, "special tokens are not part of a text"
        return "".join(map(chr, ids))


def how(rate: float = 1.0, spm_rate: float = 0.0, **changed: Any) -> FillInMiddle:
    return FillInMiddle(Letters(), rate, spm_rate, IDS, **changed)  # type: ignore[arg-type]


def ids(*parts: str | int) -> np.ndarray:
    given = [[part] if isinstance(part, int) else [ord(x) for x in part] for part in parts]
    return np.array([x for part in given for x in part], np.int64)


def rearranged(tokens: np.ndarray, rules: FillInMiddle, seed: int = 0) -> np.ndarray:
    return rules.rearrange(tokens, np.random.RandomState(seed))


def put_back(tokens: np.ndarray) -> str:
    """Return the text of a rearranged document."""
    values = tokens.tolist()
    assert values[0] == IDS["prefix"]
    middle, suffix = values.index(IDS["middle"]), values.index(IDS["suffix"])
    if suffix == 1:  # SPM, without anything between prefix and middle
        return "".join(map(chr, [*values[middle + 1 :], *values[2:middle]]))
    parts = values[1:suffix], values[middle + 1 :], values[suffix + 1 : middle]
    return "".join(chr(value) for part in parts for value in part)


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_the_parts_of_a_document_make_up_its_text(spm_rate):
    text = "the cat sat on the mat"
    rules, orders = how(spm_rate=spm_rate), set()
    for seed in range(20):
        # A short document after the first leaves room for the first one's three tokens.
        sample = ids(text, 5, "ab", *[5] * 12)
        result = rearranged(sample, rules, seed)
        assert len(result) == len(sample)
        first, second, *rest = np.split(result, np.flatnonzero(result == 5))
        assert put_back(first) == text
        assert put_back(second[1:]) == "ab"
        assert (first.tolist()[1] == IDS["suffix"]) == bool(spm_rate) or spm_rate == 0
        orders.add(tuple(first.tolist()))
        assert rest[0].tolist()[:4] == [5, 1, 3, 2]  # an empty end, and ends that terminate nothing
    assert len(orders) > 8


def test_what_is_too_long_is_cut_and_what_is_too_short_filled_up():
    sample = ids("abcdefgh")
    result = rearranged(sample, how())
    whole = rearranged(ids("abcdefgh", 5, 5, 5, 5), how())
    assert result.tolist() == whole[:8].tolist()
    short = rearranged(ids(5, 5, 5, "abc"), how(rate=0.0))
    assert short.tolist() == ids("abc", 4, 4, 4).tolist()


def test_rates_decide_by_document():
    sample = ids(*["abc", 5] * 400)
    assert (rearranged(sample, how(rate=0.0)) == sample).all()
    result = rearranged(sample, how(rate=0.25, spm_rate=0.5))
    documents = np.split(result, np.flatnonzero(result == 5))[:300]
    changed = [document for document in documents if 1 in document]
    assert 0.17 < len(changed) / 300 < 0.33
    assert 0.3 < sum(d[2] == 3 for d in changed) / len(changed) < 0.8


def test_fragments_are_rearranged_one_by_one():
    sample = ids("abc", 6, "def", 6, 6, "ghi", 5, *[5] * 20)
    rules = how(fragment_end=FRAGMENT_END, fragment_rate=1.0)
    first = np.split(rearranged(sample, rules), [99])[0]
    document = first[: first.tolist().index(5)]
    found = np.split(document, np.flatnonzero(document == 6))
    texts = [put_back(found[0]), *(put_back(part[1:]) for part in found[1:])]
    assert texts == ["abc", "def", "ghi"]
    never = how(fragment_end=FRAGMENT_END, fragment_rate=0.0)
    kept = rearranged(sample, never).tolist()
    assert kept[:12] == ids("abc", 6, "def", 6, "ghi", 5).tolist()
    # A document without fragments is a single text.
    assert put_back(rearranged(ids("abc", 5, 5, 5, 5), rules)[:6]) == "abc"


def test_texts_with_a_beginning_are_kept():
    sample = ids("#abc", 5, "abc", 5, 5, 5, 5)
    result = rearranged(sample, how(exempt_prefix="#"))
    assert result[:5].tolist() == ids("#abc", 5).tolist()
    assert put_back(result[5:11]) == "abc"


class Constant:
    """A dataset with a single text."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, i: int) -> Sample:
        return {"text": ids("abcdefghijklmnop", 5, 5, 5, 5), "id": i}


def test_a_sample_depends_on_seed_and_number_alone():
    dataset = FillInMiddleDataset(Constant(), how(), 1)
    texts = [dataset[i]["text"].tolist() for i in range(50)]
    assert len({tuple(text) for text in texts}) > 30
    again = FillInMiddleDataset(Constant(), how(), 1)
    assert [again[i]["text"].tolist() for i in reversed(range(50))] == texts[::-1]
    other = FillInMiddleDataset(Constant(), how(), 2)
    assert [other[i]["text"].tolist() for i in range(50)] != texts
    assert any(again[i + (1 << 32)]["text"].tolist() != texts[i] for i in range(3))


class Fragments(Constant):
    """A dataset with a text of five documents, of which the first has fragments."""

    def __getitem__(self, i: int) -> Sample:
        text = ids("abcdef", 6, "ghi", 6, 6, "jk", 5, "lmnop", 5, 5, "#qr", 5, "st")
        return {"text": text, "id": i}


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (0, "abcdef6ghi66jk513p2lmno5#qr5"),
        (1, "1a3f2bcde6ghi613k2j5lmnop5#q"),
        (2, "1a32bcdef61gh32i6jk5lmnop5#q"),
        (3, "13f2abcde6ghi6132jk51lm3op2n"),
        (4, "abcdef6ghi66jk51l3op2mn5#qr5"),
        (5, "abcdef6ghi66jk5lmnop5#qr5st4"),
        (4294967296, "abcdef6ghi66jk513lmnop25#qr5"),
        (21474836483, "abcdef6ghi66jk513nop2lm5#qr5"),
    ],
)
def test_the_samples_of_a_seed_stay_the_same(sample, text):
    """The samples equal recorded ones, in which digits stand for special tokens."""
    rules = how(0.6, 0.5, fragment_end=FRAGMENT_END, fragment_rate=0.7, exempt_prefix="#")
    found = FillInMiddleDataset(Fragments(), rules, 7)[sample]
    assert found["id"] == sample
    shown = [chr(token) if token > 6 else str(token) for token in found["text"].tolist()]
    assert "".join(shown) == text


def test_flags_train_a_run(tmp_path, monkeypatch):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "w{i} w1 w2 w3 w4 w5"}}\n' for i in range(200)))
    monkeypatch.setattr(toy, "TOY", [word for word in toy.TOY if word != "--mock-data"])
    words = ["--data-path", str(path), "--tokenizer-type", "BertWordPieceLowerCase"]
    words += ["--vocab-file", str(vocabulary), "--fim-data", "--fim-rate", "1"]
    with pytest.raises(ConfigError, match="--fim-prefix-token <fim_prefix>: the tokenizer has no"):
        toy.build_toy(Layout.single(), words)
    with vocabulary.open("a") as file:
        file.write("<fim_prefix>\n<fim_middle>\n<fim_suffix>\n<fim_pad>\n")
    run = toy.train_toy(Layout.single(), words)[1]
    options = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocabulary))
    vocab = build_tokenizer(options).vocab
    train, *_ = run.datasets
    assert train is not None
    tokens = np.concatenate([train[i]["text"] for i in range(20)])
    for name in ("prefix", "middle", "suffix"):
        assert (tokens == vocab[f"<fim_{name}>"]).sum() > 20


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--fim-data --fim-rate 2", "--fim-rate 2"),
        ("--fim-data --fim-split-sample x", "--fim-split-sample x requires --fim-fragment-rate"),
    ],
)
def test_mistakes_are_reported(flags, told):
    from megatron.config.parser import parse_config

    with pytest.raises(ConfigError) as caught:
        parse_config(command(flags), world_size=1)
    assert told in str(caught.value)


def test_settings_that_are_none_have_defaults():
    """`from_config` uses the run's end-of-document token unless a flag names another one."""
    data = SimpleNamespace(
        fim_rate=0.5,
        fim_spm_rate=0.25,
        fim_split_sample=None,
        fim_fragment_rate=None,
        fim_no_prefix=None,
        fim_eod_token=None,
        **{f"fim_{name}_token": name for name in ("prefix", "middle", "suffix", "pad")},
    )
    tokenizer = SimpleNamespace(vocab=IDS, eod=77)
    assert FillInMiddle.from_config(data, tokenizer).ids["eod"] == 77  # type: ignore[arg-type]
    assert FillInMiddle.from_config(data, tokenizer) == FillInMiddle(  # type: ignore[arg-type]
        tokenizer,  # type: ignore[arg-type]
        0.5,
        0.25,
        {**IDS, "eod": 77},
    )
    data.fim_eod_token = "eod"
    data.fim_split_sample, data.fim_fragment_rate, data.fim_no_prefix = "suffix", 0.75, "#"
    rules = FillInMiddle.from_config(data, tokenizer)  # type: ignore[arg-type]
    assert rules.ids["eod"] == 5
    assert (rules.fragment_end, rules.fragment_rate, rules.exempt_prefix) == (3, 0.75, "#")
