"""Values that sections compute from their fields, and texts that they parse."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron.config.adapters import is_adapter_parameter
from megatron.config.attention import LONGROPE_FIELDS, YARN_FIELDS
from megatron.config.fields import divisors, near_multiples
from megatron.config.generation import adapter_problems
from megatron.config.model import ModelConfig, ModelOptions, is_irrelevant
from megatron.config.parser import Program, parse_config
from megatron.config.retro import retro_layers
from megatron.config.rules_data import tokenizer_files
from megatron.config.stages import whole_model
from megatron.config.training import EvaluationConfig, read_batch_schedule
from megatron.errors import ConfigError
from tests.config.command import command, parse, problems
from tests.config.test_deepspeed import read, wrong


def _irrelevant(words: str = "") -> set[str]:
    model = parse(words).config.model
    return {field.name for field in fields(ModelConfig) if is_irrelevant(model, field.name)}


@pytest.mark.parametrize(
    ("words", "more", "fewer"),
    [
        ("--position-embedding-type alibi", "", "scale_alibi"),
        ("--normalization RMSNorm", "layernorm_bias", ""),
        ("--disable-bias-linear", "add_bias_attention", ""),
        ("--qk-layernorm", "", "qk_layernorm_scope"),
        ("--parallel-residual", "", "shared_parallel_norm"),
        ("--num-experts 4 --moe-router-score-function sigmoid", "moe_router_pre_softmax", ""),
    ],
)
def test_fields_that_a_flag_makes_relevant(words: str, more: str, fewer: str) -> None:
    plain, changed = _irrelevant(), _irrelevant(words)
    assert changed - plain == set(more.split())
    assert plain - changed == set(fewer.split())


def test_fields_of_rotary_embeddings() -> None:
    rotary = "--position-embedding-type rope"
    plain, rope = _irrelevant(), _irrelevant(rotary)
    assert {*LONGROPE_FIELDS, *YARN_FIELDS} - {"rope_type"} <= rope
    assert plain - rope == {
        *("rotary_percent", "rotary_base", "rotary_seq_len_interpolation_factor"),
        *("no_rope_freq", "rope_type"),
    }
    yarn = f"{rotary} --rope-type yarn --yarn-original-max-position-embeddings 64"
    scaled = rope - _irrelevant(yarn)
    assert "rotary_scaling_factor" in scaled
    assert not any(name.startswith("longrope_") for name in scaled)
    assert all("yarn" in name or "mscale" in name for name in scaled - {"rotary_scaling_factor"})
    unrotated = f"{rotary} --no-rope-freq 2"
    scaled = f"{unrotated} --attention-temperature-scale 0.1"
    assert _irrelevant(unrotated) - _irrelevant(scaled) == {"attention_temperature_floor"}
    windowed = f"{rotary} --window-size 8,0"
    assert rope - _irrelevant(windowed) == {"window_rotary_base"}


def test_the_factors_of_mup() -> None:
    base = "--use-mup --mup-base-hidden-size 32"
    model = parse(base).config.model
    assert model.logit_factor == 0.5
    assert model.attention_scale == 1 / 16**model.mup_attn_scale_power
    assert parse(base, "--mup-base-head-dim 4").config.model.attention_scale == pytest.approx(
        2 / 16**model.mup_attn_scale_power
    )
    assert parse(base, "--mup-output-mult 3").config.model.logit_factor == 3
    assert parse(base, "--logit-scale 4").config.model.logit_factor == 2
    assert parse("--logit-scale 4").config.model.logit_factor == 4
    assert parse().config.model.logit_factor is None
    assert parse("--softmax-scale 0.5").config.model.attention_scale == 0.5


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "gelu_tanh"),
        ("--no-bias-gelu-fusion", "gelu"),
        ("--disable-bias-linear", "gelu"),
        ("--onnx-safe true", "gelu"),
        ("--swiglu", "swiglu"),
        ("--squared-relu", "squared_relu"),
    ],
)
def test_activations(words: str, name: str) -> None:
    assert parse(words).config.model.activation == name


def test_batch_schedules() -> None:
    read_ = read_batch_schedule
    assert read_("0:4 1.5K:8,2m:16 3B:32 4T:64") == (
        (0, 4), (1500, 8), (2 * 10**6, 16), (3 * 10**9, 32), (4 * 10**12, 64)
    )  # fmt: skip
    for text in ("1:4", "0:4 8:8 8:16", "0:4 8:8 7:16", ""):
        with pytest.raises(ValueError, match="must grow, and begin with 0"):
            read_(text)
    for text in ("0:0", "0", "0:4:8", "1X:4"):
        with pytest.raises(ValueError, match=f"^{text}: expected TOKENS:BATCH"):
            read_(text)


@pytest.mark.parametrize("start", [None, 0, 1, 9, 10, 11, 25, 100])
def test_evaluations_are_counted_as_they_are_due(start: int | None) -> None:
    evaluation = EvaluationConfig(eval_interval=10, start_eval_at_iter=start)
    for length in (0, 9, 10, 11, 29, 30, 45):
        due = [number for number in range(1, length + 1) if evaluation.is_due(number)]
        assert evaluation.count(length) == len(due)


def test_numbers_that_messages_suggest() -> None:
    assert [divisors(number) for number in (1, 2, 6, 7)] == [
        "1",
        "1 or 2",
        "1, 2, 3 or 6",
        "1 or 7",
    ]
    assert divisors(2048).endswith(", 512 or 1024")
    assert [near_multiples(number, 32) for number in (48, 31, 64)] == ["32 or 64", "32", "64 or 96"]


def test_names_of_adapters() -> None:
    assert adapter_problems(None) == adapter_problems(["a=x", "b=x"]) == []
    assert adapter_problems([]) == []
    assert adapter_problems(()) == ["--serve-adapter has no value: give NAME=FOLDER, or drop it"]
    assert adapter_problems(["a=x", "a=y"]) == [
        "--serve-adapter a=y: a is given twice: choose another name"
    ]
    for value in ("a", "=x", "a=", " a=x", "a\n=x"):
        (line,) = adapter_problems([value])
        assert line.endswith("give NAME=FOLDER, for example sql=runs/sql/checkpoints")
    assert is_adapter_parameter("layers.0.adapter.a")
    assert not is_adapter_parameter("layers.0.weight")


def test_a_whole_model_begins_and_ends() -> None:
    part = whole_model(3)
    assert (part.layers, part.embedding, part.head) == (range(3), True, True)


@pytest.mark.parametrize("power", [0, 1, 127])
def test_powers_of_deepspeeds_loss_scale(power: int, tmp_path: Path) -> None:
    content = {"fp16": {"enabled": True, "initial_scale_power": power}}
    assert read(tmp_path, content).config.precision.initial_loss_scale == 2.0**power


@pytest.mark.parametrize("power", [-1, 128, 2.5])
def test_powers_that_are_no_loss_scale(power: Any, tmp_path: Path) -> None:
    (line,) = wrong(tmp_path, {"fp16": {"enabled": True, "initial_scale_power": power}})
    assert f"2 to the power of {power}" in line


def test_deepspeeds_key_that_is_given_twice(tmp_path: Path) -> None:
    (line,) = wrong(tmp_path, '\n{"steps_per_print": 1,\n"steps_per_print": 2}')
    assert "steps_per_print appears on lines 2 and 3: remove one" in line


@pytest.mark.parametrize(
    ("content", "given", "level"),
    [
        ({"activation_checkpointing": {"profile": True}}, "", 2),
        ({"activation_checkpointing": {"profile": True}}, "--timing-log-level 2", 2),
        ({"wall_clock_breakdown": True}, "", 1),
        ({"wall_clock_breakdown": True}, "--timing-log-level 1", 1),
        ({"wall_clock_breakdown": True}, "--timing-log-level 2", 2),
        ({}, "", 0),
    ],
)
def test_deepspeeds_timers(content: Any, given: str, level: int, tmp_path: Path) -> None:
    assert read(tmp_path, content, given).config.logging.timing_log_level == level


def test_the_rate_of_deepspeeds_decay(tmp_path: Path) -> None:
    content = {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 4},
        }
    }
    assert read(tmp_path, content, without=["--lr"]).config.schedule.lr == 1e-3


def test_a_programs_own_mistakes_are_reported_with_the_others() -> None:
    program = Program(check_extra=lambda *extra: ["a mistake", "another"])
    with pytest.raises(ConfigError) as caught:
        parse_config(command("--lr 0"), world_size=1, program=program)
    assert caught.value.problems[-2:] == ["a mistake", "another"]


def test_a_mistake_in_a_translated_flag_names_the_flag_given() -> None:
    assert problems("--batch-size 0", without=["--micro-batch-size"]) == [
        "--micro-batch-size 0: must be at least 1 (--batch-size 0 is read as --micro-batch-size)"
    ]


def _adopted(kind: str, length: int, words: str) -> tuple[int, tuple[str, ...]]:
    shape = {"model.max_position_embeddings": 128, "model.position_embedding_type": kind}
    run = parse_config(
        command("--load x --use-checkpoint-args", words, f"--seq-length {length}"),
        world_size=1,
        read_checkpoint=lambda _: shape,
    )
    notices = tuple(line for line in run.notices if "longer than" in line)
    return run.config.model.max_position_embeddings, notices


def test_a_longer_sequence_than_the_checkpoints() -> None:
    assert _adopted("rope", 128, "") == (128, ())
    assert _adopted("rope", 64, "") == (128, ())
    longer = (
        "--max-position-embeddings 256: longer than the checkpoint's 128; positions of "
        "--position-embedding-type rope have no weights"
    )
    assert _adopted("rope", 256, "") == (256, (longer,))
    with pytest.raises(ConfigError, match="--max-position-embeddings 128 is less than"):
        _adopted("learned_absolute", 256, "")


@pytest.mark.parametrize(
    ("pattern", "attention", "mlps", "mamba"),
    [
        (None, True, True, False),
        ("M*M*", True, False, True),
        ("M-M-", False, True, True),
        ("MMMM", False, False, True),
        ("*-*-", True, True, False),
    ],
)
def test_the_kinds_of_layers(pattern: str | None, attention: bool, mlps: bool, mamba: bool) -> None:
    model = ModelOptions(hybrid_layer_pattern=pattern)
    assert (model.has_attention, model.has_mlps, model.has_mamba) == (attention, mlps, mamba)


def test_layers_that_attend_to_neighbors() -> None:
    assert list(retro_layers(8)) == [5]
    assert list(retro_layers(12)) == [5, 8, 11]
    assert list(retro_layers(15)) == [5, 8, 11, 14]
    assert list(retro_layers(16)) == [8, 11, 14]


def test_files_of_tokenizers() -> None:
    assert tokenizer_files("TikTokenizer") == ("tokenizer_model", "vocab_size")
    assert tokenizer_files("Llama2Tokenizer") == ("tokenizer_model",)
    assert tokenizer_files(None) == ()


def test_no_pipeline_contradicts_stages() -> None:
    assert parse("--no-pipeline-parallel --pipeline-model-parallel-size 1").config
    (line,) = problems("--no-pipeline-parallel --pipeline-model-parallel-size 2", world_size=2)
    assert line == (
        "--pipeline-model-parallel-size 2 and --no-pipeline-parallel contradict each other: drop "
        "one of them"
    )


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({}, ["retro_gpt_chunk_length", "retro_gpt_seq_length"]),
        ({"retro_gpt_chunk_length": 0}, ["retro_gpt_chunk_length"]),
        ({"retro_gpt_chunk_length": "8"}, ["retro_gpt_chunk_length"]),
        ({"retro_gpt_data_path": "text"}, ["retro_gpt_data_path"]),
    ],
)
def test_settings_of_a_retro_folder(content: dict[str, Any], names: list[str], tmp_path) -> None:
    path = tmp_path / "args.json"
    whole = json.loads((Path(__file__).parent / "retro_workdir" / "args.json").read_text())
    path.write_text(json.dumps({**whole, **content} if content else {}))
    without = ["--mock-data", "--seq-length", "--num-layers"]
    words = f"--retro-workdir {tmp_path} --num-layers 6"
    found = problems(words, without=without, architecture="retro")
    assert all(": restore the file, or make the folder again with" in line for line in found)
    assert [line.split()[2] for line in found][: len(names)] == names
    path.write_text("[")
    (line,) = problems(words, without=without, architecture="retro")
    assert str(tmp_path) in line


def test_flags_of_a_retro_that_contradict_its_folder() -> None:
    folder = Path(__file__).parent / "retro_workdir"
    words = f"--retro-workdir {folder} --num-layers 6 --seq-length 64"
    assert problems(words, without=["--mock-data"], architecture="retro") == [
        f"--seq-length 64: --retro-workdir {folder} was created with --seq-length 32: drop the "
        "flag, or use the folder for that data"
    ]


def test_a_path_that_is_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert parse("--tensorboard-dir x").config.logging.tensorboard_dir == "x"
    (line,) = problems("--save x --save-interval 5")
    assert line.startswith("--save 'x': the path '")


@pytest.mark.parametrize(
    ("words", "largest"),
    [
        ("", 4),
        ("--eval-micro-batch-size 8 --eval-iters 0", 4),
        ("--eval-micro-batch-size 8 --eval-global-batch-size 8", 8),
        ("--eval-micro-batch-size 2", 4),
    ],
)
def test_the_largest_micro_batch(words: str, largest: int) -> None:
    assert parse(words).config.largest_micro_batch == largest
