"""Installing, importing and --help work anywhere; tracked files are presentable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from tests.repository import ROOT, name, tracked_files


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_importing_megatron_imports_nothing_heavy() -> None:
    probe = "import megatron, sys; print(megatron.__version__, 'torch' in sys.modules)"
    result = _python("-c", probe)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[1] == "False"


def test_a_wrong_flag_of_a_tool_is_refused() -> None:
    result = _python("tools/plot_loss.py", "--metric", "x")
    assert result.returncode == 9
    assert result.stderr == "error: unknown flag --metric: did you mean --metrics?\n"


def test_an_editable_installation_is_a_plain_path(tmp_path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    wheels.mkdir()
    for folder in ("megatron", "megatron/kernels"):  # as much as setup.py itself imports
        (source / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob("*.py"):
            shutil.copy(path, source / folder)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    for variable in ("RANK", "WORLD_SIZE"):  # set by tests that imitate a launcher
        environment.pop(variable, None)
    words = [sys.executable, "-c", build]
    subprocess.run(words, cwd=source, env=environment, timeout=240, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        code = [entry for entry in archive.namelist() if ".dist-info/" not in entry]
        assert [archive.read(entry).decode().strip() for entry in code] == [str(source)]


def test_a_wheel_has_all_that_the_command_needs(tmp_path) -> None:
    """It has recipes and the scripts that train them, so commands work without a clone."""
    pytest.importorskip("setuptools", minversion="77")
    source, wheels, site = (tmp_path / folder for folder in ("source", "wheels", "site"))
    wheels.mkdir()
    for file in tracked_files():
        parts = file.relative_to(ROOT).parts
        if parts[0] == "megatron" or len(parts) == 1:
            (source / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, source / file.relative_to(ROOT))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    for variable in ("RANK", "WORLD_SIZE"):  # set by tests that imitate a launcher
        environment.pop(variable, None)
    words = [sys.executable, "-c", build]
    subprocess.run(words, cwd=source, env=environment, timeout=240, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (scripts,) = site.glob("*.dist-info/entry_points.txt")
    assert "megatron = megatron.cli.main:main" in scripts.read_text().splitlines()
    plan = "pretrain gpt-tiny --gpus 0 --dry-run --dry-run-world-size 2".split()
    for asked, said in ((["recipes"], "gpt-125m"), (plan, "configuration is valid")):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "megatron", *asked],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_pins_are_exact_and_inside_the_ranges_of_pyproject() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    versions = {pin.name.lower(): next(iter(pin.specifier)).version for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["test"] + extras["docs"] + extras["lint"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[wanted.name.lower()]), text


def test_the_makefile_names_what_it_documents() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^# make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", text, re.MULTILINE), target


def test_set_up_names_an_interpreter_that_does_not_run(tmp_path) -> None:
    result = subprocess.run(
        ["sh", "tools/setup_venv.sh", str(tmp_path / "venv"), "/no/such/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.strip() == "setup: cannot run PYTHON=/no/such/python"


def _fake_python(folder, version: str, modules: bool):
    """Write an interpreter that only answers what the setup script asks it."""
    folder.mkdir(exist_ok=True)
    script = folder / "python3"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *version_info*) echo {version};; -VV) echo fake;;\n'
        f"*ensurepip*) exit {0 if modules else 1};; *) exit 9;; esac\n"
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("version", "modules", "message"),
    [
        ("3.10", True, "3.11 or newer is needed"),
        ("3.12", False, "python3.12-venv"),
        ("3.12", True, "could not create"),
    ],
)
def test_set_up_says_in_one_line_what_is_missing(tmp_path, version, modules, message) -> None:
    python = _fake_python(tmp_path / "bin", version, modules)
    result = subprocess.run(
        ["sh", "tools/setup_venv.sh", str(tmp_path / "venv"), str(python)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("version", "message"), [("3.13", "could not create"), ("3.10", "no Python 3.11, 3.12 or 3.13")]
)
def test_set_up_looks_for_an_interpreter(tmp_path, version, message) -> None:
    """It searches the PATH, where a system often has newer or older versions than are tested."""
    _fake_python(tmp_path / "bin", version, modules=True)
    for tool in ("sh", "dirname", "cat", "cksum", "sed", "tr", "rm"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    result = subprocess.run(
        ["sh", "tools/setup_venv.sh", str(tmp_path / "venv")],
        cwd=ROOT,
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert message in result.stderr


def test_set_up_never_clears_what_a_link_leads_to(tmp_path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "pyvenv.cfg").touch()
    (tmp_path / "venv").symlink_to("precious")
    result = subprocess.run(
        ["sh", "tools/setup_venv.sh", str(tmp_path / "venv"), sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "venv is a symbolic link: remove it" in result.stderr
    assert (tmp_path / "precious" / "pyvenv.cfg").exists()


def test_set_up_never_clears_a_folder_that_is_no_environment(tmp_path) -> None:
    (tmp_path / "precious").touch()
    result = subprocess.run(
        ["sh", "tools/setup_venv.sh", str(tmp_path), sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert (tmp_path / "precious").exists()


# Written in pieces, so that this file does not match itself.
_MACHINE = re.compile(
    "|".join(
        (
            re.escape("/" + "work/"),
            re.escape("/" + "root/"),
            "/" + r"home/[a-z]",
            r"/tmp/[a-z]+/main",
            r"pypi\." + "org",
            r"pythonhosted\." + "org",
            r"download\.pytorch\." + "org",
        )
    )
)


def test_no_machine_paths_or_registry_hosts_in_tracked_files() -> None:
    found = []
    for file in tracked_files():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # binary fixtures
        found += [f"{name(file)}:{i}: {x}" for i, x in enumerate(lines, 1) if _MACHINE.search(x)]
    assert not found, "\n".join(found)


def test_no_large_tracked_files() -> None:
    large = [name(file) for file in tracked_files() if file.stat().st_size > 2_000_000]
    assert not large
