"""Compile the CUDA kernels during `pip install` if NVRTC is installed.

The metadata is in pyproject.toml. A failed compilation prints a message and never fails the
installation.
"""

from __future__ import annotations

import compileall
import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithKernels(build_py):
    """A build that adds compiled kernels to the package.

    Kernels are compiled for MEGATRON_CUDA_ARCHS or, if this is not set, for this machine's GPUs.
    Kernels for other GPUs are compiled on first use.
    """

    def run(self) -> None:
        """Build the package, then its kernels."""
        super().run()
        if self.editable_mode:
            # pip compiles modules to bytecode, but not those of an editable installation. Python
            # would compile them on the first run, but containers often disable that. Compiling them
            # here saves 30 ms per start.
            compileall.compile_dir(HERE / "megatron", quiet=1)
        sys.path.insert(0, str(HERE))
        from megatron.errors import print_to_stderr
        from megatron.kernels import build

        root = HERE if self.editable_mode else Path(self.build_lib)
        folder = root / "megatron" / "kernels" / "built"
        requested = os.environ.get("MEGATRON_CUDA_ARCHS", "").replace(",", " ").split()
        for architecture in requested or build.detect_architectures():
            try:
                name = build.canonical_architecture(architecture)
                build.build(name, folder, print_to_stderr, print_to_stderr)
            except Exception as error:  # the package works without kernels
                print_to_stderr(f"fused kernels: not compiled for {architecture}: {error}")
        for leftover in (*folder.glob("*.lock"), *folder.glob("*.failed")):
            leftover.unlink()  # not part of the package


setup(
    cmdclass={"build_py": BuildWithKernels},
    # This makes an editable installation a plain path, which editors can follow. Otherwise, it
    # would be an import hook, which costs 18 ms per start.
    package_dir={"": "."},
)
