"""Compiling: caching, waiting, refusing; every kernel compiles, and no registers spill."""

from __future__ import annotations

import contextlib
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
from typing import NamedTuple

import pytest
import torch

import megatron.kernels
from megatron.kernels import build as building
from megatron.kernels import library, nvrtc, sources
from megatron.kernels.build import BuildError, Compiler, find_built, find_compiler
from megatron.kernels.driver import DriverError
from megatron.kernels.library import Kernel
from megatron.kernels.plans import KernelLaunch, Number, Pointer, Strided
from tests.repository import ROOT


def declared_kernels():
    """Return every Kernel constant of the package."""
    for info in pkgutil.iter_modules(megatron.kernels.__path__):
        if not info.ispkg and info.name != "built":
            module = importlib.import_module(f"megatron.kernels.{info.name}")
            yield from (value for value in vars(module).values() if isinstance(value, Kernel))


def test_the_list_of_kernels_is_that_of_the_sources():
    listed = sources.instances()
    assert set(listed) == {path.stem for path in sources.source_files()}
    for path in sources.source_files():
        defined = set(re.findall(r"\b(\w+_kernel)\(", path.read_text()))
        assert {name.partition("<")[0] for name in listed[path.stem]} == defined
    assert {n.partition("<")[0] for names in listed.values() for n in names} == set(
        sources.parameters()
    )


def test_every_operation_has_a_name_of_its_own():
    found = list(declared_kernels())
    assert len(found) == len({kernel.name for kernel in found}) == 25


def test_the_fields_of_a_record_are_the_arguments_of_its_operation():
    class Scaled(NamedTuple):
        x: Pointer
        mask: Strided | None
        size: int
        factor: Number

        def plan(self):
            return [KernelLaunch(f"scale_{self.size}", (1,), (1,), (self.x, self.factor))]

    kernel = Kernel.of("scaled", Scaled)
    assert kernel.kinds == "pvid"
    (launch,) = kernel.plan(Pointer(0), None, 3, Number(3))
    assert launch == KernelLaunch("scale_3", (1,), (1,), (Pointer(0), Number(3)))


def _libraries():
    """Return an NVRTC library for each release that is installed here."""
    return {nvrtc._release(path): str(path) for path in reversed(nvrtc.find_libraries())}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("release", ["12", "13"])
def test_compiles_without_a_gpu(tmp_path, architecture, release, monkeypatch):
    path = _libraries().get(release)
    if path is None:
        pytest.skip(f"needs NVRTC of CUDA {release}: pip install nvidia-cuda-nvrtc")
    monkeypatch.undo()
    reports, real = [], building._run

    def run(commands, makes, clock):
        said = real(commands, makes, clock)
        reports.extend(said)
        return said

    monkeypatch.setattr(building, "_run", run)
    monkeypatch.setattr(building, "BUILD_LIMIT", 1800)  # tests of other files run at the same time
    monkeypatch.setattr(building, "find_libraries", lambda _: [Path(path)])
    compiler = find_compiler()
    assert compiler.version.startswith(release)
    made = building.compile_sources(compiler, architecture, tmp_path, "--ptxas-options=-v")
    codes, kernels = building.split(made.read_bytes())
    assert set(kernels) == {name for names in sources.instances().values() for name in names}
    for kernel, (place, name) in kernels.items():
        assert codes[place].startswith(b"\x7fELF")
        assert f".text.{name}\0".encode() in codes[place], kernel
    if architecture != "sm_90a":
        return  # others may spill a little
    text = "\n".join(reports)
    # Four words at most: an array in local memory would use far more. LayerNorm's backward pass for
    # more than 8192 columns (E = 32) keeps two sums for each of a thread's 32: too many for
    # registers.
    functions = re.split(r"Function properties for (\S+)", text)[1:]
    assert len(functions) >= 2 * len(kernels), text
    for name, report in zip(functions[::2], functions[1::2], strict=True):
        most = 128 if "add_norm_backward_kernel" in name and "Li32ELb1" in name else 16
        for bytes_used in re.findall(r"(\d+) bytes (?:spill|stack frame)", report):
            assert int(bytes_used) <= most, (name, report)


def test_a_source_that_does_not_compile_is_quoted(tmp_path, monkeypatch):
    monkeypatch.undo()
    if not _libraries():
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")
    source = tmp_path / "column_sums.cu"
    source.write_text("__global__ void column_sums_kernel(int x) { x = }")
    command = building._command("compile", next(iter(_libraries().values())), str(source))
    done = subprocess.run(
        [*command, "sm_90a", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "column_sums.cu(1): error: expected an expression" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Run scripts written by `_fake` as libraries. A test that needs a real one undoes this."""
    monkeypatch.setattr(building, "_command", lambda *words: [sys.executable, words[1], *words])


def _fake(folder, script):
    path = folder / "lib64" / "libnvrtc.so"
    path.parent.mkdir(parents=True)
    path.write_text(script)
    return folder


VERSIONS = """
import sys
if "describe" in sys.argv:
    print('{"version": "99.1", "architectures": [80, 90]}')
    raise SystemExit
_, _, _, source, target, output = sys.argv
"""
WRITING = """
open(output, "w").write("{}\\nmade")
"""


@pytest.fixture
def counting_compiler(tmp_path, monkeypatch):
    """Return a compiler that writes something to its output, and counts how often it runs."""
    home = _fake(
        tmp_path / "toolkit",
        VERSIONS
        + f"""
import time
time.sleep(0.2)
with open({str(tmp_path / "calls")!r}, "a") as f: f.write("x")
"""
        + WRITING,
    )
    monkeypatch.setenv("CUDA_HOME", str(home))
    return tmp_path / "calls"


def test_is_compiled_once_and_found_again(tmp_path, counting_compiler):
    said = []
    folder = tmp_path / "cache"
    assert find_built("sm_90a", folder, pytest.fail) is None
    path = building.build("sm_90a", folder, said.append, said.append)
    assert building.split(path.read_bytes())[0] == [b"made"] * len(sources.source_files())
    assert len(counting_compiler.read_text()) == len(sources.source_files())
    assert len(said) == 2
    assert "sm_90a" in said[0]
    assert find_built("sm_90a", folder, pytest.fail) == path
    assert find_built("sm_80", folder, pytest.fail) is None
    assert building.build("sm_90a", folder, said.append, said.append) == path
    assert len(said) == 2


def test_one_of_many_processes_compiles(tmp_path, counting_compiler):
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=building.build, args=("sm_90a", tmp_path / "cache", print, print))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(counting_compiler.read_text()) == len(sources.source_files())


def test_changed_sources_are_compiled_again(tmp_path, counting_compiler, monkeypatch):
    first = building.build("sm_90a", tmp_path / "cache", print, print)
    copy = tmp_path / "sources"
    shutil.copytree(sources.HERE / "cuda", copy / "cuda")
    (copy / "cuda" / "common.cuh").write_text("// another")
    monkeypatch.setattr(sources, "HERE", copy)
    assert find_built("sm_90a", tmp_path / "cache", pytest.fail) is None
    assert building.build("sm_90a", tmp_path / "cache", print, print) != first


@pytest.mark.parametrize(
    ("release", "package"), [("12", "nvidia-cuda-nvrtc-cu12"), ("13", "nvidia-cuda-nvrtc")]
)
def test_without_nvrtc_one_line_says_what_to_do(tmp_path, monkeypatch, release, package):
    monkeypatch.setattr(building, "find_libraries", lambda _: [])
    with pytest.raises(BuildError, match=f"pip install {package}, or set CUDA_HOME"):
        building.build("sm_90a", tmp_path / "cache", print, print, release)


def test_a_library_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.undo()  # a real process, which loads the file
    library = _fake(tmp_path / "toolkit", "no library") / "lib64" / "libnvrtc.so"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    with pytest.raises(BuildError, match=f"{library} does not work .*: reinstall its package"):
        find_compiler()


def test_the_library_beside_torch_s_release_comes_first(tmp_path, monkeypatch):
    found = []
    for package, release in (("cuda_nvrtc", "12"), ("cu13", "13")):
        lib = tmp_path / "nvidia" / package / "lib"
        lib.mkdir(parents=True)
        for name in (f"libnvrtc.so.{release}", f"libnvrtc-builtins.so.{release}.0"):
            (lib / name).touch()
        found.append(lib / f"libnvrtc.so.{release}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(nvrtc.sysconfig, "get_path", lambda _: str(tmp_path))
    assert nvrtc.find_libraries("12")[:2] == found
    assert nvrtc.find_libraries("13")[:2] == found[::-1]
    assert nvrtc.find_libraries("")[:2] == found[::-1]
    asked = _fake(tmp_path / "toolkit", "") / "lib64" / "libnvrtc.so"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert nvrtc.find_libraries("13")[0] == asked


def test_a_failing_compiler_is_quoted(tmp_path, monkeypatch):
    script = VERSIONS + 'sys.exit("x.cu(3): error: expected a semicolon")'
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", script)))
    with pytest.raises(BuildError, match="expected a semicolon"):
        building.build("sm_90a", tmp_path / "cache", print, print)
    assert find_built("sm_90a", tmp_path / "cache", pytest.fail) is None


def test_messages_of_a_compiler_in_another_encoding_are_quoted(tmp_path, monkeypatch):
    """Compilers quote source lines, which may have any encoding."""
    script = (
        VERSIONS
        + """
sys.stderr.buffer.write(b"x.cu(3): error: \\xab;\\xbb is missing")
raise SystemExit(1)
"""
    )
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", script)))
    with pytest.raises(BuildError, match="error: \ufffd;\ufffd is missing"):
        building.build("sm_90a", tmp_path / "cache", print, print)
    (failed,) = (tmp_path / "cache").glob("*.failed")  # what a process that waited will report
    assert "\ufffd" in failed.read_text(encoding="utf-8")


def test_a_compiler_that_makes_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", VERSIONS)))
    with pytest.raises(
        BuildError, match=r"NVRTC ended without an error but did not produce .*\.bin$"
    ):
        building.build("sm_90a", tmp_path / "cache", print, print)


def test_a_compiler_that_hangs_is_given_up(tmp_path, monkeypatch):
    """Its child processes are killed too."""
    script = f"""
import os, subprocess
if "activation" in output:
    child = subprocess.Popen(["sleep", "600"])
    with open({str(tmp_path / "writing")!r}, "w") as f: f.write(str(child.pid))
    os.rename({str(tmp_path / "writing")!r}, {str(tmp_path / "child")!r})
    child.wait()
"""
    script = VERSIONS + script + WRITING
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "toolkit", script)))
    monkeypatch.setattr(building, "PROGRESS", 0.1)
    said = []

    def say(line):
        said.append(line)
        if (tmp_path / "child").exists():
            monkeypatch.setattr(building, "BUILD_LIMIT", 0.2)

    with pytest.raises(
        BuildError, match=r"did not produce .*activation.bin.* in 0.2 s: find out why it hangs"
    ):
        building.build("sm_90a", tmp_path / "cache", say, pytest.fail)
    assert re.search(r"still compiling after \d+ s, \d+ files? to go; .* after 240 s", said[1])
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    deadline = time.monotonic() + 60  # a killed process ends when it gets a core
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(child)
    assert not list((tmp_path / "cache").glob("compiling-*"))


def _lives(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] != "Z"  # nobody has reaped it
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
end = time.monotonic() + 240
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
        stop.touch()  # its child processes continue without it
    (left,) = cache.glob("compiling-*")
    monkeypatch.setenv("CUDA_HOME", str(_fake(tmp_path / "quick", VERSIONS + WRITING)))
    os.utime(left, (0, time.time() - building.ABANDONED_AFTER - 60))
    (cache / "compiling-now").mkdir()  # for another GPU, perhaps
    building.build("sm_90a", cache, print, pytest.fail)  # it waits for nobody
    assert not left.exists()
    assert (cache / "compiling-now").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, counting_compiler):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="set MEGATRON_CACHE"):
        building.build("sm_90a", tmp_path / "file" / "cache", print, print)


def test_a_newer_gpu_than_the_compiler_gets_ptx():
    compiler = Compiler(Path("libnvrtc.so"), "12.0", frozenset({80, 90}))
    assert compiler.target("sm_90a") == "sm_90a"
    assert compiler.target("sm_100a") == "compute_90"
    with pytest.raises(BuildError, match="update CUDA"):
        compiler.target("sm_70")


def test_an_architecture_is_kept_under_the_name_that_runs_look_for():
    for text, name in (
        *(("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("9.0", "sm_90a"), ("90", "sm_90a")),
        *(("8.6", "sm_86"), ("sm_100f", "sm_100a"), ("sm_120", "sm_120a")),
    ):
        assert building.canonical_architecture(text) == name
    with pytest.raises(BuildError, match="'hopper' is not of the form sm_90a"):
        building.canonical_architecture("hopper")


def test_who_waits_long_for_another_process_says_for_what(tmp_path, counting_compiler, monkeypatch):
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
        assert f"another process is compiling them and holds {lock}; after 300 s, this" in said[0]
        # A lock of a process that is gone does not block anybody.
        building.build("sm_90a", lock.parent, print, pytest.fail)


def test_what_is_installed_is_compiled_for_every_gpu_that_it_can_be(tmp_path):
    script = """
if target == "sm_80": sys.exit("x.cu(3): error: not for this one")
"""
    asked = {
        "CUDA_HOME": str(_fake(tmp_path / "toolkit", VERSIONS + script + WRITING)),
        "MEGATRON_CUDA_ARCHS": "9.0, sm_80,hopper",
    }
    program = """
import runpy, sys
from megatron.kernels import build
build._command = lambda *words: [sys.executable, words[1], *words]
runpy.run_path("setup.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for architecture, reason in (
        ("sm_80", "NVRTC failed: x.cu(3): error: not for this one"),
        ("hopper", "GPU architecture 'hopper' is not of the form sm_90a"),
    ):
        assert f"fused kernels: not compiled for {architecture}: {reason}\n" in done.stderr
    (made,) = (tmp_path / "lib" / "megatron" / "kernels" / "built").iterdir()
    content = hashlib.sha256(made.read_bytes()).hexdigest()[:32]
    assert made.name == f"kernels-sm_90a-{building.digest()}-cuda99.1-{content}.bin"


@pytest.fixture
def gpu(monkeypatch):
    """Let `find_library` find a Hopper GPU that does not exist, and return it."""
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
    assert said[-1].startswith("fused kernels: off, using plain PyTorch: ")
    for reason in reasons:
        assert reason in said[-1]


def test_a_user_without_a_home_folder_gets_the_plain_forms(gpu, monkeypatch, capsys):
    """This happens in a container that runs under an arbitrary user ID."""
    for name in ("HOME", "MEGATRON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    _is_off(gpu, capsys, "no home folder: set MEGATRON_CACHE")


def test_a_library_that_does_not_run_here_is_left_alone(
    tmp_path, gpu, counting_compiler, monkeypatch, capsys
):
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))

    class Refusing:
        """A driver that is older than the compiler's CUDA."""

        launch = None

        def __init__(self, loaded):
            pass

        def load(self, code):
            raise DriverError("cuLibraryLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION (too old)")

    monkeypatch.setattr(library, "system_library", lambda name: None)
    monkeypatch.setattr(library, "Driver", Refusing)
    reasons = ("does not run here", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "update the driver")
    _is_off(gpu, capsys, str(tmp_path / "kernels"), *reasons)


class Loads:
    """A driver that records what it is given."""

    launch = None

    def __init__(self, loaded):
        self.loaded = []
        Loads.last = self

    def load(self, code):
        self.loaded.append(code)

    def make_current(self, gpu):
        pass


@pytest.fixture
def planted(tmp_path, gpu, monkeypatch):
    """Return the bytes of a library, what the driver has loaded, and the cache.

    There is no compiler, so only libraries found in the cache can be used.
    """
    monkeypatch.setattr(library, "system_library", lambda name: None)
    monkeypatch.setattr(library, "Driver", Loads)
    library.open_library.cache_clear()
    Loads.last = Loads(None)
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "shared"))
    monkeypatch.setattr(building, "find_libraries", lambda _: [])
    content = building.join([b"{}\nplanted"])
    yield content, lambda: Loads.last.loaded, tmp_path / "shared" / f"kernels-{os.getuid()}"
    library.open_library.cache_clear()


def _named(content):
    """Return the name that a build would give to this library."""
    digest = hashlib.sha256(content).hexdigest()[:32]
    return f"kernels-sm_90a-{building.digest()}-cuda13.0-{digest}.bin"


def test_a_library_of_this_user_in_the_private_folder_is_loaded(gpu, planted):
    """This shows that the attacks below fail because of what they change."""
    content, loaded, folder = planted
    folder.mkdir(parents=True, mode=0o700)
    (folder / _named(content)).write_bytes(content)
    assert library.find_library.__wrapped__(gpu).library is not None
    assert loaded() == [b"planted"]


@pytest.mark.parametrize("folder_name", ["kernels", "kernels-UID"])
@pytest.mark.parametrize("file_name", ["kernels-sm_90a-SOURCES-cuda13.0.bin", "digest"])
def test_a_library_in_a_folder_that_others_may_enter_is_not_loaded(
    gpu, planted, capsys, folder_name, file_name
):
    content, loaded, private = planted
    folder = private.parent / folder_name.replace("UID", str(os.getuid()))
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    file_name = file_name.replace("SOURCES", building.digest())
    (folder / (_named(content) if file_name == "digest" else file_name)).write_bytes(content)
    _is_off(gpu, capsys)
    assert not loaded()


@pytest.mark.parametrize(
    "attack",
    ["replaced", "no digest", "writable by all", "by the group", "foreign", "link", "pipe"],
)
def test_a_library_that_others_may_have_written_is_not_loaded(gpu, planted, capsys, attack):
    content, loaded, folder = planted
    folder.mkdir(parents=True, mode=0o700)
    path = folder / _named(content)
    path.write_bytes(content)
    match attack:
        case "replaced":
            path.rename(folder / _named(b"what was built"))
        case "no digest":
            path.rename(folder / f"kernels-sm_90a-{building.digest()}-cuda13.0.bin")
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
    _is_off(gpu, capsys, "no NVRTC")
    assert not loaded()


def test_a_private_folder_that_is_a_link_or_foreign_is_not_entered(gpu, planted, capsys, tmp_path):
    content, loaded, folder = planted
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / _named(content)).write_bytes(content)
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    _is_off(gpu, capsys, str(folder), "not a private folder of this user", "set MEGATRON_CACHE")
    folder.unlink()
    if os.getuid() == 0:
        elsewhere.rename(folder)
        os.chown(folder, 4321, 4321)
        _is_off(gpu, capsys, str(folder), "not a private folder of this user")
    assert not loaded()


def test_a_damaged_library_is_named_and_compiled_again(tmp_path, counting_compiler):
    folder = tmp_path / "cache"
    path = building.build("sm_90a", folder, print, print)
    path.write_text("something else")
    said = []
    assert find_built("sm_90a", folder, said.append) is None
    assert said == [f"fused kernels: {path} is not used: it is damaged: delete it"]
    assert building.build("sm_90a", folder, print, print) == path  # the same bytes, the same name
    assert find_built("sm_90a", folder, pytest.fail) == path


def test_a_library_swapped_after_the_check_is_not_loaded(planted, monkeypatch):
    """Between the check and loading, the name is moved to another file."""
    content, loaded, folder = planted
    folder.mkdir(parents=True)
    path = folder / _named(content)
    path.write_bytes(content)
    real = library.read_built

    def swap(path):
        checked = real(path)
        path.unlink()
        path.write_bytes(building.join([b"{}\nanother"]))
        return checked

    monkeypatch.setattr(library, "read_built", swap)
    library.KernelLibrary(path)
    assert loaded() == [b"planted"]
