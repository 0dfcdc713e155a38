"""Compiles the CUDA kernels during `pip install` where there is a CUDA; metadata is in
pyproject.toml. A failed compilation says so in a line and never fails the installation."""

from __future__ import annotations

import compileall
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithKernels(build_py):
    """Adds compiled kernels to the package: for MEGATRON_CUDA_ARCHS, else for this machine's GPUs;
    without either there is nothing to compile. What is missing is compiled at first use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            # pip compiles the modules that it copies, not those that stay here. Python does so at
            # the first run, but in containers it is often told not to: 30 ms more at every start.
            compileall.compile_dir(HERE / "megatron", quiet=1)
        sys.path.insert(0, str(HERE))
        from megatron.environment import cuda_architectures
        from megatron.errors import say_on_stderr
        from megatron.kernels import build

        root = HERE if self.editable_mode else Path(self.build_lib)
        folder = root / "megatron" / "kernels" / "built"
        for architecture in cuda_architectures() or build.detect_architectures():
            try:
                name = build.looked_up_as(architecture)
                build.build(name, folder, say_on_stderr, say_on_stderr)
            except Exception as error:  # whatever it is, the package works without
                say_on_stderr(f"fused kernels: not compiled for {architecture}: {error}")
        for left in (*folder.glob("*.lock"), *folder.glob("*.failed")):
            left.unlink()  # of the build, not of the package


setup(
    cmdclass={"build_py": BuildWithKernels},
    # Where this is said, an editable installation is a plain path, which editors follow; else it is
    # an import hook, which takes 18 ms at every start.
    package_dir={"": "."},
)
