"""Row 38: caches and temporary names that somebody else has prepared, changed or redirected."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megatron import durable
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.data import gpt, indexed, sentences
from megatron.data.datasets import DataRequest, DatasetPart
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.data.sentence_map import SentenceMapPlan
from megatron.environment import private_cache
from megatron.errors import StorageError
from megatron.kernels import build
from megatron.tokenizer import build_tokenizer
from tests.data.corpus import write_corpus, write_sentences
from tests.reliability.scoreboard.score import Trials, expect
from tests.tokenizer.test_gpt2 import GOOD, write_pair

_OTHER_UID = 4321  # a user ID
_LIBRARY = b"a library"


@dataclass(frozen=True)
class Cache:
    """One kind of cache.

    Attributes:
        name: The kind of cache, for the table.
        prepare: Creates in an empty folder what the cache is built from.
        read: Reads the result from the cache, or builds and keeps it; for comparison.
        forge: Makes the next `read` keep something wrong whose digest matches.
    """

    name: str
    prepare: Callable[[Path], object]
    read: Callable[[Path], Any]
    forge: Callable[[], contextlib.AbstractContextManager[Any]]


def _request() -> DataRequest:
    return DataRequest(DataConfig(seq_length=16, split="1"), seed=5, samples=(0, 0, 0))


def _read_gpt(folder: Path) -> Any:
    data = IndexedDataset(folder / "x")
    part = DatasetPart("train", data, (0, len(data)), 100)
    index = gpt.build_gpt_part(part, _request(), seq_length=16, vocab_size=1000).index
    return [array.tolist() for array in index]


def _read_sentences(folder: Path) -> Any:
    data = IndexedDataset(folder / "x")
    part = DatasetPart("train", data, (0, len(data.document_indices) - 1), 100)
    plan = SentenceMapPlan(100, 61, 0.1, 7, 2)
    return sentences.map_sentences(part, plan, _request(), vocab_size=1000).rows.tolist()


def _read_library(folder: Path) -> Any:
    """Return the library to load, compiled if none is cached; nothing if the cache is unusable."""
    try:
        cache_folder = private_cache("kernels")
        library = build.find_built("sm_90a", cache_folder, build.discard_line)
        if library is None:
            (folder / "made").write_bytes(_LIBRARY)
            library = build.keep(
                folder / "made", cache_folder / f"kernels-sm_90a-{build.digest()}-cuda13.0"
            )
    except (PermissionError, IsADirectoryError):
        return _LIBRARY
    return library.read_bytes()


def _write_pair(folder: Path) -> None:
    write_pair(folder, GOOD, "#version: 0.2\na b\n")


def _read_vocabulary(folder: Path) -> Any:
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "v.json"),
        merge_file=str(folder / "m.txt"),
    )
    return build_tokenizer(config).tokenize("abba cab")


def _swapped(array: np.ndarray) -> np.ndarray:
    forged = array.copy()
    forged[[0, 1]] = forged[[1, 0]]
    return forged


def _forge_gpt() -> contextlib.AbstractContextManager[Any]:
    real = gpt.build_gpt_index

    def forged(*args: Any) -> gpt.GPTIndex:
        index = real(*args)
        return index._replace(shuffle=_swapped(index.shuffle))

    return patch.object(gpt, "build_gpt_index", forged)


def _forge_sentences() -> contextlib.AbstractContextManager[Any]:
    real = sentences.build_sentence_map
    return patch.object(sentences, "build_sentence_map", lambda *args: _swapped(real(*args)))


def _forge_library() -> contextlib.AbstractContextManager[Any]:
    return patch(f"{__name__}._LIBRARY", b"a planted library")


CACHES = (
    Cache("a GPT's index", lambda f: write_corpus(f / "x", longest=80), _read_gpt, _forge_gpt),
    Cache("a sentence map", lambda f: write_sentences(f / "x"), _read_sentences, _forge_sentences),
    Cache("a library", lambda f: None, _read_library, _forge_library),
    Cache("a compiled vocabulary", _write_pair, _read_vocabulary, contextlib.nullcontext),
)


def _content(path: Path, rng: random.Random, _: list[Path]) -> None:
    """Change the content of a file."""
    data = bytearray(path.read_bytes())
    offset = rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            data[offset : offset + 8] = rng.randbytes(rng.randrange(1, 9))
        case 1:
            del data[offset:]
        case 2:
            data += rng.randbytes(rng.randrange(1, 100))
        case 3:
            data[offset:] = bytes(len(data) - offset)
        case 4:
            data[:] = rng.randbytes(len(data))
        case 5:  # two entries
            start, width = 128 if path.suffix == ".npy" else 0, rng.choice((4, 8, 12))
            a, b = (start + width * rng.randrange(8) for _ in range(2))
            swapped = data[a : a + width], data[b : b + width]
            data[b : b + width], data[a : a + width] = swapped
    path.write_bytes(data)


def _exchange(path: Path, rng: random.Random, files: list[Path]) -> None:
    """Swap a file with another one of the cache, or remove it."""
    other = rng.choice(files)
    if other == path:
        path.unlink()
        return
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _kind(path: Path, rng: random.Random, _: list[Path]) -> None:
    """Replace a file with something that is not a file."""
    path.unlink()
    rng.choice((os.mkfifo, os.mkdir))(path)


def _access(path: Path, rng: random.Random, _: list[Path]) -> None:
    """Give a file away, make it writable by others, or replace it with a link."""
    match rng.randrange(3 if os.getuid() == 0 else 2):
        case 0:
            path.chmod(0o600 | rng.choice((0o020, 0o002, 0o022, 0o066, 0o177)))
        case 1:
            (path.parent.parent / "elsewhere").mkdir(exist_ok=True)
            path.symlink_to(path.rename(path.parent.parent / "elsewhere" / path.name))
        case 2:
            os.chown(path, _OTHER_UID + rng.randrange(1000), -1)


def _files(folder: Path, existing: set[Path]) -> list[Path]:
    """Return the files that a cache has written and reads."""
    written = (path for path in folder.rglob("*") if path.is_file() and path not in existing)
    return sorted(path for path in written if path.suffix != ".dsc" and path.name != "made")


def _attacked_files(cache: Cache, folder: Path, rng: random.Random) -> str:
    """Change the files of a cache and expect the result of a fresh one, twice."""
    cache.prepare(folder)
    existing = {path for path in folder.rglob("*") if path.is_file()}
    expected = cache.read(folder)
    attacks = {"content": _content, "exchange": _exchange, "kind": _kind, "access": _access}
    name = rng.choice([*attacks])
    files = _files(folder, existing)
    if name == "access":
        for path in files:
            path.unlink()
        with cache.forge():
            cache.read(folder)
        files = _files(folder, existing)
    for path in rng.sample(files, rng.randrange(1, len(files) + 1) if name == "access" else 1):
        attacks[name](path, rng, files)
    elsewhere = {path: path.read_bytes() for path in folder.rglob("elsewhere/*")}
    for _ in range(2):
        expect(cache.read(folder) == expected, f"{cache.name}: what {name} left was used")
    for path, content in elsewhere.items():
        expect(path.read_bytes() == content, f"{cache.name}: a link was followed")
    return f"{cache.name}: {name}"


def _guessed_names(folder: Path, rng: random.Random) -> str:
    """Put links at temporary and final names, and expect their targets to stay as they are."""
    victim, missing = folder.parent / "victim", folder.parent / "missing"
    victim.write_text("precious")
    cache = rng.choice(CACHES[:2])
    cache.prepare(folder)
    existing = {path for path in folder.rglob("*") if path.is_file()}
    expected = cache.read(folder)
    written = [path for path in folder.rglob("*") if path.is_file() and path not in existing]
    guess = f"{rng.randrange(1 << 64):x}"
    kinds = (durable.TEMPORARY + guess, f"{durable.TEMPORARY}{os.getpid()}", "")
    names = [*written, *(folder / f"out.{end}" for end in ("bin", "idx", "lengths", "documents"))]
    for path in written:
        path.unlink()
    for path in names:
        for kind in rng.sample(kinds, rng.randrange(1, 4)):
            path.with_name(path.name + kind).symlink_to(rng.choice((victim, missing)))

    def guessed(path: Path, kind: str) -> Path:
        return path.with_name(f"{path.name}{kind}{guess}")

    is_guessed = rng.random() < 0.5  # whether the attacker guesses the random part
    with contextlib.ExitStack() as stack:
        if is_guessed:
            stack.enter_context(patch.object(durable, "unique_sibling", guessed))
            stack.enter_context(patch.object(indexed, "unique_sibling", guessed))
        expect(cache.read(folder) == expected, f"{cache.name}: a link's target was used")
        with (
            contextlib.suppress(StorageError),
            IndexedDatasetBuilder(folder / "out", np.uint16) as builder,
        ):
            builder.add_documents([1, 2], [2], [1])
    expect(victim.read_text() == "precious", "a link was followed and its target overwritten")
    expect(not missing.exists(), "a link was followed and its target created")
    return f"names, {'guessed' if is_guessed else 'not guessed'}"


def _opened_folder(folder: Path, rng: random.Random) -> str:
    """Plant files in a folder that others may enter, and expect none of them to be used."""
    cache = rng.choice(CACHES[2:])
    cache.prepare(folder)
    expected = cache.read(folder)
    shutil.rmtree(folder / "cache")
    with cache.forge():
        cache.read(folder)
    (private,) = (folder / "cache").iterdir()
    match rng.randrange(3 if os.getuid() == 0 else 2):
        case 0:
            private.chmod(0o700 | rng.randrange(1, 0o100))
        case 1:
            private.symlink_to(private.rename(folder / "elsewhere"))
        case 2:
            os.chown(private, _OTHER_UID, -1)
    expect(cache.read(folder) == expected, f"{cache.name}: an open folder was used")
    return f"{cache.name}: folder"


def attacked_caches(folder: Path, count: int) -> Trials:
    """Try row 38: files that others could have written are never used, and no link is followed."""
    trials, rng = Trials("seed 38"), random.Random(38)
    while trials.tried < count:
        trial_folder = folder / f"{trials.tried}"
        trial_folder.mkdir()
        with trials.trial(f"variant {trials.tried}"), _environment(trial_folder):
            attack = rng.randrange(8)
            if attack == 0:
                trials.note(_guessed_names(trial_folder, rng))
            elif attack == 1:
                trials.note(_opened_folder(trial_folder, rng))
            else:
                trials.note(_attacked_files(rng.choice(CACHES), trial_folder, rng))
        shutil.rmtree(trial_folder)
    return trials


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    with patch.dict(os.environ, {"MEGATRON_CACHE": str(folder / "cache")}):
        yield
