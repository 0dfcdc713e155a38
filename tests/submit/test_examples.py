"""The job files in examples/ are what the commands on their pages write."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.submit.command import build_parser, run
from tests.documented import Command, commands
from tests.repository import ROOT, name

PAGES = [ROOT / "examples" / folder / "README.md" for folder in ("slurm", "kubernetes")]


@pytest.mark.parametrize("command", [one for page in PAGES for one in commands(page)], ids=str)
def test_an_example_is_what_its_command_writes(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program, file, *words = command.args
    assert (program, file) == ("megatron", "submit")
    options = build_parser().read(words)
    kept, options.output = options.output, tmp_path / "file"
    run(options)
    assert kept.read_text() == options.output.read_text(), "run the command again"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_example_has_its_command(page: Path) -> None:
    written = {command.args[command.args.index("--output") + 1] for command in commands(page)}
    assert written == {name(file) for file in page.parent.iterdir() if file != page}
