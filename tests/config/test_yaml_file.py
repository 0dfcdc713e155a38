"""Runs configured in YAML."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.config.run import Findings, RunConfig, RunOptions, flatten, narrow, with_values
from megatron.config.yaml_file import dump, layout_for, read
from megatron.errors import ConfigError
from tests.config.command import BASE, parse, problems


def _write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(path: Path) -> RunOptions:
    found = Findings()
    values = read(path, found)
    if found.problems:
        raise ConfigError(found.problems)
    return with_values(RunOptions(), values)


def test_a_resolved_run_comes_back_identical(tmp_path: Path) -> None:
    run = parse(
        "--bf16 --swiglu --rampup-batch-size 8 8 100 --global-batch-size 32 --lr 3e-5 --save x "
        "--save-interval 5 --train-samples 1000 --onnx-safe false",
        without=["--train-iters"],
    )
    path = _write(tmp_path, dump(run.config))
    assert flatten(load(Path(path))) == flatten(run.config)
    assert parse("--config", path, without=list(BASE)).config == run.config


@pytest.mark.parametrize("lr", [1e-5, 6.0e-05, 0.00015, 1 / 3, 1e22])
def test_numbers_come_back_to_the_bit(tmp_path: Path, lr: float) -> None:
    config = with_values(RunOptions(), {"schedule.lr": lr})
    assert load(Path(_write(tmp_path, dump(config)))) == config


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = _write(
        tmp_path, "training:\n  seed: 7\n  on_nonfinite: skip\nprecision:\n  bf16: true\n"
    )
    config = parse("--config", path, "--seed", "8", "--no-bf16").config
    assert config.training.seed == 8
    assert config.training.on_nonfinite == "skip"
    assert config.precision.bf16 is False


def test_a_flag_can_unset_what_the_file_sets(tmp_path: Path) -> None:
    text = "training:\n  train_iters: 5\ncheckpoint:\n  save: folder\nmodel:\n  onnx_safe: true\n"
    path = _write(tmp_path, text)
    words = f"--config {path} --train-iters none --train-samples 9 --save '' --onnx-safe none"
    config = parse(words, without=["--train-iters"]).config
    assert config.training.train_iters is None
    assert config.checkpoint.save is None
    assert config.model.onnx_safe is None


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    text = "schedule:\n  lr: 1e-4\n  min_lr: 0\ndata:\n  data_path: [0.3, one, 0.7, two]\nmodel:\n"
    config = load(Path(_write(tmp_path, text)))
    assert config.schedule.lr == 1e-4
    assert type(config.schedule.min_lr) is float
    assert config.data.data_path == ("0.3", "one", "0.7", "two")
    text = "data:\n  data_path: corpus\n"
    assert load(Path(_write(tmp_path, text))).data.data_path == ("corpus",)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(Path(_write(tmp_path, ""))) == RunOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle:\n  num_layers: 1", "unknown section modle: did you mean model?"),
        ("qqq: 1", "unknown section qqq: sections are model, training"),
        ("model:\n  num_layer: 1", "unknown key model.num_layer: did you mean num_layers?"),
        ("model:\n  num_layers: many", "model.num_layers: expected a whole number, got 'many'"),
        ("model:\n  num_layers: 1.5", "model.num_layers: expected a whole number, got 1.5"),
        ("model:\n  num_layers: true", "model.num_layers: expected a whole number, got True"),
        ("model:\n  num_layers: [1, 2]", "model.num_layers: expected a whole number, got [1, 2]"),
        ("model:\n  num_layers: 2.0", "model.num_layers: expected a whole number, got 2.0"),
        ("model:\n  num_layers: .nan", "model.num_layers: expected a whole number, got nan"),
        ("model:\n  num_layers: 18446744073709551616", "model.num_layers: "),
        ("model:\n  swiglu: 1", "model.swiglu: expected true or false, got 1"),
        ("model:\n  swiglu:", "model.swiglu: expected true or false, got nothing"),
        ("schedule:\n  lr: .inf", "schedule.lr: expected a finite number, got inf"),
        ("schedule:\n  lr: .nan", "schedule.lr: expected a finite number, got nan"),
        ("schedule:\n  lr: 1e999", "schedule.lr: expected a finite number, got '1e999'"),
        ("schedule:\n  lr: true", "schedule.lr: expected a finite number, got True"),
        ("data:\n  split: 1", "data.split: expected text, got 1: put it in quotes"),
        ("optimizer:\n  optimizer: adan", "expected one of adam, sgd, muon, got 'adan'"),
        ("model: 3", "model: expected `key: value` lines, got 3"),
        ("- a", "expected sections such as `model:`"),
        ("a: [", "not valid YAML"),
        (
            "model: {num_layers: 2}\nmodel: {hidden_size: 8}",
            "'model' appears twice: keep one of them",
        ),
        ("model: {num_layers: 2, num_layers: 4}", "'num_layers' appears twice: keep one of them"),
        ("layouts: {8: {}, 0x8: {}}", "8 appears twice: keep one of them"),
        ("layouts: {[8]: {}}", "found unhashable key"),
        ("model: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_mistake_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(Path(path))
    assert len(caught.value.problems) == 1
    assert path in caught.value.problems[0]
    assert message in caught.value.problems[0]
    assert caught.value.problems == problems("--config", path)


_LAUGHS = "a0: &a0 [x, y]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 15)
)
_MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: 1}}\n" for i in range(1, 60)
)
_LONG = "a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 10_000 + "]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 100_000, "more than 20 levels"),
        ("".join(" " * i + "a:\n" for i in range(1500)), "more than 20 levels"),
        (_LAUGHS, "too many values, or an endless structure"),
        (_MERGES, "too many values, or an endless structure"),
        (_LONG, "too many values, or an endless structure"),
        ("model: &a [*a]", "too many values, or an endless structure"),
        ("[" + "1," * 500_000 + "]", "too many values, or an endless structure"),
        ("model: 1" + ":59" * 300_000, "a number is too long"),
        ("0x" + "f" * 30_000 + ": 1", "a number is too long"),
        ("model: !!int '0b" + "1" * 30_000 + "'", "a number is too long"),
        ("# " + "x" * (3 << 20), "larger than 2 MiB"),
        ("model: !!int ''", "not valid YAML"),
        ("model: !!bool x", "not valid YAML"),
        ("model: !!timestamp x", "not valid YAML"),
        ("model: !!map x", "not valid YAML"),
        ("model: 2001-13-01", "not valid YAML"),
    ],
    ids=[
        *("brackets", "blocks", "laughs", "merges", "a long text", "itself", "many values"),
        *("base 60", "base 16", "base 2", "a long file"),
        *("no integer", "no truth value", "no time", "no mapping", "month 13"),
    ],
)
def test_a_hostile_file_is_refused_soon(tmp_path: Path, text: str, message: str) -> None:
    path = Path(_write(tmp_path, text))
    started = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        read(path, Findings())
    assert time.process_time() - started < 10
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("fits", "beyond", "message"),
    [
        ("[" * 19 + "]" * 19, "[" * 20 + "]" * 20, "more than 20 levels"),
        ("1" * 100, "1" * 101, "a number is too long"),
        ("x" * 101, f"0.{'1' * 99}", "a number is too long"),
    ],
    ids=["levels", "a whole number", "a fraction"],
)
def test_the_last_value_that_is_read_and_the_first_that_is_not(
    fits: str, beyond: str, message: str, tmp_path: Path
) -> None:
    found = Findings()
    read(Path(_write(tmp_path, f"a: {fits}")), found)
    assert "unknown section a" in found.problems[0]
    with pytest.raises(ConfigError, match=message):
        read(Path(_write(tmp_path, f"a: {beyond}")), Findings())


@pytest.mark.parametrize(
    ("counts", "world_size", "chosen"),
    [
        ((1, 2, 4), 4, 4),
        ((4, 2, 1), 6, 2),
        ((2, 3), 6, 3),
        ((1,), 7, 1),
        ((2, 8), 4, 2),
        ((2, 4), 3, None),
        ((8,), 4, None),
        ((), 1, None),
    ],
)
def test_the_largest_layout_that_divides_the_processes_is_used(
    counts: tuple[int, ...], world_size: int, chosen: int | None
) -> None:
    assert layout_for(counts, world_size) == chosen


@pytest.mark.parametrize("count", ["0", "-1", "true", "two", "1.0"])
def test_each_layout_has_a_number_of_processes(count: str, tmp_path: Path) -> None:
    path = Path(_write(tmp_path, f"layouts: {{{count}: {{}}, 2: {{parallel: {{}}}}, 4: null}}\n"))
    found = Findings()
    assert read(path, found, world_size=2) == {}
    value = {"true": "True", "two": "'two'"}.get(count, count)
    assert found.problems == [f"{path}: layouts: expected a number of processes, got {value}"]
    assert found.notices == []


def test_a_missing_file(tmp_path: Path) -> None:
    """Flags that the file might have set are not reported as missing."""
    (line,) = problems("--config", str(tmp_path / "absent.yaml"), without=["--num-layers"])
    assert line.startswith(f"--config {tmp_path / 'absent.yaml'}: cannot be read")


def test_mistakes_in_file_and_flags_come_together(tmp_path: Path) -> None:
    path = _write(tmp_path, "model:\n  num_layers: many\nschedule:\n  lr: x\n")
    lines = problems("--config", path, "--fp16", "--bf16", without=["--num-layers", "--lr"])
    assert len(lines) == 3


def test_what_follows_from_a_changed_flag_follows(tmp_path: Path) -> None:
    path = _write(tmp_path, dump(parse("--ffn-hidden-size", "100").config))
    config = parse("--config", path, "--hidden-size", "128", "--weight-decay", "0.5").config
    assert config.model.kv_channels == 32
    assert config.model.ffn_hidden_size == 100
    assert config.optimizer.end_weight_decay == 0.5
    assert config.training.global_batch_size == 4


def test_the_global_batch_of_a_saved_run_is_kept_on_more_processes(tmp_path: Path) -> None:
    path = _write(tmp_path, dump(parse("--global-batch-size", "16").config))
    assert parse("--config", path, world_size=4).config.training.global_batch_size == 16


def test_values_by_path_give_the_run_back() -> None:
    new = parse("--seed", "5", "--swiglu").config
    assert narrow(with_values(RunOptions(), flatten(new)), RunConfig) == new
