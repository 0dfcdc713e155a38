"""Job files for a hostfile, on two machines simulated by network namespaces."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.ports import free_port
from tests.reliability.machines import Machine, machines
from tests.reliability.processes import wait_until
from tests.repository import ROOT, command_environment
from tests.submit.descriptions import job_file

__all__ = ["machines"]  # a fixture

_SSHD = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PidFile none
"""
_SSH = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
_TRAINING = [
    *("pretrain_gpt.py", "--config", str(ROOT / "examples" / "gpt_tiny.yaml")),
    *("--train-iters", "150", "--eval-iters", "0", "--hidden-size", "32", "--num-workers", "0"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--save-interval", "10000", "--distributed-timeout-minutes", "1"),
]


@contextmanager
def _reachable(machines: list[Machine], folder: Path) -> Iterator[list[str]]:
    """Start sshd on the machines, and yield the flags by which a job file reaches them."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("sshd or ssh is not installed (apt-get install openssh-server openssh-client)")
    Path("/run/sshd").mkdir(exist_ok=True)
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(words, check=True)
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    (folder / "hosts").write_text("".join(f"{one.address} slots=1\n" for one in machines))
    with ExitStack() as daemons:
        for one in machines:
            start = [*one.command_prefix, sshd, "-D", "-f", str(folder / "sshd_config")]
            daemon = daemons.enter_context(subprocess.Popen(start))
            daemons.callback(daemon.kill)
        ask = ("ssh", "-F", str(folder / "ssh_config"))
        for one in machines:
            words = [
                *machines[0].command_prefix,
                *ask,
                f"{getpass.getuser()}@{one.address}",
                "true",
            ]
            wait_until(lambda words=words: not subprocess.run(words, check=False).returncode, 240.0)
        yield ["--hostfile", str(folder / "hosts"), "--ssh-config", str(folder / "ssh_config")]


def _losses(text: str) -> list[tuple[str, str]]:
    return re.findall(r"iteration +(\d+)/.*? lm loss: (\S+)", text)


@contextmanager
def _running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": "/nowhere"}  # must not be needed
    with log.open("a") as stream:
        process = subprocess.Popen(
            words, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_mpirun_trains(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin)")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ("--hostfile", str(tmp_path / "hosts"), "--launcher", "mpi", "--port", str(free_port()))
    text = job_file(
        *("hostfile", *words, "--python", sys.executable, "--workdir", str(ROOT), "--"),
        *(*_TRAINING, "--train-iters", "3"),
    )
    (tmp_path / "job.sh").write_text(text)
    roots = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")],
        env={**os.environ, **dict.fromkeys(roots, "1")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes: TP 1, CP 1, DP 2, PP 1" in done.stdout
    assert len(_losses(done.stdout)) == 3


@pytest.mark.slow
def test_machines_of_a_hostfile_train_save_on_a_signal_and_continue(
    machines: list[Machine], tmp_path: Path
) -> None:
    with _reachable(machines, tmp_path) as flags:
        save = ("--save", str(tmp_path / "it's"), "--load", str(tmp_path / "it's"))
        text = job_file(
            *("hostfile", *flags, "--workdir", str(ROOT), "--python", sys.executable),
            *("--logs", str(tmp_path / "logs"), "--", *_TRAINING, *save),
        )
        (tmp_path / "job.sh").write_text(text)
        job, log = [*machines[0].command_prefix, "bash", str(tmp_path / "job.sh")], tmp_path / "log"
        with _running(job, log) as process:
            wait_until(lambda: len(_losses(log.read_text())) > 10, 240.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=240) == 3, log.read_text()
        with _running(job, log) as process:
            assert process.wait(timeout=240) == 0, log.read_text()
    words = [str(ROOT / _TRAINING[0]), *_TRAINING[1:], "--save", str(tmp_path / "other")]
    done = run_ranks(words, command_environment(), 2)
    assert done.returncode == 0, done.stdout
    assert _losses(log.read_text()) == _losses(done.stdout)
    assert len(_losses(done.stdout)) == 150
