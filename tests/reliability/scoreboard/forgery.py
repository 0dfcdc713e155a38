"""Row 36: manifests and headers changed by hand, with matching digests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST, _sign
from megatron.checkpoint.shard import digest_of
from tests.reliability.scoreboard.damage import refused_and_replaced, two_checkpoints
from tests.reliability.scoreboard.score import Trials, within
from tests.reliability.scoreboard.untrusted import SECONDS

# Types of equal width.
_LIKE = {"F32": "I32", "F16": "I16", "BF16": "F16", "I64": "F64", "U8": "I8", "BOOL": "U8"}

_VALUES = (None, True, -1, 1.5, 1 << 31, 1 << 63, 1 << 64, 10**400, "", "F64", "../x", [], [[]], {})
_FILES = ("", ".", "/dev/zero", "/etc/passwd", "../iter_0000001/rank_00000.safetensors", "x\0")
_FILES += ("manifest.json", "./rank_00000.safetensors", "rank_00002.safetensors")

Table = dict[str, Any]  # a manifest's or header's entries, by tensor
Forge = Callable[[Table, random.Random], None]


def _rename(table: Table, rng: random.Random) -> None:
    name = rng.choice(sorted(table))
    table[name[:-1] + "x"] = table.pop(name)


def _exchange_names(table: Table, rng: random.Random) -> None:
    a, b = rng.sample(sorted(table), 2)
    table[a], table[b] = table[b], table[a]


def _retype(table: Table, rng: random.Random) -> None:
    entry = table[rng.choice(sorted(table))]
    entry["dtype"] = _LIKE[entry["dtype"]]


def _drop(table: Table, rng: random.Random) -> None:
    del table[rng.choice(sorted(table))]


def _double(table: Table, rng: random.Random) -> None:
    name = rng.choice(sorted(table))
    table[name + "x"] = table[name]


def _reshape(table: Table, rng: random.Random) -> None:
    entry = table[rng.choice(sorted(table))]
    entry["shape"] = [*entry["shape"], 1]
    for piece in entry.get("pieces", ()):
        piece["shape"], piece["offset"] = [*piece["shape"], 1], [*piece["offset"], 0]


def _exchange_locations(table: Table, rng: random.Random) -> None:
    """Swap the places (with file and digest) of two tensors of equal size in a manifest."""
    by_size: dict[int, list[Any]] = {}
    for name in sorted(table):
        for piece in table[name]["pieces"]:
            by_size.setdefault(piece["bytes"], []).append(piece)
    a, b = rng.sample(rng.choice([pieces for pieces in by_size.values() if len(pieces) > 1]), 2)
    for field in ("file", "start", "sha256"):
        a[field], b[field] = b[field], a[field]


def _move(table: Table, rng: random.Random) -> None:
    """Give a tensor in a header the offsets of another one."""
    a, b = rng.sample(sorted(table), 2)
    key = "data_offsets"
    table[a][key], table[b][key] = table[b][key], table[a][key]


def _put_value(table: Table, rng: random.Random) -> None:
    """Replace a part of an entry with another value."""
    locations: list[tuple[Any, Any]] = [(entry, key) for entry in table.values() for key in entry]
    for entry in table.values():
        locations += [(piece, key) for piece in entry.get("pieces", ()) for key in piece]
        locations += [(values, i) for values in entry.values() for i in range(_length(values))]
    container, key = rng.choice(locations)
    before = container[key]
    while container[key] == before:
        container[key] = rng.choice(_VALUES)


def _length(values: Any) -> int:
    return len(values) if isinstance(values, list) else 0


def _shift(table: Table, rng: random.Random) -> None:
    """Change an offset or a size slightly, or so that it lies outside the file."""
    locations: list[tuple[Any, Any]] = []
    for entry in table.values():
        locations += [
            (piece, key) for piece in entry.get("pieces", ()) for key in ("start", "bytes")
        ]
        locations += [(entry["data_offsets"], i) for i in range(2) if "data_offsets" in entry]
    container, key = rng.choice(locations)
    container[key] += rng.choice((-8, -4, -1, 1, 4, 8, 1 << 20, 1 << 40, 1 << 62, -(1 << 40)))


def _leave(table: Table, rng: random.Random) -> None:
    """Point a piece of the manifest to a file elsewhere."""
    piece = rng.choice([piece for name in sorted(table) for piece in table[name]["pieces"]])
    piece["file"] = rng.choice(_FILES)


_IN_BOTH: tuple[Forge, ...] = (_rename, _exchange_names, _retype, _drop, _double, _reshape)
_IN_BOTH += (_put_value, _shift)


def forged_tables(folder: Path, count: int) -> Trials:
    """Try row 36: forgeries are refused before a tensor changes, although every digest matches."""
    newest, older = two_checkpoints(folder)
    shards = sorted(newest.glob("*.safetensors"))
    trials, rng = Trials("seed 36"), random.Random(36)
    manifest = newest / MANIFEST
    original = manifest.read_bytes()
    while trials.tried < count:
        body = json.loads(original)
        del body["sha256"]
        file = rng.choice([manifest, *shards])
        content = file.read_bytes()
        if file == manifest:
            forge = rng.choice((*_IN_BOTH, _exchange_locations, _leave))
            forge(body["tensors"], rng)
        else:
            forge = rng.choice((*_IN_BOTH, _move))
            header, rest = _forged_header(content, forge, rng)
            file.write_bytes(header + rest)
            _describe_header(body, file.name, header)
        manifest.write_bytes(_sign(body))
        if manifest.read_bytes() == original:  # two identical entries were swapped
            continue
        with (
            trials.trial(f"{forge.__name__} in {file.name}, trial {trials.tried}"),
            within(SECONDS),
        ):
            refused_and_replaced(newest, file.name, older)
        trials.note("of the manifest" if file == manifest else "of a header")
        file.write_bytes(content)
        manifest.write_bytes(original)
    reader = open_checkpoint(folder)
    assert reader is not None
    assert reader.iteration == 2  # unchanged
    return trials


def _forged_header(data: bytes, forge: Forge, rng: random.Random) -> tuple[bytes, bytes]:
    """Return a shard with a forged header."""
    end = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:end])
    forge(table, rng)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, data[end:]


def _describe_header(body: dict[str, Any], file: str, header: bytes) -> None:
    """Update the manifest for its file's new header and the offsets that it moved."""
    info = body["files"][file]
    shift = len(header) - info["header_bytes"]
    info["bytes"] += shift
    info |= {"header_bytes": len(header), "header_sha256": digest_of(header)}
    for tensor in body["tensors"].values():
        for piece in tensor["pieces"]:
            piece["start"] += shift * (piece["file"] == file)
