"""The table of commands: help, mistakes, and how fast each command starts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron.cli import main as cli
from tests.repository import ROOT

_PROBE = """
import sys
from megatron.cli.main import main
try:
    code = main({words!r})
except SystemExit as leaving:
    code = leaving.code or 0
heavy = sorted({heavy} & set(sys.modules))
assert not heavy, heavy
raise SystemExit(code)
"""


_HEAVY = {"torch", "tokenizers", "matplotlib", "pyarrow"}
_ALLOWED = {"plan": {"torch"}}  # its flags default to the planner's own tables


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    heavy = _HEAVY - _ALLOWED.get(words[0] if words else "", set())
    return subprocess.run(
        [sys.executable, "-c", _PROBE.format(words=list(words), heavy=heavy)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_help_is_one_screen_and_names_every_command() -> None:
    done = _run("--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 24
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert _run().stdout == done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_explains_itself_without_heavy_imports(name: str) -> None:
    done = _run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: megatron {name}")


def test_a_misspelled_command_gets_the_nearest_one() -> None:
    done = _run("pretain", "gpt-125m")
    assert done.returncode == 9
    assert done.stderr == "error: unknown command pretain: did you mean pretrain?\n"


@pytest.mark.parametrize("words", [[], ["data"], ["pretrain", "--help"]], ids=str)
def test_a_reader_that_leaves_ends_help_quietly(words: list[str]) -> None:
    command = [sys.executable, "-m", "megatron", *words]
    done = subprocess.run(
        ["bash", "-c", '"$@" | true; echo ${PIPESTATUS[0]}', "bash", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_python_m_megatron_is_the_same() -> None:
    words = [sys.executable, "-m", "megatron", "--version"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("megatron ")


def test_the_guide_lists_every_command() -> None:
    table = (ROOT / "docs/recipes.md").read_text(encoding="utf-8").partition("## All commands")[2]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `megatron")]
    listed = set(re.findall(r"[a-z-]+", " ".join(first)))
    assert cli.COMMANDS.keys() | cli.DATA.keys() <= listed


@pytest.mark.parametrize("name", ["plot", "demo"])
def test_a_tool_s_help_describes_it_as_the_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.dispatch("megatron", cli.COMMANDS, [name, "--help"])
    usage, about, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: megatron {name}")
    assert not about.startswith("options:")
    assert "python tools/" not in about


@pytest.mark.parametrize(("name", "own"), [("serve", "--request-timeout"), ("generate", "--top-k")])
def test_help_of_what_runs_a_model_has_no_flags_of_training(
    name: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.dispatch("megatron", cli.COMMANDS, [name, "--help"])
    flags = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert {"--load", own} <= flags
    assert flags.isdisjoint({"--lr", "--train-iters"})


def test_the_first_word_of_an_evaluation_is_its_task() -> None:
    assert cli.with_task(["LAMBADA", "--load", "x"]) == ["--task", "LAMBADA", "--load", "x"]
    assert cli.with_task(["--load", "x", "--task", "MNLI"]) == ["--load", "x", "--task", "MNLI"]
    assert cli.with_task([]) == []


def test_evaluating_a_classifier_needs_no_flags_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("megatron.tasks.main.main", lambda words, _: started.append(words) or 0)
    cases = (
        (["QQP", "--load", "best"], ["--epochs", "0"]),
        (["--load", "best", "--task", "RACE"], ["--epochs", "0"]),
        (["QQP", "--epochs", "2", "--train-data", "a.tsv"], []),
        (["QQP", "--train-data", "a.tsv"], []),
        (["LAMBADA", "--load", "runs/a"], []),
        (["LAMBDA"], []),
        ([], []),
    )
    for words, more in cases:
        assert cli.evaluate(words) == 0
        assert started.pop() == [*cli.with_task(words), *more]


def test_a_table_of_commands_is_aligned() -> None:
    commands = {"go": cli.Command("move", "x"), "return": cli.Command("move back", "y")}
    assert cli.overview("megatron x", commands).splitlines() == [
        "usage: megatron x COMMAND [...]",
        "",
        "  go      move",
        "  return  move back",
        "`megatron x COMMAND --help` explains a command.",
    ]


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        ([], "usage: megatron COMMAND"),
        (["-h"], "usage: megatron COMMAND"),
        (["data"], "usage: megatron data COMMAND"),
        (["data", "--help"], "usage: megatron data COMMAND"),
        (["detoxify"], "usage: megatron detoxify COMMAND"),
        (["detoxify", "-h"], "usage: megatron detoxify COMMAND"),
        (["--version"], "megatron "),
        (["--version", "--help"], "megatron "),
    ],
)
def test_tables_and_the_version_are_printed(
    argv: list[str],
    begins: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    guarded: list[bool] = []
    monkeypatch.setattr(cli, "guard_imports", lambda: guarded.append(True))
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith(begins)
    assert guarded == [True]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["data", "shov"], "unknown command shov: did you mean show?"),
        (["data", "xyzzy"], "unknown command xyzzy: `megatron data --help` lists all commands"),
        (["detoxify", "selct"], "unknown command selct: did you mean select?"),
    ],
)
def test_an_unknown_step_is_reported(
    argv: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "guard_imports", lambda: None)
    assert cli.main(argv) == 9
    assert capsys.readouterr().err == f"error: {said}\n"


def test_the_words_after_the_program_s_name_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "guard_imports", lambda: None)
    for words in ((["megatron", "--version"], None), (["megatron"], ["--version"])):
        monkeypatch.setattr("sys.argv", words[0])
        assert cli.main(words[1]) == 0
        assert capsys.readouterr().out.startswith("megatron ")
