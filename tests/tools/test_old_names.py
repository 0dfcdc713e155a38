"""Programs under their old names, each started with a command line of its time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import parse_config
from megatron.data.indexed import IndexedDataset
from tests.data.test_indexed import read_all, write_cached, write_random
from tests.repository import ROOT
from tests.tokenizer.test_kinds import tokenizer_folder  # noqa: F401 - a fixture
from tools import old_names
from tools.old_names import OLD_NAMES


class BecameError(Exception):
    """Carries the command that `os.execv` was called with."""


@pytest.fixture
def start(monkeypatch):
    """Start an old script in this process; return today's script and its arguments."""

    def execv(program, words):
        raise BecameError(words)

    def call(name: str, *words: object) -> tuple[str, list[str]]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        monkeypatch.setattr(os, "execv", execv)
        with pytest.raises(BecameError) as caught:
            old_names.run_old_name(str(ROOT / name))
        (python, *now) = caught.value.args[0]
        assert python == sys.executable
        return str(Path(now[0]).relative_to(ROOT)), now[1:]

    return call


def main_of(script: str):
    """Return the `main` behind a script, which may only start a module of the package."""
    name = script.removesuffix(".py").replace("/", ".")
    is_moved = importlib.util.find_spec(f"megatron.{name}") is not None
    return importlib.import_module(f"megatron.{name}" if is_moved else name).main


# As in examples/pretrain_gpt2.sh of v1.0, at test size.
_V1 = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --batch-size 2 --seq-length 32
    --max-position-embeddings 32 --train-iters 3 --lr-decay-iters 3 --data-path DATA
    --vocab-file vocab.json --merge-file merges.txt --data-impl cached --split 949,50,1
    --distributed-backend gloo --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine
    --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --checkpoint-activations --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 0 --model-parallel-size 1"""


def test_pretrain_gpt2(start):
    script, words = start("pretrain_gpt2.py", *_V1.replace("DATA", "old").split())
    assert script == "pretrain_gpt.py"
    config = parse_config(words, world_size=1, architecture="gpt").config
    assert config.training.micro_batch_size == 2
    assert config.data.data_path == ("old",)
    assert config.data.data_impl == "cached"


def test_pretrain_gpt2_trains_on_data_of_its_time(tmp_path):
    lengths, tokens = [40] * 50, list(range(1000)) * 2
    ends = [40 * i for i in range(51)]
    numbers = [1, 4, 4, 50, 50, 51, *range(51), *ends, *lengths, *range(51)]
    write_cached(
        tmp_path / "old",
        b"TNTIDX\0\0" + b"".join(n.to_bytes(8, "little") for n in numbers),
        b"".join(n.to_bytes(4, "little") for n in tokens),
    )
    words = _V1.replace("DATA", str(tmp_path / "old")).split()
    at = words.index("--vocab-file")
    words[at : at + 4] = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt2.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert "iteration        3/       3" in finished.stdout
    assert (
        "note: pretrain_gpt2.py is an old name (2019 to v1.1) of pretrain_gpt.py" in finished.stderr
    )


@pytest.mark.parametrize(
    "name", ["many_cores", "partitions", "dist"], ids=lambda name: f"preprocess_data_{name}.py"
)
def test_preprocessing(start, tmp_path, name):
    text = tmp_path / "in.jsonl"
    text.write_text('{"text": "1 2"}\n{"text": "3"}\n')
    more = {
        "many_cores": "--workers 2 --make-vocab-size-divisible-by 8 --pad-vocab-size-to 300",
        "partitions": "--workers 2 --partitions 2 --log-interval 100",
        "dist": "--split train --columns text --merge parallel --torch-backend gloo",
    }
    words = ["--input", text, "--output-prefix", tmp_path / "x", "--dataset-impl", "mmap"]
    words += [*more[name].split(), "--append-eod", "--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", "100"]
    script, now = start(f"tools/preprocess_data_{name}.py", *words)
    assert script == "tools/preprocess_data.py"
    assert main_of(script)(now) == 0
    assert len(IndexedDataset(tmp_path / "x_text_document")) == 2


@pytest.mark.parametrize(
    ("kind", "files", "ids"),
    [
        ("PretrainedFromHF", "--tokenizer-name-or-path FOLDER", [[0, 3, 4], [0, 5]]),
        ("CharacterLevelTokenizer", "", None),
        ("BertWordPieceTokenizer", "--vocab FOLDER/vocab.txt", [[5, 6], [7]]),
    ],
)
def test_tokenizers_by_their_old_names(
    start,
    tokenizer_folder,  # noqa: F811
    tmp_path,
    kind,
    files,
    ids,
):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "other"]
    (tokenizer_folder / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "wiki_00").write_text('{"text": "hello world"}\n{"text": "other"}\n')
    words = ["--input", tmp_path / "wiki_00", "--output-prefix", tmp_path / "x", "--workers", "1"]
    words += ["--tokenizer-type", kind, *files.replace("FOLDER", str(tokenizer_folder)).split()]
    script, now = start("tools/preprocess_data_many_cores.py", *words, "--dataset-impl", "mmap")
    assert main_of(script)(now) == 0
    found = read_all(tmp_path / "x_text_document")
    if ids is None:  # one token per character
        assert [len(sequence) for sequence in found] == [11, 5]
    else:
        assert found == ids


def test_merging(start, tmp_path, capsys, monkeypatch):
    for name in "ab":
        write_random(tmp_path / name)
    words = ["--datasets", tmp_path / "b", tmp_path / "a", "--output-prefix", tmp_path / "ba"]
    words += ["--merge", "distributed", "--torch-backend", "gloo", "--local_rank=0"]
    script, now = start("tools/merge_preprocessed_data.py", *words)
    assert main_of(script)(now) == 0
    assert read_all(tmp_path / "ba") == [*read_all(tmp_path / "b"), *read_all(tmp_path / "a")]
    monkeypatch.setenv("RANK", "1")  # one process does the work of all
    with pytest.raises(SystemExit) as caught:
        old_names.run_old_name(str(ROOT / "tools/merge_preprocessed_data.py"))
    assert caught.value.code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tools/checkpoint_util.py",
            "--model-type GPT --load-dir LOAD --save-dir SAVE --target-tensor-parallel-size 1 "
            "--target-pipeline-parallel-size 1 --megatron-path . --max-queue-size 50",
        ),
        (
            "tools/checkpoint/convert.py",
            "--model-type GPT --loader mcore --saver legacy --load-dir LOAD --save-dir SAVE "
            "--target-tensor-parallel-size 1 --target-pipeline-parallel-size 1 --bf16",
        ),
        (
            "tools/merge_mp_partitions.py",
            "--model-type GPT --tensor-model-parallel-size 2 --tokenizer-type GPT2BPETokenizer "
            "--vocab-file VOCAB --merge-file MERGES --num-layers 4 --hidden-size 64 "
            "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
            "--load LOAD --save SAVE",
        ),
    ],
)
def test_checkpoints_are_merged(start, golden, tmp_path, name, words):
    data = golden / "data"
    for old, now in (
        ("LOAD", golden / "gpt_tp2pp2_fp32" / "ckpt"),
        ("SAVE", tmp_path / "out"),
        ("VOCAB", data / "gpt2-tiny-vocab.json"),
        ("MERGES", data / "gpt2-tiny-merges.txt"),
    ):
        words = words.replace(old, str(now))
    script, now = start(name, *words.split())
    assert script == "tools/checkpoint/util.py"
    assert main_of(script)(now) == 0
    written = [path.parent.name for path in (tmp_path / "out").rglob("model_optim_rng.pt")]
    assert written == ["mp_rank_00"]


def test_converting_to_core(start):
    words = "--model-type GPT --loader core --saver core --load-dir a --save-dir b --bf16"
    script, now = start("tools/checkpoint/convert.py", *words.split())
    assert script == "tools/checkpoint/util.py"
    assert now == (
        "--model-type GPT --loader megatron --saver torch_dist --load-dir a --save-dir b".split()
    )


def test_generation(start):
    words = "--num-layers 24 --load gpt2 --top_p 0.9 --genfile out.json --num-samples 2 --fp16"
    script, now = start("tools/generate_samples_gpt2.py", *words.split())
    assert (script, now) == ("tools/generate_samples_gpt.py", words.split())


@pytest.mark.parametrize("name", [name for name, old in OLD_NAMES.items() if not old.successor])
def test_what_has_no_successor_says_so_in_one_line(name):
    words = [sys.executable, str(ROOT / name), "--input", "x"]
    finished = subprocess.run(words, capture_output=True, text=True, check=False)
    assert finished.returncode == 9
    (line,) = finished.stderr.splitlines()
    assert (
        line == f"error: {name} ({OLD_NAMES[name].versions}) was removed: {OLD_NAMES[name].remedy}"
    )


@pytest.mark.parametrize("name", OLD_NAMES)
def test_each_name_is_a_script_and_documented(name):
    assert "run_old_name(__file__)" in (ROOT / name).read_text()
    old = OLD_NAMES[name]
    assert not old.successor or (ROOT / old.successor).is_file()
    line = (
        f"| `{name}` | {old.versions} | {f'`{old.successor}`' if old.successor else old.remedy} |"
    )
    assert line in (ROOT / "docs" / "compatibility.md").read_text().splitlines()
