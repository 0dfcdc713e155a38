#!/usr/bin/env python3
"""Run tests with the oldest server libraries that pyproject.toml allows.

make test-lowest

The libraries are installed into their own virtual environment, build/lowest. All other packages
come from the environment that runs this command.
"""

from __future__ import annotations

import re
import site
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# The libraries that read data from clients.
LIBRARIES = ("starlette", "uvicorn", "h11", "Jinja2", "prometheus-client", "pydantic", "orjson")
_TESTS = ("tests/inference/server",)
# The examples find torchrun on the PATH. The outer environment's torchrun would use that
# environment's libraries.
_TORCHRUN = """#!{python}
import sys
from torch.distributed.run import main
sys.exit(main())
"""


def lowest() -> list[str]:
    """Return the server libraries, each pinned to the lowest allowed version.

    Raises:
        KeyError: A library is not in pyproject.toml, or has no lowest version there.
    """
    text = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["project"]["dependencies"]
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(entries), re.MULTILINE))
    return [f"{name}=={floors[name]}" for name in LIBRARIES]


def main(argv: Sequence[str] | None = None) -> int:
    """Install the libraries, run pytest with the given arguments, and return its exit code."""
    tests = list(sys.argv[1:] if argv is None else argv) or list(_TESTS)
    if tests[0] in ("-h", "--help"):  # pytest's own help needs the environment
        print(f"usage: {Path(__file__).name} [arguments of pytest]\n\n{__doc__}")
        return 0
    folder = _ROOT / "build" / "lowest"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Packages that are not installed here are found in the outer environment.
    (site_packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    torchrun = python.with_name("torchrun")
    torchrun.write_text(_TORCHRUN.format(python=python))
    torchrun.chmod(0o755)
    install = [str(python), "-m", "pip", "install", "--quiet", "--ignore-installed", *lowest()]
    subprocess.run(install, check=True)
    print(" ".join(lowest()))
    return subprocess.run([python, "-m", "pytest", *tests], cwd=_ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
