"""Compiling: caching, waiting, refusing; what Python calls exists; registers do not spill."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import pkgutil
import re
import shutil
import subprocess
import sys

import pytest

import megatron.kernels
from megatron.kernels import build as building
from megatron.kernels.build import BuildError, Compiler, find_built, find_compiler
from megatron.kernels.library import Kernel

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def declared_kernels():
    """Every Kernel constant of the package."""
    for info in pkgutil.iter_modules(megatron.kernels.__path__):
        if not info.ispkg and info.name != "built":
            module = importlib.import_module(f"megatron.kernels.{info.name}")
            yield from (value for value in vars(module).values() if isinstance(value, Kernel))


def kinds_in_sources():
    """{function: letters of its arguments} as the .cu files have it."""
    found = {}
    for file in building.source_files():
        for name, arguments in re.findall(r'extern "C" int (\w+)\(([^)]*)\)', file.read_text()):
            words = [re.sub(r"\s+", " ", argument).strip() for argument in arguments.split(",")]
            found[name] = words
    return found


def test_python_and_cuda_agree_on_every_argument():
    sources = kinds_in_sources()
    types = {"p": "*", "v": "*", "i": "int64_t", "d": "double"}
    for kernel in declared_kernels():
        *arguments, stream = sources[kernel.name]
        assert stream.startswith("cudaStream_t"), kernel
        assert len(arguments) == len(kernel.kinds), kernel
        for kind, argument in zip(kernel.kinds, arguments, strict=True):
            assert types[kind] in argument, (kernel, argument)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_compiles_without_a_gpu(tmp_path, architecture, monkeypatch):
    reports = []

    def run(command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        reports.append(done.stderr)

    monkeypatch.setattr(building, "_run", run)
    compiler, extra = find_compiler(), ("-Xptxas", "-v")
    if architecture != "sm_90a" and tuple(map(int, compiler.version.split("."))) >= (12, 9):
        extra = ("-Ofc=max",)  # nobody looks at what it makes, so in a fifth of the time
    path = building.compile_sources(compiler, architecture, tmp_path, *extra)
    library = ctypes.CDLL(str(path))
    for kernel in declared_kernels():
        assert hasattr(library, kernel.name), kernel
    if architecture != "sm_90a":
        return  # an older GPU may spill a little
    text = "\n".join(reports)
    # Two words at most: an array in local memory would be far more.
    for bytes_used in re.findall(r"(\d+) bytes (?:spill|stack frame)", text):
        assert int(bytes_used) <= 8, text


def _fake(folder, script):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!{sys.executable}\n{script}")
    nvcc.chmod(0o755)
    return folder


VERSIONS = """
import sys
if "--version" in sys.argv: print("release 99.1"); raise SystemExit
if "--list-gpu-arch" in sys.argv: print("compute_80 compute_90"); raise SystemExit
"""


@pytest.fixture
def counting_nvcc(tmp_path, monkeypatch):
    """An nvcc that writes its name into its output, and counts how often it runs."""
    home = _fake(
        tmp_path / "toolkit",
        VERSIONS
        + f"""
import time, pathlib
time.sleep(0.2)
with open({str(tmp_path / "calls")!r}, "a") as f: f.write("x")
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("made")
""",
    )
    monkeypatch.setenv("CUDA_HOME", str(home))
    return tmp_path / "calls"


def test_is_compiled_once_and_found_again(tmp_path, counting_nvcc):
    said = []
    folder = tmp_path / "cache"
    assert find_built("sm_90a", folder) is None
    path = building.build("sm_90a", folder, said.append)
    assert path.read_text() == "made"
    assert len(counting_nvcc.read_text()) == len(building.source_files()) + 1  # and the linking
    assert len(said) == 2
    assert "sm_90a" in said[0]
    assert find_built("sm_90a", folder) == path
    assert find_built("sm_80", folder) is None
    assert building.build("sm_90a", folder, said.append) == path
    assert len(said) == 2


def test_of_many_processes_one_compiles(tmp_path, counting_nvcc):
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=building.build, args=("sm_90a", tmp_path / "cache", print))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(counting_nvcc.read_text()) == len(building.source_files()) + 1


def test_changed_sources_are_compiled_again(tmp_path, counting_nvcc, monkeypatch):
    first = building.build("sm_90a", tmp_path / "cache", print)
    copy = tmp_path / "sources"
    shutil.copytree(building.HERE / "cuda", copy / "cuda")
    (copy / "cuda" / "common.cuh").write_text("// another")
    monkeypatch.setattr(building, "HERE", copy)
    assert find_built("sm_90a", tmp_path / "cache") is None
    assert building.build("sm_90a", tmp_path / "cache", print) != first


def test_without_nvcc_one_line_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda n, path=None: real(n, path=str(tmp_path)))
    with pytest.raises(BuildError, match="install the CUDA toolkit or set CUDA_HOME"):
        building.build("sm_90a", tmp_path / "cache", print)


def test_a_failing_nvcc_is_quoted(tmp_path, monkeypatch):
    script = VERSIONS + 'sys.exit("x.cu(3): error: expected a semicolon")'
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", script)))
    with pytest.raises(BuildError, match="expected a semicolon"):
        building.build("sm_90a", tmp_path / "cache", print)
    assert find_built("sm_90a", tmp_path / "cache") is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path, counting_nvcc):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="set MEGATRON_CACHE"):
        building.build("sm_90a", tmp_path / "file" / "cache", print)


def test_a_newer_gpu_than_nvcc_gets_ptx():
    nvcc = Compiler(building.Path("nvcc"), "12.0", frozenset({80, 90}))
    assert nvcc.gencode("sm_90a") == "-gencode=arch=compute_90a,code=sm_90a"
    assert nvcc.gencode("sm_100a") == "-gencode=arch=compute_90,code=compute_90"
    with pytest.raises(BuildError, match="update CUDA"):
        nvcc.gencode("sm_70")
