"""Row 43: checkpoints that no run wrote, with matching digests, and special files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import MANIFEST, _sign
from megatron.checkpoint.shard import digest_of
from megatron.parallel.layout import Layout
from tests.checkpoint.states import assert_loads, make_state, save, save_state
from tests.reliability.scoreboard.score import Trials, expect, within

SECONDS = 10  # to open any checkpoint
_OTHER_UID = 54_321  # a user ID
META = {
    "skipped_train_samples": 0,
    "optimizer": {"step": 2, "loss_scale": {"scale": 65536.0, "growth_tracker": 3}},
    "schedule": {"num_steps": 8, "max_lr": 0.1, "lr_decay_steps": 40, "lr_decay_style": "cosine"},
    "rng": {"seed": 1234},
    "tokenizer": "fingerprint",
    "corpus": "fingerprint",
    "config": {"model": {"num_layers": 2}, "training": {"train_iters": 10}},
    "notices": ["a line"],
}
META["optimizer"]["loss_scale"]["hysteresis_tracker"] = 2  # type: ignore[index]
_FREE = ("created", "hysteresis_tracker")  # any text, any number
# A schedule may contain fractions and None, and a configuration what YAML can.
_LENIENT = ("num_steps", "lr_decay_steps", "num_layers", "train_iters")
_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000)


def _wrong(key: Any, value: Any, rng: random.Random) -> Any:
    """Return a value of another type, or a number out of range."""
    wrong: list[Any] = [True, [1], {"a": 1}, [[]], {"a": {"b": None}}]
    wrong += [7, 1.5] if isinstance(value, str) else ["x", ""]
    if type(value) is int:
        wrong += [1e300] if key in _LENIENT else [1.5, None, 2.0, 1e300, "1"]
    return rng.choice([candidate for candidate in wrong if type(candidate) is not type(value)])


def _locations(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) below a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        if key not in _FREE:
            yield value, key
            if isinstance(value[key], dict | list):
                yield from _locations(value[key])


def _mistype(newest: Path, rng: random.Random) -> None:
    body = _body(newest)
    part = rng.choice([body, body["meta"], body["meta"]])
    container, key = rng.choice(list(_locations(part)))
    container[key] = _wrong(key, container[key], rng)
    (newest / MANIFEST).write_bytes(_sign(body))


def _number(newest: Path, rng: random.Random) -> None:
    """Replace a number with one that JSON lacks or that nothing can hold; sign the result."""
    body = _body(newest)
    numbers = [(c, k) for c, k in _locations(body) if type(c[k]) in (int, float)]
    container, key = rng.choice(numbers)
    container[key] = "@"
    text = json.dumps(body).replace('"@"', rng.choice(_NUMBERS)) + "\n"
    signed = f'{{"sha256": "{digest_of(text.encode())}", {text[1:]}'
    (newest / MANIFEST).write_text(signed)


def _cut(newest: Path, rng: random.Random) -> None:
    """Cut a tensor into thousands of pieces along any dimension, two of which overlap."""
    body = _body(newest)
    names = sorted(name for name in body["tensors"] if "model.layers.0.mlp.up.weight" in name)
    tensor = body["tensors"][rng.choice(names)]
    (piece,), axis, count = tensor["pieces"], rng.randrange(2), rng.randrange(2, 5_000)
    tensor["shape"][axis] = count
    pieces = []
    for i in range(count):
        offset, shape = [0, 0], list(tensor["shape"])
        offset[axis], shape[axis] = i, 1
        pieces.append({**piece, "offset": offset, "shape": shape})
    a, b = rng.sample(range(count), 2)
    pieces[a] = pieces[b]
    tensor["pieces"] = pieces
    (newest / MANIFEST).write_bytes(_sign(body))


def put_special(path: Path, target: Path, rng: random.Random) -> str:
    """Create a FIFO, a socket, a device, a folder or a link, and return which."""

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
            server.bind(path.name)  # a socket's address has at most 107 bytes

    def make_device() -> None:
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:  # only root can
            os.symlink("/dev/zero", path)

    makers: dict[str, Callable[[], object]] = {
        "a FIFO": lambda: os.mkfifo(path),
        "a socket": listen,
        "a device": make_device,
        "a folder": path.mkdir,
        "a link to a device": lambda: os.symlink("/dev/zero", path),
        "a link to itself": lambda: os.symlink(path, path),
        "a link": lambda: os.symlink(target, path),
    }
    name = rng.choice(sorted(makers))
    makers[name]()
    return name


def _replace(newest: Path, rng: random.Random) -> None:
    """Replace a file with something else."""
    path = rng.choice(sorted(newest.iterdir()))
    aside = path.rename(newest.parent / "aside")
    put_special(path, aside, rng)


def _link(newest: Path, rng: random.Random) -> None:
    """Replace the checkpoint with a link out of its folder."""
    outside = newest.parent.parent / "outside"
    newest.rename(outside)
    newest.symlink_to(outside)


def _open_to_all(newest: Path, rng: random.Random) -> None:
    path = rng.choice([newest, *sorted(newest.iterdir())])
    path.chmod(path.stat().st_mode | 0o002)


def _give_away(newest: Path, rng: random.Random) -> None:
    path = rng.choice([newest, *sorted(newest.iterdir())])
    if os.geteuid():
        _open_to_all(newest, rng)  # only root can give files away
    else:
        os.chown(path, _OTHER_UID, _OTHER_UID)


ATTACKS = (_mistype, _mistype, _mistype, _number, _number, _cut, _replace, _link, _open_to_all)
ATTACKS += (_give_away,)


def _body(newest: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((newest / MANIFEST).read_bytes())
    del body["sha256"]
    return body


def hostile_checkpoints(folder: Path, count: int) -> Trials:
    """Try row 43: the older checkpoint loads, whatever the newest one is."""
    trials, rng = Trials("seed 43"), random.Random(43)
    for i in range(count):
        root = folder / str(i) / "root"
        save_state(root, 1)
        newest = save(root, 2, make_state(2), META, Layout.single())
        attack = rng.choice(ATTACKS)
        attack(newest, rng)
        output = io.StringIO()
        with trials.trial(f"{attack.__name__[1:]}, trial {i}"):
            with within(SECONDS), contextlib.redirect_stderr(output):
                assert_loads(root, [1])
            expect(newest.name in output.getvalue(), f"is not named: {output.getvalue()}")
        trials.note(attack.__name__[1:].replace("_", " "))
    return trials
