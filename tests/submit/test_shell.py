"""Job files for bash: they are valid, and each word reaches the ranks unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.submit.descriptions import COMMAND, HOSTILE, RESUME, job_file

# Stands in for a job's Python interpreter: records how it was started.
_RECORD = f"""#!{sys.executable}
import json, os, sys
name = os.path.join(os.environ["RECORDED"], os.environ.get("PET_NODE_RANK", "0"))
json.dump([sys.argv[1:], dict(os.environ)], open(name, "w"))
sys.exit(int(os.environ.get("CODE", "0")))
"""
# srun runs the command after its own flags on each node. Its exit code is the largest of all.
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
code=0
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node "$@" || code=$?
done
exit $code
"""
_SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames "*) printf 'node1\\nnode2\\n' ;;
    "show node --oneliner node1") echo "NodeName=node1 Arch=x NodeAddr=10.0.0.1 NodeHostName=x" ;;
    *) echo "$0 $*" | sed 's|.*/||' >> "$RECORDED/asked" ;;
esac
"""
# ssh joins its words and passes them to the user's shell there.
_SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift 2; done
shift
exec bash -c "$*"
"""


def _run(text: str, folder: Path, **variables: str) -> int:
    """Run a job file with stand-ins for a cluster's programs; return its exit code."""
    programs = {"srun": _SRUN, "scontrol": _SCONTROL, "scancel": _SCONTROL, "ssh": _SSH}
    programs |= {"python": _RECORD}
    for name, body in programs.items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **slurm, "PATH": path, "RECORDED": str(folder), **variables}
    (folder / "job.sh").write_text(text)
    words = ["bash", "job.sh"]
    return subprocess.run(words, cwd=folder, env=environment, timeout=240, check=False).returncode


def _started(folder: Path, node: int = 0) -> tuple[list[str], dict[str, str]]:
    words, environment = json.loads((folder / str(node)).read_text())
    return words, environment


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    return str(tmp_path / "hosts")


def _files(hostfile: str) -> dict[str, str]:
    plain = ("--env", "A=1", "--cpus-per-node", "64")
    every = (*plain, "--time", "24:00:00", "--memory-gb", "512")
    container = ("--image", "a/b:1", "--volume", "/a:/b", "--workdir", "/b")
    queue = ("--partition", "gpu", "--account", "me", "--qos", "high", "--module", "cuda/12.8")
    return {
        "one": job_file("slurm", *every, *COMMAND),
        "several": job_file("slurm", "--nodes", "2", *queue, *every, *COMMAND),
        "container": job_file("slurm", "--nodes", "2", *container, *every, *COMMAND),
        "requeue": job_file("slurm", "--requeue", *COMMAND, *RESUME),
        "chain": job_file("slurm", "--chain", "4", *every, *COMMAND, *RESUME),
        "local": job_file("local", *plain, *COMMAND),
        "ssh": job_file("hostfile", "--hostfile", hostfile, *plain, *COMMAND),
        "mpi": job_file("hostfile", "--hostfile", hostfile, "--launcher", "mpi", *plain, *COMMAND),
    }


def test_job_files_are_valid_bash(hostfile: str, tmp_path: Path) -> None:
    for name, text in _files(hostfile).items():
        file = tmp_path / name
        file.write_text(text)
        done = subprocess.run(["bash", "-n", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "\n\n\n" not in text


def test_job_files_pass_shellcheck(hostfile: str, tmp_path: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    for name, text in _files(hostfile).items():
        file = tmp_path / name
        file.write_text(text)
        words = [program, "--severity", "warning", file]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", ["slurm", "local", "hostfile"])
def test_every_word_arrives_as_it_was_given(target: str, hostfile: str, tmp_path: Path) -> None:
    hosts = ["--hostfile", hostfile] if target == "hostfile" else []
    nodes = ["--nodes", "2"] if target == "slurm" else []
    words = [word for value in HOSTILE for word in ("--x", value)]
    flags = ["--env", *(f"V{i}={one}" for i, one in enumerate(HOSTILE) if "\n" not in one)]
    command = ["--", "train.py", *words]
    folder = tmp_path / "a $(touch injected) 'folder'"
    folder.mkdir()
    text = job_file(target, *hosts, *nodes, "--workdir", str(folder), *flags, *command)
    assert _run(text, folder) == 0
    for node in range(1 if target == "local" else 2):
        given, environment = _started(folder, node)
        assert given[given.index("train.py") + 1 :] == words
        assert given[:2] == ["-m", "megatron.processes.torchrun"]
        for i, one in enumerate(HOSTILE):
            assert "\n" in one or environment[f"V{i}"] == one
    assert not list(tmp_path.rglob("injected"))


def test_nodes_meet_at_the_first_one(tmp_path: Path) -> None:
    flags = ("--nodes", "2", "--gpus-per-node", "4", "--cpus-per-node", "32")
    assert _run(job_file("slurm", *flags, *COMMAND), tmp_path) == 0
    for node in range(2):
        words, environment = _started(tmp_path, node)
        assert " ".join(words[2:10]) == (
            "--nnodes 2 --nproc-per-node 4 --master-addr 10.0.0.1 --master-port 22345"
        )
        assert environment["PET_NODE_RANK"] == str(node)
        assert environment["PET_LOG_DIR"] == f"logs/megatron-12345-0/node-{node}"
        assert environment["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(
    ("flag", "code", "asked", "ends"),
    [
        ("--requeue", 3, "scontrol requeue 12345", 3),
        ("--requeue", 9, None, 9),
        ("--requeue", 0, None, 0),
        ("--chain=3", 3, None, 0),
        ("--chain=3", 9, "scancel 77", 9),
        ("--chain=3", 0, None, 0),
    ],
)
def test_what_happens_after_a_run(
    flag: str, code: int, asked: str | None, ends: int, tmp_path: Path
) -> None:
    words = ("--time", "1:00:00", flag, *COMMAND, *RESUME)
    text = job_file("slurm", *words)
    assert _run(text, tmp_path, CODE=str(code), SLURM_ARRAY_JOB_ID="77") == ends
    record = tmp_path / "asked"
    assert (record.read_text().strip() if record.exists() else None) == asked


@pytest.mark.parametrize("target", ["slurm", "local", "hostfile"])
def test_variables_of_the_user_win(target: str, hostfile: str, tmp_path: Path) -> None:
    hosts = ["--hostfile", hostfile] if target == "hostfile" else []
    assert _run(job_file(target, *hosts, *COMMAND), tmp_path) == 0
    assert _started(tmp_path)[1]["NCCL_DEBUG"] == "WARN"
    text = job_file(target, *hosts, "--env", "NCCL_DEBUG=INFO", "--", "a.py")
    assert _run(text, tmp_path) == 0
    assert _started(tmp_path)[1]["NCCL_DEBUG"] == "INFO"
