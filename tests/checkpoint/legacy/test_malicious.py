"""Files built to run code, read other files or exhaust memory: all refused, nothing executed."""

import io
import os
import pickle
import resource
import struct
import sys
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch

from megatron.checkpoint.legacy import unpickler
from megatron.checkpoint.legacy.torch_file import TorchZip
from megatron.checkpoint.legacy.unpickler import read_pickle
from megatron.checkpoint.loading import open_checkpoint
from megatron.errors import CheckpointError
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write

MARK = "executed"  # the file that a payload creates in the current folder


class Calls:
    """An object that pickles as a call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def with_pickle(path, data):
    """Replace the tree in a torch.save file, with a correct CRC."""
    with zipfile.ZipFile(path) as archive:
        records = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, held in records.items():
            archive.writestr(name, data if name.endswith("data.pkl") else held)


def _global(module, name):
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _call(module, name, *args):
    """Return protocol 2 code that calls a global with strings."""
    return _global(module, name) + b"(" + b"".join(map(_text, args)) + b"tR"


def _storage(numel, key="0", kind="FloatStorage"):
    number = b"\x8a\x08" + struct.pack("<q", numel)
    return (
        b"("
        + _text("storage")
        + _global("torch", kind)
        + _text(key)
        + _text("cpu")
        + number
        + b"tQ"
    )


def _tensor(numel=4, offset=b"K\x00", shape=b"(K\x04t", stride=b"(K\x01t"):
    rebuild = _global("torch._utils", "_rebuild_tensor_v2")
    hooks = _global("collections", "OrderedDict") + b")R"
    return rebuild + b"(" + _storage(numel) + offset + shape + stride + b"\x89" + hooks + b"tR"


def _long(value):
    return b"\x8a\x08" + struct.pack("<q", value)


def _dumped(*call, protocol=2):
    return pickle.dumps(Calls(*call), protocol=protocol)


def _code(body):
    return b"\x80\x02" + body + b"."


CORPUS = {
    "os.system": _dumped(os.system, f"touch {MARK}"),
    "os.system, protocol 0": _dumped(os.system, f"touch {MARK}", protocol=0),
    "os.system, protocol 4": _dumped(os.system, f"touch {MARK}", protocol=4),
    "os.system by its other name": _code(_call("os", "system", f"touch {MARK}")),
    "eval": _dumped(eval, f"open({MARK!r}, 'w')"),
    "exec": _dumped(exec, f"open({MARK!r}, 'w')"),
    "open": _dumped(open, MARK, "w"),
    "getattr chain": _code(
        _global("builtins", "getattr") + b"(" + _global("os", "path") + _text("os") + b"tR"
    ),
    "getattr on a stand-in": _code(
        _call("builtins", "getattr", "x", "__class__"),
    ),
    "attribute of an allowed name": _code(_global("collections", "OrderedDict.fromkeys")),
    "attribute by STACK_GLOBAL": b"\x80\x04\x8c\x0bcollections\x8c\x16OrderedDict.__class__.\x93.",
    "subprocess": _code(_call("subprocess", "Popen", f"touch {MARK}")),
    "an import with a side effect": _code(_global("antigravity", "geohash")),
    "torch's own loader": _code(_call("torch", "load", MARK)),
    "torch's loader of bytes": _code(_call("torch.storage", "_load_from_bytes", "x")),
    "a lazily imported module of torch": _code(_global("torch", "_inductor")),
    "numpy's loader": _code(_call("numpy", "load", MARK)),
    "runpy": _code(_call("runpy", "run_path", MARK)),
    "functools.partial": _code(_call("functools", "partial", "x")),
    "operator.attrgetter": _code(_call("operator", "attrgetter", "x")),
    "INST": b"\x80\x02(" + _text(f"touch {MARK}") + b"ios\nsystem\n.",
    "OBJ": b"\x80\x02(" + _global("os", "system") + _text(f"touch {MARK}") + b"o.",
    "EXT1": b"\x80\x02\x82\x01.",
    "NEWOBJ_EX": b"\x80\x04" + _global("argparse", "Namespace") + b")}\x92.",
    "state for a stand-in function": _code(
        _global("torch._utils", "_rebuild_tensor_v2") + b"}" + _text("call") + b"Nsb"
    ),
    "slot state for a stand-in function": _code(
        _global("collections", "OrderedDict") + b"N}" + _text("call") + b"Ns\x86b"
    ),
    "state for the Namespace class": _code(_global("argparse", "Namespace") + b"}b"),
    "a Namespace filled twice": _code(
        _global("argparse", "Namespace") + b")\x81" + 2 * (b"}" + _text("a") + b"Nsb")
    ),
    "a Namespace with slots": _code(
        _global("argparse", "Namespace") + b")\x81N}" + _text("__class__") + b"Ns\x86b"
    ),
    "state for a tensor": _code(_tensor() + b"}" + _text("offset") + b"K\x09sb"),
    "an item of a tensor set": _code(_tensor() + b"K\x00K\x01s"),
    "append to a string": _code(_text("x") + b"K\x01a"),
    "a text called": _code(_global("torch", "float32") + b")R"),
    "a stand-in for a class called with __import__": _code(
        _global("builtins", "__import__") + b"(" + _text("antigravity") + b"tR"
    ),
    "a reference that is not a storage": _code(_text("x") + b"Q"),
    "a storage of a text": _code(b"(" + 5 * _text("storage") + b"tQ"),
    "a storage with a negative size": _code(_storage(-1)),
    "a tensor beyond its storage": _code(_tensor(numel=3)),
    "a tensor from beyond its storage": _code(_tensor(offset=b"K\x01")),
    "a negative offset": _code(_tensor(offset=_long(-1))),
    "a negative stride": _code(_tensor(stride=b"(" + _long(-1) + b"t")),
    "a stride beyond the storage": _code(_tensor(stride=b"(K\x02t")),
    "a stride of zero and a shape of terabytes": _code(
        _tensor(shape=b"(" + _long(1 << 40) + b"t", stride=b"(K\x00t")
    ),
    "sizes whose product overflows": _code(
        _tensor(shape=b"(" + 2 * _long(1 << 33) + b"t", stride=b"(K\x00K\x00t")
    ),
    "shape and stride of different length": _code(_tensor(stride=b"(t")),
    "a tensor of a text": _code(_call("torch._utils", "_rebuild_tensor_v2", *"abcd")),
    "bytes in a codec that runs": _code(_call("_codecs", "encode", "x", "zlib")),
    "an OrderedDict of an iterator": _code(_call("collections", "OrderedDict", "ab")),
    "a memo index of gigabytes": _code(b"Nr\xff\xff\xff\x7f"),
    "a text of four gigabytes": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of exabytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3f.",
    "a frame of exabytes": b"\x80\x04\x95" + b"\xff" * 7 + b"\x3f.",
    "a bytearray of terabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 42) + b".",
    "a number of two gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "no end": b"\x80\x02N",
    "nothing": b"",
    "an unknown protocol": b"\x80\x63N.",
    "an empty stack": b"\x80\x02.",
    "an unknown instruction": b"\x80\x02\xff.",
}


@pytest.fixture(autouse=True)
def _nothing_happens(tmp_path, monkeypatch):
    """Check after each test: no mark, no imported module, unchanged stand-ins, little memory."""
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert not (tmp_path / MARK).exists()
    assert not {"antigravity", "runpy"} & (set(sys.modules) - modules)
    assert not [name for name in set(sys.modules) - modules if name.startswith("torch._inductor")]
    assert not hasattr(unpickler.Namespace, "__class_getitem__")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KB


@pytest.mark.parametrize("data", CORPUS.values(), ids=CORPUS.keys())
def test_a_hostile_pickle_is_refused(data):
    with pytest.raises(CheckpointError, match="nothing in it was run") as caught:
        read_pickle(data, "file")
    assert "MemoryError" not in str(caught.value)


def test_the_payloads_do_work_elsewhere(tmp_path):
    """Otherwise the corpus would prove nothing."""
    pickle.loads(CORPUS["os.system"])
    assert (tmp_path / MARK).exists()
    (tmp_path / MARK).unlink()


def test_the_name_asked_for_is_reported():
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        read_pickle(CORPUS["os.system"], "file")


@pytest.mark.parametrize("pair", [_text("collections") + b"K\x01", b"K\x01" + _text("x")])
def test_a_name_that_is_a_number_is_refused(pair):
    with pytest.raises(CheckpointError, match="a name that is not a string"):
        read_pickle(b"\x80\x04" + pair + b"\x93.", "file")


def _doubled(levels):
    """Return code for a value with 2^levels leaves: each level is a pair of the level below."""
    return (
        b"K\x01q\x000"
        + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(levels))
        + b"h%c" % levels
    )


def _repeated_call(call, size):
    """Return code that builds one long list and calls a function with it repeatedly."""
    many = b"(" + b"K\x01" * size + b"tq\x000"
    return many + call + b"q\x010" + b"]" + b"h\x01h\x00\x85Ra" * size


# Functions, because the bodies take 250 MB, which every forked process would have to map.
EXHAUSTING: dict[str, Callable[[], bytes]] = {
    "a tree as deep as it is long": lambda: b"]" * 100_000 + b"a" * 99_999,
    "30 MB of nested lists": lambda: b"]" * 15_000_000 + b"a" * 14_999_999,
    "30 MB of nested tuples": lambda: b")" + b"\x85" * 30_000_000,
    "2^60 leaves": lambda: _doubled(60),
    "a hash that takes 2^60 steps": lambda: b"}" + _doubled(60) + b"Ns",
    "the same in an OrderedDict": lambda: (
        _global("collections", "OrderedDict") + b"(](" + _doubled(60) + b"NteatR"
    ),
    "nested tuples as a key": lambda: b"})" + b"\x85" * 1_000_000 + b"Ns",
    "a list that contains itself": lambda: b"]q\x00h\x00a",
    "a dict in its own values": lambda: b"}q\x00" + _text("a") + b"h\x00s",
    "an integer of 200 bytes": lambda: b"\x8a\xc8" + b"\x7f" * 200,
    "an integer of 60 MB": lambda: b"\x8b" + struct.pack("<i", 60_000_000) + b"\x7f" * 60_000_000,
    "a large integer as a key": lambda: b"}" + _long(1 << 61) + b"Ns",
    "a number as a key": lambda: b"}G" + bytes(8) + b"Ns",
    "truth as a key": lambda: b"}\x88Ns",
    "one list copied a hundred thousand times": lambda: _repeated_call(
        _global("torch", "Size"), 100_000
    ),
    "one long list listed 300,000 times": lambda: (
        b"](" + b"K\x01" * 300_000 + b"eq\x000](" + b"h\x00" * 300_000 + b"e"
    ),
    "a tensor of 100,000 dimensions": lambda: _tensor(
        shape=b"(" + b"K\x01" * 100_000 + b"t", stride=b"(" + b"K\x01" * 100_000 + b"t"
    ),
    "too many instructions": lambda: b"N0" * 2_000_000 + b"N",
    "too many bytes": lambda: b"N" * (65 << 20),
    "a set": lambda: b"\x8f",
    "a name of 60 MB": lambda: _global("x" * 60_000_000, "y"),
}


@pytest.mark.parametrize("name", EXHAUSTING)
def test_a_pickle_that_exhausts_is_refused_soon(name):
    code = _code(EXHAUSTING[name]())
    started = time.process_time()
    with pytest.raises(CheckpointError, match="nothing in it was run") as caught:
        read_pickle(code, "file")
    assert time.process_time() - started < 60  # at most 6 s each on an idle machine
    assert len(str(caught.value)) < 400


def test_a_tuple_of_names_is_a_key():
    """Megatron Core keys the buffers of its distributed optimizer by a pair of dtypes."""
    pair = _global("torch", "bfloat16") + _global("torch", "float32") + b"\x86"
    tree = read_pickle(_code(b"}" + pair + b"K\x01s"), "file")
    assert tree == {("torch.bfloat16", "torch.float32"): 1}


def test_a_whole_file_with_a_payload_is_refused(tmp_path):
    write(tmp_path, Form(), whole_model(), rng_state=Calls(os.system, f"touch {MARK}"))
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        open_checkpoint(tmp_path)


def test_megatrons_own_objects_become_inert_records():
    tree = read_pickle(_code(_call("megatron.core.enums", "ModelType", "1")), "file")
    assert tree == unpickler.Opaque("ModelType", ("1",))
    assert "megatron.core" not in sys.modules


def test_what_checkpoints_do_hold_is_read():
    tree = {"a": OrderedDict(x=torch.ones(2)), "args": Namespace(n=1), "d": torch.float16}
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    with zipfile.ZipFile(buffer) as archive:
        found = read_pickle(archive.read("archive/data.pkl"), "file")
    assert found["a"]["x"].shape == (2,)
    assert found["args"].fields == {"n": 1}
    assert found["d"] == "torch.float16"


def _zip(path, records, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside", "refused: record name"),
        ("top/../../outside", "refused: record name"),
        ("/etc/passwd", "refused: record name"),
        ("top//data.pkl", "refused: record name"),
        ("top\\..\\x", "refused: record name"),
        ("alone", "refused: record name"),
        ("other/data/0", "records of 2 files"),
    ],
)
def test_record_names_that_leave_the_file_are_refused(tmp_path, name, message):
    with pytest.raises(CheckpointError, match=message):
        TorchZip(_zip(tmp_path / "x.pt", [("top/data.pkl", b"N."), (name, b"")]))


def test_packed_records_are_refused(tmp_path):
    bomb = _zip(tmp_path / "x.pt", [("top/data.pkl", bytes(50_000_000))], zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        TorchZip(bomb)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="twice"):
        TorchZip(_zip(tmp_path / "x.pt", [("top/data.pkl", b"N."), ("top/data.pkl", b"K\x01.")]))


def test_a_record_that_claims_more_than_the_file_is_refused(tmp_path):
    path = _zip(tmp_path / "x.pt", [("top/data.pkl", b"N."), ("top/data/0", bytes(16))])
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="outside the file"):
        TorchZip(path)


def test_a_storage_that_lies_about_its_size_is_refused(tmp_path):
    """The record holds 16 bytes; the tree says 1 TB."""
    tensor = _tensor(numel=1 << 38)
    word = b"}" + _text("weight") + tensor + b"s"
    tree = b"}" + _text("model") + b"}" + _text("language_model") + b"}" + _text("embedding")
    tree += b"}" + _text("word_embeddings") + word + b"ssss"
    tree += _text("iteration") + b"K\x03s" + _text("checkpoint_version") + b"K\x03s"
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    _zip(folder / "model_optim_rng.pt", [("x/data.pkl", _code(tree)), ("x/data/0", bytes(16))])
    with pytest.raises(CheckpointError, match="wrong size"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK", bytes(1000), _dumped(os.system, f"touch {MARK}")])
def test_what_is_no_zip_is_refused(tmp_path, data):
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="not a file of torch.save"):
        TorchZip(tmp_path / "x.pt")


def test_a_link_to_a_file_elsewhere_is_refused(tmp_path):
    path = write(tmp_path, Form(), whole_model()) / "mp_rank_00" / "model_optim_rng.pt"
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


def test_a_big_endian_file_is_refused(tmp_path):
    records = [("x/data.pkl", b"N."), ("x/byteorder", b"big")]
    with pytest.raises(CheckpointError, match="big-endian"):
        TorchZip(_zip(tmp_path / "x.pt", records))
