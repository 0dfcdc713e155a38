"""Compiling: caching, waiting, refusing; what Python calls exists; registers do not spill."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron.kernels
from megatron.kernels import build as building
from megatron.kernels import library
from megatron.kernels.build import BuildError, Compiler, find_built, find_compiler
from megatron.kernels.library import Kernel, KernelError
from tests.repository import ROOT

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
    reports, real = [], building._run

    def run(commands, clock):
        said = real(commands, clock)
        reports.extend(said)
        return said

    monkeypatch.setattr(building, "_run", run)
    monkeypatch.setattr(building, "BUILD_LIMIT", 1800)  # tests of other files run beside it
    compiler, extra = find_compiler(), ("-Xptxas", "-v")
    if architecture != "sm_90a" and tuple(map(int, compiler.version.split("."))) >= (12, 9):
        extra = ("-Ofc=max",)  # nobody looks at what it makes, so in a fifth of the time
    path = building.compile_sources(compiler, architecture, tmp_path, *extra)
    loaded = ctypes.CDLL(str(path))
    for kernel in declared_kernels():
        assert hasattr(loaded, kernel.name), kernel
    if architecture != "sm_90a":
        return  # an older GPU may spill a little
    text = "\n".join(reports)
    # Four words at most: an array in local memory would be far more. LayerNorm's backward of more
    # than 8192 columns (E = 32) keeps two sums for each of a thread's 32: too many for registers.
    functions = re.split(r"Function properties for (\S+)", text)[1:]
    assert functions, text
    for name, report in zip(functions[::2], functions[1::2], strict=True):
        most = 128 if "add_norm_backward_kernel" in name and "Li32ELb1" in name else 16
        for bytes_used in re.findall(r"(\d+) bytes (?:spill|stack frame)", report):
            assert int(bytes_used) <= most, (name, report)


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
    assert find_built("sm_90a", folder, pytest.fail) is None
    path = building.build("sm_90a", folder, said.append, said.append)
    assert path.read_text() == "made"
    assert len(counting_nvcc.read_text()) == len(building.source_files()) + 1  # and the linking
    assert len(said) == 2
    assert "sm_90a" in said[0]
    assert find_built("sm_90a", folder, pytest.fail) == path
    assert find_built("sm_80", folder, pytest.fail) is None
    assert building.build("sm_90a", folder, said.append, said.append) == path
    assert len(said) == 2


def test_of_many_processes_one_compiles(tmp_path, counting_nvcc):
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=building.build, args=("sm_90a", tmp_path / "cache", print, print))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(counting_nvcc.read_text()) == len(building.source_files()) + 1


def test_changed_sources_are_compiled_again(tmp_path, counting_nvcc, monkeypatch):
    first = building.build("sm_90a", tmp_path / "cache", print, print)
    copy = tmp_path / "sources"
    shutil.copytree(building.HERE / "cuda", copy / "cuda")
    (copy / "cuda" / "common.cuh").write_text("// another")
    monkeypatch.setattr(building, "HERE", copy)
    assert find_built("sm_90a", tmp_path / "cache", pytest.fail) is None
    assert building.build("sm_90a", tmp_path / "cache", print, print) != first


def test_without_nvcc_one_line_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda n, path=None: real(n, path=str(tmp_path)))
    with pytest.raises(BuildError, match="install the CUDA toolkit or set CUDA_HOME"):
        building.build("sm_90a", tmp_path / "cache", print, print)


def test_a_failing_nvcc_is_quoted(tmp_path, monkeypatch):
    script = VERSIONS + 'sys.exit("x.cu(3): error: expected a semicolon")'
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", script)))
    with pytest.raises(BuildError, match="expected a semicolon"):
        building.build("sm_90a", tmp_path / "cache", print, print)
    assert find_built("sm_90a", tmp_path / "cache", pytest.fail) is None


def test_an_nvcc_that_speaks_in_another_encoding_is_quoted(tmp_path, monkeypatch):
    """gcc's messages are those of the locale, and quote sources."""
    script = """
import sys
out = sys.stdout.buffer
if "--version" in sys.argv: out.write(b"\\xa9 NVIDIA, release 99.1"); raise SystemExit
if "--list-gpu-arch" in sys.argv: print("compute_90"); raise SystemExit
sys.stderr.buffer.write(b"x.cu(3): error: \\xab;\\xbb is missing")
raise SystemExit(1)
"""
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", script)))
    with pytest.raises(BuildError, match="error: \ufffd;\ufffd is missing"):
        building.build("sm_90a", tmp_path / "cache", print, print)
    (failed,) = (tmp_path / "cache").glob("*.failed")  # what a process that waited will say
    assert "\ufffd" in failed.read_text(encoding="utf-8")


def test_an_nvcc_that_makes_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", VERSIONS)))
    with pytest.raises(BuildError, match=r"nvcc ended without an error but did not produce .*\.o$"):
        building.build("sm_90a", tmp_path / "cache", print, print)


def test_an_nvcc_that_hangs_is_given_up(tmp_path, monkeypatch):
    """With what it started: nvcc itself only waits for others."""
    script = f"""
import os, subprocess
if "activation" in sys.argv[-1]:
    child = subprocess.Popen(["sleep", "60"])
    with open({str(tmp_path / "writing")!r}, "w") as f: f.write(str(child.pid))
    os.rename({str(tmp_path / "writing")!r}, {str(tmp_path / "child")!r})
    child.wait()
open(sys.argv[sys.argv.index("-o") + 1], "w").close()
"""
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", VERSIONS + script)))
    monkeypatch.setattr(building, "PROGRESS", 0.1)
    said = []

    def say(line):
        said.append(line)
        if (tmp_path / "child").exists():
            monkeypatch.setattr(building, "BUILD_LIMIT", 0.2)

    with pytest.raises(
        BuildError, match=r"did not produce .*activation.o.* in 0.2 s: see why it hangs"
    ):
        building.build("sm_90a", tmp_path / "cache", say, pytest.fail)
    assert re.search(r"still compiling after \d+ s, \d+ file\(s\) to go; .* after 240 s", said[1])
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    deadline = time.monotonic() + 10  # a killed process goes when it gets a core
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(child)
    assert not list((tmp_path / "cache").glob("compiling-*"))


def _lives(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] != "Z"  # nobody waits for it
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_made_just_in_time_is_taken(monkeypatch):
    clock = building._Clock(pytest.fail)
    monkeypatch.setattr(building, "BUILD_LIMIT", -1)
    clock.check([])
    with pytest.raises(BuildError, match=r"did not produce a\.o in -1 s"):
        clock.check(["a.o"])


def test_what_a_killed_build_left_goes_with_the_next(tmp_path, monkeypatch):
    started, stop, cache = tmp_path / "started", tmp_path / "stop", tmp_path / "cache"
    waiting = f"""
import os, time
open({str(started)!r}, "a").close()
end = time.monotonic() + 60
while not os.path.exists({str(stop)!r}) and time.monotonic() < end: time.sleep(0.05)
"""
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "slow", VERSIONS + waiting)))
    builder = multiprocessing.get_context("fork").Process(
        target=building.build, args=("sm_90a", cache, print, print)
    )
    builder.start()
    try:
        while not started.exists():
            assert builder.is_alive()
            time.sleep(0.05)
    finally:
        builder.kill()
        builder.join()
        stop.touch()  # what it started goes on without it
    (left,) = cache.glob("compiling-*")
    writing = 'open(sys.argv[sys.argv.index("-o") + 1], "w").close()'
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "quick", VERSIONS + writing)))
    os.utime(left, (0, time.time() - building.LEFT_AFTER - 60))
    (cache / "compiling-now").mkdir()  # for another GPU, perhaps
    building.build("sm_90a", cache, print, pytest.fail)  # nobody is waited for
    assert not left.exists()
    assert (cache / "compiling-now").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, counting_nvcc):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="set MEGATRON_CACHE"):
        building.build("sm_90a", tmp_path / "file" / "cache", print, print)


def test_a_newer_gpu_than_nvcc_gets_ptx():
    nvcc = Compiler(building.Path("nvcc"), "12.0", frozenset({80, 90}))
    assert nvcc.gencode("sm_90a") == "-gencode=arch=compute_90a,code=sm_90a"
    assert nvcc.gencode("sm_100a") == "-gencode=arch=compute_90,code=compute_90"
    with pytest.raises(BuildError, match="update CUDA"):
        nvcc.gencode("sm_70")


def test_an_architecture_is_kept_under_the_name_that_runs_look_for():
    for text, name in (
        *(("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("9.0", "sm_90a"), ("90", "sm_90a")),
        *(("8.6", "sm_86"), ("sm_100f", "sm_100a"), ("sm_120", "sm_120a")),
    ):
        assert building.looked_up_as(text) == name
    with pytest.raises(BuildError, match="'hopper' is not of the form sm_90a"):
        building.looked_up_as("hopper")


def test_who_waits_long_for_another_process_says_for_what(tmp_path, counting_nvcc, monkeypatch):
    monkeypatch.setattr(building, "LOCK_PATIENCE", 0.05)
    lock = tmp_path / "cache" / f"kernels-sm_90a-{building.digest()}-cuda99.1.lock"
    lock.parent.mkdir()
    said = []

    def say_waiting(line):
        said.append(line)
        fcntl.flock(holder, fcntl.LOCK_UN)

    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        building.build("sm_90a", lock.parent, print, say_waiting)
        assert len(said) == 1
        assert f"another process is compiling them and holds {lock}" in said[0]
        # That of a process which is gone holds up nobody.
        building.build("sm_90a", lock.parent, print, pytest.fail)


def test_what_is_installed_is_compiled_for_every_gpu_that_it_can_be(tmp_path):
    script = """
if "arch=compute_80" in " ".join(sys.argv): sys.exit("x.cu(3): error: not for this one")
open(sys.argv[sys.argv.index("-o") + 1], "w").close()
"""
    asked = {
        "CUDA_HOME": str(_fake(tmp_path / "toolkit", VERSIONS + script)),
        "MEGATRON_CUDA_ARCHS": "9.0, sm_80,hopper",
    }
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for architecture, reason in (
        ("sm_80", "nvcc failed: x.cu(3): error: not for this one"),
        ("hopper", "GPU architecture 'hopper' is not of the form sm_90a"),
    ):
        assert f"fused kernels: not compiled for {architecture}: {reason}\n" in done.stderr
    (made,) = (tmp_path / "lib" / "megatron" / "kernels" / "built").iterdir()
    content = hashlib.sha256(made.read_bytes()).hexdigest()[:32]
    assert made.name == f"kernels-sm_90a-{building.digest()}-cuda99.1-{content}.so"


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper, for `find_library`; there is none."""
    device = SimpleNamespace(
        is_gpu=True, capability=(9, 0), name="a card", as_current=contextlib.nullcontext
    )
    monkeypatch.setattr(library, "Device", lambda _: device)
    monkeypatch.setattr(library, "current_gpu", lambda: 0)
    monkeypatch.setattr(library, "PREBUILT", Path("/nonexistent"))
    return torch.device("cuda", 0)


def _is_off(gpu, capsys, *reasons):
    choice = library.find_library.__wrapped__(gpu)
    assert choice.library is None
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("fused kernels: off, plain PyTorch runs instead: ")
    for reason in reasons:
        assert reason in said[-1]


def test_a_user_without_a_home_folder_gets_the_plain_forms(gpu, monkeypatch, capsys):
    """As in a container that runs under some number."""
    for name in ("HOME", "MEGATRON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    _is_off(gpu, capsys, "no home folder: set MEGATRON_CACHE")


def test_a_library_that_does_not_run_here_is_left_alone(
    tmp_path, gpu, counting_nvcc, monkeypatch, capsys
):
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    _is_off(gpu, capsys, str(tmp_path / "kernels"), "does not run here", "update the driver")

    class Refused:
        """As by a driver that is older than the CUDA of nvcc."""

        def __init__(self, path):
            pass

        def check(self, gpu):
            raise KernelError("set_device: cudaErrorInsufficientDriver (too old)")

    monkeypatch.setattr(library, "KernelLibrary", Refused)
    _is_off(gpu, capsys, "cudaErrorInsufficientDriver", "update the driver")


@pytest.fixture
def planted(tmp_path, gpu, monkeypatch):
    """The bytes of a library that leaves a mark when it is loaded, the mark and the cache.

    There is no compiler, so that what is found in the cache is all there is.
    """
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    mark, source = tmp_path / "mark", tmp_path / "planted.c"
    source.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) void run() {{ creat("{mark}", 420); }}'
    )
    made = tmp_path / "planted.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "shared"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda n, path=None: real(n, path=str(tmp_path)))
    return made.read_bytes(), mark, tmp_path / "shared" / f"kernels-{os.getuid()}"


def _named(content):
    """The name that a build would give to this library."""
    digest = hashlib.sha256(content).hexdigest()[:32]
    return f"kernels-sm_90a-{building.digest()}-cuda13.0-{digest}.so"


def test_a_library_of_this_user_in_the_private_folder_is_loaded(gpu, planted):
    """The attacks below fail because of what they change."""
    content, mark, folder = planted
    folder.mkdir(parents=True, mode=0o700)
    (folder / _named(content)).write_bytes(content)
    library.find_library.__wrapped__(gpu)
    assert mark.exists()


@pytest.mark.parametrize("folder_name", ["kernels", "kernels-UID"])
@pytest.mark.parametrize("file_name", ["kernels-sm_90a-SOURCES-cuda13.0.so", "digest"])
def test_a_library_in_a_folder_that_others_may_enter_is_not_loaded(
    gpu, planted, capsys, folder_name, file_name
):
    content, mark, private = planted
    folder = private.parent / folder_name.replace("UID", str(os.getuid()))
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    file_name = file_name.replace("SOURCES", building.digest())
    (folder / (_named(content) if file_name == "digest" else file_name)).write_bytes(content)
    _is_off(gpu, capsys)
    assert not mark.exists()


@pytest.mark.parametrize(
    "attack",
    ["replaced", "no digest", "writable by all", "by the group", "foreign", "link", "pipe"],
)
def test_a_library_that_others_may_have_written_is_not_loaded(gpu, planted, capsys, attack):
    content, mark, folder = planted
    folder.mkdir(parents=True, mode=0o700)
    path = folder / _named(content)
    path.write_bytes(content)
    match attack:
        case "replaced":
            path.rename(folder / _named(b"what was built"))
        case "no digest":
            path.rename(folder / f"kernels-sm_90a-{building.digest()}-cuda13.0.so")
        case "writable by all":
            path.chmod(0o666)
        case "by the group":
            path.chmod(0o664)
        case "foreign":
            if os.getuid():
                pytest.skip("only root can give files away")
            os.chown(path, 4321, 4321)
        case "link":
            path.rename(folder / "elsewhere")
            path.symlink_to(folder / "elsewhere")
        case "pipe":
            path.unlink()
            os.mkfifo(path)
    _is_off(gpu, capsys, "no nvcc")
    assert not mark.exists()


def test_a_private_folder_that_is_a_link_or_foreign_is_not_entered(gpu, planted, capsys, tmp_path):
    content, mark, folder = planted
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / _named(content)).write_bytes(content)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    _is_off(gpu, capsys, str(folder), "not a folder of this user alone", "set MEGATRON_CACHE")
    folder.unlink()
    if os.getuid() == 0:
        elsewhere.rename(folder)
        os.chown(folder, 4321, 4321)
        _is_off(gpu, capsys, str(folder), "not a folder of this user alone")
    assert not mark.exists()


def test_a_damaged_library_is_named_and_compiled_again(tmp_path, counting_nvcc):
    folder = tmp_path / "cache"
    path = building.build("sm_90a", folder, print, print)
    path.write_text("something else")
    said = []
    assert find_built("sm_90a", folder, said.append) is None
    assert said == [f"fused kernels: {path} is not used: it is damaged: delete it"]
    assert building.build("sm_90a", folder, print, print) == path  # the same bytes, the same name
    assert find_built("sm_90a", folder, pytest.fail) == path


def test_a_library_swapped_after_the_check_is_not_loaded(planted, monkeypatch):
    """Between the check and loading, the name is given to another file."""
    content, mark, folder = planted
    folder.mkdir(parents=True)
    harmless = subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "made.so")],
        input="int set_device(long a) { return 0; }",
        text=True,
        check=False,
    )
    assert harmless.returncode == 0
    path, real = building.keep(folder / "made.so", folder / "kernels"), library.open_built

    def swap(path):
        opened = real(path)
        path.unlink()
        path.write_bytes(content)
        return opened

    monkeypatch.setattr(library, "open_built", swap)
    with pytest.raises(AttributeError):  # the harmless one has not all functions
        library.KernelLibrary(path)
    assert not mark.exists()
