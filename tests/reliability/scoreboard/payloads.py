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

_OTHER_UID = 4321  # a user ID
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
_YAML_TEMPLATES = (
    "{}",
    "training: {}",
    "training:\n  lr: {}",
    "model:\n  - 1\n  - {}",
    "? {}\n: 1",
    "training:\n  <<: {}",
    "a: &a {}\ntraining:\n  lr: *a",
)


def random_pickle(rng: random.Random) -> bytes:
    """Return a pickle that makes a call which `pickle` itself would execute."""
    value: Any = Calls(*rng.choice(_CALLS))
    for _ in range(rng.randrange(4)):
        value = rng.choice(_WRAPPERS)(value)
    return pickle.dumps(value, protocol=rng.randrange(6))


def exhausting_pickle(rng: random.Random) -> bytes:
    """Return a small pickle that takes a naive reader forever, or all of its memory or stack."""
    depth = rng.randrange(25, 60)
    doubled = b"K\x01q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(depth))
    number = rng.randrange(9, 1 << 20)
    bodies = (
        b"}" + doubled + b"h%cNs" % depth,  # a hash of 2^depth steps
        doubled + b"h%c" % depth,
        b"]" * number + b"a" * (number - 1),  # nesting
        b"})" + b"\x85" * number + b"Ns",
        b"\x8b" + number.to_bytes(4, "little") + b"\x7f" * number,  # an integer
        b"(" * number + b"t" * number,
        b"N" * number,
        b"X" + rng.randbytes(4),  # a text of up to 4 GiB
    )
    return b"\x80\x02" + rng.choice(bodies) + b"."


def torch_file(data: bytes, rng: random.Random) -> bytes:
    """Return a file with this pickle, as torch.save writes it or as it never does."""
    file = io.BytesIO()
    match rng.randrange(4):
        case 0:
            return data
        case 1:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for name in ("pickle", "storages", "../../outside"):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        case _:
            top = rng.choice(("archive", "x", "model_optim_rng", "a b"))
            packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            with zipfile.ZipFile(file, "w", packing) as archive:
                archive.writestr(f"{top}/data.pkl", data)
                archive.writestr(f"{top}/version", b"3\n")
                if rng.random() < 0.3:
                    archive.writestr(rng.choice(("../../outside", "/outside", "x/outside")), b"x")
    return file.getvalue()


def random_yaml(rng: random.Random) -> str:
    """Return a configuration that calls something, or that grows when its aliases are resolved."""
    if rng.random() < 0.2:
        levels, width = rng.randrange(9, 40), rng.randrange(2, 10)
        lines = ["a0: &a0 [x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
        return "\n".join(lines) + "\n"
    function, arguments = rng.choice(_YAML_CALLS)
    value = f"{rng.choice(_TAGS).format(function)} {arguments}"
    begin = "%TAG !p! tag:yaml.org,2002:python/\n---\n" if "!p!" in value else ""
    return begin + rng.choice(_YAML_TEMPLATES).format(value) + "\n"


def random_hooks(rng: random.Random) -> dict[str, Any]:
    """Return Hugging Face model settings that ask for code from the model's folder or the hub."""
    reference = rng.choice(("modeling.M", "evil/x--modeling.M", "../x.M", "os.system", "modeling"))
    kinds = rng.sample(("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer"), 2)
    hooks: dict[str, Any] = {
        "auto_map": {kind: rng.choice((reference, [reference, None])) for kind in kinds}
    }
    if rng.random() < 0.3:
        hooks = {"_attn_implementation_internal": rng.choice(("evil/x", "x/y:f", "evil/x@main"))}
    elif rng.random() < 0.3:
        hooks["model_type"] = rng.choice(("custom", "os", "../llama", "llama.py"))
    return hooks


@cache
def library() -> bytes:
    """Return the content of a kernel library."""
    return join([b"{}\ncode"])


def plant_library(data: bytes) -> Path:
    """Put a library into this user's cache as `megatron.kernels.build` does."""
    folder = private_cache("kernels")
    (folder / "made").write_bytes(data)
    return keep(folder / "made", folder / f"kernels-sm_90a-{digest()}-cuda13.0")


def spoil_library(path: Path, rng: random.Random) -> str:
    """Turn a planted library into one that another user may have written; return how."""
    folder = path.parent
    permissions = rng.randrange(1, 0o100)
    changes: dict[str, Callable[[], object]] = {
        "an open folder": lambda: folder.chmod(0o700 | permissions),
        "a linked folder": lambda: folder.symlink_to(folder.rename(folder.with_name("elsewhere"))),
        "a file that others may write": lambda: path.chmod(0o644 | rng.choice((2, 0o20, 0o22))),
        "a link": lambda: path.symlink_to(path.rename(folder.parent / "elsewhere.bin")),
        "another digest": lambda: path.rename(
            path.with_name(path.name[:-36] + f"{rng.randrange(1 << 128):032x}.bin")
        ),
        "more content": lambda: path.write_bytes(path.read_bytes() + rng.randbytes(9)),
    }
    if os.geteuid() == 0:
        owner = _OTHER_UID + rng.randrange(1000)
        changes["another's folder"] = lambda: os.chown(folder, owner, -1)
        changes["another's file"] = lambda: os.chown(path, owner, -1)
    name = rng.choice(sorted(changes))
    changes[name]()
    return name
