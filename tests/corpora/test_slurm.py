"""SLURM's executor, with stand-ins for sbatch and srun that run the jobs at once."""

from __future__ import annotations

import json
import os
import sys

import pytest

pytest.importorskip("datatrove", reason="needs the extra: pip install -e '.[corpora]'")

from megatron.corpora.plan import CorpusPlan, DuplicatesStep, FixStep
from megatron.corpora.run import Cluster, Stage, _executor, build_corpus
from megatron.errors import ConfigError
from tests.repository import ROOT

_SBATCH = """#!/bin/bash
# Run each task of the job array, and print the line that SLURM prints.
script=${@: -1}
echo "$*" >>"$FAKE_SLURM_LOG"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_NODELIST=localhost
for task in $(seq 0 "${last:-0}"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_PROCID=0 SLURM_NODEID=0 bash "$script" >>"$FAKE_SLURM_LOG" 2>&1
done
echo "Submitted batch job 7"
"""
_SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
"""
_SCONTROL = """#!/bin/bash
echo localhost
"""


@pytest.mark.slow
def test_slurm_jobs_write_what_local_processes_write(tmp_path, monkeypatch) -> None:
    source = tmp_path / "in.jsonl"
    texts = ["schÃ¶n and good", "another text", "Another text!"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan = CorpusPlan((str(source),), {"fix": FixStep(), "duplicates": DuplicatesStep()})
    build_corpus(plan, tmp_path / "local", Cluster(), overwrite=False)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"sbatch": _SBATCH, "srun": _SRUN, "scontrol": _SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_SLURM_LOG", str(tmp_path / "log"))
    cluster = Cluster("slurm", workers=2, partition="cpu")
    build_corpus(plan, tmp_path / "slurm", cluster, overwrite=False)
    log = (tmp_path / "log").read_text()
    for name in ("text/00000.jsonl", "report.json", "dropped/select/00000.jsonl"):
        found = tmp_path / "slurm" / name
        assert found.exists(), log[-3000:]
        assert found.read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert "afterok:7" in log


def test_jobs_get_the_resources_of_the_cluster(tmp_path, monkeypatch) -> None:
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    first = _executor(Stage("clean", [], 9), tmp_path / "a", Cluster("slurm", 4, "cpu"), None)
    assert (first.tasks, first.workers, first.partition, first.depends) == (9, 4, "cpu", None)
    assert (first.time, first.mem_per_cpu_gb, first.venv_path) == ("24:00:00", 4, None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    cluster = Cluster("slurm", 4, "gpu", time="01:30:00", memory_gb=16)
    second = _executor(Stage("groups", [], 1), tmp_path / "b", cluster, first)
    assert (second.tasks, second.workers, second.partition, second.depends) == (1, 1, "gpu", first)
    assert (second.time, second.mem_per_cpu_gb) == ("01:30:00", 16)
    assert second.venv_path == str(tmp_path / "bin" / "activate")
    assert (second.job_name, second.logging_dir.path) == ("corpus-groups", str(tmp_path / "b"))


def test_a_machine_without_slurm_says_so(tmp_path, monkeypatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch was not found"):
        build_corpus(
            CorpusPlan((str(source),), {"fix": FixStep()}),
            tmp_path / "out",
            Cluster("slurm", partition="cpu"),
            overwrite=False,
        )
