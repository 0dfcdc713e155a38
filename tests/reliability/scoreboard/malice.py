"""Rows 29 and 30: files that want to run code or to reach outside, and our own source."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.manifest import MANIFEST
from megatron.data.cache import ArraySpec, IndexCache
from megatron.errors import CheckpointError, ConfigError, DataError
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write
from tests.checkpoint.legacy.test_malicious import CORPUS, MARK, Calls
from tests.checkpoint.states import save_state
from tests.reliability.scoreboard.commands import Command, run_training, run_words
from tests.reliability.scoreboard.score import Trials, expect
from tests.repository import name as repository_name
from tests.test_banned_calls import _shipped, find_banned
from tools.checkpoint import util

_PAYLOAD = pickle.dumps(Calls(os.system, f"touch {MARK}"))
_CODE = f"open({MARK!r}, 'w')\n"

_REFUSALS = {CheckpointError.exit_code, DataError.exit_code, ConfigError.exit_code}

# Makes the files in a folder, and runs the command that is to read them; its exit code.
Attack = Callable[[Path], int]


def _train(folder: Path, *flags: str) -> int:
    return run_training(folder.parent / "out", *flags, before=lambda: os.chdir(folder)).code


def _load(folder: Path) -> int:
    return _train(folder, "--load", str(folder), "--exit-on-missing-checkpoint")


def _legacy(data: bytes) -> Attack:
    """Return a file in torch.save's format with this pickle in it."""

    def attack(folder: Path) -> int:
        _records(folder, [("archive/data.pkl", data), ("archive/version", b"3\n")])
        return _load(folder)

    return attack


def _records(folder: Path, records: list[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(_weights_file(folder), "w") as archive:
        for name, data in records:
            archive.writestr(name, data)


def _weights_file(folder: Path) -> Path:
    rank = folder / "iter_0000003" / "mp_rank_00"
    rank.mkdir(parents=True)
    (folder / TRACKER).write_text("3")
    return rank / "model_optim_rng.pt"


def _whole_tree(folder: Path) -> int:
    """Write a checkpoint of Megatron's that is sound except for one object."""
    write(folder, Form(), whole_model(), rng_state=Calls(os.system, f"touch {MARK}"))
    return _load(folder)


def _bare_pickle(folder: Path) -> int:
    _weights_file(folder).write_bytes(_PAYLOAD)
    return _load(folder)


def _leaving_records(folder: Path) -> int:
    _records(folder, [("archive/data.pkl", b"N."), ("../../../../outside", b"x")])
    return _load(folder)


def _tar(folder: Path) -> int:
    with tarfile.open(_weights_file(folder), "w") as archive:
        entry = tarfile.TarInfo("../../../../outside")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    return _load(folder)


def _distributed_checkpoint(folder: Path) -> int:
    """Write torch.distributed.checkpoint's files: pickles under other names."""
    inner = folder / "iter_0000003"
    inner.mkdir()
    (folder / TRACKER).write_text("3")
    (inner / ".metadata").write_bytes(_PAYLOAD)
    (inner / "__0_0.distcp").write_bytes(_PAYLOAD)
    return _load(folder)


def _linked_shard(folder: Path) -> int:
    shard = next(save_state(folder, 3).glob("*.safetensors"))
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")
    return _load(folder)


def _linked_manifest(folder: Path) -> int:
    manifest = save_state(folder, 3) / MANIFEST
    manifest.rename(folder.parent / "elsewhere")
    manifest.symlink_to(folder.parent / "elsewhere")
    return _load(folder)


def _pickle_for_a_manifest(folder: Path) -> int:
    (save_state(folder, 3) / MANIFEST).write_bytes(_PAYLOAD)
    return _load(folder)


def _yaml_tag(folder: Path) -> int:
    text = f"!!python/object/apply:os.system ['touch {MARK}']\n"
    (folder / "run.yaml").write_text(f"training: {text}")
    return _train(folder, "--config", str(folder / "run.yaml"))


def _tokenizer_pickle(kind: str, *flags: str) -> Attack:
    def attack(folder: Path) -> int:
        (folder / "tokenizer").write_bytes(_PAYLOAD)
        words = [str(folder / "tokenizer") if word == "FILE" else word for word in flags]
        return _train(folder, "--tokenizer-type", kind, *words)

    return attack


def _tokenizer_code(folder: Path) -> int:
    """Write a folder of the Hub whose tokenizer is Python code."""
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.T", None]}, "tokenizer_class": "T"})
    )
    (folder / "code.py").write_text(_CODE)
    return _train(
        folder, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)
    )


def _convert(folder: Path) -> int:
    words = ["--model-type", "GPT", "--loader", "hf", "--saver", "native"]
    words += ["--load-dir", str(folder), "--save-dir", str(folder / "converted")]
    return run_words(folder.parent / "out", util.main, *words).code


def _hub_hook(**hooks: Any) -> Attack:
    def attack(folder: Path) -> int:
        case = CASES["llama"]
        write_folder(folder, case.config | hooks, tensors_of(case))
        for name in ("modeling.py", "configuration.py"):
            (folder / name).write_text(_CODE)
        return _convert(folder)

    return attack


def _hub_pickle(folder: Path) -> int:
    case = CASES["llama"]
    write_folder(folder, case.config, tensors_of(case))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(_PAYLOAD)
    return _convert(folder)


def _hub_link(folder: Path) -> int:
    case = CASES["llama"]
    write_folder(folder, case.config, tensors_of(case))
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")
    return _convert(folder)


def _object_array(folder: Path) -> int:
    """Write an index cache with an array of objects: it is built again, never read."""
    spec = ArraySpec("a_idx", np.dtype("i4"), (3,))
    cache = IndexCache((folder,))
    cache.load_or_build("text", [spec], lambda: (np.arange(3, dtype=np.int32),))
    objects = np.array([Calls(os.system, f"touch {folder / MARK}")], dtype=object)
    np.save(next(folder.glob("*.npy")), objects, allow_pickle=True)

    def build() -> tuple[np.ndarray, ...]:
        raise DataError("built anew")

    def read() -> int:
        os.chdir(folder)
        try:
            cache.load_or_build("text", [spec], build)
        except DataError as error:
            return error.exit_code
        return 0

    with Command(read, folder.parent / "out") as command:
        return command.end().code


def _attacks() -> Iterator[tuple[str, Attack]]:
    yield "a whole checkpoint with a payload", _whole_tree
    yield "YAML tag", _yaml_tag
    yield "torch.distributed.checkpoint", _distributed_checkpoint
    yield "a pickle for a manifest", _pickle_for_a_manifest
    yield "a linked shard", _linked_shard
    yield "a linked manifest", _linked_manifest
    yield "a pickle for a torch file", _bare_pickle
    yield "records that leave the file", _leaving_records
    yield "a tar for a torch file", _tar
    yield "an array of objects", _object_array
    yield (
        "a SentencePiece model",
        _tokenizer_pickle("SentencePieceTokenizer", "--tokenizer-model", "FILE"),
    )
    yield "a tiktoken file", _tokenizer_pickle("TikTokenizer", "--tokenizer-model", "FILE")
    yield (
        "a GPT-2 vocabulary",
        _tokenizer_pickle("GPT2BPETokenizer", "--vocab-file", "FILE", "--merge-file", "FILE"),
    )
    yield (
        "a WordPiece vocabulary",
        _tokenizer_pickle("BertWordPieceLowerCase", "--vocab-file", "FILE"),
    )
    yield "tokenizer code", _tokenizer_code
    auto_map = {"AutoModelForCausalLM": "modeling.M", "AutoConfig": "configuration.C"}
    yield "auto_map", _hub_hook(model_type="custom", auto_map=auto_map)
    yield "auto_map of a family that we have", _hub_hook(auto_map=auto_map)
    yield "an attention of the hub", _hub_hook(_attn_implementation_internal="evil/x")
    yield "weights that are a pickle", _hub_pickle
    yield "weights that are a link", _hub_link
    for name, data in CORPUS.items():
        yield f"pickle: {name}", _legacy(data)


def _snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


def malicious_files(folder: Path, count: int) -> Trials:
    """Try row 29: nothing runs, nothing appears outside the folder, and the command fails."""
    trials = Trials()
    pickle.loads(_PAYLOAD)  # or the payloads would prove nothing
    expect(Path(MARK).exists(), "the payload does not work")
    Path(MARK).unlink()
    outside = folder / "beside"
    outside.mkdir()
    for number, (name, attack) in enumerate(_attacks()):
        if number >= count:
            break
        jail = folder / "jail" / "files"
        jail.mkdir(parents=True)
        before = _snapshot(outside)
        with trials.trial(name):
            code = attack(jail)
            expect(code in _REFUSALS, f"ended with {code}")
            marks = list(folder.rglob(MARK)) + [Path(MARK)] * Path(MARK).exists()
            expect(not marks, f"it ran: {marks}")
            expect(_snapshot(outside) == before, "files appeared outside")
            expect(not list(folder.rglob("outside")), "a record left its file")
        shutil.rmtree(folder / "jail")
    return trials


def banned_calls(folder: Path, count: int) -> Trials:
    """Try row 30: no shipped file can execute what it reads."""
    trials = Trials()
    for file in _shipped()[:count]:
        where = repository_name(file)
        with trials.trial(where):
            expect(
                not find_banned(file.read_text(), where), str(find_banned(file.read_text(), where))
            )
    return trials
