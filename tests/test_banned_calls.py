"""Nothing that we ship executes the content of a file, a flag or a request.

Walks the syntax tree of every shipped Python file. Each exception is one name in one file. The
writer of Megatron's files uses only pickle's `Pickler` class; nothing unpickles, because
checkpoint/legacy/unpickler.py reads the byte code itself. The writer of Megatron Core's index takes
only the classes of its records from torch.distributed.checkpoint. Two files load shared libraries:
those of the system by name, and NVRTC from the folders that Python imports from. Neither loads
anything from a cache. In the package, files are written by megatron/durable.py, which never follows
a link; the reason for every other writer is stated here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
_IMPORTS = {
    "import of importlib.import_module",
    "importlib.import_module executes the module that a text names",
}
# Records of an index, which are plain data created by the writer of Megatron Core's index.
_INDEX_RECORDS = {
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
    *("TensorProperties", "TensorStorageMetadata"),
}
_RECORDS = {f"torch.distributed.checkpoint.metadata.{name}" for name in _INDEX_RECORDS}
_RECORDS |= {"torch.distributed.checkpoint.filesystem._StorageInfo"}
ALLOWED = {
    "megatron/checkpoint/core/writer.py": _RECORDS | {f"import of {name}" for name in _RECORDS},
    # These name our own modules, or one package, in the source.
    "megatron/kernels/attention.py": _IMPORTS,
    "megatron/tokenizer/build.py": {
        "importlib.import_module executes the module that a text names"
    },
    "tools/benchmark_kernels.py": _IMPORTS,
    # The user's own Python file, named on the command line.
    "examples/grpo/grpo.py": {"importlib.util.spec_from_file_location executes a file"},
    # A script with an old name starts the current script, which a table in the source names.
    "megatron/cli/main.py": {"importlib.import_module executes the module that a text names"},
    "megatron/cli/pretrain.py": {"os.execv starts a program: use subprocess"},
    # Our launcher, in place of the command that tests machines.
    "megatron/cli/health.py": {"os.execv starts a program: use subprocess"},
    # The user's script, as `python` runs it, in a fork that has loaded its modules.
    "megatron/processes/warm.py": {"import of runpy"},
    "megatron/submit/command.py": {"os.execvp starts a program: use subprocess"},
    "tools/old_names.py": {"os.execv starts a program: use subprocess"},
    "megatron/checkpoint/legacy/torch_file.py": {
        "import of pickle",
        "pickle.Pickler",
        "open(..., 'w')",  # a record in a zip file
    },
    "megatron/kernels/library.py": {"ctypes.CDLL loads a library"},
    "megatron/kernels/nvrtc.py": {"ctypes.CDLL loads a library"},
    "megatron/command.py": {"open(..., 'w')"},  # the null device, in place of a closed stream
    "megatron/config/__main__.py": {"write_text"},  # our own documentation
    "megatron/processes/launch.py": {"write_text"},  # the error file that torchrun created
}

BANNED_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal",
    "shelve", "_ctypes", "cffi", "code", "codeop", "imp", "pdb", "pty", "runpy", "zipimport",
}  # fmt: skip
BANNED_NAMES = {"eval", "exec", "compile", "__import__", "execfile", "breakpoint", "__builtins__"}
YAML_LOADERS = ("Loader", "CLoader", "FullLoader", "CFullLoader", "UnsafeLoader", "CUnsafeLoader")
YAML_LOADERS += ("unsafe_load_all", "full_load_all")
BANNED_CALLS = {
    "torch.load": "executes what it reads",
    "torch.save": "writes pickles",
    "torch.serialization.load": "executes what it reads",
    "torch.serialization.save": "writes pickles",
    "torch.jit.load": "executes what it reads",
    "torch.hub.load": "downloads and executes",
    "torch.package.PackageImporter": "executes what it reads",
    "yaml.load": "builds any object: use safe_load",
    "yaml.load_all": "builds any object: use safe_load_all",
    "yaml.unsafe_load": "builds any object",
    "yaml.full_load": "builds objects",
    **{f"yaml.{name}": "builds objects" for name in YAML_LOADERS},
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
    "subprocess.getoutput": "goes through a shell",
    "subprocess.getstatusoutput": "goes through a shell",
    "tempfile.mktemp": "its name can be taken before it is used",
    "pandas.read_pickle": "executes what it reads",
    "builtins.eval": "executes text",
    "builtins.exec": "executes text",
    "importlib.import_module": "executes the module that a text names",
    "importlib.machinery.SourceFileLoader": "executes a file",
    "importlib.machinery.ExtensionFileLoader": "loads a library",
    "importlib.util.spec_from_file_location": "executes a file",
    "types.CodeType": "executes bytes",
    "types.FunctionType": "executes bytes",
    "asyncio.create_subprocess_shell": "goes through a shell",
    "logging.config.listen": "executes what it receives",
    "torch.ops.load_library": "loads a library",
    "torch.classes.load_library": "loads a library",
    "torch.utils.cpp_extension.load": "loads a library",
    "torch.utils.cpp_extension.load_inline": "loads a library",
    "numpy.ctypeslib.load_library": "loads a library",
    **{
        f"ctypes.{name}": "loads a library"
        for name in ("CDLL", "PyDLL", "OleDLL", "WinDLL", "LibraryLoader", "cdll", "pydll")
    },
}
BANNED_WRITES = {"write_text", "write_bytes", "touch"}
# Collectives that pickle their data, and torch.distributed.checkpoint, whose files are executed.
BANNED_ATTRIBUTES = {
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
BANNED_PACKAGES = ("torch.distributed.checkpoint", "torch.distributed.rpc", "torch.package")
BANNED_KEYWORDS = {
    "allow_pickle": True,
    "shell": True,
    "weights_only": False,
    "trust_remote_code": True,
}


def _shipped() -> list[Path]:
    """Return every Python file of the repository except tests, including uncommitted ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split("\n") if listed.returncode == 0 else []
    if not any(names):  # an unpacked archive has no git
        names = [str(path.relative_to(ROOT)) for path in ROOT.glob("*.py")]
        for folder in ("megatron", "tools", "tasks", "examples"):
            names += [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")]
    kept = [name for name in names if name and not name.startswith("tests/")]
    return [ROOT / name for name in kept if (ROOT / name).exists()]


def find_banned(source: str, name: str) -> list[str]:
    """Return what a file must not contain, as "line: what" entries."""
    tree = ast.parse(source, name)
    aliases = dict(_aliases(tree))
    hits = []
    for node in ast.walk(tree):
        for what in _complaints(node, aliases, name):
            if what not in ALLOWED.get(name, ()):
                hits.append(f"{name}:{getattr(node, 'lineno', 0)}: {what}")
    return hits


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local names of imports with their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                local = item.asname or item.name.partition(".")[0]
                yield local, item.name if item.asname else local
        elif isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                yield item.asname or item.name, f"{node.module}.{item.name}"


def _complaints(node: ast.AST, aliases: dict[str, str], file: str) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from _check_import(node)
    elif isinstance(node, ast.Name) and node.id in BANNED_NAMES:
        yield node.id
    elif isinstance(node, ast.Name | ast.Attribute) or _is_getattr(node):
        full = _full_name(node, aliases)
        if full in BANNED_CALLS:
            yield f"{full} {BANNED_CALLS[full]}"
        if re.match(r"os\.(exec|spawn|posix_spawn)", full):
            yield f"{full} starts a program: use subprocess"
        if full.rpartition(".")[2] in BANNED_ATTRIBUTES:
            yield f"{full} carries pickles"
        if full.startswith("pickle."):
            yield full
        if full.startswith(BANNED_PACKAGES):
            yield full
    if isinstance(node, ast.Call):
        yield from _check_keywords(node)
        if file.startswith("megatron/") and file != "megatron/durable.py":
            yield from _check_write(node)


def _check_write(node: ast.Call) -> Iterator[str]:
    """Yield a complaint about a call that would truncate a file, or create one through a link."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in BANNED_WRITES:
        yield name
    modes = [*node.args[:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    for mode in modes if name in {"open", "fdopen", "FileIO"} else []:
        if isinstance(mode, ast.Constant) and re.fullmatch(r"[rbt+]*w[bt+]*", str(mode.value)):
            yield f"open(..., {mode.value!r})"


def _check_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        modules = [item.name for item in node.names]
    else:
        modules = [f"{node.module}.{item.name}" for item in node.names if node.module]
    for module in modules:
        if module.partition(".")[0] in BANNED_MODULES:
            yield f"import of {module}"
        if module.startswith(BANNED_PACKAGES) or module in BANNED_CALLS:
            yield f"import of {module}"
        if module.rpartition(".")[2] in BANNED_ATTRIBUTES:
            yield f"import of {module}"


def _check_keywords(node: ast.Call) -> Iterator[str]:
    given: list[tuple[object, ast.expr]] = [(word.arg, word.value) for word in node.keywords]
    for keyword in node.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):  # f(**{"shell": True})
            names = [getattr(key, "value", None) for key in keyword.value.keys]
            given += zip(names, keyword.value.values, strict=True)
    for name, value in given:
        if not isinstance(name, str) or name not in BANNED_KEYWORDS:
            continue
        # A computed value could be anything, so only the harmless constant passes.
        harmless = not BANNED_KEYWORDS[name]
        if (value.value if isinstance(value, ast.Constant) else None) is not harmless:
            yield f"{name}={ast.unparse(value)}"


def _is_getattr(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether this is `getattr` with a literal name."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr":
        return False
    return len(node.args) > 1 and isinstance(getattr(node.args[1], "value", None), str)


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return a dotted name with import aliases resolved, or its parts if it is no plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif _is_getattr(node):
            parts.append(ast.literal_eval(node.args[1]))  # getattr(os, "system")
            node = node.args[0]
        else:
            break
    if isinstance(node, ast.Name):
        parts.append(aliases.get(node.id, node.id))
    return ".".join(reversed(parts))


def test_the_shipped_tree_holds_nothing_banned():
    files = _shipped()
    assert len(files) > 50
    hits = [
        hit for path in files for hit in find_banned(path.read_text(), str(path.relative_to(ROOT)))
    ]
    assert not hits, "\n".join(hits)


def test_every_exception_is_needed():
    for name, allowed in ALLOWED.items():
        source = (ROOT / name).read_text()
        hits = {hit.partition(": ")[2] for hit in find_banned(source, "megatron/no exception here")}
        assert hits == allowed, name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "eval('1')",
        "f = exec",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load\nload('x')",
        "import torch\ntorch.save({}, 'x')",
        "import yaml\nyaml.load(f, Loader=yaml.SafeLoader)",
        "from yaml import load as y\ny(f)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "run('ls', shell=True)",
        "run('ls', shell=1)",
        "from torch.serialization import load\nload(f, weights_only=False)",
        "import os\nos.system('ls')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "__import__('pickle')",
        "import ctypes\nctypes.CDLL('x.so')",
        "from ctypes import cdll\ncdll.LoadLibrary('x.so')",
        "from ctypes import PyDLL as load\nload('x.so')",
        "import torch\ntorch.ops.load_library('x.so')",
        "from torch.utils.cpp_extension import load_inline",
        "import runpy\nrunpy.run_path('x.py')",
        "import torch.serialization as s\ns.load(f)",
        "from torch import serialization\nserialization.load(f)",
        "import yaml\nyaml.UnsafeLoader(f)",
        "import os\ngetattr(os, 'system')('ls')",
        "import os as o\no.execvp('ls', ['ls'])",
        "import os\nos.posix_spawn('ls', ['ls'], {})",
        "run('ls', **{'shell': True})",
        "__builtins__['eval']('1')",
        "import importlib\nimportlib.import_module(name)",
        "from asyncio import create_subprocess_shell",
        "from types import FunctionType",
        "import torch\ngetattr(torch.ops, 'load_library')('x.so')",
    ],
)
def test_the_gate_sees_what_is_banned(source):
    assert find_banned(source, "x")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nmodel.eval()",
        "import re\nre.compile('x')",
        "import yaml\nyaml.safe_load(f)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "run(['ls'], shell=False)",
        "from megatron.checkpoint.reader import load",
        "import torch\ntorch.compile(model)",
    ],
)
def test_the_gate_lets_harmless_code_pass(source):
    assert not find_banned(source, "x")


@pytest.mark.parametrize(
    "source",
    [
        "open(f'{x}.tmp', 'w')",
        "open(x, mode='wb')",
        "path.open('w+b')",
        "path.write_text('x')",
        "path.write_bytes(b'x')",
        "path.touch()",
    ],
)
def test_the_package_writes_files_in_one_place(source):
    assert find_banned(source, "megatron/x.py")
    assert not find_banned(source, "megatron/durable.py")


def test_the_package_may_read_append_and_create():
    for source in ("open(x)", "open(x, 'rb')", "open(x, 'xb')", "path.open('a')"):
        assert not find_banned(source, "megatron/x.py")


def test_even_the_writer_of_megatron_s_files_may_not_load_freely():
    file = "megatron/checkpoint/legacy/torch_file.py"
    assert find_banned("import pickle\npickle.loads(b'')", file)
    assert not find_banned("import pickle\nclass U(pickle.Pickler): pass", file)
    assert find_banned("import pickle\nu = pickle.Unpickler, pickle.Pickler", file)


def test_even_the_loader_of_kernels_may_load_in_one_way_only():
    file = "megatron/kernels/library.py"
    assert not find_banned("import ctypes\nctypes.CDLL('x')", file)
    assert find_banned("import ctypes\nctypes.cdll.LoadLibrary('x')", file)
