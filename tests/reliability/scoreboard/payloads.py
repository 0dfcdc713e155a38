"""Random content that tries to run code or to exhaust its reader, for row 29.

Each payload that runs creates the file `MARK` in the current folder.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import subprocess
import tarfile
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron.environment import private_cache
from megatron.kernels.build import digest, join, keep
from tests.checkpoint.legacy.test_malicious import MARK, Calls

_STRANGER = 4321  # a user id
_CALLS: tuple[tuple[Any, ...], ...] = (
    (os.system, f"touch {MARK}"),
    (os.mkdir, MARK),
    (os.symlink, "/", MARK),
    (eval, f"open({MARK!r}, 'w')"),
    (exec, f"open({MARK!r}, 'w')"),
    (open, MARK, "w"),
    (subprocess.call, ["touch", MARK]),
    (shutil.copy, "/etc/passwd", MARK),
    (Path.touch, Path(MARK)),
    (partial(os.mkdir, MARK),),
)
_WRAPPERS: tuple[Callable[[Any], Any], ...] = (
    lambda value: [value],
    lambda value: (1, value),
    lambda value: {"model": value},
    lambda value: {(1, 2): value},
    lambda value: OrderedDict(a=value),
    lambda value: Namespace(args=value),
    lambda value: {"optimizer": {"state": {0: value}}},
    lambda value: [value] * 3,
)
_TAGS = (
    "!!python/object/apply:{}",
    "!!python/object/new:{}",
    "!<tag:yaml.org,2002:python/object/apply:{}>",
    "!p!object/apply:{}",
)
_YAML_CALLS = (
    ("os.system", f"[touch {MARK}]"),
    ("builtins.eval", f"[\"open('{MARK}', 'w')\"]"),
    ("subprocess.call", f"[[touch, {MARK}]]"),
    ("os.mkdir", f"[{MARK}]"),
)
_YAML_PLACES = (
    "{}",
    "training: {}",
    "training:\n  lr: {}",
    "model:\n  - 1\n  - {}",
    "? {}\n: 1",
    "training:\n  <<: {}",
    "a: &a {}\ntraining:\n  lr: *a",
)


def random_pickle(draw: random.Random) -> bytes:
    """Return a pickle that makes a call which `pickle` itself would execute."""
    value: Any = Calls(*draw.choice(_CALLS))
    for _ in range(draw.randrange(4)):
        value = draw.choice(_WRAPPERS)(value)
    return pickle.dumps(value, protocol=draw.randrange(6))


def exhausting_pickle(draw: random.Random) -> bytes:
    """Return a small pickle that takes a naive reader forever, or all of its memory or stack."""
    depth = draw.randrange(25, 60)
    doubled = b"K\x01q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(depth))
    number = draw.randrange(9, 1 << 20)
    bodies = (
        b"}" + doubled + b"h%cNs" % depth,  # a hash of 2^depth steps
        doubled + b"h%c" % depth,
        b"]" * number + b"a" * (number - 1),  # nesting
        b"})" + b"\x85" * number + b"Ns",
        b"\x8b" + number.to_bytes(4, "little") + b"\x7f" * number,  # an integer
        b"(" * number + b"t" * number,
        b"N" * number,
        b"X" + draw.randbytes(4),  # a text of up to 4 GiB
    )
    return b"\x80\x02" + draw.choice(bodies) + b"."


def torch_file(data: bytes, draw: random.Random) -> bytes:
    """Return a file with this pickle, as torch.save writes it or as it never does."""
    file = io.BytesIO()
    match draw.randrange(4):
        case 0:
            return data
        case 1:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for name in ("pickle", "storages", "../../outside"):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        case _:
            top = draw.choice(("archive", "x", "model_optim_rng", "a b"))
            packing = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            with zipfile.ZipFile(file, "w", packing) as archive:
                archive.writestr(f"{top}/data.pkl", data)
                archive.writestr(f"{top}/version", b"3\n")
                if draw.random() < 0.3:
                    archive.writestr(draw.choice(("../../outside", "/outside", "x/outside")), b"x")
    return file.getvalue()


def random_yaml(draw: random.Random) -> str:
    """Return a configuration that calls something, or that grows when its aliases are resolved."""
    if draw.random() < 0.2:
        levels, width = draw.randrange(9, 40), draw.randrange(2, 10)
        lines = ["a0: &a0 [x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
        return "\n".join(lines) + "\n"
    function, arguments = draw.choice(_YAML_CALLS)
    value = f"{draw.choice(_TAGS).format(function)} {arguments}"
    begin = "%TAG !p! tag:yaml.org,2002:python/\n---\n" if "!p!" in value else ""
    return begin + draw.choice(_YAML_PLACES).format(value) + "\n"


def random_hooks(draw: random.Random) -> dict[str, Any]:
    """Return Hugging Face model settings that ask for code from the model's folder or the hub."""
    place = draw.choice(("modeling.M", "evil/x--modeling.M", "../x.M", "os.system", "modeling"))
    kinds = draw.sample(("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer"), 2)
    hooks: dict[str, Any] = {
        "auto_map": {kind: draw.choice((place, [place, None])) for kind in kinds}
    }
    if draw.random() < 0.3:
        hooks = {"_attn_implementation_internal": draw.choice(("evil/x", "x/y:f", "evil/x@main"))}
    elif draw.random() < 0.3:
        hooks["model_type"] = draw.choice(("custom", "os", "../llama", "llama.py"))
    return hooks


@cache
def library() -> bytes:
    """Return the content of a kernel library."""
    return join([b"{}\ncode"])


def plant_library(data: bytes) -> Path:
    """Put a library into this user's cache as `megatron.kernels.build` does."""
    kept = private_cache("kernels")
    (kept / "made").write_bytes(data)
    return keep(kept / "made", kept / f"kernels-sm_90a-{digest()}-cuda13.0")


def spoil_library(path: Path, draw: random.Random) -> str:
    """Turn a planted library into one that another user may have written; return how."""
    kept = path.parent
    others = draw.randrange(1, 0o100)
    ways: dict[str, Callable[[], object]] = {
        "an open folder": lambda: kept.chmod(0o700 | others),
        "a linked folder": lambda: kept.symlink_to(kept.rename(kept.with_name("elsewhere"))),
        "a file that others may write": lambda: path.chmod(0o644 | draw.choice((2, 0o20, 0o22))),
        "a link": lambda: path.symlink_to(path.rename(kept.parent / "elsewhere.bin")),
        "another digest": lambda: path.rename(
            path.with_name(path.name[:-36] + f"{draw.randrange(1 << 128):032x}.bin")
        ),
        "more content": lambda: path.write_bytes(path.read_bytes() + draw.randbytes(9)),
    }
    if os.geteuid() == 0:
        owner = _STRANGER + draw.randrange(1000)
        ways["another's folder"] = lambda: os.chown(kept, owner, -1)
        ways["another's file"] = lambda: os.chown(path, owner, -1)
    name = draw.choice(sorted(ways))
    ways[name]()
    return name
