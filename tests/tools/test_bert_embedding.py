"""Texts to vectors: blocks, restarts, processes, Megatron's masks, refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.retro.embedding import EmbedderOptions, Masking, build_embedder
from megatron.tools import bert_embedding
from tests.retro.recorded import Recorded, read

TEXTS = [f"the union of {number} states and people " * (number % 5) for number in range(25)]


@pytest.fixture
def words(golden: Path, tmp_path: Path) -> list[str]:
    """Return the command line, to which tests add flags."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return [
        *("--input", str(path), "--output-dir", str(tmp_path / "vectors")),
        *("--load", str(golden / "bert_fp32/ckpt"), "--tokenizer-type", "BertWordPieceLowerCase"),
        *("--vocab-file", str(golden / "data/bert-5000-vocab.txt")),
        *("--block-size", "10", "--batch-size", "4", "--max-length", "64"),
    ]


def run(words: list[str]) -> None:
    bert_embedding.run(bert_embedding.build_parser().parse_args(words))


def vectors(folder: Path) -> NDArray[np.float32]:
    return np.concatenate([read(path) for path in sorted(folder.glob("*.hdf5"))])


def expected(golden: Path, **changes: Any) -> NDArray[np.float32]:
    options = EmbedderOptions(
        "megatron",
        str(golden / "bert_fp32/ckpt"),
        Recorded(golden).bert_tokenizer,
        max_length=64,
        **changes,
    )
    embedder = build_embedder(options, Device.cpu())
    return np.concatenate([embedder.embed(TEXTS[start : start + 10]) for start in (0, 10, 20)])


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_vectors(golden: Path, words: list[str], tmp_path: Path, masked: bool):
    """As in Megatron-LM, text i of a block is masked by seed + i."""
    run([*words, *(["--retro-compatible", "--seed", "5"] if masked else [])])
    names = [path.name for path in sorted((tmp_path / "vectors").glob("*.hdf5"))]
    assert names == ["000-010.hdf5", "010-020.hdf5", "020-025.hdf5"]
    wanted = expected(golden, masking=Masking(5, 0.15) if masked else None)
    np.testing.assert_allclose(vectors(tmp_path / "vectors"), wanted, atol=2e-6)


def test_a_newer_checkpoint_is_not_mixed_with_older_vectors(words: list[str], tmp_path: Path):
    run(words)
    path = tmp_path / "vectors/made_from.json"
    origin = json.loads(path.read_text())
    iteration = origin.pop("iteration of --load")
    assert iteration > 0
    path.write_text(json.dumps(origin))  # as an earlier version wrote it
    run(words)
    path.write_text(json.dumps(origin | {"iteration of --load": 7}))
    with pytest.raises(ConfigError) as caught:
        run(words)
    assert str(caught.value) == (
        f"--output-dir {path.parent} contains vectors that were made with iteration of --load 7, "
        f"not {iteration}: give another folder, or delete it"
    )


def test_a_run_continues(golden: Path, words: list[str], tmp_path: Path, capsys: Any):
    run(words)
    wanted = vectors(tmp_path / "vectors")
    (tmp_path / "vectors/010-020.hdf5").unlink()
    capsys.readouterr()
    run(words)
    assert capsys.readouterr().out.count("vectors, 64 numbers each") == 1
    np.testing.assert_array_equal(vectors(tmp_path / "vectors"), wanted)


def test_processes_divide_the_blocks(
    golden: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, blocks in ((0, 2), (1, 3)):
        monkeypatch.setenv("RANK", str(rank))
        run(words)
        assert len(list((tmp_path / "vectors").glob("*.hdf5"))) == blocks
    np.testing.assert_allclose(vectors(tmp_path / "vectors"), expected(golden), atol=2e-6)


def test_other_vectors_are_not_mixed(words: list[str], tmp_path: Path):
    run(words)
    with pytest.raises(ConfigError, match="made with max_length 64, not 32: give another folder"):
        run([*words, "--max-length", "32"])
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match="made with texts 25, not 1"):
        run(words)
    other = "".join(f'{{"text": "other {i}"}}\n' for i in range(25))
    (tmp_path / "texts.jsonl").write_text(other)
    with pytest.raises(ConfigError, match="made with sha256 of the texts .*: give another folder"):
        run(words)
    (tmp_path / "vectors/made_from.json").write_text("{")
    with pytest.raises(DataError, match="made_from.json: cannot be read"):
        run(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "there is no text"), ('{"text": "a"}\n{"b": 1}\n', "line 2 .* no key 'text'")],
)
def test_bad_texts(words: list[str], tmp_path: Path, text: str, message: str):
    (tmp_path / "texts.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        run(words)


def test_bad_flags(words: list[str], monkeypatch: pytest.MonkeyPatch):
    # Otherwise the library looks for no-model on the internet, for 20 s where there is none.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="--block-size 0: give at least 1"):
        run([*words, "--block-size", "0"])
    with pytest.raises(ConfigError, match="--max-length 2: the BERT in .* positions: give 3 to"):
        run([*words, "--max-length", "2"])
    with pytest.raises(ConfigError, match="--load no-model: not a model that transformers can"):
        run([*words, "--bert-embedder-type", "huggingface", "--load", "no-model"])
    with pytest.raises(ConfigError, match="--mask-prob 7.0: give a number from 0 to 1"):
        run([*words, "--mask-prob", "7"])
    without = words[: words.index("--vocab-file")] + words[words.index("--vocab-file") + 2 :]
    with pytest.raises(ConfigError, match="both --tokenizer-type and --vocab-file"):
        run(without)


def test_shares_from_0_to_1_and_sizes_from_1_are_accepted(tmp_path: Path):
    """Without texts, the command ends after its flags have been checked."""
    (tmp_path / "none.jsonl").touch()
    words = ["--input", str(tmp_path / "none.jsonl"), "--output-dir", str(tmp_path / "vectors")]
    words += ["--load", "x", "--block-size", "1", "--batch-size", "1"]
    for share in ("0", "1"):
        with pytest.raises(DataError, match="there is no text"):
            run([*words, "--mask-prob", share])
    for share in ("-0.1", "1.1", "nan"):
        with pytest.raises(ConfigError, match=f"--mask-prob {share}: give a number from 0 to 1"):
            run([*words, "--mask-prob", share])
    for flag in ("--block-size", "--batch-size"):
        with pytest.raises(ConfigError, match=f"{flag} 0: give at least 1"):
            run([*words, flag, "0"])


class _Lengths:
    """An embedder of a text's length and last character."""

    width, iteration = 2, 7

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        return np.array([[len(text), ord(text[-1])] for text in texts], np.float32)


def test_blocks_of_any_embedder_s_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[EmbedderOptions] = []

    def build(options: EmbedderOptions, _: Device) -> _Lengths:
        asked.append(options)
        return _Lengths()

    monkeypatch.setattr("megatron.retro.embedding.build_embedder", build)
    lines = [{"body": "abcdefg"[: i + 1]} for i in range(6)] + [{"body": ["abc", "def"]}]
    source, folder = tmp_path / "texts.jsonl", tmp_path / "vectors"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--input", str(source), "--output-dir", str(folder), "--json-key", "body"]
    flags += ["--load", "bert", "--block-size", "3"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, blocks in ((0, ["00-03", "06-07"]), (1, ["03-06"])):
        monkeypatch.setenv("RANK", str(rank))
        for _ in range(2):  # nothing is left for the second run
            run(flags)
        said = capsys.readouterr().out.splitlines()
        assert said == [
            f"{folder}/{block}.hdf5: {1 if block == '06-07' else 3} of 7 vectors, 2 numbers each"
            for block in blocks
        ]
    expected = [[i + 1, ord("abcdef"[i])] for i in range(6)]
    assert vectors(folder).tolist() == [*expected, [7, ord("f")]]
    digest = hashlib.sha256(b"a\0ab\0abc\0abcd\0abcde\0abcdef\0abc def\0").hexdigest()
    assert json.loads((folder / "made_from.json").read_text()) == {
        "input": [str(source)],
        "texts": 7,
        "sha256 of the texts": digest,
        "width": 2,
        "json_key": "body",
        "block_size": 3,
        "bert_embedder_type": "megatron",
        "load": "bert",
        **dict.fromkeys(("tokenizer_type", "vocab_file", "dtype")),
        "max_length": 256,
        "retro_compatible": False,
        "seed": 1234,
        "mask_prob": 0.15,
        "iteration of --load": 7,
    }
    assert asked[0] == EmbedderOptions("megatron", "bert", None, length_flag="--max-length")
    assert (asked[0].batch_size, asked[0].max_length, asked[0].masking) == (128, 256, None)
    flags[3] = str(tmp_path / "others")
    more = "--retro-compatible --seed 5 --mask-prob 0.2 --dtype bf16 --batch-size 9 --max-length 8"
    tokenizer = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", "v.txt"]
    run([*flags, *more.split(), *tokenizer, "--allow-foreign-checkpoints"])
    assert asked[-1] == EmbedderOptions(
        "megatron",
        "bert",
        TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file="v.txt"),
        batch_size=9,
        max_length=8,
        dtype="bf16",
        masking=Masking(5, 0.2),
        allow_foreign=True,
        length_flag="--max-length",
    )
    for half in (tokenizer[:2], tokenizer[2:]):
        with pytest.raises(ConfigError, match="give both --tokenizer-type and --vocab-file, or"):
            run([*flags, *half])
    source.write_text('{"body": "a"}\n\n{"text": 1}\n')
    with pytest.raises(DataError, match=r"texts.jsonl: line 3 after byte 0: no key 'body': fix or"):
        run(flags)


def test_a_folder_keeps_the_record_of_its_vectors(tmp_path: Path):
    path, origin = tmp_path / "new" / "made_from.json", {"texts": 25, "max_length": 64}
    bert_embedding._check_origin(path, origin)
    bert_embedding._check_origin(path, origin)
    with pytest.raises(ConfigError, match="made with max_length 64, not 32"):
        bert_embedding._check_origin(path, origin | {"max_length": 32})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="made with texts None, not 25"):
        bert_embedding._check_origin(path, origin)
