"""Compilation of the CUDA sources next to this file into a cached shared library.

It needs nvcc but no GPU, and does not import torch, so that `pip install` can use it. A library
serves one GPU architecture. Its file name identifies its sources and its content, so a stale or
damaged one is never used:

    kernels-<architecture>-<digest of sources and flags>-cuda<nvcc version>-<digest of the file>.so

A library runs as this user, so it is only loaded if nobody else can have written it (`open_built`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from megatron.durable import open_trusted, replace_file
from megatron.environment import cuda_home

HERE = Path(__file__).parent
PREBUILT = HERE / "built"  # filled by `pip install`
FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC")
# Time limit in seconds for the whole compilation, which usually takes 10 to 16, or 60 on two cores
# that others use too. It is well below --distributed-timeout-minutes, because processes on other
# machines may be waiting already.
BUILD_LIMIT = 240
PROGRESS = 30  # seconds between progress lines
LOCK_LIMIT = 300  # seconds to wait for another process that builds
LOCK_PATIENCE = 20.0  # seconds until a line says that this process waits
LEFT_AFTER = 3600.0  # seconds without a change after which a scratch folder is a killed build's
_SCRATCH = "compiling-"
_LINK_FLAGS = ("-shared", "-cudart", "static", "-Xlinker", "--exclude-libs,ALL")

Say = Callable[[str], None]


class BuildError(Exception):
    """An error in building the library. The message states the cause and the remedy in one line."""


@dataclass(frozen=True)
class Compiler:
    """An installed nvcc."""

    path: Path
    version: str  # "13.0"
    architectures: frozenset[int]  # 80, 90, ...: what it can compile for

    def gencode(self, architecture: str) -> str:
        """Return nvcc's flag for "sm_90a" and the like.

        If this nvcc is too old for the GPU, it compiles to PTX for the newest architecture that it
        knows, and the driver compiles that further.
        """
        major, minor = _capability(architecture)
        number = 10 * major + minor
        if number in self.architectures:
            virtual = architecture.replace("sm_", "compute_")
            return f"-gencode=arch={virtual},code={architecture}"
        older = [known for known in self.architectures if known < number]
        if not older:
            raise BuildError(f"nvcc {self.version} cannot compile for {architecture}: update CUDA")
        newest = f"compute_{max(older)}"
        return f"-gencode=arch={newest},code={newest}"


def find_compiler() -> Compiler:
    """Return the nvcc in CUDA_HOME, on the PATH, or in /usr/local/cuda.

    Raises:
        BuildError: There is no nvcc, or it does not run.
    """
    home = cuda_home()
    found = shutil.which("nvcc", path=str(home / "bin")) if home else shutil.which("nvcc")
    found = found or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        where = f"in CUDA_HOME={home}" if home else "on the PATH"
        raise BuildError(f"no nvcc {where}: install the CUDA toolkit or set CUDA_HOME")
    try:
        said = _output(found, "--version")
        listed = _output(found, "--list-gpu-arch")
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{found} does not run ({error}): reinstall the CUDA toolkit") from None
    version = re.search(r"release (\d+\.\d+)", said)
    if version is None:
        raise BuildError(f"{found} --version names no release: reinstall the CUDA toolkit")
    known = frozenset(int(number) for number in re.findall(r"compute_(\d+)", listed))
    return Compiler(Path(found), version[1], known)


def _output(*command: str) -> str:
    """Return what a command prints, replacing bytes that are not UTF-8."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True
    ).stdout


def _capability(architecture: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", architecture)
    if match is None:
        raise BuildError(f"GPU architecture {architecture!r} is not of the form sm_90a")
    return int(match[1]), int(match[2])


def looked_up_as(architecture: str) -> str:
    """Return the name under which a run looks for "sm_90", "90" or "9.0": "sm_90a"."""
    return name_of(*_capability(architecture))


def source_files() -> list[Path]:
    """Return every .cu file."""
    return sorted(HERE.glob("cuda/*.cu"))


def digest() -> str:
    """Return a digest of all sources, headers and flags."""
    state = hashlib.sha256(repr((FLAGS, _LINK_FLAGS)).encode())
    for file in sorted(HERE.glob("cuda/*.cu*")):
        state.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def find_built(architecture: str, folder: Path, say: Say, version: str = "*") -> Path | None:
    """Return a sound library in `folder` that was made from these sources, or `None`.

    Args:
        architecture: The GPU architecture, such as "sm_90a".
        folder: The cache, or the folder that `pip install` fills.
        say: Prints one line about each library that is not used.
        version: The version of nvcc that made the library. By default any version will do.
    """
    reasons = []
    for path in sorted(folder.glob(f"kernels-{architecture}-{digest()}-cuda{version}-*.so")):
        try:
            os.close(open_built(path))
        except OSError as error:
            reasons.append(f"fused kernels: {path} is not used: {error.strerror}")
        else:
            return path
    for reason in reasons:
        say(reason)
    return None


def open_built(path: Path) -> int:
    """Return a descriptor of a library that is safe to load.

    Nobody but this user, root or the owner of this package, who may run code here anyway, can have
    written the file, and its bytes match the digest in its name.

    Raises:
        OSError: The file is missing, foreign or damaged.
    """
    with open_trusted(path, HERE.stat().st_uid) as file:
        if not path.stem.endswith(f"-{_digest_of(file)}"):
            raise OSError(errno.EBADMSG, "it is damaged: delete it", str(path))
        return os.dup(file.fileno())


def _digest_of(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def build(architecture: str, folder: Path, say: Say, say_waiting: Say) -> Path:
    """Find or build the library in `folder`. One process builds it while the others wait.

    Args:
        architecture: The name of the GPU architecture, such as "sm_90a".
        folder: The folder in which libraries are cached.
        say: A function that prints one line.
        say_waiting: A function that prints one line if another process takes long to build.

    Raises:
        BuildError: There is no compiler or no place to write, or the compiler fails.
    """
    compiler = find_compiler()
    stem = f"kernels-{architecture}-{digest()}-cuda{compiler.version}"
    started = time.time()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{stem}.lock", say_waiting):
            found = find_built(architecture, folder, say_nothing, compiler.version)
            if found is not None:
                return found
            failed = folder / f"{stem}.failed"
            if failed.exists() and failed.stat().st_mtime >= started:
                raise BuildError(failed.read_text(encoding="utf-8"))  # another process just tried
            try:
                made = _make(compiler, architecture, folder / stem, say)
            except BuildError as error:
                replace_file(failed, str(error).encode())
                raise
            failed.unlink(missing_ok=True)
            return made
    except OSError as error:
        raise BuildError(
            f"cannot write to {folder} ({error.strerror}): set MEGATRON_CACHE to another folder"
        ) from None


def _make(compiler: Compiler, architecture: str, stem: Path, say: Say) -> Path:
    """Compile a library, and keep it as `stem` with its digest appended."""
    sources = source_files()
    say(
        f"fused kernels: compiling {len(sources)} CUDA files for {architecture} with nvcc "
        f"{compiler.version}, once; less than a minute"
    )
    started = time.monotonic()
    for left in stem.parent.glob(f"{_SCRATCH}*"):  # by killed builds; another may be running
        with suppress(FileNotFoundError):  # another process removes them too
            if time.time() - left.stat().st_mtime > LEFT_AFTER:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=stem.parent, prefix=_SCRATCH) as scratch:
        kept = keep(compile_sources(compiler, architecture, Path(scratch), say=say), stem)
    say(f"fused kernels: compiled in {time.monotonic() - started:.0f} s, kept as {kept}")
    return kept


def keep(made: Path, stem: Path) -> Path:
    """Rename a library to `stem` with its digest appended, and return its path.

    Nobody ever sees a partial library, even if the machine crashes.
    """
    with made.open("rb") as file:
        kept = stem.with_name(f"{stem.name}-{_digest_of(file)}.so")
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    return made.replace(kept)


def compile_sources(
    compiler: Compiler, architecture: str, scratch: Path, *more_flags: str, say: Say | None = None
) -> Path:
    """Compile all sources in parallel, and link them.

    Args:
        compiler: The nvcc.
        architecture: The name of the GPU architecture, such as "sm_90a".
        scratch: The folder for object files and the library.
        more_flags: Further flags for nvcc.
        say: A function that prints a line every half minute; `None` prints nothing.

    Returns:
        The library.

    Raises:
        BuildError: nvcc fails (the message has its first error) or takes too long.
    """
    command = [str(compiler.path), *FLAGS, *more_flags, compiler.gencode(architecture), "-c"]
    made = {source: str(scratch / (source.stem + ".o")) for source in source_files()}
    clock = _Clock(say or say_nothing)
    _run([[*command, str(source), "-o", target] for source, target in made.items()], clock)
    library = scratch / "library.so"
    _run([[str(compiler.path), *_LINK_FLAGS, *made.values(), "-o", str(library)]], clock)
    return library


class _Clock:
    """The clock of a build. It prints the build's progress, and ends a build that hangs."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._started = time.monotonic()
        self._next_line = self._started + PROGRESS

    def check(self, unfinished: Sequence[str]) -> None:
        """Raise `BuildError` if files are unfinished and the time is up."""
        if not unfinished:
            return
        now = time.monotonic()
        seconds = now - self._started
        if seconds > BUILD_LIMIT:
            raise BuildError(
                f"nvcc did not produce {' '.join(unfinished)} in {BUILD_LIMIT} s: see why it "
                "hangs, or compile on a machine with more free cores (docs/kernels.md, Compiling)"
            )
        if now >= self._next_line:
            self._next_line = now + PROGRESS
            self._say(
                f"fused kernels: still compiling after {seconds:.0f} s, {len(unfinished)} file(s) "
                f"to go; the run continues without them after {BUILD_LIMIT} s"
            )


def _run(commands: Sequence[list[str]], clock: _Clock) -> list[str]:
    """Run nvcc commands in parallel, and return what each of them printed.

    The last argument of a command is the file that it creates.
    """
    running: dict[int, subprocess.Popen[str]] = {}
    said = [""] * len(commands)
    with ExitStack() as files:
        outputs = [
            files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            for _ in commands
        ]
        try:
            for i, command in enumerate(commands):
                # Use a separate process group, which includes the processes that nvcc itself
                # starts.
                running[i] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=outputs[i],
                    text=True,
                    process_group=0,
                )
            while running:
                for i in [i for i, process in running.items() if process.poll() is not None]:
                    outputs[i].seek(0)
                    said[i] = outputs[i].read()
                    if code := running.pop(i).returncode:
                        lines = said[i].splitlines()
                        errors = [line for line in lines if "error" in line.lower()]
                        reason = next(iter(errors + lines), f"exit code {code}")
                        raise BuildError(f"nvcc failed: {reason.strip()}")
                    if not Path(commands[i][-1]).is_file():
                        made = commands[i][-1]
                        raise BuildError(f"nvcc ended without an error but did not produce {made}")
                clock.check([Path(commands[i][-1]).name for i in running])
                time.sleep(0.02)
        except OSError as error:
            raise BuildError(f"{commands[0][0]} does not run ({error.strerror})") from None
        finally:
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return said


@contextmanager
def _alone(path: Path, say_waiting: Say) -> Iterator[None]:
    """Hold the lock file while the body runs.

    On a file system without locks, continue without it: files are renamed into place, so building
    twice wastes time but does no harm.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "rb") as file:
        started, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited > LOCK_LIMIT:
                    break
                if waited > LOCK_PATIENCE and not said:
                    said = True
                    say_waiting(
                        f"fused kernels: another process is compiling them and holds {path}; "
                        f"this one continues without them after {LOCK_LIMIT} s"
                    )
                time.sleep(0.1)
            except OSError:
                break
        yield


def say_nothing(line: str) -> None:
    """Print nothing. Use this instead of `errors.say_on_stderr` where another process prints."""


def detect_architectures() -> list[str]:
    """Return the architectures of this machine's GPUs, or none if it has no driver."""
    try:
        said = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError):
        return []
    found = {name_of(int(a), int(b)) for a, b in re.findall(r"^\s*(\d+)\.(\d+)", said, re.M)}
    return sorted(found)


def name_of(major: int, minor: int) -> str:
    """Return "sm_90a" for (9, 0). The letter adds features that only this architecture has."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
