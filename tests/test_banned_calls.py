"""Nothing that we ship runs what a file, a flag or a request contains.

Walks the syntax tree of every shipped Python file. One file may touch `pickle`: what writes
Megatron's files takes the `Pickler` class alone. Nothing unpickles: checkpoint/legacy/unpickler.py
reads the byte code itself.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OF_PICKLE = {
    "megatron/checkpoint/legacy/torch_file.py": "pickle.Pickler",
}

BANNED_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal",
    "shelve",
}  # fmt: skip
BANNED_NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
BANNED_CALLS = {
    "torch.load": "executes what it reads",
    "torch.save": "writes pickles",
    "torch.jit.load": "executes what it reads",
    "torch.hub.load": "downloads and executes",
    "torch.package.PackageImporter": "executes what it reads",
    "yaml.load": "builds any object: use safe_load",
    "yaml.load_all": "builds any object: use safe_load_all",
    "yaml.unsafe_load": "builds any object",
    "yaml.full_load": "builds objects",
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
    "subprocess.getoutput": "goes through a shell",
    "subprocess.getstatusoutput": "goes through a shell",
    "tempfile.mktemp": "its name can be taken before it is used",
    "pandas.read_pickle": "executes what it reads",
    "builtins.eval": "executes text",
    "builtins.exec": "executes text",
}
# Collectives that pickle what they carry, and torch.distributed.checkpoint, whose files execute.
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
    """Every Python file of the repository but the tests, also those not committed yet."""
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
    """What a file must not hold: "line: what" each."""
    tree = ast.parse(source, name)
    aliases = dict(_aliases(tree))
    hits = []
    for node in ast.walk(tree):
        for what in _complaints(node, aliases, name):
            hits.append(f"{name}:{getattr(node, 'lineno', 0)}: {what}")
    return hits


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local names of imported things, with their full names."""
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
        yield from _check_import(node, file)
    elif isinstance(node, ast.Name) and node.id in BANNED_NAMES:
        yield node.id
    elif isinstance(node, ast.Name | ast.Attribute):
        full = _full_name(node, aliases)
        if full in BANNED_CALLS:
            yield f"{full} {BANNED_CALLS[full]}"
        if full.rpartition(".")[2] in BANNED_ATTRIBUTES:
            yield f"{full} carries pickles"
        if full.startswith("pickle.") and full != OF_PICKLE.get(file):
            yield full
        if full.startswith(BANNED_PACKAGES):
            yield full
    elif isinstance(node, ast.Call):
        yield from _check_keywords(node)


def _check_import(node: ast.Import | ast.ImportFrom, file: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        modules = [item.name for item in node.names]
    else:
        modules = [f"{node.module}.{item.name}" for item in node.names if node.module]
    for module in modules:
        allowed = file in OF_PICKLE and module == "pickle"
        if module.partition(".")[0] in BANNED_MODULES and not allowed:
            yield f"import of {module}"
        if module.startswith(BANNED_PACKAGES) or module in BANNED_CALLS:
            yield f"import of {module}"
        if module.rpartition(".")[2] in BANNED_ATTRIBUTES:
            yield f"import of {module}"


def _check_keywords(node: ast.Call) -> Iterator[str]:
    for keyword in node.keywords:
        if keyword.arg not in BANNED_KEYWORDS:
            continue
        # A value that is computed could be anything, so only the harmless constant passes.
        harmless = not BANNED_KEYWORDS[keyword.arg]
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if value is not harmless:
            yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    """Dotted name with import aliases resolved; "" where it is no plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
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


def test_reader_and_writer_of_megatron_s_files_are_the_only_exceptions():
    hits = [
        hit.partition(": ")[2]
        for path in _shipped()
        for hit in find_banned(path.read_text(), "no exception here")
    ]
    both = ["import of pickle", "pickle.Pickler"]
    assert sorted(hits) == sorted(both)


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


def test_even_reader_and_writer_may_not_load_freely():
    for file, kind in OF_PICKLE.items():
        assert find_banned("import pickle\npickle.loads(b'')", file)
        assert not find_banned(f"import pickle\nclass U({kind}): pass", file)
        assert find_banned("import pickle\nu = pickle.Unpickler, pickle.Pickler", file)
