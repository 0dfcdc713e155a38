"""Row 29: files that try to run code or to reach outside their folder."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.manifest import MANIFEST
from megatron.data.cache import ArraySpec, IndexCache
from megatron.environment import private_cache
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.kernels.build import find_built
from megatron.kernels.driver import Driver
from megatron.kernels.library import KernelLibrary
from megatron.tools.checkpoint import util
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write
from tests.checkpoint.legacy.test_malicious import CORPUS, EXHAUSTING, MARK, Calls
from tests.checkpoint.states import save_state
from tests.reliability.scoreboard import payloads
from tests.reliability.scoreboard.commands import Command, run_tool, run_training
from tests.reliability.scoreboard.score import Trials, expect
from tests.repository import ROOT
from tests.training.toy import TOY

_PAYLOAD = pickle.dumps(Calls(os.system, f"touch {MARK}"))
_CODE = f"open({MARK!r}, 'w')\n"

_REFUSALS = {CheckpointError.exit_code, DataError.exit_code, ConfigError.exit_code}

_TOKENIZERS = (
    ("SentencePieceTokenizer", ("--tokenizer-model", "FILE")),
    ("TikTokenizer", ("--tokenizer-model", "FILE")),
    ("GPT2BPETokenizer", ("--vocab-file", "FILE", "--merge-file", "FILE")),
    ("BertWordPieceLowerCase", ("--vocab-file", "FILE")),
    ("HuggingFaceTokenizer", ("--tokenizer-model", "FILE")),
)
_WEIGHTS = ("pytorch_model.bin", "consolidated.00.pth", "model.safetensors", "model.pt")
_NATIVE = (MANIFEST, "rank_00000.safetensors")

# Creates the files in a folder, runs the command that reads them, and returns its exit code.
Attack = Callable[[Path], int]


def _train(folder: Path, *flags: str) -> int:
    return run_training(folder.parent / "out", *flags, preexec=lambda: os.chdir(folder)).code


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
    """Write one of Megatron's checkpoints that is sound except for one object."""
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


def _distributed_checkpoint(data: bytes) -> Attack:
    """Return the files of torch.distributed.checkpoint: pickles under other names."""

    def attack(folder: Path) -> int:
        inner = folder / "iter_0000003"
        inner.mkdir()
        (folder / TRACKER).write_text("3")
        (inner / ".metadata").write_bytes(data)
        (inner / "__0_0.distcp").write_bytes(data)
        return _load(folder)

    return attack


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


def _yaml(text: str) -> Attack:
    def attack(folder: Path) -> int:
        (folder / "run.yaml").write_text(text)
        return _train(folder, "--config", str(folder / "run.yaml"))

    return attack


def _tokenizer_pickle(kind: str, *flags: str, data: bytes = _PAYLOAD) -> Attack:
    def attack(folder: Path) -> int:
        (folder / "tokenizer").write_bytes(data)
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
    return run_tool(folder.parent / "out", util.main, *words).code


def _hub_hook(**hooks: Any) -> Attack:
    def attack(folder: Path) -> int:
        case = CASES["llama"]
        write_folder(folder, case.config | hooks, tensors_of(case))
        for name in ("modeling.py", "configuration.py"):
            (folder / name).write_text(_CODE)
        return _convert(folder)

    return attack


def _hub_pickle(name: str = "pytorch_model.bin", data: bytes = _PAYLOAD) -> Attack:
    """Return a Hugging Face folder whose only weights are a pickle under this name."""

    def attack(folder: Path) -> int:
        case = CASES["llama"]
        write_folder(folder, case.config, tensors_of(case))
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(data)
        return _convert(folder)

    return attack


def _hub_link(folder: Path) -> int:
    case = CASES["llama"]
    write_folder(folder, case.config, tensors_of(case))
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")
    return _convert(folder)


def _object_array(folder: Path) -> int:
    """Write an index cache with an object array: it is rebuilt, never read."""
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
    yield "YAML tag", _yaml(f"training: !!python/object/apply:os.system ['touch {MARK}']\n")
    yield "torch.distributed.checkpoint", _distributed_checkpoint(_PAYLOAD)
    yield "a pickle for a manifest", _pickle_for_a_manifest
    yield "a linked shard", _linked_shard
    yield "a linked manifest", _linked_manifest
    yield "a pickle for a torch file", _bare_pickle
    yield "records that leave the file", _leaving_records
    yield "a tar for a torch file", _tar
    yield "an array of objects", _object_array
    for kind, flags in _TOKENIZERS:
        yield f"a pickle for {kind}", _tokenizer_pickle(kind, *flags)
    yield "tokenizer code", _tokenizer_code
    auto_map = {"AutoModelForCausalLM": "modeling.M", "AutoConfig": "configuration.C"}
    yield "auto_map", _hub_hook(model_type="custom", auto_map=auto_map)
    yield "auto_map of a family that we have", _hub_hook(auto_map=auto_map)
    yield "an attention of the hub", _hub_hook(_attn_implementation_internal="evil/x")
    yield "weights that are a pickle", _hub_pickle()
    yield "weights that are a .pth", _hub_pickle("consolidated.00.pth")
    yield "weights that are a link", _hub_link
    yield "modules and a .pth in the current folder", _planted_modules
    for name, data in CORPUS.items():
        yield f"pickle: {name}", _legacy(data)
    for name, body_of in EXHAUSTING.items():
        yield f"pickle: {name}", _legacy(b"\x80\x02" + body_of() + b".")


def _random_attack(rng: random.Random) -> tuple[str, Attack]:
    """Return a random payload in a random place, and a description of it."""
    kind = rng.choice((*["pickle"] * 3, "bomb", "YAML", "hooks", "library"))
    match kind:
        case "YAML":
            attack = _yaml(payloads.random_yaml(rng))
        case "hooks":
            attack = _hub_hook(**payloads.random_hooks(rng))
        case "library":
            attack = _library(rng)
        case "bomb":
            attack = _random_place(payloads.exhausting_pickle(rng), rng)
        case _:
            data = payloads.random_pickle(rng)
            _expect_execution(data)
            attack = _random_place(data, rng)
    return kind, attack


def _random_place(data: bytes, rng: random.Random) -> Attack:
    """Put a pickle into one of our files, or a file in a format that some program unpickles."""
    file = payloads.torch_file(data, rng)
    name, flags = rng.choice(_TOKENIZERS)
    return rng.choice(
        (
            partial(_load_weights, file),
            partial(_load_weights, file),
            _hub_pickle(rng.choice(_WEIGHTS), file),
            _native(rng.choice(_NATIVE), data),
            _distributed_checkpoint(data),
            _tokenizer_pickle(name, *flags, data=data),
        )
    )


def _expect_execution(data: bytes) -> None:
    """Check that pickle itself would execute this; otherwise the trial would prove nothing."""
    with tempfile.TemporaryDirectory() as folder:

        def read() -> None:
            os.chdir(folder)
            pickle.loads(data)

        with Command(read, Path(folder) / "out") as command:
            command.end()
        expect(os.path.lexists(Path(folder) / MARK), f"the payload does not work: {data!r}")


def _load_weights(data: bytes, folder: Path) -> int:
    _weights_file(folder).write_bytes(data)
    return _load(folder)


def _native(name: str, data: bytes) -> Attack:
    """Return a checkpoint of ours with a pickle in place of a file."""

    def attack(folder: Path) -> int:
        (save_state(folder, 3) / name).write_bytes(data)
        return _load(folder)

    return attack


def _library(rng: random.Random) -> Attack:
    """Return a cache with a library that another user may have written."""

    def attack(folder: Path) -> int:
        data = payloads.library()
        with patch.dict(os.environ, {"MEGATRON_CACHE": str(folder / "cache")}):
            (folder / "cache").mkdir()
            payloads.spoil_library(payloads.plant_library(data), rng)
            return _load_library(folder)

    return attack


class _Driver:
    """A driver that leaves a mark when it receives code."""

    launch = None

    def load(self, code: bytes) -> None:
        Path(MARK).touch()


def _load_library(folder: Path) -> int:
    """Load the cached library as a run on a GPU would."""

    def load() -> int:
        os.chdir(folder)
        try:
            found = find_built("sm_90a", private_cache("kernels"), lambda line: None)
            if found is not None:
                KernelLibrary(found, cast(Driver, _Driver()))
        except OSError:
            found = None
        return 0 if found else DataError.exit_code

    with Command(load, folder.parent / "out") as command:
        return command.end().code


def _planted_modules(folder: Path) -> int:
    """Start a program in a folder with modules that it imports and a file that Python starts."""
    for name in ("json", "yaml", "numpy", "torch", "msgspec", "megatron", "sitecustomize"):
        (folder / f"{name}.py").write_text(_CODE)
    (folder / "x.pth").write_text(f"import os; os.system('touch {MARK}')\n")
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--load", str(folder), *TOY]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words += ["--exit-on-missing-checkpoint"]
    return subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, check=False
    ).returncode


def _snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


def malicious_files(folder: Path, count: int) -> Trials:
    """Try row 29: nothing runs, nothing appears outside the folder, and the command fails.

    All known attacks are tried, then as many random ones.
    """
    trials, rng = Trials("seed 29"), random.Random(29)
    with contextlib.chdir(folder):  # tests that run at the same time look into the other one
        pickle.loads(_PAYLOAD)  # otherwise the payloads would prove nothing
    expect((folder / MARK).exists(), "the payload does not work")
    (folder / MARK).unlink()
    _expect_a_sound_library_runs(folder / "sound")
    for name, attack in itertools.islice(_attacks(), count):
        _try(trials, folder, name, attack)
    trials.note("known attacks", trials.tried)
    for number in range(count):
        kind, attack = _random_attack(rng)
        _try(trials, folder, f"random {number}: {kind}", attack)
        trials.note(f"random: {kind}")
    return trials


def _try(trials: Trials, folder: Path, name: str, attack: Attack) -> None:
    """Make one attack in an empty folder, next to which nothing may appear."""
    jail, outside = folder / "jail" / "files", folder / "beside"
    jail.mkdir(parents=True)
    outside.mkdir(exist_ok=True)
    before = _snapshot(outside)
    with trials.trial(name):
        code = attack(jail)
        expect(code in _REFUSALS, f"ended with {code}")
        marks = [path for path in (*folder.rglob(MARK), Path(MARK)) if os.path.lexists(path)]
        expect(not marks, f"it ran: {marks}")
        expect(_snapshot(outside) == before, "files appeared outside")
        expect(not list(folder.rglob("outside")), "a record left its file")
    shutil.rmtree(folder / "jail")


def _expect_a_sound_library_runs(folder: Path) -> None:
    folder.mkdir()
    with patch.dict(os.environ, {"MEGATRON_CACHE": str(folder)}):
        payloads.plant_library(payloads.library())
        _load_library(folder)
    expect((folder / MARK).exists(), "the planted library does not work")
    shutil.rmtree(folder)
