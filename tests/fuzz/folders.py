"""Whole checkpoint folders, randomly damaged, and loaded by the functions that training uses.

An input is only the seed for the random changes to the newest checkpoint. Then a run
that holds other values loads the folder. It must either be refused before any of the run's tensors
changes, or match a sound checkpoint of the folder exactly.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import io
import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.entries import buffer_state, flatten
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST, _sign
from megatron.checkpoint.trust import open_plain
from megatron.config.parser import parse_config
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.restoring import network_of, open_for_loading, restore_run
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe
from tests.checkpoint.core.core_files import to_core
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.distributed import run_distributed
from tests.fuzz.harness import Target
from tests.training.toy import CPU, TOY, train_toy

_TRAIN = "--save-interval 2 --exit-interval 4 --eval-iters 0 --untie-embeddings-and-output-weights"
_VALUES = (None, True, -1, 0, 1.5, 1 << 40, 1 << 64, 1e300, "", "x", "../x", [], {}, [[]], "cosine")
_OF_CORE = (
    *("--swiglu", "--num-experts", "2", "--moe-router-topk", "1", "--moe-ffn-hidden-size", "8"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)
_OF_LLAMA = ("--vocab-size", str(CASES["llama"].config["vocab_size"] - 1))
_SOUND = b"no mutation"
_ERRORS = (CheckpointError, ConfigError)  # a folder may no longer look like a checkpoint
_UNTOUCHED = 7.0  # what the run's tensors hold before loading


@dataclass(frozen=True)
class _Original:
    """A sound folder, the run that loads it, and what the run then holds, by iteration.

    Attributes:
        root: the folder that --load names.
        newest: the folder in it that is damaged.
        run: a run of the same network.
        state: its progress and schedules before it loads.
        sound: the run's tensors after each of the folder's checkpoints.
    """

    root: Path
    newest: Path
    run: Run
    state: tuple[Any, Any]
    sound: dict[int, dict[str, Tensor]]


def _tensors(run: Run) -> dict[str, Tensor]:
    """Return the tensors that loading sets."""
    tensors = {name: parameter.detach() for name, parameter in run.named_parameters()}
    tensors |= {name: one.tensor for name, one in flatten(buffer_state(run.parts))}
    own = {f"optimizer.{name}": one for name, (one, _) in run.optimizer.named_tensors().items()}
    return tensors if run.config.checkpoint.finetune else tensors | own


def _load(run: Run, root: Path) -> int | None:
    """Load a folder as `build_run` does; return the iteration."""
    checkpoint = copy.copy(run.config.checkpoint)
    object.__setattr__(checkpoint, "load", str(root))
    config = copy.copy(run.config)
    object.__setattr__(config, "checkpoint", checkpoint)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, reader = open_for_loading(config, run.layout)
        if reader is None:
            return None
        restore_run(run, reader)
    return reader.iteration


def _train(layout: Layout, root: str, kind: str) -> None:
    if kind != "core":
        train_toy(layout, [*_TRAIN.split(), "--save", root, "--ckpt-format", kind])
        return
    with tempfile.TemporaryDirectory() as own:
        train_toy(layout, [*_TRAIN.split(), *_OF_CORE, "--save", own])
        for step in (2, 4):
            reader = open_checkpoint(own, step=step)
            assert reader is not None
            to_core(reader, Path(root))


@cache
def _original(kind: str) -> _Original:
    root = Path(tempfile.mkdtemp(prefix="fuzz-folders-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    if kind == "hf":
        words = ["--load", str(root), "--finetune", "--use-checkpoint-args", *_OF_LLAMA]
        write_folder(root, CASES["llama"].config, tensors_of(CASES["llama"]), shards=2)
        iterations, newest = {0: root}, root
    else:
        words = [*_TRAIN.split(), "--load", str(root), *(_OF_CORE if kind == "core" else ())]
        if kind == "core":
            run_distributed(1, _train, str(root), kind)
        else:
            run_distributed(2, _train, str(root), kind, tensor=2)
        folders = sorted(root.glob("iter_*"))
        iterations, newest = {2: folders[0], 4: folders[1]}, folders[1]
    parsed = parse_config(
        [*TOY, "--train-iters", "6", "--no-exit-signal-handler", *words],
        world_size=1,
        read_checkpoint=network_of,
    )
    run = build_run(parsed.config, GPTRecipe(), CPU, Layout.single())
    state = copy.deepcopy((run.progress, run.schedules))
    sound = {}
    for iteration, folder in iterations.items():
        assert _load(run, folder) == iteration
        sound[iteration] = {name: tensor.clone() for name, tensor in _tensors(run).items()}
    return _Original(root, newest, run, state, sound)


def _read(kind: str, data: bytes, folder: Path) -> None:
    original, rng = _original(kind), random.Random(data)
    root = folder / "root"
    shutil.copytree(original.root, root)
    newest = root / original.newest.relative_to(original.root)
    for _ in range(rng.choice((1, 1, 1, 2)) if data != _SOUND else 0):
        with contextlib.suppress(IndexError):  # nothing is left to mutate
            rng.choice(_MUTATIONS[kind])(newest, rng)
    run = original.run
    run.progress, run.schedules = copy.deepcopy(original.state)
    for tensor in _tensors(run).values():
        tensor.fill_(_UNTOUCHED)
    try:
        iteration = _load(run, root)
    except _ERRORS:
        for name, tensor in _tensors(run).items():
            assert bool((tensor == _UNTOUCHED).all()), f"{name} has changed"
        raise
    assert iteration is not None, "it starts from scratch"
    assert iteration in original.sound, iteration
    for name, tensor in _tensors(run).items():
        assert torch.equal(tensor, original.sound[iteration][name]), name


# Mutations of a folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _change_bytes(folder: Path, rng: random.Random, *, beyond: str = "") -> None:
    """Change some bytes of a file, but only in the first 64 if its name ends with `beyond`."""
    path = rng.choice(_files(folder))
    data = bytearray(path.read_bytes())
    end = min(64, len(data)) if beyond and path.name.endswith(beyond) else len(data)
    for _ in range(rng.choice((1, 1, 4))):
        if end:
            data[rng.randrange(end)] = rng.randrange(256)
    path.write_bytes(data)


def _change_length(folder: Path, rng: random.Random) -> None:
    path = rng.choice(_files(folder))
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    more = rng.randbytes(rng.choice((1, 8, 64)))
    path.write_bytes(rng.choice((data[:at], data[:at] + more + data[at:], data + more)))


def _swap(folder: Path, rng: random.Random) -> None:
    """Swap two files of any two checkpoints, or replace one with the other."""
    one, other = rng.choice(_files(folder)), rng.choice(_files(folder.parent))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    if folder in other.parents and rng.random() < 0.5:
        other.write_bytes(data)


def _remove(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.rglob("*")))
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _duplicate(folder: Path, rng: random.Random) -> None:
    """Duplicate a file or a folder under a name that follows the others' pattern."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    path = rng.choice([*_files(folder), *folders])
    stem = path.name.rstrip("0123456789")
    name = rng.choice((path.name + "1", f"{stem}02", f"x{path.name}"))
    if path.is_dir():
        with contextlib.suppress(OSError):  # another mutation put something else there
            shutil.copytree(path, path.with_name(name), symlinks=True)
    else:
        path.with_name(name).write_bytes(path.read_bytes())


def _replace(folder: Path, rng: random.Random) -> None:
    """Replace a file with something that is not a regular file."""
    path = rng.choice(_files(folder))
    path.unlink()
    rng.choice((path.mkdir, partial(os.mkfifo, path), partial(path.symlink_to, "/dev/zero")))()


def _open_to_all(folder: Path, rng: random.Random) -> None:
    path = rng.choice([folder, *_files(folder)])
    path.chmod(path.stat().st_mode | 0o002)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in a JSON value or a pickle, except inside tensors."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        if not isinstance(value[key], Tensor):
            yield value, key
            if isinstance(value[key], dict | list | argparse.Namespace):
                yield from _places(value[key])


def _edit(tree: Any, rng: random.Random) -> None:
    """Remove a value, replace it, or wrap it."""
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(list(_places(tree)))
        value = container[key]
        match rng.randrange(4):
            case 0:
                del container[key]
            case 1:
                container[key] = rng.choice(([value], {"x": value}))
            case 2 if isinstance(container, dict):
                container[rng.choice(("x", f"{key}x", *map(str, container)))] = value
            case _:
                container[key] = rng.choice(_VALUES)


def _sign_anew(folder: Path, rng: random.Random) -> None:
    """Change values of the manifest, mostly metadata, and sign it again, as an attacker would."""
    with contextlib.suppress(
        ValueError, KeyError, OSError, CheckpointError
    ):  # another mutation came first
        with open_plain(folder / MANIFEST) as file:
            body = json.loads(file.read())
        del body["sha256"]
        _edit(rng.choice((body, body["meta"], body["meta"]["schedule"], body["tensors"])), rng)
        (folder / MANIFEST).write_bytes(_sign(body))


def _pickle_anew(folder: Path, rng: random.Random, *, kind: str = "legacy") -> None:
    """Change values of one of Megatron-LM's files, with correct CRCs."""
    path = rng.choice([path for path in _files(folder) if path.suffix == ".pt"])
    with contextlib.suppress(Exception):  # another mutation came first
        # Bytes that were changed before the CRCs were computed cannot be told from sound ones.
        sound = _original(kind).newest / path.relative_to(folder)
        tree = torch.load(sound, weights_only=False)
        own = [value for value in tree.values() if isinstance(value, dict | argparse.Namespace)]
        _edit(rng.choice((tree, *own)), rng)
        torch.save(tree, path)


def _index_anew(folder: Path, rng: random.Random) -> None:
    """Change an offset, a box, a type or a name in Megatron Core's `.metadata`."""
    index = pickle.loads((_original("core").newest / ".metadata").read_bytes())
    tensors = {n: one for n, one in index.state_dict_metadata.items() if hasattr(one, "chunks")}
    place = rng.choice(list(index.storage_data))
    info, tensor = index.storage_data[place], rng.choice(list(tensors.values()))
    chunk = rng.choice(tensor.chunks)
    name = rng.choice(list(tensors))
    number = rng.choice((-1, 1, 8, 64, 1 << 40, -(1 << 40), None, "x", 1.5))

    def moved(sizes: torch.Size) -> Any:
        changed = list(sizes)
        at = rng.randrange(len(changed))
        changed[at] += number if type(number) is int else 1
        return rng.choice((tuple(changed), (*sizes, 1), (), changed))

    def moved_to(value: Any) -> Any:
        return value + number if type(number) is int else number

    match rng.randrange(11):
        case 0:
            info.relative_path = rng.choice(
                (
                    "/dev/zero",
                    "../common.pt",
                    "common.pt",
                    "__0_9.distcp",
                    "__0_0.distcp\0",
                    None,
                    1,
                )
            )
        case 1:
            info.offset = moved_to(info.offset)
        case 2:
            info.length = moved_to(info.length)
        case 3:
            del index.storage_data[place]
        case 4:
            del index.state_dict_metadata[name]
        case 5:
            tensor.chunks.append(chunk)
        case 6:
            tensor.chunks.remove(chunk)
        case 7:
            chunk.offsets = moved(chunk.offsets)
        case 8:
            chunk.sizes = moved(chunk.sizes)
        case 9:
            index.state_dict_metadata[rng.choice(("x", f"{name}x", "decoder.layers.99.x", 7))] = (
                index.state_dict_metadata.pop(name)
            )
        case _:
            tensor.properties.dtype = rng.choice((torch.float64, torch.int8, torch.bfloat16))
    with contextlib.suppress(OSError):  # another mutation put something else there
        (folder / ".metadata").write_bytes(pickle.dumps(index))


def _change_json(folder: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in _files(folder) if path.suffix == ".json"])
    with contextlib.suppress(ValueError):  # another mutation came first
        tree = json.loads(path.read_bytes())
        _edit(tree, rng)
        path.write_text(json.dumps(tree))


def _change_header(folder: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    with contextlib.suppress(ValueError):  # another mutation came first
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        tree = json.loads(data[8:end])
        _edit(tree, rng)
        text = json.dumps(tree).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


Mutation = Callable[[Path, random.Random], None]
_OF_FILES: tuple[Mutation, ...] = (_change_length, _remove, _duplicate, _replace, _open_to_all)
# Hugging Face's tensors have no digests: changed bytes and swapped files cannot be detected.
_MUTATIONS: dict[str, Sequence[Mutation]] = {
    "native": (*_OF_FILES, _swap, _change_bytes, *[_sign_anew] * 6),
    "legacy": (*_OF_FILES, _swap, _change_bytes, *[_pickle_anew] * 4),
    # Nothing reveals files from different saves, unless their sizes differ.
    "core": (
        *(*_OF_FILES, *[_change_bytes] * 3, *[_index_anew] * 6),
        *[partial(_pickle_anew, kind="core")] * 2,
    ),
    "hf": (
        *_OF_FILES,
        partial(_change_bytes, beyond=".safetensors"),
        *[_change_json] * 3,
        *[_change_header] * 3,
    ),
}


def _seeds(kind: str) -> list[bytes]:
    _original(kind)  # created before the search is forked
    return [_SOUND]


TARGETS = tuple(
    Target(f"{kind} folder", partial(_seeds, kind), partial(_read, kind), _ERRORS)
    for kind in _MUTATIONS
)
