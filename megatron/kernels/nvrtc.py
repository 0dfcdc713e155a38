"""NVRTC, the compiler for device code that comes with every PyTorch for CUDA.

`build.py` runs this module in separate processes, which can run in parallel and be killed:

    describe LIBRARY
    compile LIBRARY SOURCE ARCHITECTURE OUTPUT [FLAG...]

This module does not import torch.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.durable import replace_file
from megatron.environment import cuda_home
from megatron.kernels.sources import instances

FLAGS = ("--std=c++17",)


class CompileError(Exception):
    """An error that NVRTC reports."""


def find_libraries(release: str = "") -> list[Path]:
    """Return the paths of this machine's NVRTC libraries in order of preference.

    Args:
        release: The major version of PyTorch's CUDA, such as "13", whose packages come before those
            of other versions; "" if it is unknown.
    """
    folders = dict.fromkeys((*sys.path, *(sysconfig.get_path(k) for k in ("purelib", "platlib"))))
    packages = [
        path
        for folder in folders
        for pattern in ("nvidia/*/lib/libnvrtc.so*", "torch/lib/libnvrtc*.so*")
        for path in Path(folder).glob(pattern)
        if "builtins" not in path.name
    ]
    packages.sort(key=lambda path: (_release(path) == release, _release(path)), reverse=True)
    home = cuda_home()
    in_cuda_home = _in_toolkit(home) if home else []
    return [*in_cuda_home, *packages, *_in_toolkit(Path("/usr/local/cuda"))]


def _release(path: Path) -> str:
    match = re.search(r"\.so\.(\d+)", path.name)
    return match[1] if match else ""


def _in_toolkit(home: Path) -> list[Path]:
    return [
        path for folder in ("lib64", "lib") for path in sorted(home.glob(f"{folder}/libnvrtc.so*"))
    ]


class Nvrtc:
    """A loaded NVRTC library.

    Args:
        path: The path of the library.

    Raises:
        OSError: The library cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        """Load the library."""
        for part in Path(path).parent.glob("libnvrtc-builtins.so*"):  # looked up by name
            ctypes.CDLL(str(part))
        self._loaded = ctypes.CDLL(path)
        self._loaded.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> str:
        """Return the version, such as "13.0"."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def architectures(self) -> list[int]:
        """Return the GPU architectures for which NVRTC can compile: 80, 90, ..."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        return list(architectures)

    def compile(
        self, source: Path, architecture: str, flags: Sequence[str]
    ) -> tuple[dict[str, str], bytes, str]:
        """Compile the kernels of a source file (`sources.instances`).

        Args:
            source: The .cu file.
            architecture: The target, such as "sm_90a" for machine code or "compute_90" for PTX.
            flags: Additional flags.

        Returns:
            The compiled name of each kernel, the compiled code, and the compiler's log.

        Raises:
            CompileError: NVRTC reports an error, for example in the source.
        """
        program = ctypes.c_void_p()
        text = source.read_bytes()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text, source.name.encode(), 0, None, None
        )
        names = [name.encode() for name in instances()[source.stem]]
        for name in names:
            self._call("nvrtcAddNameExpression", program, name)
        arguments = [*FLAGS, *flags, f"--gpu-architecture={architecture}", f"-I{source.parent}"]
        options = (ctypes.c_char_p * len(arguments))(*(word.encode() for word in arguments))
        result = self._loaded.nvrtcCompileProgram(program, len(arguments), options)
        log = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if result:
            raise CompileError(log or self._error(result))
        lowered = {}
        for name in names:
            pointer = ctypes.c_char_p()
            self._call("nvrtcGetLoweredName", program, name, ctypes.byref(pointer))
            lowered[name.decode()] = (pointer.value or b"").decode()
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        return lowered, self._bytes(f"nvrtcGet{kind}", program), log

    def _bytes(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if result := getattr(self._loaded, function)(*arguments):
            raise CompileError(f"{function}: {self._error(result)}")

    def _error(self, result: int) -> str:
        text: bytes = self._loaded.nvrtcGetErrorString(result)
        return text.decode()


def main() -> int:
    """Run the command and return the exit code.

    `compile` writes a line of JSON with the compiled name of each kernel, and then the code.
    """
    command, library, *arguments = sys.argv[1:]
    try:
        nvrtc = Nvrtc(library)
        if command == "describe":
            description = {"version": nvrtc.version(), "architectures": nvrtc.architectures()}
            print(json.dumps(description))
            return 0
        source, architecture, output, *flags = arguments
        names, code, log = nvrtc.compile(Path(source), architecture, flags)
    except (CompileError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(log, file=sys.stderr)
    replace_file(Path(output), json.dumps(names).encode() + b"\n" + code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
