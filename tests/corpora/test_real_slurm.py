"""The pipeline as jobs of a real SLURM, if one is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("datatrove", reason="needs the extra: pip install -e '.[corpora]'")

from megatron.tools import build_corpus
from tests.corpora.planted import Sizes, plant
from tests.reliability.processes import wait_until
from tests.submit.test_slurm import Slurm, slurm  # noqa: F401 - a fixture


def _files(corpus: Path) -> dict[str, bytes]:
    names = ("text/*", "dropped/*/*", "report.*")
    return {
        str(file.relative_to(corpus)): file.read_bytes()
        for name in names
        for file in corpus.glob(name)
    }


@pytest.mark.slow
def test_jobs_of_slurm_write_what_local_processes_write(
    slurm: Slurm,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted = plant(tmp_path / "in", Sizes(60, 6, 3, 3), seed=1, shared=False)
    words = ["--input", str(planted.folder), "--tasks", str(planted.tasks[0])]
    assert build_corpus.main([*words, "--output", str(tmp_path / "local"), "--workers", "1"]) == 0
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    words += ["--output", str(tmp_path / "slurm"), "--executor", "slurm", "--workers", "2"]
    words += ["--slurm-partition", "low", "--slurm-time", "00:10:00", "--memory-gb", "1"]
    assert build_corpus.main(words) == 0
    assert "jobs are submitted" in capsys.readouterr().out
    wait_until((tmp_path / "slurm" / "report.json").exists, 240.0)
    # The last job may outlive the report for a moment.
    wait_until(lambda: not slurm.ask("squeue", "--noheader").strip(), 60.0)
    assert _files(tmp_path / "slurm") == _files(tmp_path / "local")
    assert json.loads((tmp_path / "slurm" / "report.json").read_bytes())["read"] == 60


def test_jobs_that_slurm_refuses_are_reported_in_one_line(
    slurm: Slurm,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    words = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    words += ["--executor", "slurm", "--slurm-partition", "low", "--memory-gb", "9999"]
    assert build_corpus.main(words) == 9
    *slurms, ours = capfd.readouterr().err.splitlines()
    assert any("Memory specification" in line for line in slurms)
    assert ours.startswith("error: --executor slurm: sbatch refused the jobs of stage clean")
