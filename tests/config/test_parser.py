"""The command line as a whole: types, switches, mistakes, help."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from typing import Any, NoReturn

import pytest

from megatron.config.arguments import ToolParser, add_flags, from_values, split, title_of
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import TokenizerConfig
from megatron.config.fields import fields_of, flag
from megatron.config.parser import Program, asks_for_mpi, parse_config
from megatron.config.run import RunOptions, sections
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import SAVED_MODEL_READS
from tests.config.command import BASE, command, parse, problems
from tests.repository import ROOT


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True),
        (["--no-bias-gelu-fusion"], False),
        (["--bias-gelu-fusion"], True),
    ],
)
def test_a_switch_that_is_on_by_default(words: list[str], expected: bool) -> None:
    assert parse(*words).config.model.bias_gelu_fusion is expected


@pytest.mark.parametrize(
    ("words", "expected"), [([], False), (["--swiglu"], True), (["--no-swiglu"], False)]
)
def test_a_switch_that_is_off_by_default(words: list[str], expected: bool) -> None:
    assert parse(*words).config.model.swiglu is expected


@pytest.mark.parametrize(
    ("word", "expected"), [("true", True), ("False", False), ("1", True), ("off", False)]
)
def test_a_bool_with_a_value_reads_the_word(word: str, expected: bool) -> None:
    assert parse("--onnx-safe", word).config.model.onnx_safe is expected


def test_values_may_be_joined_negative_or_repeated() -> None:
    config = parse("--lr=0.1", "--min-lr", "0", "--seed", "1", "--seed", "2").config
    assert config.schedule.lr == 0.1
    assert config.training.seed == 2
    assert problems("--min-lr", "-1e-5") == ["--min-lr -1e-05: must be at least 0"]


def test_lists() -> None:
    config = parse("--profile-ranks", "0", "1", "--profile", world_size=2).config
    assert config.profiling.profile_ranks == (0, 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--seed abc", "--seed abc: expected a whole number, got 'abc'"),
        ("--seed 1.5", "--seed 1.5: expected a whole number, got '1.5'"),
        ("--clip-grad nan", "--clip-grad nan: expected a finite number, got 'nan'"),
        ("--onnx-safe perhaps", "--onnx-safe perhaps: expected true or false, got 'perhaps'"),
        ("--save", "--save: expected one argument"),
        ("--fp16 yes", "--fp16 yes: takes no value"),
        (
            "--optimizer adan",
            "--optimizer adan: expected one of adam, sgd, muon, got 'adan': did you mean adam?",
        ),
        ("--seed 1 2", "'2' does not belong to a flag (--seed takes one value): drop it"),
        ("--nm-workers 4", "unknown flag --nm-workers: did you mean --num-workers?"),
        ("--batch-sise 4", "unknown flag --batch-sise: did you mean --batch-size?"),
        ("--qqq", "unknown flag --qqq: --help-all lists all flags"),
        ("--num-work 1", "unknown flag --num-work: did you mean --num-workers?"),
        (
            "--encoder-seq-length 64",
            "--seq-length 128 and --encoder-seq-length 64 contradict each other: use one of them",
        ),
        ("--fp16 --no-fp16", "--fp16 and --no-fp16 contradict each other: use one of them"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(words: str, line: str) -> None:
    assert problems(words) == [line]


def test_a_stray_word_hides_no_flag_behind_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(["stray", *command()], world_size=1)
    assert caught.value.problems == ["'stray' does not belong to a flag: drop it"]


def test_all_mistakes_are_reported_at_once() -> None:
    lines = problems(
        "--hiden-size 64 --lr abc --seed x --mtp-num-layers 2 --epochs 3 --fp16 --bf16",
        without=["--hidden-size", "--lr"],
    )
    assert [re.findall(r"--[\w-]+", line)[0] for line in lines] == [
        "--epochs",
        "--hiden-size",
        "--lr",
        "--seed",
        "--mtp-num-layers",
        "--fp16",
    ]


def test_a_value_that_cannot_be_read_is_not_reported_missing_too() -> None:
    assert problems("--lr", "abc", without=["--lr"]) == [
        "--lr abc: expected a finite number, got 'abc'"
    ]


def test_help_is_grouped_and_has_units_defaults_and_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(["--help-all"], world_size=1)
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert left.value.code == 0
    for section in sections().values():
        assert f"\n{title_of(section)}:\n" in text
        for field in fields_of(section):
            if not field.names:  # only in the YAML file
                assert field.name not in text
                continue
            assert field.names[0] in text
            assert field.display_name in text or field.default is False
    assert "Sequence length. (required; tokens)" in words
    assert "--optimizer {adam,sgd,muon}" in words
    assert "--vision-pretraining" not in text
    assert "unset" not in text


def test_help_shows_the_flags_that_are_used_most(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(["--help"], world_size=1, program=Program(extra=[_TaskConfig]))
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert len(text.splitlines()) < 80
    assert "unset" not in text
    assert "--help-all lists all of them" in text
    for line in (
        "-h, --help  Show the most common flags.",
        "--help-all  Show all flags.",
        "--config FILE  YAML file with flag values.",
    ):
        assert re.search(rf"^  {re.sub('  +', ' +', line)}$", text, re.MULTILINE)
    assert "--adam-eps" not in text
    for name in re.findall(r"(--[\w-]+) is required", "\n".join(problems(without=list(BASE)))):
        # Python 3.13 writes a comma after the first of several names.
        assert re.search(rf"{name}[ ,].*?\(required", text, re.DOTALL)
    assert "--keep-last" in text  # the program's own


def test_help_of_a_program_with_a_trained_model(capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(find_start=lambda given: RunOptions())
    with pytest.raises(SystemExit):
        parse_config(["-h"], world_size=1, program=program)
    text = capsys.readouterr().out
    assert "--load" in text
    assert "required" not in text
    assert "--lr " not in text


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from megatron.config import parse_config\n"
        "try:\n"
        "    parse_config(['--help'], world_size=1)\n"
        "except SystemExit:\n"
        "    print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all"])
@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py"])
def test_a_training_script_answers_help_before_it_imports_torch(script: str, word: str) -> None:
    words = [sys.executable, "-X", "importtime", script, "--lr", "1", word]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"usage: {script} ")
    imported = re.findall(r"\| +([\w.]+)$", run.stderr, re.MULTILINE)
    assert "megatron.config.parser" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    "script", ["pretrain_ict.py", "pretrain_retro.py", "tools/retro/main.py", "tasks/main.py"]
)
def test_the_help_with_all_flags_names_each_once(script: str) -> None:
    words = [sys.executable, script, "--help-all"]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    flags = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert len(flags) == len(set(flags)) > 100


def test_flags_of_one_section_for_a_tool() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, TokenizerConfig)
    given = parser.parse_args(["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v.json"])
    assert from_values(TokenizerConfig, vars(given)) == TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file="v.json"
    )


def test_a_tool_says_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, TokenizerConfig)
    with pytest.raises(SystemExit):
        parser.parse_args(["--vocab-size", "many"])
    assert "--vocab-size: expected a whole number, got 'many'" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TaskConfig:
    """Task.

    Attributes:
        task: What to do.
        keep_last: Keep the last batch.
    """

    task: str | None = None
    keep_last: bool = False


def test_a_program_may_add_flags() -> None:
    parsed = parse_config(
        command("--task", "lambada"), world_size=1, program=Program(extra=[_TaskConfig])
    )
    assert parsed.extra == (_TaskConfig(task="lambada"),)


def test_mpi_is_seen_before_the_world_is_known(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("parallel:\n  use_mpi: true\n")
    assert asks_for_mpi(["--lr", "1", "--use-mpi"])
    assert asks_for_mpi(["--config", str(path)])
    assert not asks_for_mpi(["--config", str(path), "--no-use-mpi"])
    assert not asks_for_mpi(["--config", str(tmp_path / "absent.yaml")])
    assert not asks_for_mpi(command())


def test_shape_from_a_checkpoint_wins_over_flags() -> None:
    def shape(options: CheckpointConfig) -> dict[str, int]:
        assert (options.load, options.ckpt_step) == ("old", 7)
        return {"model.num_layers": 2, "model.hidden_size": 32, "data.seq_length": 64}

    words = command("--load old --ckpt-step 7 --use-checkpoint-args", without=["--seq-length"])
    parsed = parse_config(words, world_size=1, read_checkpoint=shape)
    assert parsed.config.model.num_layers == 2
    assert parsed.config.model.kv_channels == 8
    assert parsed.config.data.seq_length == 64
    overruled, others = parsed.notices[:2], parsed.notices[2:]
    assert overruled == (
        "--num-layers 4 is overridden: --use-checkpoint-args takes --num-layers 2 from old",
        "--hidden-size 64 is overridden: --use-checkpoint-args takes --hidden-size 32 from old",
    )
    assert others == ("--use-checkpoint-args: from the checkpoint: --seq-length 64",)


def test_a_checkpoint_says_what_it_overrules_of_flags_and_of_the_file(tmp_path) -> None:
    def shape(options: CheckpointConfig) -> dict[str, object]:
        return {
            "model.num_layers": 4,
            "model.normalization": "RMSNorm",
            "model.swiglu": False,
            "model.add_bias_linear": True,
            "model.rotary_base": 5e5,
        }

    path = tmp_path / "run.yaml"
    path.write_text("model:\n  add_bias_linear: false\n  rotary_base: 20000\n")
    words = command(f"--config {path} --load old --use-checkpoint-args --swiglu")
    parsed = parse_config(words, world_size=1, read_checkpoint=shape)
    model = parsed.config.model
    assert (model.swiglu, model.add_bias_linear, model.rotary_base) == (False, True, 5e5)
    taken = "is overridden: --use-checkpoint-args takes"
    of_file = f"of --config {path} {taken}"
    told = [line for line in parsed.notices if "--use-checkpoint-args" in line]
    assert sorted(told) == sorted(
        [
            f"--swiglu {taken} --no-swiglu from old",
            f"--disable-bias-linear {of_file} --add-bias-linear from old",
            f"--rotary-base 20000 {of_file} --rotary-base 500000 from old",
            "--use-checkpoint-args: from the checkpoint: --normalization RMSNorm",
        ]
    )


@pytest.mark.parametrize("in_file", [False, True])
def test_finetuning_keeps_the_requested_frequencies_and_only_those(in_file: bool, tmp_path) -> None:
    shape = {"model.rotary_base": 5e5, "model.num_layers": 2, "model.rotary_percent": 0.5}
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{rotary_base: {20000 if in_file else 10000}}}\n")
    words = f"--config {path} --position-embedding-type rope --load x --use-checkpoint-args"
    words += "" if in_file else " --rotary-base 20000"

    def model(more: str) -> tuple[float, int, float]:
        run = parse_config(command(words, more), world_size=1, read_checkpoint=lambda _: shape)
        found = run.config.model
        return found.rotary_base, found.num_layers, found.rotary_percent

    assert model("--finetune") == (20000, 2, 0.5)
    assert model("") == (5e5, 2, 0.5)


def test_flags_of_another_task_and_of_megatron_are_told_apart() -> None:
    """The first is also a flag of Megatron-LM, but means something else to this program."""
    program = Program(flags_of_other_tasks={"--epochs": "GLUE", "--guess-file": "MSDP"})
    with pytest.raises(ConfigError) as caught:
        parse_config(
            command("--guess-file x --epochs 3 --kd --seed 5"), world_size=1, program=program
        )
    assert caught.value.problems == [
        "--guess-file belongs to MSDP: drop it",
        "--epochs belongs to GLUE: drop it",
        "--kd: use --teacher-load DIR, which turns distillation on",
    ]


def test_flags_that_a_program_does_not_read_are_named_as_they_were_given() -> None:
    sizes = {"training.micro_batch_size", "data.seq_length"}
    program = Program(rules=(), reads=lambda given: SAVED_MODEL_READS | sizes)
    words = command("--no-gradient-accumulation-fusion --use-distributed-optimizer --seed 7")
    assert parse_config(words, world_size=1, program=program).notices == (
        "these flags have no effect here: --train-iters, --seed, "
        "--no-gradient-accumulation-fusion, --lr, --use-distributed-optimizer, --mock-data",
    )


def test_a_misspelled_flag_is_reported_beside_those_that_are_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(["--hidden-sise", "64"], world_size=1)
    first, *others = caught.value.problems
    assert first == "unknown flag --hidden-sise: did you mean --hidden-size?"
    assert "--num-layers is required: give it a value" in others
    assert not [line for line in others if "--hidden-size" in line]


@pytest.mark.parametrize("asked", ["find_start", "read_checkpoint"])
def test_a_misspelled_flag_is_reported_beside_a_checkpoint_that_is_missing(asked: str) -> None:
    def refuse(*_: object) -> NoReturn:
        raise CheckpointError("--load nowhere: there is no checkpoint")

    options: dict[str, Any] = {
        "find_start": {"program": Program(find_start=refuse)},
        "read_checkpoint": {"read_checkpoint": refuse},
    }[asked]
    words = command("--load nowhere --use-checkpoint-args --sead 5")
    with pytest.raises(ConfigError) as caught:
        parse_config(words, world_size=1, **options)
    assert caught.value.problems == [
        "unknown flag --sead: did you mean --seed?",
        "--load nowhere: there is no checkpoint",
    ]
    words.remove("--sead")
    words.remove("5")
    with pytest.raises(CheckpointError):
        parse_config(words, world_size=1, **options)


def test_the_caller_gets_every_problem_in_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config([], world_size=1)
    assert len(caught.value.problems) == len(set(caught.value.problems)) > 5
    assert str(caught.value) == "\n".join(caught.value.problems)


def _tool(**options: Any) -> ToolParser:
    parser = ToolParser("tool.py", "Do something.", {"--workers": "it uses all cores"}, **options)
    parser.add_argument("--input", required=True)
    parser.add_argument("rest", nargs="*")
    parser.add_argument_group("more").add_argument("--jobs", type=int, default=3, help="Jobs.")
    return parser


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--inptu", "x"], "error: unknown flag --inptu: did you mean --input?\n"),
        (["--job", "x"], "error: unknown flag --job: did you mean --jobs?\n"),
        (["--xyzzy"], "error: unknown flag --xyzzy: --help lists all flags\n"),
        (["--workers", "2"], "error: --workers: it uses all cores\n"),
        (["--input", "x", "--xyzzy"], "error: unknown flag --xyzzy: --help lists all flags\n"),
        (
            ["--workers", "2", "--xyzzy"],
            "error: --workers: it uses all cores\n"
            "error: unknown flag --xyzzy: --help lists all flags\n",
        ),
        ([], "error: the following arguments are required: --input\n"),
    ],
)
def test_mistakes_in_a_tool_s_flags(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="9"):
        _tool().read(argv)
    assert capsys.readouterr().err == said


def test_words_of_a_tool_that_are_no_flags() -> None:
    read = _tool().read(["--input", "--a b", "x", "--", "--xyzzy"])
    assert (read.input, read.rest, read.jobs) == ("--a b", ["x", "--xyzzy"], 3)


@pytest.mark.parametrize(
    ("options", "shows"),
    [({}, False), ({"shows_defaults": False}, False), ({"shows_defaults": True}, True)],
)
def test_help_of_a_tool_wins_over_unknown_flags(
    options: dict[str, bool], shows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        _tool(**options).read(["--xyzzy", "-h"])
    assert ("(default: 3)" in capsys.readouterr().out) == shows


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("", []),
        ("a b --c", [("", ("a", "b")), ("--c", ())]),
        ("--a=1=2 3 --b= -4", [("--a", ("1=2", "3")), ("--b", ("", "-4"))]),
        ("--a 1 -h 2", [("--a", ("1",)), ("-h", ("2",))]),
    ],
)
def test_words_follow_their_flags(words: str, flags: list[tuple[str, tuple[str, ...]]]) -> None:
    assert [(flag.name, flag.values) for flag in split(words.split())] == flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HelpConfig:
    """Options of a tool.

    Attributes:
        count: Number of things.
        rate: Rate, 50% for example.
        names: Names.
        sizes: Sizes.
        fast: Be fast.
        slow: Be slow.
        path: A file.
    """

    count: int = flag(3, unit="things")
    rate: float = 0.5
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    fast: bool = True
    slow: bool = False
    path: str | None = None


def test_the_help_of_a_tool_s_fields() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, _HelpConfig)
    text = " ".join(parser.format_help().split())
    assert "Options of a tool:" in text
    for field in (
        "--count N Number of things. (things; default: 3)",
        "--rate X Rate, 50% for example. (default: 0.5)",
        "--names [TEXT ...] Names. --sizes",
        "--sizes [N ...] Sizes. (default: 1 2)",
        "--fast, --no-fast Be fast. (default: on)",
        "--slow Be slow. (default: off)",
        "--path TEXT A file.",
    ):
        assert field in text
    assert text.endswith("A file.")


def test_the_flags_of_a_tool_s_fields_are_read() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, _HelpConfig)
    read = parser.parse_args("--count 4 --no-fast --slow --sizes 7 8".split())
    assert (read.count, read.fast, read.slow, read.sizes) == (4, False, True, [7, 8])
    assert parser.parse_args(["--fast"]).fast
