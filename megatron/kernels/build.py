"""Compilation of the CUDA sources next to this file into a cached library of kernels.

Compilation needs NVRTC, which comes with PyTorch, but no GPU, CUDA toolkit or C++ compiler. This
module does not import torch, so `pip install` can use it. Each library targets one GPU
architecture. Its file name identifies its sources and its content, so a stale or damaged library is
never used:

    kernels-<architecture>-<digest of sources and flags>-cuda<NVRTC version>-<digest of file>.bin

The file contains a line of JSON and then the compiled code of each source (`join`). It is loaded
only if no other user could have written it (`read_built`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.durable import open_trusted, replace_file
from megatron.environment import module_command, usable_cores
from megatron.kernels import sources
from megatron.kernels.nvrtc import FLAGS, find_libraries

PREBUILT = sources.HERE / "built"  # filled by `pip install`
# The time limit in seconds for the whole compilation, which usually takes 5 s, or 40 s on one core.
# It is well below --distributed-timeout-minutes, because processes on other machines may be
# waiting.
BUILD_LIMIT = 240
PROGRESS = 30  # seconds between progress lines
LOCK_LIMIT = 300  # seconds to wait for another process that is building
LOCK_PATIENCE = 20.0  # seconds until this process prints that it is waiting
ABANDONED_AFTER = 3600.0  # seconds after which an unchanged scratch folder counts as abandoned
_SCRATCH = "compiling-"

LineWriter = Callable[[str], None]


class BuildError(Exception):
    """An error in building the library. Its message gives the cause and the remedy in one line."""


@dataclass(frozen=True)
class Compiler:
    """An installed NVRTC.

    Attributes:
        path: The path of the library.
        version: The version, such as "13.0".
        architectures: The GPU architectures for which it can compile: 80, 90, ...
    """

    path: Path
    version: str
    architectures: frozenset[int]

    def target(self, architecture: str) -> str:
        """Return the compilation target for a GPU architecture such as "sm_90a".

        If this NVRTC is too old for the GPU, the target is PTX for the newest architecture that it
        supports, which the driver then compiles.

        Raises:
            BuildError: This NVRTC supports only newer architectures, or the name is malformed.
        """
        major, minor = _capability(architecture)
        number = 10 * major + minor
        if number in self.architectures:
            return architecture
        older = [supported for supported in self.architectures if supported < number]
        if not older:
            raise BuildError(f"NVRTC {self.version} cannot compile for {architecture}: update CUDA")
        return f"compute_{max(older)}"


def find_compiler(release: str = "") -> Compiler:
    """Return the NVRTC of CUDA_HOME, PyTorch's packages or /usr/local/cuda, in this order.

    Args:
        release: The major version of PyTorch's CUDA, such as "13", or "" if it is unknown.

    Raises:
        BuildError: There is no NVRTC, or the first one does not work.
    """
    libraries = find_libraries(release)
    if not libraries:
        package = "nvidia-cuda-nvrtc-cu12" if release == "12" else "nvidia-cuda-nvrtc"
        raise BuildError(
            "found no NVRTC (libnvrtc.so), which normally comes with PyTorch for CUDA: "
            f"pip install {package}, or set CUDA_HOME to a CUDA toolkit"
        )
    try:
        description = json.loads(_output(*_command("describe", str(libraries[0]))))
        return Compiler(
            libraries[0], description["version"], frozenset(description["architectures"])
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        text = str(getattr(error, "stderr", "") or error).strip()
        raise BuildError(
            f"{libraries[0]} does not work ({text}): reinstall its package, or set CUDA_HOME to a "
            "CUDA toolkit"
        ) from None


def _command(*arguments: str) -> list[str]:
    """Return the command that runs NVRTC in a separate process (`nvrtc.main`)."""
    return [*module_command("megatron.kernels.nvrtc"), *arguments]


def _output(*command: str) -> str:
    """Return the output of a command, replacing bytes that are not UTF-8."""
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True
    ).stdout


def _capability(architecture: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", architecture)
    if match is None:
        raise BuildError(f"GPU architecture {architecture!r} is not of the form sm_90a")
    return int(match[1]), int(match[2])


def canonical_architecture(architecture: str) -> str:
    """Return the architecture's name in file names: "sm_90a" for "sm_90", "90" or "9.0".

    Raises:
        BuildError: The architecture is not of this form.
    """
    return name_of(*_capability(architecture))


def digest() -> str:
    """Return a digest of all sources, headers, kernels to compile and flags."""
    return sources.digest(FLAGS)


def find_built(
    architecture: str, folder: Path, report: LineWriter, version: str = "*"
) -> Path | None:
    """Return an undamaged library in `folder` that was built from these sources, or `None`.

    Args:
        architecture: The GPU architecture, such as "sm_90a".
        folder: The cache, or the folder that `pip install` fills.
        report: A function that prints a line about each library that cannot be used, if none can.
        version: The version of NVRTC that built the library; "*" accepts any.
    """
    reasons = []
    for path in sorted(folder.glob(f"kernels-{architecture}-{digest()}-cuda{version}-*.bin")):
        try:
            read_built(path)
        except OSError as error:
            reasons.append(f"fused kernels: {path} is not used: {error.strerror}")
        else:
            return path
    for reason in reasons:
        report(reason)
    return None


def read_built(path: Path) -> bytes:
    """Return the content of a library, after checking that it is safe to load.

    It is safe if its bytes match the digest in its name, and if only this user, root or the owner
    of this package could have written the file. They can all run code in this process anyway.

    Raises:
        OSError: The file is missing or damaged, or another user may have written it.
    """
    with open_trusted(path, sources.HERE.stat().st_uid) as file:
        content = file.read()
    if not path.stem.endswith(f"-{_digest_of(content)}"):
        raise OSError(errno.EBADMSG, "it is damaged: delete it", str(path))
    return content


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def build(
    architecture: str,
    folder: Path,
    report: LineWriter,
    report_waiting: LineWriter,
    release: str = "",
) -> Path:
    """Find or build the library in `folder`. A single process builds it while others wait.

    A process that has waited for `LOCK_LIMIT` seconds builds it too.

    Args:
        architecture: The name of the GPU architecture, such as "sm_90a".
        folder: The folder in which libraries are cached.
        report: A function that prints a line.
        report_waiting: A function that prints a line if another process takes a long time to build.
        release: The major version of PyTorch's CUDA, such as "13", or "" if it is unknown.

    Returns:
        The path of the library.

    Raises:
        BuildError: There is no compiler, the folder is not writable, or the compiler fails, takes
            too long or has just failed in another process.
    """
    compiler = find_compiler(release)
    stem = f"kernels-{architecture}-{digest()}-cuda{compiler.version}"
    started = time.time()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{stem}.lock", report_waiting):
            existing = find_built(architecture, folder, discard_line, compiler.version)
            if existing is not None:
                return existing
            failed = folder / f"{stem}.failed"
            if failed.exists() and failed.stat().st_mtime >= started:
                raise BuildError(failed.read_text(encoding="utf-8"))  # another process just tried
            try:
                built = _make(compiler, architecture, folder / stem, report)
            except BuildError as error:
                replace_file(failed, str(error).encode())
                raise
            failed.unlink(missing_ok=True)
            return built
    except OSError as error:
        raise BuildError(
            f"cannot write to {folder} ({error.strerror}): set MEGATRON_CACHE to another folder"
        ) from None


def _make(compiler: Compiler, architecture: str, stem: Path, report: LineWriter) -> Path:
    """Compile a library, store it under `stem` with its digest appended, and return its path."""
    count = len(sources.source_files())
    report(
        f"fused kernels: compiling {count} CUDA files for {architecture} with NVRTC "
        f"{compiler.version}; this is done once and takes less than a minute"
    )
    started = time.monotonic()
    # Killed builds may have left files, and another build may be running.
    for abandoned in stem.parent.glob(f"{_SCRATCH}*"):
        with suppress(FileNotFoundError):  # another process may remove it too
            if time.time() - abandoned.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=stem.parent, prefix=_SCRATCH) as scratch:
        stored = keep(compile_sources(compiler, architecture, Path(scratch), report=report), stem)
    report(f"fused kernels: compiled in {time.monotonic() - started:.0f} s, stored as {stored}")
    return stored


def keep(path: Path, stem: Path) -> Path:
    """Rename a library to `stem` with its digest appended, and return its new path.

    No process ever sees a partially written library, even if the machine crashes.
    """
    with path.open("rb") as file:
        stored = stem.with_name(f"{stem.name}-{_digest_of(file.read())}.bin")
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    return path.replace(stored)


def compile_sources(
    compiler: Compiler,
    architecture: str,
    scratch: Path,
    *extra_flags: str,
    report: LineWriter | None = None,
) -> Path:
    """Compile all sources in parallel and join them.

    Args:
        compiler: The installed NVRTC.
        architecture: The name of the GPU architecture, such as "sm_90a".
        scratch: The folder for compiled sources and the library.
        extra_flags: Additional flags for NVRTC.
        report: A function that prints a line every half minute; `None` prints nothing.

    Returns:
        The path of the library.

    Raises:
        BuildError: NVRTC fails (the message contains its first error), takes too long, or does not
            support the architecture.
    """
    target = compiler.target(architecture)
    outputs = {source: scratch / f"{source.stem}.bin" for source in sources.source_files()}
    commands = [
        _command("compile", str(compiler.path), str(source), target, str(output), *extra_flags)
        for source, output in outputs.items()
    ]
    _run(commands, [path.name for path in outputs.values()], _Clock(report or discard_line))
    for path in outputs.values():
        if not path.is_file():
            raise BuildError(f"NVRTC ended without an error but did not produce {path}")
    library = scratch / "library"
    replace_file(library, join([path.read_bytes() for path in outputs.values()]))
    return library


def join(compiled: Sequence[bytes]) -> bytes:
    """Return the content of a library, given the output of `nvrtc.main` for each source."""
    kernels, codes = {}, []
    for index, content in enumerate(compiled):
        names, _, code = content.partition(b"\n")
        kernels.update({kernel: (index, name) for kernel, name in json.loads(names).items()})
        codes.append(code)
    header = {"sizes": [len(code) for code in codes], "kernels": kernels}
    return json.dumps(header).encode() + b"\n" + b"".join(codes)


def split(content: bytes) -> tuple[list[bytes], Mapping[str, tuple[int, str]]]:
    """Split the content of a library.

    Returns:
        The binaries, and the index of the binary and the compiled name of each kernel, by name.
    """
    header, _, binaries = content.partition(b"\n")
    index = json.loads(header)
    codes, start = [], 0
    for size in index["sizes"]:
        codes.append(binaries[start : start + size])
        start += size
    return codes, {kernel: (binary, name) for kernel, (binary, name) in index["kernels"].items()}


class _Clock:
    """The clock of a build, which prints progress and stops a build that hangs."""

    def __init__(self, report: LineWriter) -> None:
        self._report = report
        self._started = time.monotonic()
        self._next_line = self._started + PROGRESS

    def check(self, unfinished: Sequence[str]) -> None:
        """Print progress if it is due, and raise `BuildError` if the time limit is exceeded."""
        if not unfinished:
            return
        now = time.monotonic()
        seconds = now - self._started
        if seconds > BUILD_LIMIT:
            raise BuildError(
                f"NVRTC did not produce {' '.join(unfinished)} in {BUILD_LIMIT} s: find out why "
                "it hangs, or compile on a machine with more free cores (docs/kernels.md, "
                "Compiling)"
            )
        if now >= self._next_line:
            self._next_line = now + PROGRESS
            self._report(
                f"fused kernels: still compiling after {seconds:.0f} s, {len(unfinished)} "
                f"file{'s' * (len(unfinished) > 1)} to go; the run continues without them after "
                f"{BUILD_LIMIT} s"
            )


def _run(commands: Sequence[list[str]], outputs_of: Sequence[str], clock: _Clock) -> list[str]:
    """Run commands in parallel, one per core, and return the output of each.

    Args:
        commands: The programs to run, with their arguments.
        outputs_of: The name of the file that each command creates, for messages.
        clock: The clock that stops the commands if they take too long.

    Raises:
        BuildError: A command fails, does not run, or takes too long.
    """
    waiting, running = list(range(len(commands))), dict[int, subprocess.Popen[str]]()
    logs = [""] * len(commands)
    with ExitStack() as files:
        outputs = [
            files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            for _ in commands
        ]
        try:
            while waiting or running:
                while waiting and len(running) < usable_cores():
                    i = waiting.pop(0)
                    # A separate process group also includes the processes that the command starts.
                    running[i] = subprocess.Popen(
                        commands[i],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=outputs[i],
                        text=True,
                        process_group=0,
                    )
                for i in [i for i, process in running.items() if process.poll() is not None]:
                    outputs[i].seek(0)
                    logs[i] = outputs[i].read()
                    if code := running.pop(i).returncode:
                        lines = logs[i].splitlines()
                        errors = [line for line in lines if "error" in line.lower()]
                        reason = next(iter(errors + lines), f"exit code {code}")
                        raise BuildError(f"NVRTC failed: {reason.strip()}")
                clock.check([outputs_of[i] for i in (*running, *waiting)])
                time.sleep(0.02)
        except OSError as error:
            raise BuildError(f"{commands[0][0]} does not run ({error.strerror})") from None
        finally:
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return logs


@contextmanager
def _alone(path: Path, report_waiting: LineWriter) -> Iterator[None]:
    """Hold the lock on a file inside the context.

    If the file system has no locks, or another process holds the lock for too long, continue
    without it. Files are renamed into place, so building twice only wastes time.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "rb") as file:
        started, has_reported = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited > LOCK_LIMIT:
                    break
                if waited > LOCK_PATIENCE and not has_reported:
                    has_reported = True
                    report_waiting(
                        f"fused kernels: another process is compiling them and holds {path}; "
                        f"after {LOCK_LIMIT} s, this one compiles them too"
                    )
                time.sleep(0.1)
            except OSError:
                break
        yield


def discard_line(line: str) -> None:
    """Do nothing. Pass this as a `LineWriter` to discard lines."""


def detect_architectures() -> list[str]:
    """Return the architectures of this machine's GPUs; an empty list if there is no driver."""
    try:
        output = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError):
        return []
    architectures = {
        name_of(int(a), int(b)) for a, b in re.findall(r"^\s*(\d+)\.(\d+)", output, re.M)
    }
    return sorted(architectures)


def name_of(major: int, minor: int) -> str:
    """Return the name of an architecture: "sm_90a" for compute capability (9, 0).

    The letter enables features that are specific to this architecture.
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
