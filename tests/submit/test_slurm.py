"""Job files under a real SLURM, running here with two nodes that are both this machine.

Debian and Ubuntu: apt-get install slurm-wlm munge. An installed cluster is not touched.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.ports import free_port
from tests.reliability.processes import wait_until
from tests.repository import ROOT, command_environment
from tests.submit.descriptions import job_file

_PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
_CONFIGURATION = """
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again may start once its credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4096
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4096
PartitionName=low Nodes=node1,node2 PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=node1,node2 PriorityTier=10 State=UP
"""


@contextmanager
def _daemon(folder: Path, *words: str) -> Iterator[None]:
    with (folder / f"{Path(words[0]).name}.log").open("a") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Slurm:
    """A cluster of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
        }

    def ask(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    def submit(self, *words: str) -> str:
        """Submit a job and return its number."""
        return self.ask("sbatch", "--parsable", *words).strip()

    def state(self, job: str) -> str:
        """Return PENDING, RUNNING, COMPLETED, FAILED etc., with the exit code and signal."""
        told = dict(
            word.partition("=")[::2] for word in self.ask("scontrol", "show", "job", job).split()
        )
        return f"{told['JobState']} {told['ExitCode']}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    programs = {name: shutil.which(name, path=_PATH) for name in ("munged", "slurmctld", "slurmd")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)")
    found = {name: str(path) for name, path in programs.items()}
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "key-file").write_bytes(secrets.token_bytes(64))
    (folder / "key-file").chmod(0o600)
    ports = [free_port() for _ in range(3)]
    text = _CONFIGURATION.format(
        folder=folder,
        ports=ports,
        user=getpass.getuser(),
        host=socket.gethostname().partition(".")[0],
    )
    (folder / "slurm.conf").write_text(text)
    munge = [
        f"--{name}={folder}/{name}" for name in ("key-file", "pid-file", "seed-file", "log-file")
    ]
    cluster = Slurm(folder)
    with ExitStack() as daemons:
        start = [found["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket"]
        daemons.enter_context(_daemon(folder, *start, *munge))
        wait_until((folder / "munge.socket").exists, 60.0)
        configuration = ("-D", "-f", str(folder / "slurm.conf"))
        daemons.enter_context(_daemon(folder, found["slurmctld"], *configuration))
        for node in ("node1", "node2"):
            (folder / node).mkdir()
            daemons.enter_context(_daemon(folder, found["slurmd"], "-N", node, *configuration))
        try:
            wait_until(lambda: _idle(cluster) == 2, 60.0)
        except AssertionError:
            logs = "".join(log.read_text()[-1000:] for log in folder.glob("*.log"))
            pytest.skip(f"SLURM does not start here: {logs}")
        yield cluster


def _idle(cluster: Slurm) -> int:
    try:
        return cluster.ask("sinfo", "--noheader", "--Node", "--partition=low", "-o", "%t").count(
            "idle"
        )
    except subprocess.CalledProcessError:
        return 0


_ITERATIONS = 150
_TRAINING = [
    *("pretrain_gpt.py", "--config", str(ROOT / "examples" / "gpt_tiny.yaml")),
    *("--train-iters", str(_ITERATIONS), "--eval-iters", "0", "--hidden-size", "32"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--num-workers", "1", "--save-interval", "10000", "--distributed-timeout-minutes", "1"),
]


def _job(folder: Path, *words: str) -> str:
    text = job_file(
        *("slurm", "--nodes", "2", "--gpus-per-node", "0", "--partition", "low", "--requeue"),
        *("--workdir", str(ROOT), "--python", sys.executable, "--logs", str(folder / "logs")),
        *("--time", "0:10:00", "--", *_TRAINING, *words),
        *("--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")),
    )
    (folder / "logs").mkdir()
    (folder / "job.sh").write_text(text)
    return str(folder / "job.sh")


def _losses(text: str) -> list[tuple[int, str]]:
    """Return each iteration in a log with its loss."""
    found = re.findall(r"iteration +(\d+)/.*? lm loss: (\S+)", text)
    return [(int(iteration), loss) for iteration, loss in found]


def _log(folder: Path) -> str:
    return "".join(log.read_text() for log in (folder / "logs").glob("megatron-*.log"))


@pytest.mark.slow
def test_a_preempted_job_ends_with_the_losses_of_an_uninterrupted_one(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = slurm.submit(_job(tmp_path))
    wait_until(lambda: len(_losses(_log(tmp_path))) > 20, 240.0)
    # A job in a partition with higher priority needs both nodes.
    other = slurm.submit("--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=srun true")
    wait_until(lambda: slurm.state(other).startswith("COMPLETED"), 240.0)
    assert "received SIGTERM" in _log(tmp_path)
    wait_until(lambda: slurm.state(job).startswith(("COMPLETED", "FAILED")), 240.0)
    assert slurm.state(job) == "COMPLETED 0:0", _log(tmp_path)
    losses = _losses(_log(tmp_path))
    stopped = int(re.findall(r"exiting program at iteration (\d+)", _log(tmp_path))[0])
    assert 20 < stopped < _ITERATIONS
    words = [str(ROOT / _TRAINING[0]), *_TRAINING[1:], "--save", str(tmp_path / "other")]
    done = run_ranks(words, command_environment(), 2)
    assert done.returncode == 0, done.stdout
    assert losses == _losses(done.stdout)
    assert [iteration for iteration, _ in losses] == list(range(1, _ITERATIONS + 1))
    files = sorted(path.parts[-4:] for path in (tmp_path / "logs").rglob("stdout.log"))
    assert len(files) == 4, "a file for each rank of each start"


@pytest.mark.slow
def test_a_job_whose_time_is_nearly_up_queues_itself_again(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(_job(tmp_path, "--train-iters", "100000"))
    wait_until(lambda: len(_losses(_log(tmp_path))) > 5, 240.0)
    # Like --signal: the steps get the signal, but the job's script does not.
    slurm.ask("scancel", "--signal=TERM", job)
    wait_until(lambda: slurm.state(job).startswith("PENDING"), 240.0)
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()
    slurm.ask("scancel", job)
    wait_until(lambda: _idle(slurm) == 2, 240.0)


@pytest.mark.slow
def test_missing_data_fail_the_job_with_their_code(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(_job(tmp_path, "--data-path", "/not/here", "--no-mock-data"))
    wait_until(lambda: slurm.state(job).startswith(("COMPLETED", "FAILED")), 240.0)
    assert slurm.state(job) == "FAILED 6:0"
    assert "error: dataset /not/here" in _log(tmp_path)
