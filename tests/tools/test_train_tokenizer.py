"""tools/train_tokenizer.py: the files it writes, which preprocessing can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.config.data import TokenizerConfig
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import build_tokenizer
from megatron.tools import train_tokenizer
from tests.repository import ROOT

TEXT = "the tailor told the tale of the tall tower, and the tower told the time. " * 20


def write(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return str(path)


def train(source: str, folder: Path, *flags: str) -> int:
    return train_tokenizer.main(
        ["--input", source, "--json-keys", "body", "--output-dir", str(folder), *flags]
    )


def test_both_forms_give_the_same_ids(tmp_path):
    source = write(tmp_path / "in.jsonl", TEXT, "naïve — 世界")
    folder = tmp_path / "deep" / "tokenizer"
    assert train(source, folder, "--vocab-size", "280") == 0
    gpt2 = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    )
    huggingface = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    )
    assert gpt2.vocab_size == huggingface.vocab_size == 280
    assert gpt2.eod == huggingface.eod == 279
    for text in (TEXT, "The  tower\n\n told 1234 世界", ""):
        ids = gpt2.tokenize(text)
        assert ids == huggingface.tokenize(text)
        assert gpt2.detokenize(ids) == text
    assert len(gpt2.tokenize(TEXT)) < len(TEXT) / 3


def test_same_input_same_files(tmp_path):
    source = write(tmp_path / "in.jsonl", TEXT, "naïve — 世界")
    for name in ("a", "b"):
        assert train(source, tmp_path / name, "--vocab-size", "290") == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "kind", "words"),
    [
        ([], "BertWordPieceLowerCase", "the tailor , naive"),
        (["--cased"], "BertWordPieceCase", "The tailor , naïve"),
    ],
)
def test_wordpiece(tmp_path, flags, kind, words):
    source = write(tmp_path / "in.jsonl", TEXT, "The tailor, naïve 世界!")
    for name in ("a", "b"):
        folder = tmp_path / name
        assert train(source, folder, "--kind", "wordpiece", "--vocab-size", "150", *flags) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    ours = build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, vocab_file=str(tmp_path / "a" / "vocab.txt"))
    )
    huggingface = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "a"))
    )
    assert (ours.pad, ours.cls, ours.sep, ours.mask) == (0, 2, 3, 4)
    ids = ours.tokenize("The tailor, naïve")
    assert ids == huggingface.tokenize("The tailor, naïve")
    assert ours.detokenize(ids) == words
    assert 5 <= len(ours.tokenize("the tower told the time")) < 10  # learned words, or nearly
    assert "##!" not in ours.vocab  # punctuation never continues a word
    assert "##t" in ours.vocab


_SMALL = ("the tall tower, the tale. Told the tower!", "a tall tale: the")


def test_the_entries_that_a_small_text_yields(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", *_SMALL)
    assert train(source, tmp_path / "bpe", "--vocab-size", "266") == 0
    said = capsys.readouterr().out
    names = "vocab.json, merges.txt, tokenizer.json, tokenizer_config.json"
    assert said.startswith(f"{tmp_path}/bpe: {names} with 266 entries in ")
    assert said.count("\n") == 1
    merges = (tmp_path / "bpe" / "merges.txt").read_text()
    assert merges.replace("\u0120", "_").split("\n") == [
        "#version: 0.2",
        *("_ t", "a l", "h e", "_t al", "_t he", "e r", "o w", "_t ow", "_tal e"),
        "",
    ]
    vocab = json.loads((tmp_path / "bpe" / "vocab.json").read_text())
    assert list(vocab.values()) == list(range(266))
    assert list(vocab)[254:] == [
        *("\u0142", "\u0143", "\u0120t", "al", "he", "\u0120tal", "\u0120the", "er", "ow"),
        *("\u0120tow", "\u0120tale", "<|endoftext|>"),
    ]
    config = json.loads((tmp_path / "bpe" / "tokenizer_config.json").read_text())
    assert config == {"eos_token": "<|endoftext|>"}

    special, letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], [*"adehlortw"]
    for flags, learned in (
        ([], ["##al", "##he", "tal", "the", "to", "##er", "##wer", "tale", "tall", "tower"]),
        (["--min-frequency", "3"], ["##al", "##he", "tal", "the", "to"]),
    ):
        folder = tmp_path / f"wordpiece{len(flags)}"
        words = [*special, *(f"##{letter}" for letter in letters), *"!,.:", *letters, *learned]
        assert train(source, folder, "--kind", "wordpiece", "--vocab-size", "60", *flags) == 0
        assert (folder / "vocab.txt").read_text() == "".join(f"{word}\n" for word in words)
        said = capsys.readouterr().out
        times = flags[1] if flags else 2
        assert f"than --vocab-size 60: no other pair occurs {times} times\n" in said
        needed = len(special) + 2 * len(letters) + 4
        again = ("--overwrite", "--kind", "wordpiece", "--vocab-size")
        assert train(source, folder, *again, str(needed)) == 0
        assert train(source, folder, *again, str(needed - 1)) == 9
        assert f"the characters of the text alone need {needed} entries" in capsys.readouterr().err
        assert json.loads((folder / "tokenizer_config.json").read_text()) == {
            f"{name[1:-1].lower()}_token": name for name in special
        }


def test_a_bad_line_is_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"t": ["x", ""]}\n{"t": "y"}\n')
    long = json.dumps({"t": "z" * (1 << 20)})
    (tmp_path / "b.jsonl").write_text(f'{long}\n\n{long}\n{long}\n\n{{"t": 1}}\n{{"t": 2}}\n')
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    options = SimpleNamespace(json_keys=["t"], max_line_mb=2)
    texts = train_tokenizer._texts(paths[:1], options)
    assert list(texts) == ["x", "", "y"]
    with pytest.raises(DataError, match=r"b.jsonl:6: 't' is a number.*; fix or remove the line"):
        list(train_tokenizer._texts(paths, options))
    options.max_line_mb = 1
    with pytest.raises(DataError, match=r"b.jsonl:1: .* than 1 MiB; raise --max-line-mb, or rem"):
        list(train_tokenizer._texts(paths, options))


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("a b", (["a"], "b")),
        ("--input a c --output-dir b", (["a", "c"], "b")),
        ("a b --kind bpe", (["a"], "b")),
        ("", "required: --input, --output-dir"),
        ("--input a", "required: --output-dir"),
        ("--output-dir a", "required: --input"),
        ("a", "give FILE and DIR, or"),
        ("b --input=a", "give FILE and DIR, or"),
        ("a --output-dir b", (["a"], "b")),
        ("a b --input=c", "--input and FILE a: give only one of them"),
        ("b --input=a --output-dir c", "--output-dir and DIR b: give only one of them"),
    ],
)
def test_input_and_output_have_two_forms(words, read):
    options = train_tokenizer.build_parser().read(words.split())
    if isinstance(read, str):
        with pytest.raises(ConfigError, match=read):
            train_tokenizer._use_positional_arguments(options)
    else:
        train_tokenizer._use_positional_arguments(options)
        assert (options.input, options.output_dir) == read


def test_long_lines_are_cut_for_sentencepiece(monkeypatch):
    monkeypatch.setattr(train_tokenizer, "_MAX_SENTENCE_BYTES", 12)
    text = "abc\nabcd\n\nabcdefg\n"
    assert list(train_tokenizer._lines(text)) == ["abc", "abc", "d", "abc", "def", "g"]


def test_small_text_gives_fewer_entries(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", "ab ab")
    assert train(source, tmp_path / "t", "--vocab-size", "1000") == 0
    assert "fewer entries than --vocab-size 1,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("texts", "flags", "code", "message"),
    [
        ([TEXT], ["--vocab-size", "256"], 9, "--vocab-size 256: give at least 257"),
        ([TEXT], ["--min-frequency", "0"], 9, "--min-frequency 0: give at least 1"),
        (
            [TEXT],
            ["--kind", "wordpiece", "--vocab-size", "20"],
            9,
            "the characters of the text alone need",
        ),
        ([TEXT], ["--cased"], 9, "--cased has an effect only with --kind wordpiece"),
        ([""], ["--kind", "wordpiece"], 6, "no text to learn from"),
        ([""], [], 6, "no text to learn from"),
        ([TEXT], ["--json-keys", "text"], 6, "in.jsonl:1: no key 'text'"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, texts, flags, code, message):
    assert train(write(tmp_path / "in.jsonl", *texts), tmp_path / "t", *flags) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_an_existing_tokenizer_stays(tmp_path, capsys, kind):
    source = write(tmp_path / "in.jsonl", TEXT)
    flags = ("--kind", kind, "--vocab-size", "280")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "notes.txt").touch()  # not part of a tokenizer
    assert train(source, tmp_path / "t", *flags) == 0
    names = {path.name for path in (tmp_path / "t").iterdir()} - {"notes.txt"}
    assert len(names) > 2
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("mine")
        assert train(source, folder, *flags) == 9
        message = f"--output-dir: {folder / name} already exists: choose another name, or give "
        assert message + "--overwrite to replace it" in capsys.readouterr().err
        assert [path.read_text() for path in folder.iterdir()] == ["mine"]


def test_overwrite_replaces_a_whole_tokenizer(tmp_path):
    source, folder = write(tmp_path / "in.jsonl", TEXT), tmp_path / "t"
    assert train(source, folder, "--kind", "wordpiece", "--vocab-size", "280") == 0
    (folder / "notes.txt").touch()
    assert train(source, folder, "--vocab-size", "280", "--overwrite") == 0
    assert train(source, tmp_path / "new", "--vocab-size", "280") == 0
    new = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == new | {"notes.txt": b""}


def test_output_folder_that_is_a_file(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", TEXT)
    assert train(source, Path(source)) == 8
    assert "choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("character", ["x", " ", "1", ".", "\u00e9"])
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_word_of_megabytes_is_learned_from_in_seconds(tmp_path, character, kind):
    """Uncut, it would take the library time quadratic in its length."""
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "some words " + character * (4 << 20)}) + "\n")
    words = ["--input", str(path), "--output-dir", str(tmp_path / "out"), "--kind", kind]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), *words, "--vocab-size", "300"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_only_long_words_are_cut():
    texts = ["", "a few words " * 1000, "x" * 999 + " " + "y" * 999, "a " + "x" * 2500 + " b"]
    assert ["".join(train_tokenizer._cut_long_words(text)) for text in texts] == texts
    assert [len(list(train_tokenizer._cut_long_words(text))) for text in texts] == [1, 1, 1, 3]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece(tmp_path, model_type):
    source = write(tmp_path / "in.jsonl", TEXT, "Naïve  spaces,\n\n世界 and\ttabs. " + TEXT)
    flags = ["--kind", "sentencepiece", "--model-type", model_type, "--vocab-size", "300"]
    for name in ("a", "b"):
        words = [source, str(tmp_path / name), "--json-keys", "body", *flags]
        assert train_tokenizer.main(words) == 0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["tokenizer.model", "tokenizer.vocab"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    model = str(tmp_path / "a" / "tokenizer.model")
    for kind in ("GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"):
        tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model))
        for text in ("the tower\n\n  told\t世界 😀 ", TEXT, ""):
            assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 3)
    assert len(tokenizer.tokenize(TEXT)) < 0.7 * len(TEXT)
    # BPE scores entries by their rank, and a unigram model by the logarithm of their probability.
    lines = (tmp_path / "a" / "tokenizer.vocab").read_text().splitlines()[260:]
    scores = [float(line.rpartition("\t")[2]) for line in lines]
    assert (scores == [-number for number in range(len(scores))]) == (model_type == "bpe")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("FILE", "give FILE and DIR, or --input and --output-dir"),
        ("FILE DIR --input FILE", "--input and FILE .*: give only one of them"),
        ("FILE DIR --output-dir DIR", "--output-dir and DIR .*: give only one of them"),
        ("--output-dir DIR", "required: --input"),
        ("FILE DIR --model-type bpe", "--model-type bpe has an effect only with --kind"),
        ("FILE DIR --kind sentencepiece --vocab-size 260", "give at least 261"),
        ("FILE DIR --kind sentencepiece --character-coverage 2", "give a share from 0.9 to 1"),
        ("FILE DIR --kind sentencepiece --character-coverage 0", "give a share from 0.9 to 1"),
        ("FILE DIR --kind sentencepiece --vocab-size 262 --model-type bpe", "--vocab-size 262: .*"),
    ],
)
def test_mistakes_of_the_other_forms(tmp_path, capsys, words, message):
    import re

    source = write(tmp_path / "in.jsonl", TEXT)
    words = words.replace("FILE", source).replace("DIR", str(tmp_path / "out"))
    assert train_tokenizer.main([*words.split(), "--json-keys", "body"]) == 9
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--vocab-size 257 --min-frequency 1 --max-line-mb 1",
        "--kind sentencepiece --vocab-size 261 --character-coverage 0.9",
        "--kind sentencepiece --character-coverage 1",
        "--kind wordpiece --vocab-size 1 --cased",
    ],
)
def test_flags_at_their_bounds_are_accepted(tmp_path, flags):
    words = ["in.jsonl", str(tmp_path / "out"), *flags.split()]
    train_tokenizer._check(train_tokenizer.build_parser().read(words))


def test_rare_characters_of_a_large_alphabet_are_unknown(tmp_path):
    characters = [chr(0x4E00 + i) for i in range(1003)]
    source = write(tmp_path / "in.jsonl", " ".join(characters * 2), " ".join(characters[3:]))
    assert train(source, tmp_path / "out", "--kind", "wordpiece", "--vocab-size", "2005") == 0
    entries = (tmp_path / "out" / "vocab.txt").read_text().split()
    assert {entry for entry in entries if len(entry) == 1} == {*characters[3:]}
