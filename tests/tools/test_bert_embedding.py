"""Texts to vectors: blocks, restarts, processes, Megatron's masks, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

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


def test_a_run_goes_on(golden: Path, words: list[str], tmp_path: Path, capsys: Any):
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


def test_a_folder_keeps_the_record_of_its_vectors(tmp_path: Path):
    path, origin = tmp_path / "new" / "made_from.json", {"texts": 25, "max_length": 64}
    bert_embedding._check_origin(path, origin)
    bert_embedding._check_origin(path, origin)
    with pytest.raises(ConfigError, match="made with max_length 64, not 32"):
        bert_embedding._check_origin(path, origin | {"max_length": 32})
    path.write_text("[]")
    with pytest.raises(ConfigError, match="made with texts None, not 25"):
        bert_embedding._check_origin(path, origin)
