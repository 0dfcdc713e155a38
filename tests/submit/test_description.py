"""Descriptions of runs: a file and flags, and errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.fields import fields_of
from megatron.errors import ConfigError
from megatron.submit.command import Host, read_hostfile
from megatron.submit.description import SECTIONS, JobConfig
from tests.submit.descriptions import COMMAND, RESUME, job_file

_FILE = """
job:
  name: mine
  nodes: 2
  env: [A=1, B=2]
  command: >
    pretrain_gpt.py --config examples/gpt_tiny.yaml
    --save 'runs/a b' --save-interval 10
slurm:
  partition: gpu
"""


def _problems(*words: str, target: str = "slurm") -> str:
    with pytest.raises(ConfigError) as caught:
        job_file(target, *words)
    return str(caught.value)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(_FILE)
    file = ("--run", str(tmp_path / "run.yaml"))
    text = job_file("slurm", *file, "--partition", "other")
    assert "#SBATCH --job-name=mine\n#SBATCH --nodes=2\n" in text
    assert "#SBATCH --partition=other\n" in text
    assert "    --save 'runs/a b'\n" in text
    assert "export B=2\n" in text
    text = job_file("slurm", *file, "--", "other.py", "--x")
    assert "    other.py\n    --x\n)" in text


def test_mistakes_in_a_file_name_it_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("job: {nodez: 2, gpus_per_node: many}\nslrum: {}\nkubernetes: {kind: pod}\n")
    assert _problems("--run", str(file)).splitlines() == [
        f"{file}: unknown key job.nodez: did you mean nodes?",
        f"{file}: job.gpus_per_node: expected a whole number, got 'many'",
        f"{file}: unknown section slrum: did you mean slurm?",
        f"{file}: kubernetes.kind: expected one of job, jobset, pytorchjob, debug, got 'pod'",
    ]
    file.write_text("job: [1]\n")
    assert f"{file}: job: expected `key: value` lines" in _problems("--run", str(file))
    assert "cannot be read" in _problems("--run", str(tmp_path / "none.yaml"))
    file.write_text('job: {command: "a.py \'b"}')
    assert "job.command: No closing quotation: close the quotes" in _problems("--run", str(file))


_RESUME = (*COMMAND, *RESUME)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "0", *COMMAND), "--nodes 0: "),
        (("--name", "a;b", *COMMAND), "--name 'a;b': expected at most 40 lowercase letters"),
        (("--name", "a\n#SBATCH --uid=0", *COMMAND), "--name 'a\\n"),
        (("--time", "1 day", *COMMAND), "--time '1 day': expected HH:MM:SS"),
        (("--partition", "gpu --uid=0", *COMMAND), "--partition 'gpu --uid=0': expected letters"),
        (("--logs", "a b", *COMMAND), "--logs 'a b': expected a path without spaces"),
        (("--image", "a,b", *COMMAND), "--image 'a,b': expected an image"),
        (("--env", "A", *COMMAND), "--env 'A': expected NAME=VALUE"),
        (("--env", "A-B=1", *COMMAND), "--env 'A-B=1': expected NAME=VALUE"),
        (("--volume", "/a", *COMMAND), "--volume '/a': expected SOURCE:/TARGET"),
        (("--volume", "a:/b", "--image", "x", *COMMAND), "folders begin with /"),
        (("--volume", "/a:/b", *COMMAND), "--volume needs --image"),
        (("--workdir", "a\nb", *COMMAND), "--workdir 'a\\nb': expected text on one line"),
        ((), "no command: write it after --"),
        (("--", "torchrun", "a.py"), "the command begins with 'torchrun': begin with a Python"),
        (("--", "-m"), "the command begins with '-m': begin with a Python"),
        (("--", "a.py", "\0"), "job.command: it contains a NUL character: remove it"),
        (("--processes-per-node", "9", *COMMAND), "is more than --gpus-per-node 8"),
        (("--requeue", "--", "a.py", "--save", "x"), "--requeue continues from a checkpoint, but"),
        (("--requeue", "--", "a.py", "--save", "x"), "has no --load: add --load and --save"),
        (("--requeue", "--", "a.py", "--save=x"), "has no --load: add --load and --save"),
        (("--requeue", "--chain", "2", *_RESUME), "both continue a run: give only one of them"),
        (("--chain", "2", *_RESUME), "--chain 2 needs --time"),
        (
            ("--time", "0:02:00", "--requeue", *_RESUME),
            "--save-seconds 120: the job would receive the signal",
        ),
    ],
)
def test_a_mistake_says_its_remedy(words: tuple[str, ...], message: str) -> None:
    assert message in _problems(*words)


def test_mistakes_of_a_recipe_are_reported_before_the_queue() -> None:
    recipe = ("--", "megatron", "pretrain", "gpt-tiny")
    assert "--nproc-per-node 8" in job_file("slurm", *recipe)
    assert "unknown flag --micro-batch:" in _problems(*recipe, "--micro-batch", "1")
    assert "did you mean gpt-tiny?" in _problems("--", "megatron", "pretrain", "gpt-tny")
    job_file("slurm", "--", "megatron", "pretrain", "/not/here.yaml")
    assert "--gpus: the job starts the processes" in _problems(*recipe, "--gpus", "8")


def test_a_module_may_use_every_gpu_and_any_value() -> None:
    words = ("--processes-per-node", "8", "--env", "A=b=c", "--", "-m", "tool")
    text = job_file("slurm", *words)
    assert "export A=b=c\n" in text
    assert "    -m tool\n" in text


def test_flags_with_an_equals_sign_are_read() -> None:
    job_file("slurm", "--requeue", "--", "a.py", "--load=x", "--save=x")
    assert "--global-batch-size 3" in _problems(
        "--nodes", "2", "--", "pretrain_gpt.py", f"--config={COMMAND[-1]}", "--global-batch-size=3"
    )


def test_mistakes_of_the_training_are_reported_before_the_queue() -> None:
    words = ("--nodes", "2", *COMMAND, "--global-batch-size", "4")
    assert "--global-batch-size 4" in _problems(*words)
    assert "unknown flag --micro-batch:" in _problems(*COMMAND, "--micro-batch", "1")
    job_file(
        "slurm", "--", "pretrain_gpt.py", "--config", "/not/here.yaml", "--global-batch-size", "4"
    )


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("kubernetes", COMMAND, "--to kubernetes needs --image"),
        ("kubernetes", ("--image", "a"), "no command: write it after --"),
        ("kubernetes", ("--image", "a", "--toleration", "a:b", *COMMAND), "--toleration 'a:b'"),
        ("kubernetes", ("--image", "a", "--queue", "A_b", *COMMAND), "--queue 'A_b': expected"),
        (
            "kubernetes",
            ("--image", "a", "--memory-gb", "8", *COMMAND),
            "--shared-memory-gb 64 counts toward",
        ),
        (
            "kubernetes",
            ("--image", "a", "--memory-gb", "64", *COMMAND),
            "--shared-memory-gb 64 counts toward",
        ),
        ("hostfile", COMMAND, "--to hostfile needs --hostfile"),
        (
            "hostfile",
            ("--hostfile", "/no/file", *COMMAND),
            "--hostfile /no/file: cannot be read: No such file or directory",
        ),
        ("local", ("--nodes", "2", *COMMAND), "--to local uses one machine, but --nodes is 2"),
        ("local", ("--image", "a", *COMMAND), "--to local does not start containers"),
        ("local", ("--volume", "/a:/b", *COMMAND), "has no effect with --to local: remove it"),
        ("local", ("--time", "1:00:00", *COMMAND), "--time has no effect with --to local"),
        ("local", ("--hostfile", "x", *COMMAND), "--hostfile has no effect with --to local"),
        ("slurm", ("--port", "3000", *COMMAND), "--port has no effect with --to slurm"),
        ("kubernetes", ("--requeue", *COMMAND), "--requeue has no effect with --to kubernetes"),
        ("hostfile", ("--launcher", "mpi", "--logs", "x", *COMMAND), "--logs has no effect with"),
        ("hostfile", ("--nodes", "2", *COMMAND), "--nodes has no effect with --to hostfile"),
    ],
)
def test_each_target_has_its_needs(target: str, words: tuple[str, ...], message: str) -> None:
    assert message in _problems(*words, target=target)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("a slots=2\nb slots=2\n", "--nnodes 2\n    --nproc-per-node 2\n"),
        ("# all\na:4\n\nb:4 # last\n", "--nnodes 2\n    --nproc-per-node 4\n"),
        ("10.0.0.1\n10.0.0.2\nc\n", "--nnodes 3\n    --nproc-per-node 8\n"),
        ("a slots = 2 max_slots=4\n", "--nnodes 1\n    --nproc-per-node 2\n"),
    ],
)
def test_hostfiles_of_mpi_and_deepspeed(text: str, sizes: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    words = ("--hostfile", str(tmp_path / "hosts"))
    assert sizes in job_file("hostfile", *words, *COMMAND)
    fewer = job_file("hostfile", *words, "--processes-per-node", "1", *COMMAND)
    assert "--nproc-per-node 1\n" in fewer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no machines: write one per line, as HOST slots=8"),
        ("a slots=two\n", "line 1: 'a slots=two': expected HOST, HOST slots=8 or HOST:8"),
        ("a\n-oProxyCommand=x\n", "line 2: '-oProxyCommand=x': expected HOST"),
        ("a slots=1\na slots=1\n", "line 2: a appears twice: keep one line"),
        ("a slots=1\nb slots=2\n", "the numbers of slots differ (a has 1, b has 2)"),
        ("a slots=0\n", "line 1: 'a slots=0'"),
    ],
)
def test_a_bad_hostfile_says_its_remedy(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    problems = _problems("--hostfile", str(tmp_path / "hosts"), *COMMAND, target="hostfile")
    assert message in problems


@pytest.mark.parametrize("asked", [("--chain", "2"), ("--requeue",)])
def test_a_job_that_continues_needs_a_checkpoint(asked: tuple[str, ...]) -> None:
    words = (*asked, "--time", "01:00:00", "--")
    assert f"{' '.join(asked)} continues from a checkpoint" in _problems(*words, "a.py")
    # Without a second job, there is nothing to continue, and no signal to save.
    job_file("slurm", "--chain", "1", "--time", "00:01:00", "--", "a.py")


def test_every_line_of_a_hostfile_is_checked_and_numbered_from_1(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two machines\n\nnode0 slots=x\nnode1 slots=8  # fast\n\na b c\nnode1\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    said = str(caught.value)
    assert "line 3: 'node0 slots=x': expected" in said
    assert "line 6: 'a b c': expected" in said
    assert "line 7: node1 appears twice" in said
    path.write_text("node0\nnode1 slots=4\nnode2:2\n")
    assert read_hostfile(path) == [Host("node0", None), Host("node1", 4), Host("node2", 2)]
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="no machines: write one per line"):
        read_hostfile(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8' codec can't decode byte 0xff"):
        read_hostfile(path)


def test_a_time_limit_in_seconds() -> None:
    """Kubernetes takes the limit in seconds."""
    text = job_file("kubernetes", "--time", "01:02:03", "--image", "x", *COMMAND)
    assert "activeDeadlineSeconds: 3723" in text


def test_defaults_and_ranges_of_numbers_and_switches() -> None:
    fields = [field for kind in SECTIONS.values() for field in fields_of(kind)]
    assert [field.name for field in fields if not field.names] == ["command"]  # it follows --
    assert {
        field.names[0]: (field.default, field.info.at_least, field.info.at_most)
        for field in fields
        if field.kind is not str
    } == {
        "--nodes": (1, 1, 100_000),
        "--gpus-per-node": (8, 0, 1024),
        "--processes-per-node": (None, 1, 1024),
        "--cpus-per-node": (None, 1, None),
        "--memory-gb": (None, 1, None),
        "--requeue": (False, None, None),
        "--chain": (1, 1, 1000),
        "--save-seconds": (120, 1, 65_535),
        "--shared-memory-gb": (64, 1, None),
        "--restarts": (10, 0, 10_000),
        "--pod-save-seconds": (300, 1, 86_400),
        "--silence-minutes": (60, 0, 10_000),
        "--port": (29_500, 1024, 65_535),
    }


@pytest.mark.parametrize(
    ("target", "flag", "least", "most"),
    [
        ("slurm", "--nodes", 1, 100_000),
        ("slurm", "--save-seconds", 1, 65_535),  # what `sbatch --signal` accepts
        ("kubernetes", "--port", 1024, 65_535),  # ports that need no privileges
        ("kubernetes", "--restarts", 0, 10_000),
        ("kubernetes", "--pod-save-seconds", 1, 86_400),  # a day
        ("kubernetes", "--silence-minutes", 0, 10_000),
    ],
)
def test_both_ends_of_a_range_are_allowed(target: str, flag: str, least: int, most: int) -> None:
    more = ["--image", "x", "--", "a.py"]
    job_file(target, flag, str(least), *more)
    job_file(target, flag, str(most), *more)
    assert f"{flag} {least - 1}: must be at least {least}" in _problems(
        flag, str(least - 1), *more, target=target
    )
    assert f"{flag} {most + 1}: must be at most {most}" in _problems(
        flag, str(most + 1), *more, target=target
    )


@pytest.mark.parametrize(
    ("sizes", "processes", "threads"),
    [
        ({}, 8, 1),
        ({"gpus_per_node": 0}, 1, 1),
        ({"gpus_per_node": 0, "cpus_per_node": 6}, 1, 6),
        ({"cpus_per_node": 36}, 8, 4),
        ({"processes_per_node": 2, "cpus_per_node": 7}, 2, 3),
        ({"cpus_per_node": 4}, 8, 1),
    ],
)
def test_the_processes_of_a_node_and_their_cores(
    sizes: dict[str, int], processes: int, threads: int
) -> None:
    job = JobConfig(**sizes)
    assert (job.processes, job.threads) == (processes, threads)


def test_a_node_may_have_a_single_process() -> None:
    words = ["--gpus-per-node", "4", *COMMAND]
    assert "--processes-per-node 0: must be" in _problems("--processes-per-node", "0", *words)
    one, each = (job_file("slurm", *more, *words) for more in (["--processes-per-node", "1"], []))
    assert one != each
