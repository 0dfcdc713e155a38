"""Damaged and hostile folders are refused by name before any tensor changes, and run no code.

Each variant changes one thing in a sound folder of a small network.
"""

import io
import os
import pickle
import random
import shutil
import zipfile
from argparse import Namespace

import pytest
import torch

from megatron.checkpoint.core.index import INDEX
from megatron.checkpoint.core.reader import COMMON, FORMAT
from megatron.checkpoint.find import CheckpointFolder
from megatron.checkpoint.loading import open_checkpoint, open_folder
from megatron.errors import CheckpointError
from tests.checkpoint.core.core_files import FILES, write_core
from tests.checkpoint.legacy.test_malicious import CORPUS, MARK, Calls, with_pickle
from tests.checkpoint.states import read_all

_HIDDEN, _LAYERS, _EXPERTS, _WORDS = 8, 2, 2, 16


def _tensors():
    """Return a mixture's weights and one moment of each, under Megatron Core's names."""
    shapes = {
        "embedding.word_embeddings.weight": (_WORDS, _HIDDEN),
        "output_layer.weight": (_WORDS, _HIDDEN),
        "decoder.final_layernorm.weight": (_HIDDEN,),
        "decoder.layers.self_attention.linear_qkv.weight": (_LAYERS, 3 * _HIDDEN, _HIDDEN),
        "decoder.layers.mlp.router.weight": (_LAYERS, _EXPERTS, _HIDDEN),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (_LAYERS, _EXPERTS, 8, _HIDDEN),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (_LAYERS, _EXPERTS, _HIDDEN, 4),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return weights | {f"optimizer.state.exp_avg.{name}": 2 * w for name, w in weights.items()}


def _common(**changes):
    args = {
        "num_layers": _LAYERS,
        "hidden_size": _HIDDEN,
        "num_attention_heads": 2,
        "num_experts": _EXPERTS,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "consumed_train_samples": 48,
    }
    state = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": []}
    schedule = {"num_steps": 48, "max_lr": 1.0}
    tree = {"args": Namespace(**args | changes.pop("args", {})), "iteration": 3}
    return tree | {"optimizer": state, "opt_param_scheduler": schedule} | changes


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core") / "iter_0000003"
    write_core(folder, _tensors(), _common())
    return folder


@pytest.fixture
def folder(sound, tmp_path, monkeypatch):
    """Return a copy of a sound folder, and check after the test that none of its code has run."""
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / sound.name
    shutil.copytree(sound, copy)
    yield copy
    assert not (tmp_path / MARK).exists()


def refused(folder, match="."):
    """Check that the folder is refused with an error that names one of its files or the problem."""
    with pytest.raises(CheckpointError, match=match) as caught:
        open_folder(CheckpointFolder("core", 3, folder))
    assert "MemoryError" not in str(caught.value)
    return str(caught.value)


def test_the_sound_folder_is_read(sound):
    held = read_all(sound)
    assert held["model.layers.1.mlp.experts.up.weight"].shape == (_EXPERTS, 2, 4, _HIDDEN)
    whole = _tensors()["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert torch.equal(held["model.layers.1.mlp.experts.up.weight"].flatten(1, 2), whole[1])
    assert open_checkpoint(sound).meta["optimizer"] == {"step": 3, "loss_scale": {}}


# Pickles in the index, in common.pt and in a tensor's file


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_index_is_refused(folder, name):
    (folder / INDEX).write_bytes(CORPUS[name])
    assert INDEX in refused(folder, "nothing in it was run")


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_common_file_is_refused(folder, name):
    with_pickle(folder / COMMON, CORPUS[name])
    assert COMMON in refused(folder, "nothing in it was run")


def _change_index(folder, change):
    index = pickle.loads((folder / INDEX).read_bytes())
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def _put(folder, blob):
    """Replace the bytes of a tensor that is stored as one chunk, and return its name."""
    index = pickle.loads((folder / INDEX).read_bytes())
    place = next(p for p in index.storage_data if p.fqn == "decoder.layers.mlp.router.weight")
    info = index.storage_data[place]
    file = folder / info.relative_path
    data = bytearray(file.read_bytes())
    info.offset, info.length = len(data), len(blob)
    file.write_bytes(data + blob)
    (folder / INDEX).write_bytes(pickle.dumps(index))
    return place.fqn


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_tensor_is_refused(folder, name):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", CORPUS[name])
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/padding", bytes(64))
    assert ".distcp" in refused(folder, f"nothing in it was run.*{_put(folder, buffer.getvalue())}")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1, 2, 8),
        torch.zeros(1, 1, 8, dtype=torch.float64),
        torch.zeros(1, 1, 9),
        torch.zeros(8),
        {"x": torch.zeros(1, 1, 8)},
        [],
        None,
        Namespace(a=1),
    ],
    ids=str,
)
def test_another_value_than_the_index_says_is_refused(folder, value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert ".distcp" in refused(folder, _put(folder, buffer.getvalue()))


def test_objects_that_nobody_needs_are_never_read(folder):
    """Random states and extra states are pickles too."""
    index = pickle.loads((folder / INDEX).read_bytes())
    place = next(p for p in index.storage_data if p.fqn.startswith("rng_state"))
    info = index.storage_data[place]
    path = folder / info.relative_path
    data, payload = bytearray(path.read_bytes()), pickle.dumps(Calls(os.system, f"touch {MARK}"))
    data[info.offset : info.offset + len(payload)] = payload
    path.write_bytes(data)
    assert open_checkpoint(folder).iteration == 3


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "SavePlan"),
        ("torch.distributed.checkpoint.planner", "LoadPlan"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("torch.serialization", "load"),
        ("torch", "load"),
        ("torch", "FloatStorage"),
        ("argparse", "Namespace"),
        ("megatron.core.enums", "ModelType"),
        ("numpy", "ndarray"),
        ("collections", "OrderedDict"),
        ("os", "system"),
    ],
)
def test_only_the_index_s_own_classes_may_be_named_in_it(folder, module, name):
    code = b"\x80\x02c" + module.encode() + b"\n" + name.encode() + b"\n."
    (folder / INDEX).write_bytes(code)
    refused(folder, f"it names {module}.{name}")


# Offsets and boxes


def _a_place(index):
    return next(one for p, one in index.storage_data.items() if "linear_qkv.weight" in p.fqn)


def _a_tensor(index):
    return index.state_dict_metadata["decoder.layers.self_attention.linear_qkv.weight"]


_PLACES = {
    "a folder above": ("relative_path", "../common.pt"),
    "an absolute path": ("relative_path", "/dev/zero"),
    "another file": ("relative_path", COMMON),
    "the index": ("relative_path", INDEX),
    "no such file": ("relative_path", "__7_7.distcp"),
    "a folder": ("relative_path", "x/__0_0.distcp"),
    "no path": ("relative_path", None),
    "bytes": ("relative_path", b"__0_0.distcp"),
    "a null byte": ("relative_path", "__0_0.distcp\0"),
    "a line break": ("relative_path", "__0_0.distcp\n"),
    "before the file": ("offset", -1),
    "beyond the file": ("offset", 1 << 40),
    "beyond numbers": ("offset", 1 << 63),
    "no number": ("offset", "0"),
    "a fraction": ("offset", 0.5),
    "a truth": ("offset", True),
    "one byte on": ("offset", 1),
    "the start of another": ("offset", 0),
    "nothing": ("length", 0),
    "negative": ("length", -5),
    "too little": ("length", 10),
    "too long": ("length", 1 << 50),
    "encoded": ("transform_descriptors", ["zstd"]),
}


@pytest.mark.parametrize("case", _PLACES)
def test_a_place_that_cannot_be_is_refused(folder, case):
    field, value = _PLACES[case]

    def change(index):
        info = _a_place(index)
        if case == "one byte on":
            info.offset += 1
        else:
            setattr(info, field, value)

    _change_index(folder, change)
    refused(folder)


def _drop(mapping, name):
    del mapping[next(key for key in mapping if name in getattr(key, "fqn", key))]


_SIZE = torch.Size
_INDEXES = {
    "overlap": lambda i: _a_tensor(i).chunks.append(_a_tensor(i).chunks[0]),
    "gap": lambda i: _a_tensor(i).chunks.pop(),
    "no chunks": lambda i: _a_tensor(i).chunks.clear(),
    "chunks of text": lambda i: setattr(_a_tensor(i), "chunks", ["x"]),
    "chunks of nothing": lambda i: setattr(_a_tensor(i), "chunks", None),
    "outside": lambda i: setattr(_a_tensor(i).chunks[0], "offsets", _SIZE([1, 99, 0])),
    "negative": lambda i: setattr(_a_tensor(i).chunks[0], "offsets", (-1, 0, 0)),
    "too wide": lambda i: setattr(_a_tensor(i).chunks[0], "sizes", _SIZE([9, 99, 99])),
    "an empty chunk": lambda i: setattr(_a_tensor(i).chunks[0], "sizes", _SIZE([0, 12, 8])),
    "other dimensions": lambda i: setattr(_a_tensor(i).chunks[0], "sizes", _SIZE([96])),
    "sizes of text": lambda i: setattr(_a_tensor(i).chunks[0], "sizes", ("x", 1, 1)),
    "a larger tensor": lambda i: setattr(_a_tensor(i), "size", _SIZE([2, 48, 8])),
    "a tensor of exabytes": lambda i: setattr(_a_tensor(i), "size", _SIZE([1 << 60, 24, 8])),
    "a tensor of nothing": lambda i: setattr(_a_tensor(i), "size", _SIZE([0, 24, 8])),
    "a scalar": lambda i: setattr(_a_tensor(i), "size", _SIZE([])),
    "too many dimensions": lambda i: setattr(_a_tensor(i), "size", _SIZE([1] * 20)),
    "no size": lambda i: setattr(_a_tensor(i), "size", None),
    "another type": lambda i: setattr(_a_tensor(i).properties, "dtype", torch.float64),
    "an unknown type": lambda i: setattr(_a_tensor(i).properties, "dtype", torch.complex64),
    "a sparse layout": lambda i: setattr(_a_tensor(i).properties, "layout", torch.sparse_coo),
    "no properties": lambda i: setattr(_a_tensor(i), "properties", None),
    "a tensor without places": lambda i: _drop(i.storage_data, "linear_qkv.weight"),
    "places without a tensor": lambda i: _drop(i.state_dict_metadata, "linear_qkv.weight"),
    "an object without a place": lambda i: _drop(i.storage_data, "rng_state"),
    "an unknown parameter": lambda i: _rename(i, "decoder.layers.mlp.unheard_of.weight"),
    "a layer twice": lambda i: _rename(
        i, "decoder.layers.0.mlp.router.weight", "decoder.final_layernorm.weight"
    ),
    "a parameter of prediction": lambda i: _rename(i, "mtp.layers.0.other.weight"),
    "no tensors": lambda i: setattr(i, "state_dict_metadata", {}),
    "no dict of tensors": lambda i: setattr(i, "state_dict_metadata", []),
    "no dict of places": lambda i: setattr(i, "storage_data", None),
    "a number for a name": lambda i: i.state_dict_metadata.update({7: _a_tensor(i)}),
    "text for a tensor": lambda i: i.state_dict_metadata.update(x="y"),
    "a tensor for a place": lambda i: i.storage_data.update(
        dict.fromkeys(list(i.storage_data)[:1], _a_tensor(i))
    ),
    "text for a key of places": lambda i: i.storage_data.update(x=_a_place(i)),
    "words without an embedding": lambda i: _remove(i, "embedding.word_embeddings.weight"),
}


def _remove(index, name):
    del index.state_dict_metadata[name]
    for place in [place for place in index.storage_data if place.fqn == name]:
        del index.storage_data[place]


def _rename(index, name, old="decoder.layers.self_attention.linear_qkv.weight"):
    index.state_dict_metadata[name] = index.state_dict_metadata.pop(old)
    for place in [place for place in index.storage_data if place.fqn == old]:
        info = index.storage_data.pop(place)
        index.storage_data[type(place)(name, place.offset)] = info


@pytest.mark.parametrize("case", _INDEXES)
def test_an_index_that_contradicts_itself_is_refused(folder, case):
    _change_index(folder, _INDEXES[case])
    refused(folder)


# Files


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("name", [INDEX, COMMON, FORMAT, *FILES])
def test_a_truncated_file_is_refused(folder, name, share):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    assert name in refused(folder)


@pytest.mark.parametrize("kind", ["missing", "folder", "FIFO", "link", "device", "random"])
@pytest.mark.parametrize("name", [INDEX, COMMON, FORMAT, *FILES])
def test_what_is_no_such_file_is_refused(folder, name, kind):
    path = folder / name
    path.rename(folder.parent / "kept")
    {
        "missing": lambda: None,
        "folder": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(folder.parent / "kept"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "random": lambda: path.write_bytes(random.Random(1).randbytes(100_000)),
    }[kind]()
    assert name in refused(folder)


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_byte_of_a_tensor_is_refused(folder, seed):
    rng = random.Random(seed)
    index = pickle.loads((folder / INDEX).read_bytes())
    place = rng.choice([p for p in sorted(index.storage_data, key=str) if p.offset is not None])
    info = index.storage_data[place]
    path = folder / info.relative_path
    data = bytearray(path.read_bytes())
    window = data[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(window)) as archive:
        record = next(one for one in archive.infolist() if one.filename.endswith("data/0"))
        values = archive.read(record)
    at = info.offset + bytes(window).index(values) + rng.randrange(len(values))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    assert place.fqn in refused(folder, "CRC-32")


_FORMATS = {
    "another backend": b'{"sharded_backend": "zarr", "sharded_backend_version": 1}',
    "a later version": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 2}',
    "no JSON": b"{",
    "a list": b"[]",
    "nesting": b"[" * 60_000,
    "a number": b"1",
}


@pytest.mark.parametrize("case", _FORMATS)
def test_another_format_is_refused(folder, case):
    (folder / FORMAT).write_bytes(_FORMATS[case])
    assert FORMAT in refused(folder)


_COMMONS = {
    "no dict": [],
    "no arguments": _common() | {"args": None},
    "arguments in a dict": _common() | {"args": {"num_layers": 2}},
    "no iteration": {k: v for k, v in _common().items() if k != "iteration"},
    "an iteration of text": _common(iteration="3"),
    "a negative iteration": _common(iteration=-3),
    "another iteration": _common(iteration=4),
    "steps that differ": _common(
        optimizer={i: {"state": {"common_step": torch.tensor(float(i))}} for i in (0, 1)}
    ),
    "steps of text": _common(optimizer={"state": {"common_step": "3"}}),
    "many steps": _common(optimizer={"state": {"common_step": torch.zeros(2)}}),
    "steps without end": _common(optimizer={"state": {"common_step": float("inf")}}),
    "a negative step": _common(optimizer={"state": {"common_step": -1}}),
    "no schedule": _common(opt_param_scheduler=None),
    "no position in the schedule": _common(opt_param_scheduler={"max_lr": 1.0}),
    "other layers": _common(args={"num_layers": 3}),
    "layers of text": _common(args={"num_layers": "2"}),
    "latent attention": _common(args={"multi_latent_attention": True}),
    "one layer for all depths": _common(args={"mtp_use_repeated_layer": True}),
    "a hybrid": _common(args={"is_hybrid_model": True}),
    "a window of both sides": _common(args={"window_size": [128, 128]}),
    "a window of text": _common(args={"window_size": "wide"}),
    "a window in other layers": _common(
        args={"window_size": [8, 0], "window_attn_skip_freq": [1, 0, 1]}
    ),
    "negative samples": _common(args={"consumed_train_samples": -1}),
    "a width of text": _common(args={"hidden_size": "wide"}),
}


@pytest.mark.parametrize("case", _COMMONS)
def test_a_common_file_of_something_else_is_refused(folder, case):
    torch.save(_COMMONS[case], folder / COMMON)
    refused(folder)


def test_more_layers_than_any_network_has_are_refused_before_they_are_listed(folder):
    """Otherwise, one byte for each of a million layers would become a gigabyte of records."""
    tensors = {name: one for name, one in _tensors().items() if "decoder.layers" not in name}
    tensors["decoder.layers.input_layernorm.bias"] = torch.zeros(10_001, 1, dtype=torch.uint8)
    shutil.rmtree(folder)
    write_core(folder, tensors, _common(args={"num_layers": 10_001}))
    refused(folder, "more than 10,000 layers")


def test_nothing_is_executed_by_the_sound_index_s_own_classes(folder):
    """Classes that an index needs may occur with any content, but nothing is built from it."""
    index = pickle.loads((folder / INDEX).read_bytes())
    index.planner_data = Calls(os.system, f"touch {MARK}")
    (folder / INDEX).write_bytes(pickle.dumps(index))
    refused(folder, "it names posix.system")


def test_there_are_enough_variants():
    parts = (3 * len(CORPUS), 8, 11, len(_PLACES), len(_INDEXES), 6 * 6, 6 * 6, 20)
    assert sum(parts) + len(_FORMATS) + len(_COMMONS) >= 200
