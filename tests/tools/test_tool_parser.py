"""What the tools' command lines accept, and how they report mistakes."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError
from megatron.tools import demo, plot_loss, preprocess_data
from tests.repository import entry_points, name
from tools import (
    benchmark_corpora,
    benchmark_generation,
    benchmark_loader,
    benchmark_preprocess,
    benchmark_retro,
    benchmark_retro_training,
    benchmark_server,
)

_PARSERS = json.loads(Path(__file__).with_name("parsers.json").read_text(encoding="utf-8"))


def _parser() -> ToolParser:
    parser = ToolParser("tool.py", "A tool.", {"--gone": "use --text"})
    parser.add_argument("place")
    parser.add_argument("--text")
    parser.add_argument("--number", type=float)
    return parser


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        _parser().read(words)
    assert left.value.code == ConfigError.exit_code
    return capsys.readouterr().err


def test_mistakes_are_reported_all_at_once_with_the_code_of_a_config_error(capsys):
    told = _refusal(capsys, "--gone", "1", "--tex", "a")
    assert told == "error: --gone: use --text\nerror: unknown flag --tex: did you mean --text?\n"
    assert "required: place" in _refusal(capsys, "--text", "a")
    with pytest.raises(SystemExit) as left:
        _parser().read(["--tex", "--help"])
    assert left.value.code == 0


@pytest.mark.parametrize("text", ["-- said he", "--text is a flag", "a --number", "-- a=b"])
def test_a_text_with_a_space_is_no_flag(text):
    assert _parser().read(["here", "--text", text]).text == text


def test_values_that_look_like_flags():
    read = _parser().read
    assert read(["--number", "-1.5", "here"]).number == -1.5
    assert read(["--text=--gone", "here"]).text == "--gone"
    assert read(["--text", "a", "--", "--here"]).place == "--here"


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["--append_eod"], ["unknown flag --append_eod: did you mean --append-eod?"]),
        (["--json-kyes", "a"], ["unknown flag --json-kyes: did you mean --json-keys?"]),
        (
            ["--imput", "x", "--log_interval=5"],
            [
                "unknown flag --imput: did you mean --input?",
                "unknown flag --log_interval: did you mean --log-interval?",
            ],
        ),
        (
            ["--find-optimal-num-workers"],
            ["--find-optimal-num-workers: omit it and --workers: one process per core"],
        ),
        (["--zzz"], ["unknown flag --zzz: --help lists all flags"]),
        ([], ["the following arguments are required: --input, --output-prefix"]),
        (["--workers", "x"], ["argument --workers: invalid int value: 'x'"]),
    ],
)
def test_a_misspelled_flag_is_named_before_those_that_are_missing(capsys, flags, lines):
    with pytest.raises(SystemExit) as left:
        preprocess_data.main(flags)
    assert left.value.code == 9
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in lines]


def test_every_tool_reads_its_command_line_so():
    """Alternatively, `megatron.config` reads it, as for the training scripts."""
    tools = [file for file in entry_points() if "tools" in file.parts]
    assert not [name(file) for file in tools if "argparse.ArgumentParser(" in file.read_text()]
    for tool in (plot_loss, demo):
        with pytest.raises(SystemExit) as left:
            tool.main(["--titel", "x"])
        assert left.value.code == ConfigError.exit_code


def test_every_number_below_its_minimum_is_reported():
    parser = _parser()
    parser.add_argument("--batch-size", type=int, nargs="+", default=[8])
    given = parser.read(["x", "--number", "nan", "--batch-size", "1", "0"])
    assert minimum_problems(given, number=0.5, batch_size=1, text=1) == [
        "--number nan: give at least 0.5",
        "--batch-size 1 0: give at least 1",
    ]
    assert minimum_problems(parser.read(["x", "--number", "0.5"]), number=0.5, batch_size=8) == []


def _described(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Describe a tool's own flags: those of the configuration have no default here."""
    found = {}
    for action in parser._actions:
        if action.default == argparse.SUPPRESS:
            continue
        kind = getattr(action.type, "__name__", "str") if action.nargs != 0 else "switch"
        parts = [kind, *([f"nargs {action.nargs}"] if action.nargs else [])]
        if action.choices is not None:
            parts.append("of " + ", ".join(map(str, action.choices)))
        required = action.required and "required"
        default = action.default
        default = default.as_posix() if isinstance(default, Path) else default
        found["/".join(action.option_strings) or action.dest] = "; ".join(
            [*parts, required or f"default {default!r}"]
        )
    return found


@pytest.mark.parametrize("module", list(_PARSERS))
def test_flags_and_defaults_of_tools_stay_the_same(module):
    """Scripts rely on them. After a deliberate change, edit parsers.json."""
    parser = importlib.import_module(module).build_parser()
    assert _described(parser) == _PARSERS[module]


_GPT2 = ["--vocab-file", "v", "--merge-file", "m"]


@pytest.mark.parametrize(
    ("run", "parser", "args", "problem"),
    [
        (
            benchmark_server.run,
            benchmark_server._parser,
            ["localhost:1", "--prompt-words", "0"],
            "--prompt-words 0: give at least 1",
        ),
        (
            benchmark_server.run,
            benchmark_server._parser,
            ["localhost:1", "--clients", "0"],
            "--clients 0: give at least 1",
        ),
        (
            benchmark_generation.run,
            benchmark_generation._parser,
            ["--new", "0"],
            "--new 0: give at least 1",
        ),
        (
            benchmark_loader.run,
            benchmark_loader.build_parser,
            ["--data-path", "x", *_GPT2, "--workers", "-1"],
            "--workers -1: give at least 0",
        ),
        (
            benchmark_preprocess.run,
            benchmark_preprocess.build_parser,
            [*_GPT2, "--repeat", "0"],
            "--repeat 0: give at least 1",
        ),
        (
            benchmark_retro.run,
            benchmark_retro.build_parser,
            ["--nprobe", "16", "0"],
            "--nprobe 16 0: give at least 1",
        ),
        (
            benchmark_retro_training.run,
            benchmark_retro_training.build_parser,
            ["--iterations", "0"],
            "--iterations 0: give at least 1",
        ),
        (
            benchmark_corpora.run,
            benchmark_corpora.build_parser,
            ["--repeats", "0"],
            "--repeats 0: give at least 1",
        ),
    ],
)
def test_benchmarks_refuse_numbers_with_which_they_measure_nothing(run, parser, args, problem):
    with pytest.raises(ConfigError, match=f"^{problem}$"):
        run(parser().read(args))
