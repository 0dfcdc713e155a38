"""`--submit` passes the job file on, and leaves signals to the program that receives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.submit import command
from tests.reliability.processes import wait_until
from tests.repository import ROOT
from tests.submit.descriptions import COMMAND

# Stands in for the launcher, which takes a while to save after Ctrl-C.
_SAVES = f"""#!{sys.executable}
import signal, sys, time
from pathlib import Path

def save(number, frame):
    time.sleep(2)
    sys.exit(3)

signal.signal(signal.SIGINT, save)
Path(sys.argv[0] + ".ready").touch()
time.sleep(600)
"""


def _submit(folder: Path, *words: str) -> list[str]:
    output = ["--output", str(folder / "job file.sh"), "--submit", *words, *COMMAND]
    return [sys.executable, "-m", "megatron", "submit", *output]


def test_ctrl_c_leaves_time_to_save(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(_SAVES)
    (tmp_path / "python").chmod(0o755)
    words = _submit(tmp_path, "--to", "local", "--python", str(tmp_path / "python"))
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True) as process:
        wait_until((tmp_path / "python.ready").exists, 240.0)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=240) == 3


@pytest.mark.parametrize(
    ("target", "program"), [(["slurm"], "sbatch"), (["kubernetes", "--image", "a"], "kubectl")]
)
def test_a_missing_program_is_named(target: list[str], program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        _submit(tmp_path, "--to", *target, "--logs", str(tmp_path / "logs")),
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 9
    assert f"--submit: {program} is not installed here" in done.stderr
    assert (tmp_path / "job file.sh").exists()


@pytest.mark.parametrize("workdir", [None, "project"])
def test_slurm_finds_a_folder_for_its_output(
    workdir: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the folder does not exist, SLURM silently cancels the job.

    SLURM takes --output relative to where sbatch runs, before the job changes to --workdir.
    """
    started: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(command.os, "execvp", lambda _, words: started.append(words))
    place = [] if workdir is None else ["--workdir", str(tmp_path / workdir)]
    words = ["--to", "slurm", "--logs", "my-logs", *place, "--output", "job.sh", "--submit"]
    for _ in range(2):  # the folder of an earlier job is kept
        command.run(command.build_parser().read([*words, *COMMAND]))
        assert started.pop() == ["sbatch", "job.sh"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["my-logs"]


def test_a_job_file_is_written_into_a_new_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "jobs" / "job file.sh"
    for _ in range(2):  # an older file is replaced
        command.run(command.build_parser().read(["--to", "local", "--output", str(file), *COMMAND]))
        said = capsys.readouterr()
        assert (said.out, said.err.splitlines()[-1]) == (
            "", f"wrote {file}; submit it with: bash '{file}'"
        )  # fmt: skip
    assert "pretrain_gpt.py" in file.read_text()


def test_a_file_that_is_not_a_job_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.sh"
    file.write_text("my notes\n")
    words = ["--to", "local", "--output", str(file)]
    with pytest.raises(ConfigError, match=r"--output: .*notes\.sh already exists"):
        command.run(command.build_parser().read([*words, *COMMAND]))
    assert file.read_text() == "my notes\n"
    command.run(command.build_parser().read([*words, "--overwrite", *COMMAND]))
    assert "pretrain_gpt.py" in file.read_text()
    mark = b"\n# Written by megatron submit "
    for size, is_job in ((1024, True), (1025, False)):  # only the first lines count
        file.write_bytes(mark.rjust(size, b"#"))
        assert command._is_job_file(file) == is_job
    with pytest.raises(ConfigError, match=f"--output: {tmp_path} already exists"):
        command.run(
            command.build_parser().read(["--to", "local", "--output", str(tmp_path), *COMMAND])
        )


def test_a_target_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="9"):
        command.build_parser().read(COMMAND)
    assert "--to" in capsys.readouterr().err
