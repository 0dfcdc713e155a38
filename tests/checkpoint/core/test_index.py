"""What `.metadata` must contain, and which contradictions in it are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.checkpoint.core.index import Blob, Chunk, StoredTensor, _InvalidIndexError, _parse
from megatron.checkpoint.entries import Box
from megatron.checkpoint.legacy.unpickler import Opaque, Record

FILE = "__0_0.distcp"


def _record(kind: str, state: Any) -> Record:
    made = Record(kind)
    made.state = state
    return made


def _location(name: str, offset: tuple[int, ...] | None, start: int, length: int) -> Any:
    key = _record("MetadataIndex", {"fqn": name, "offset": offset})
    info = {"relative_path": FILE, "offset": start, "length": length}
    return key, _record("_StorageInfo", info)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Record:
    return _record("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes})


def _tree() -> Record:
    """Return the index of a tensor [2, 3] in two chunks, and of another object."""
    properties = _record(
        "TensorProperties", ("torch.float32", Opaque("layout", ("torch.strided",)))
    )
    tensor = {
        "properties": properties,
        "size": (2, 3),
        "chunks": [_chunk((0, 0), (1, 3)), _chunk((1, 0), (1, 3))],
    }
    metadata = {
        "x": _record("TensorStorageMetadata", tensor),
        "y": _record("BytesStorageMetadata", {}),
    }
    storage = dict(
        [_location("x", (0, 0), 0, 12), _location("x", (1, 0), 12, 13), _location("y", None, 30, 1)]
    )
    return _record("Metadata", {"state_dict_metadata": metadata, "storage_data": storage})


def test_chunks_are_found_in_their_files() -> None:
    tensors, blobs, spans = _parse(_tree())
    boxes = [Box((row, 0), (1, 3)) for row in range(2)]
    chunks = (Chunk(boxes[0], Blob(FILE, 0, 12)), Chunk(boxes[1], Blob(FILE, 12, 13)))
    assert tensors == {"x": StoredTensor(torch.float32, (2, 3), chunks)}
    assert blobs == {"y": Blob(FILE, 30, 1)}
    assert spans == {FILE: [(0, 12), (12, 13), (30, 1)]}
    tree = _tree()
    layout = Opaque("layout", ("torch.strided",))
    _tensor(tree)["properties"].state = {"dtype": "torch.bfloat16", "layout": layout, "more": 1}
    assert _parse(tree)[0]["x"].dtype == torch.bfloat16


def _state(tree: Record) -> dict[str, Any]:
    assert isinstance(tree.state, dict)
    return tree.state


def _tensor(tree: Record) -> dict[str, Any]:
    found: dict[str, Any] = _state(tree)["state_dict_metadata"]["x"].state
    return found


def _info(tree: Record, place: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = list(_state(tree)["storage_data"].values())[place].state
    return found


def _move(tree: Record, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    _tensor(tree)["chunks"][1] = _chunk(offsets, sizes)


_STRIDED = Opaque("layout", ("torch.strided",))
_CHANGES: dict[str, tuple[Callable[[Record], Any], str]] = {
    "another kind": (lambda t: setattr(t, "kind", "SavePlan"), "a Record instead of a Metadata"),
    "a tuple": (lambda t: setattr(t, "state", ()), "a Record instead of a Metadata"),
    "no tensors": (lambda t: _state(t).pop("state_dict_metadata"), "it has no state_dict_metadata"),
    "no locations": (lambda t: _state(t).pop("storage_data"), "or no storage_data"),
    "a name of bytes": (
        lambda t: _state(t)["state_dict_metadata"].update({b"x": None}),
        "a tensor's name is not a string",
    ),
    "a tensor that is none": (
        lambda t: _state(t)["state_dict_metadata"].update(x="text"),
        "'text' instead of a TensorStorageMetadata",
    ),
    "an object without a place": (
        lambda t: _state(t)["state_dict_metadata"].update(z=_record("BytesStorageMetadata", {})),
        "z has no location",
    ),
    "a place without a tensor": (
        lambda t: _state(t)["storage_data"].update([_location("z", None, 40, 1)]),
        "locations that belong to no tensor",
    ),
    "two places": (
        lambda t: _state(t)["storage_data"].update([_location("x", (0, 0), 40, 12)]),
        "x has two locations",
    ),
    "a place without a name": (
        lambda t: _state(t)["storage_data"].update([_location(None, None, 40, 1)]),  # type: ignore[arg-type]
        "a location has no name",
    ),
    "another folder": (lambda t: _info(t).update(relative_path="../__0_0.distcp"), "not a file of"),
    "another file": (lambda t: _info(t).update(relative_path="__0_0.pt"), "which is not a file of"),
    "no file": (lambda t: _info(t).update(relative_path=None), "x is in None"),
    "a negative start": (lambda t: _info(t).update(offset=-1), "x is at byte -1, 12 bytes long"),
    "a start of text": (lambda t: _info(t).update(offset="1"), "x is at byte '1'"),
    "no bytes": (lambda t: _info(t).update(length=0), "x is at byte 0, 0 bytes long"),
    "true bytes": (lambda t: _info(t).update(length=True), "x is at byte 0, True bytes long"),
    "a codec": (lambda t: _info(t).update(transform_descriptors=["zstd"]), "is compressed"),
    "too few bytes": (lambda t: _info(t, 1).update(length=11), "needs more bytes than are stored"),
    "no properties": (lambda t: _tensor(t).pop("properties"), "x has the type None"),
    "few properties": (
        lambda t: setattr(_tensor(t)["properties"], "state", ("torch.float32",)),
        "x has the type None",
    ),
    "another type": (
        lambda t: setattr(_tensor(t)["properties"], "state", ("torch.complex64", _STRIDED)),
        "x has the type 'torch.complex64'",
    ),
    "another layout": (
        lambda t: setattr(_tensor(t)["properties"], "state", ("torch.float32", "torch.sparse")),
        "x is not a dense tensor",
    ),
    "a shape in a list": (lambda t: _tensor(t).update(size=[2, 3]), "not a tuple of sizes"),
    "a negative size": (lambda t: _tensor(t).update(size=(2, -3)), "not a tuple of sizes"),
    "no elements": (lambda t: _tensor(t).update(size=(2, 0)), "no elements or too many dim"),
    "seven dimensions": (lambda t: _tensor(t).update(size=(1,) * 7), "too many dimensions"),
    "no chunks": (lambda t: _tensor(t).update(chunks=None), "x has no chunks"),
    "a chunk outside": (lambda t: _move(t, (1, 0), (2, 3)), "a chunk of x lies outside it"),
    "a chunk elsewhere": (lambda t: _move(t, (0, 1), (1, 1)), "or has no location"),
    "a gap": (lambda t: _move(t, (1, 0), (1, 2)), "the chunks of x overlap or leave gaps"),
}


@pytest.mark.parametrize("case", _CHANGES)
def test_an_index_that_contradicts_itself_is_refused(case: str) -> None:
    tree, (change, message) = copy.deepcopy(_tree()), _CHANGES[case]
    change(tree)
    with pytest.raises(_InvalidIndexError, match=message):
        _parse(tree)


def test_a_tensor_may_have_six_dimensions() -> None:
    tree = _tree()
    sizes = (1, 1, 1, 1, 2, 3)
    _tensor(tree).update(size=sizes, chunks=[_chunk((0,) * 6, sizes)])
    storage = dict([_location("x", (0,) * 6, 0, 24), _location("y", None, 30, 1)])
    _state(tree)["storage_data"] = storage
    assert _parse(tree)[0]["x"].shape == sizes
