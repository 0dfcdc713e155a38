"""GPT-2 BPE: every encoder against a plain implementation, and Megatron's own datasets."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import regex

from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import build_tokenizer, fast_bpe
from megatron.tokenizer.fast_bpe import (
    GigatokenEncoder,
    TiktokenEncoder,
    build_encoder,
    byte_of_character,
    compiled_encoder,
)


class Reference:
    """GPT-2's algorithm word by word: merge the earliest pair everywhere until none is left."""

    split = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, vocab: dict[str, int], merges: list[str]) -> None:
        self.vocab = vocab
        self.rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.character = {byte: character for character, byte in byte_of_character().items()}
        self.ids_of_word = cache(self._ids_of_word)

    def encode(self, text: str) -> list[int]:
        return [i for word in self.split.findall(text) for i in self.ids_of_word(word)]

    def _ids_of_word(self, word: str) -> list[int]:
        parts = [self.character[byte] for byte in word.encode()]
        while pairs := [pair for pair in zip(parts, parts[1:], strict=False) if pair in self.rank]:
            best = min(pairs, key=self.rank.__getitem__)
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = ["".join(best)]
                i += 1
        return [self.vocab[part] for part in parts]


def awkward_texts() -> list[str]:
    """Return random Unicode of several kinds, runs of whitespace, spelled-out special tokens."""
    generator = random.Random(5)
    everything = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    kinds = [
        everything,
        [chr(c) for c in range(0x3000)],
        [chr(c) for c in range(128)] + ["'ll", "'re", "'S", "  ", "\r\n", "\n\n"],
        [c for c in everything if c.isspace()] + ["a", "1", ".", "'s", "\u200b", "\ufeff", "\0"],
        ["<|endoftext|>", "<|endoftext", " ", "x", "\n"],
    ]
    texts = ["".join(generator.choices(k, k=generator.randint(0, 60))) for k in kinds * 300]
    return [*texts, "", " " * 3000, "a" * 3000, "中文" * 500, "I'm WE'LL don''t"]


def tiny_config(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "gpt2-tiny-vocab.json"),
        merge_file=str(folder / "gpt2-tiny-merges.txt"),
    )


# A vocabulary in the order of its merges, as GPT-2's is.
_MERGES = [
    "t a",
    "a l",
    "\u0120 t",
    "\u0120t w",
    "o f",
    "\u0120 of",
    "ta l",
    "c i",
    "\u0120 1",
    "9 9",
]
_MERGES += ["\u010a \u010a", "\u00e4 \u00b8", "\u00e4\u00b8 \u0143", "' s", "\u0120 \u0120"]


def made(*more: str) -> tuple[dict[str, int], list[str]]:
    merges = [*_MERGES, *more]
    entries = [*byte_of_character(), *(merge.replace(" ", "") for merge in merges)]
    return {entry: i for i, entry in enumerate([*entries, "<|endoftext|>"])}, merges


@pytest.fixture
def tiny(tmp_path: Path) -> TokenizerConfig:
    folder = tmp_path / "pair"
    folder.mkdir()
    vocab, merges = made()
    return write_pair(folder, vocab, "\n".join(["#version: 0.2", *merges, ""]))


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path / "cache" / f"tokenizers-{os.getuid()}"
    assert not (tmp_path / "home").exists()


def load_files(folder: Path, name: str) -> tuple[dict[str, int], list[str]]:
    vocab = json.loads((folder / f"{name}-vocab.json").read_text())
    lines = (folder / f"{name}-merges.txt").read_text(encoding="utf-8").split("\n")
    return vocab, [line for line in lines if line and not line.startswith("#version")]


def test_characters_stand_for_bytes_as_in_other_libraries():
    from tokenizers.pre_tokenizers import ByteLevel

    table = byte_of_character.__wrapped__()  # not what an import has cached
    assert sorted(table) == sorted(ByteLevel.alphabet())
    assert "".join(table)[188:] == "".join(map(chr, range(0x100, 0x144)))
    character = {byte: character for character, byte in table.items()}
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 0x1000)]))
    ((spelled, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert spelled == "".join(character[byte] for byte in text.encode())


@pytest.mark.parametrize("name", ["gpt2", "gpt2-tiny", "made"])
def test_all_encoders_equal_the_reference(request, cache_folder, name):
    if name == "made":
        vocab, merges = made()
    else:
        shared_data = request.getfixturevalue("shared_data")
        vocab, merges = load_files(shared_data / "tokenizers" / name, name)
    reference = Reference(vocab, merges)
    texts = awkward_texts()
    expected = [reference.encode(text) for text in texts]
    fresh = build_encoder(vocab, merges, vocab["<|endoftext|>"], "key")
    compiled = compiled_encoder("key")
    assert compiled is not None, "the order of GPT-2's ids must be recognized"
    encoder, *size_and_end = compiled
    assert size_and_end == [len(vocab), vocab["<|endoftext|>"]]
    tiktoken = TiktokenEncoder(vocab, merges)
    encoders = {"fresh": fresh, "compiled": encoder, "tiktoken": tiktoken}
    for kind, encoder in encoders.items():
        got = [ids.tolist() for ids in encoder.encode(texts)]
        assert got == expected, kind


def test_ids_in_another_order_are_not_compiled(cache_folder):
    vocab, merges = made()
    moved = {entry: (index + 1) % len(vocab) for entry, index in vocab.items()}
    encoder = build_encoder(moved, merges, moved["<|endoftext|>"], "key")
    assert compiled_encoder("key") is None
    texts = awkward_texts()[:200]
    reference = Reference(moved, merges)
    assert [ids.tolist() for ids in encoder.encode(texts)] == [reference.encode(t) for t in texts]
    swapped = {**vocab, "of": vocab["tal"], "tal": vocab["of"]}  # only two ids of many
    fast_bpe._cache_compiled("key", swapped, merges, len(vocab) - 1, encoder.backend)
    assert compiled_encoder("key") is None
    tiktoken_ids = TiktokenEncoder(moved, merges).encode(texts)
    assert [ids.tolist() for ids in tiktoken_ids] == [reference.encode(t) for t in texts]


def test_merges_that_do_not_follow_from_their_order_are_not_compiled(cache_folder):
    """In the order of the pieces, ` ta` would be made of ` ` and `ta`."""
    vocab, merges = made("\u0120t a")
    encoder = build_encoder(vocab, merges, vocab["<|endoftext|>"], "key")
    assert compiled_encoder("key") is None
    texts = [" ta", "ta", " tata"]
    reference = Reference(vocab, merges)
    assert [ids.tolist() for ids in encoder.encode(texts)] == [reference.encode(t) for t in texts]


def test_damaged_compiled_file_is_not_used(tiny, cache_folder):
    expected = build_tokenizer(tiny).tokenize("a tale of two cities")
    (compiled,) = cache_folder.glob("*.tiktoken")
    compiled.write_bytes(compiled.read_bytes()[:-100])
    assert compiled_encoder(compiled.stem.split("-")[0]) is None
    assert build_tokenizer(tiny).tokenize("a tale of two cities") == expected


def test_compiled_file_of_another_name_is_not_used(tiny, cache_folder):
    tokenizer = build_tokenizer(tiny)
    (compiled,) = cache_folder.glob("*.tiktoken")
    key, size, end, rest = compiled.name.split("-")
    for name in (f"{key}-{size}-{int(end) - 1}-{rest}", f"{key}-{int(size) + 1}-{end}-{rest}"):
        compiled = compiled.rename(cache_folder / name)
        assert compiled_encoder(key) is None
        assert build_tokenizer(tiny).eod == tokenizer.eod == tokenizer.vocab["<|endoftext|>"]
        next(path for path in cache_folder.glob("*.tiktoken") if path != compiled).unlink()


def _swap_two_entries(compiled: Path) -> None:
    """Swap the ids of two letters in a compiled file, and give it the matching name."""
    content = compiled.read_bytes()
    for old, new in ((b"\nYQ== ", b"\n? "), (b"\ndA== ", b"\nYQ== "), (b"\n? ", b"\ndA== ")):
        content = content.replace(old, new)
    key, size, end, _ = compiled.stem.split("-")
    compiled.unlink()
    named = fast_bpe._compiled_name(key, int(size), int(end), content)
    (compiled.parent / named).write_bytes(content)


@pytest.mark.parametrize("attack", ["folder", "writable", "foreign", "link"])
def test_a_compiled_file_that_others_may_have_written_is_not_used(tiny, cache_folder, attack):
    expected = build_tokenizer(tiny).tokenize("a tale of two cities")
    (compiled,) = cache_folder.glob("*.tiktoken")
    _swap_two_entries(compiled)
    assert build_tokenizer(tiny).tokenize("a tale of two cities") != expected  # ours is used
    (planted,) = cache_folder.glob("*.tiktoken")
    match attack:
        case "folder":
            cache_folder.chmod(0o777)
        case "writable":
            planted.chmod(0o666)
        case "foreign":
            if os.getuid():
                pytest.skip("only root can give files away")
            os.chown(planted, 4321, 4321)
        case "link":
            planted.symlink_to(planted.rename(cache_folder / "elsewhere"))
    assert build_tokenizer(tiny).tokenize("a tale of two cities") == expected


def test_a_link_under_a_temporary_name_is_not_followed(tiny, cache_folder, tmp_path):
    build_tokenizer(tiny)
    (compiled,) = cache_folder.glob("*.tiktoken")
    compiled.unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    compiled.with_name(f"{compiled.name}.tmp-{os.getpid()}").symlink_to(victim)
    build_tokenizer(tiny)
    assert victim.read_text() == "precious"
    assert compiled.exists()


def test_a_compiled_tokenizer_knows_its_vocabulary(tiny, cache_folder):
    fresh, compiled = build_tokenizer(tiny), build_tokenizer(tiny)
    assert (compiled.vocab_size, compiled.eod) == (fresh.vocab_size, fresh.eod)
    assert compiled.vocab == fresh.vocab
    assert compiled.detokenize(compiled.tokenize("a tale")) == "a tale"


def test_encoder_forgets_and_continues(tiny, monkeypatch):
    tokenizer = build_tokenizer(tiny)
    expected = tokenizer.tokenize("once upon a time")
    monkeypatch.setattr("megatron.tokenizer.fast_bpe._RESET_AFTER", 10)
    backend = tokenizer._encoder.backend
    assert tokenizer.tokenize("once upon a time") == expected
    assert tokenizer.tokenize("once upon a time") == expected
    assert tokenizer._encoder.backend is not backend


def test_without_gigatoken_tiktoken_gives_the_same(tiny, cache_folder, monkeypatch):
    expected = build_tokenizer(tiny).tokenize("It's 1999.\n\n  Fine")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = build_tokenizer(tiny)
    assert isinstance(tokenizer._encoder._object, TiktokenEncoder)
    assert tokenizer.tokenize("It's 1999.\n\n  Fine") == expected


def reencode(prefix: Path, lines: list[str], config: TokenizerConfig) -> tuple[bytes, bytes]:
    tokenizer = build_tokenizer(config)
    dataset = IndexedDataset(prefix)
    ids = tokenizer.tokenize_batch([json.loads(line)["text"] for line in lines])
    tokens = np.concatenate([np.append(i, tokenizer.eod) for i in ids]).astype(dataset.dtype)
    return tokens.tobytes(), Path(f"{prefix}.bin").read_bytes()


def test_megatrons_openwebtext_to_the_byte(shared_data):
    folder = shared_data / "binidx"
    with gzip.open(folder / "openwebtext-1000.reconstructed.jsonl.gz", "rt", encoding="utf-8") as f:
        lines = f.read().splitlines(keepends=False)
    config = tiny_config(shared_data / "tokenizers" / "gpt2-tiny")
    got, expected = reencode(folder / "meg-gpt2-openwebtext_text_document", lines, config)
    assert got == expected


def test_megatrons_speeches_to_the_byte(golden):
    lines = (golden / "data" / "speeches.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    got, expected = reencode(
        golden / "data" / "gpt_text_document", lines, tiny_config(golden / "data")
    )
    assert got == expected


def test_interface(golden):
    tokenizer = build_tokenizer(tiny_config(golden / "data"))
    assert tokenizer.vocab_size == 5000
    assert tokenizer.eod == tokenizer.eos == tokenizer.vocab["<|endoftext|>"] == 4999
    text = "héllo <|endoftext|> 世界\n\ttab"
    assert tokenizer.eod not in tokenizer.tokenize(text)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.detokenize([4999, 5000]) == "<|endoftext|>\ufffd"
    assert tokenizer.tokenize("") == []
    with pytest.raises(ConfigError, match="GPT2BPETokenizer has no mask token"):
        _ = tokenizer.mask


def write_pair(folder: Path, vocab: object, merges: str) -> TokenizerConfig:
    (folder / "v.json").write_text(json.dumps(vocab) if not isinstance(vocab, str) else vocab)
    (folder / "m.txt").write_text(merges, encoding="utf-8")
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "v.json"),
        merge_file=str(folder / "m.txt"),
    )


BYTES = {character: i for i, character in enumerate(byte_of_character())}
GOOD = {**BYTES, "ab": 256, "<|endoftext|>": 257}


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "a b", "v.json: not a JSON file"),
        ([1, 2], "a b", "v.json: expected a JSON object"),
        ({**BYTES, "ab": 256}, "a b", "v.json: there is no entry <.endoftext.>, which ends"),
        ({**GOOD, "<|endoftext|>": 300}, "a b", "each id from 0 to 257 must appear"),
        ("[" * 100_000, "a b", "v.json: "),
        ('{"a": ' * 100_000, "a b", "v.json: "),
        ({**GOOD, "ab": True}, "a b", "v.json: expected a JSON object of entries and ids"),
        ({**GOOD, "ab": 256.0}, "a b", "v.json: expected a JSON object of entries and ids"),
        ({**GOOD, "ab": -1}, "a b", "each id from 0 to 257 must appear"),
        ({**GOOD, "ab": 1 << 63}, "a b", "each id from 0 to 257 must appear"),
        ({**GOOD, "ab": 10**400}, "a b", "v.json: "),
        ({**GOOD, "ab": float("nan")}, "a b", "v.json: not a JSON file"),
        (GOOD, "#version: 0.2\na b\nabc", "m.txt: merge 2 is 'abc'"),
        (GOOD, "a c", "no entry for 'a c'.*m.txt needs"),
        (
            {e: i for i, e in enumerate(GOOD) if e != "\u0143"} | {"<|endoftext|>": 255},
            "a b",
            "no entry for '\u0143', which .*m.txt needs \\(1 entries are missing",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, cache_folder, vocab, merges, message):
    with pytest.raises(DataError, match=message):
        build_tokenizer(write_pair(tmp_path, vocab, merges))


def test_small_good_pair(tmp_path, cache_folder):
    tokenizer = build_tokenizer(write_pair(tmp_path, GOOD, "#version: 0.2\na b\n"))
    assert tokenizer.tokenize("abab") == [256, 256]
    assert tokenizer.tokenize_with_special("ab<|endoftext|>") == [256, 257]
    assert 257 not in tokenizer.tokenize("ab<|endoftext|>")
    assert tokenizer.detokenize([256, 257, 258]) == "ab<|endoftext|>\ufffd"


def test_merges_may_have_any_line_ends_and_no_version(tmp_path, cache_folder):
    expected = build_tokenizer(write_pair(tmp_path, GOOD, "#version: 0.2\na b")).tokenize("abab")
    for merges in ("a b\n\n\n", "a b", "#version: 0.2\r\na b\r\n"):
        config = write_pair(tmp_path, GOOD, "")
        (tmp_path / "m.txt").write_bytes(merges.encode())
        assert build_tokenizer(config).tokenize("abab") == expected == [256, 256]


def test_a_small_compiled_file_is_read_again(tmp_path, cache_folder):
    pytest.importorskip("gigatoken")
    config = write_pair(tmp_path, GOOD, "a b\n")
    fresh = build_tokenizer(config)
    (compiled,) = cache_folder.glob("*.tiktoken")
    again = build_tokenizer(config)
    assert (again.vocab_size, again.eod) == (fresh.vocab_size, fresh.eod) == (258, 257)
    assert again.tokenize("abba") == fresh.tokenize("abba")
    compiled.write_bytes(compiled.read_bytes()[:-1])
    assert compiled_encoder(compiled.stem.split("-")[0]) is None


def test_an_encoder_is_renewed_once_it_has_seen_enough():
    """It remembers every word, so its memory would grow without end."""
    limit = 256 << 20
    built: list[SimpleNamespace] = []

    def load() -> SimpleNamespace:
        built.append(SimpleNamespace(encode=lambda text: np.array([len(built)])))
        return built[-1]

    encoder = GigatokenEncoder(load)
    # A range stands for a long text.
    calls = ([range(limit - 3), "abc"], ["d"], ["e"], [range(limit - 1)], ["f"], ["g"])
    assert [int(encoder.encode(texts)[0][0]) for texts in calls] == [1, 1, 2, 2, 2, 3]
