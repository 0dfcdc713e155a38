"""DeepSpeed's JSON file and Megatron-DeepSpeed's flags: each is used, or reported by name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.deepspeed import NAMES, key_table
from megatron.config.fields import by_spelling
from megatron.config.other_flags import other_flags
from megatron.config.parser import ParsedRun, asks_for_mpi
from megatron.config.run import flatten, sections
from megatron.errors import ConfigError
from tests.config.command import parse, problems
from tests.config.deepspeed_schedules import SCHEDULES

WITHOUT_SIZE = ["--micro-batch-size"]

# Settings of a file; the run has no flag for them.
_READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"train_micro_batch_size_per_gpu": 2}, {"training.micro_batch_size": 2}),
    ({"gradient_clipping": 0.5}, {"optimizer.clip_grad": 0.5}),
    ({"zero_optimization": {"stage": 2}}, {"parallel.zero_stage": 2}),
    ({"zero_optimization": {"overlap_comm": True}}, {"parallel.overlap_grad_reduce": True}),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        {"optimizer.optimizer_cpu_offload": True},
    ),
    ({"zero_optimization": {"cpu_offload": True}}, {"optimizer.optimizer_cpu_offload": True}),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 11, "loss_scale_window": 500}},
        {"precision.fp16": True, "precision.initial_loss_scale": 2048.0}
        | {"precision.loss_scale_window": 500.0, "precision.loss_scale": None},
    ),
    (
        {"fp16": {"enabled": True, "hysteresis": 4, "min_loss_scale": 2}},
        {"precision.initial_loss_scale": 2.0**16, "precision.hysteresis": 4}
        | {"precision.min_loss_scale": 2.0},
    ),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision.loss_scale": 128.0}),
    ({"bf16": {"enabled": True}}, {"precision.bf16": True}),
    ({"bfloat16": {"enabled": True}}, {"precision.bf16": True}),
    (
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"precision.accumulate_allreduce_grads_in_fp32": True},
    ),
    (
        {"fp16": {"enabled": True}, "communication_data_type": "fp32"},
        {"precision.accumulate_allreduce_grads_in_fp32": True},
    ),
    (
        {
            "optimizer": {
                "type": "AdamW",
                "params": {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "lr": 1e-3},
            }
        },
        {"optimizer.adam_beta1": 0.8, "optimizer.adam_beta2": 0.95, "optimizer.adam_eps": 1e-6}
        | {"optimizer.weight_decay": 0.1, "schedule.lr": 1e-3},
    ),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, {"optimizer.weight_decay": 0.0}),
    (
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}},
        {"optimizer.optimizer": "sgd", "optimizer.sgd_momentum": 0.5, "schedule.lr": 1e-3},
    ),
    ({"steps_per_print": 7}, {"logging.log_interval": 7}),
    ({"wall_clock_breakdown": True}, {"logging.timing_log_level": 1}),
    ({"activation_checkpointing": {"profile": True}}, {"logging.timing_log_level": 2}),
    (
        {"memory_breakdown": True, "tensorboard": {"enabled": True, "output_path": "t"}},
        {"logging.log_memory_to_tensorboard": True}
        | {"logging.tensorboard_dir": "t/DeepSpeedJobName"},
    ),
    (
        {"tensorboard": {"enabled": True, "output_path": "a/b", "job_name": "c"}},
        {"logging.tensorboard_dir": "a/b/c"},
    ),
    (
        {"wandb": {"enabled": True, "team": "us"}},
        {"logging.wandb_project": "deepspeed", "logging.wandb_entity": "us"},
    ),
    *SCHEDULES,
    (
        {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 16,
                "max_difficulty": 128,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 16},
            }
        },
        {"curriculum.curriculum_schedule": "fixed_linear", "curriculum.curriculum_min_length": 16}
        | {"curriculum.curriculum_max_length": 128, "curriculum.curriculum_steps": 30}
        | {"curriculum.curriculum_length_step": 16},
    ),
    (
        {
            "curriculum_learning": {
                "enabled": True,
                "min_difficulty": 8,
                "max_difficulty": 128,
                "schedule_type": "fixed_root",
                "schedule_config": {
                    "total_curriculum_step": 30,
                    "difficulty_step": 8,
                    "root_degree": 3,
                },
            }
        },
        {"curriculum.curriculum_schedule": "fixed_root", "curriculum.curriculum_root_degree": 3},
    ),
    (
        {
            "curriculum_learning": {
                "enabled": True,
                "min_difficulty": 8,
                "max_difficulty": 128,
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [8, 64, 128], "max_step": [5, 10]},
            }
        },
        {"curriculum.curriculum_lengths": (8, 64, 128), "curriculum.curriculum_until": (5, 10)},
    ),
    (
        {"flops_profiler": {"enabled": True}},
        {"profiling.profile": True, "profiling.profile_step_start": 2}
        | {"profiling.profile_step_end": 3},
    ),
]


def read(folder: Path, content: Any, *words: str, **run: Any) -> ParsedRun:
    return parse(f"--deepspeed_config {file_of(folder, content)}", *words, **run)


def wrong(folder: Path, content: Any, *words: str, **run: Any) -> list[str]:
    """Return the mistakes of a run with a file, with the file's folder removed from them."""
    path = file_of(folder, content)
    lines = problems(f"--deepspeed_config {path}", *words, **run)
    return [line.replace(f"{folder}/", "") for line in lines]


def file_of(folder: Path, content: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path


@pytest.mark.parametrize(("content", "expected"), _READ, ids=[str(c) for c, _ in _READ])
def test_keys_are_read_as_flags(
    tmp_path: Path, content: dict[str, Any], expected: dict[str, Any]
) -> None:
    without = WITHOUT_SIZE if "train_micro_batch_size_per_gpu" in content else []
    run = read(tmp_path, content, without=without)
    values = flatten(run.config)
    assert {path: values[path] for path in expected} == expected
    assert len([line for line in run.notices if ": read as --" in line]) == 1


def test_every_translated_key_is_tried() -> None:
    def names(part: dict[str, Any], prefix: str = "") -> set[str]:
        inner = [(prefix + key, value) for key, value in part.items()]
        below = [names(value, f"{key}.") for key, value in inner if isinstance(value, dict)]
        return {key for key, _ in inner}.union(*below)

    tried = set().union(*(names(content) for content, _ in _READ))
    elsewhere = {"train_batch_size", "gradient_accumulation_steps", "wandb.project"}
    elsewhere |= {"optimizer.params.max_grad_norm", "flops_profiler.profile_step"}
    elsewhere |= {"activation_checkpointing.partition_activations"}
    assert set(key_table().translated) - tried == elsewhere


@pytest.mark.parametrize(
    ("content", "words", "micro", "total"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, "", 2, 16),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, "", 4, 16),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "", 2, 12),
        ({"gradient_accumulation_steps": 3}, "--micro-batch-size 4", 4, 24),
        ({"train_batch_size": 16}, "", 8, 16),
        ({"train_batch_size": "auto"}, "--micro-batch-size 4 --global-batch-size 32", 4, 32),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": "auto"},
            *("--micro-batch-size 2 --global-batch-size 16", 2, 16),
        ),
    ],
)
def test_batch_sizes_follow_from_each_other(
    tmp_path: Path, content: dict[str, Any], words: str, micro: int, total: int
) -> None:
    run = read(tmp_path, content, words, without=WITHOUT_SIZE, world_size=2).config.training
    assert (run.micro_batch_size, run.global_batch_size) == (micro, total)
    line = f"{words} --dry-run --dry-run-world-size 2"
    run = read(tmp_path, content, line, without=WITHOUT_SIZE).config.training
    assert (run.micro_batch_size, run.global_batch_size) == (micro, total)


def test_batch_sizes_that_contradict_each_other(tmp_path: Path) -> None:
    content = {"train_batch_size": 16, "gradient_accumulation_steps": 3}
    (line,) = wrong(tmp_path, content, "--micro-batch-size 2", without=WITHOUT_SIZE)
    assert line == (
        "gradient_accumulation_steps 3 in ds.json and --global-batch-size 16 contradict each "
        "other: with --micro-batch-size 2 and 1 replicas the batch size is 6; change one of them, "
        "or remove gradient_accumulation_steps"
    )


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 8},
            "",
            "--micro-batch-size 4 and train_micro_batch_size_per_gpu (ds.json, line 2) "
            "(--micro-batch-size 8) contradict each other: change one of them",
        ),
        (
            {"zero_optimization": {"stage": 2}},
            "--zero-stage 1",
            "--zero-stage 1 and zero_optimization.stage (ds.json, line 3) (--zero-stage 2) "
            "contradict each other: change one of them",
        ),
        (
            {"fp16": {"enabled": False}},
            "--fp16",
            "--fp16 and fp16.enabled (ds.json, line 3) (--no-fp16) contradict each other: change "
            "one of them",
        ),
        (
            {"gradient_clipping": 1, "optimizer": {"params": {"max_grad_norm": 2}}},
            "",
            "optimizer.params.max_grad_norm (ds.json, line 5) and gradient_clipping (ds.json, "
            "line 2) contradict each other: remove one of them",
        ),
        (
            {"wall_clock_breakdown": True},
            "--timing-log-level 0",
            "--timing-log-level 0 and wall_clock_breakdown (ds.json, line 2) (--timing-log-level "
            "1) contradict each other: change one of them",
        ),
    ],
)
def test_contradictions_name_both(
    tmp_path: Path, content: dict[str, Any], words: str, expected: str
) -> None:
    assert wrong(tmp_path, content, words) == [expected]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimization": {"stage": 1}}, "--use-distributed-optimizer"),
        ({"gradient_clipping": 1, "fp16": {"enabled": True}}, "--clip-grad 1.0 --fp16"),
        ({"wall_clock_breakdown": True}, "--timing-log-level 2"),
        ({"wall_clock_breakdown": False}, "--timing-log-level 1"),
        ({"tensorboard": {"enabled": False}}, "--tensorboard-dir t"),
    ],
)
def test_what_agrees_with_the_flags_is_no_contradiction(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    read(tmp_path, content, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"fp16": {"enabled": True, "initial_scale_power": "auto"}},
            "--fp16 --initial-loss-scale 1024",
        ),
        (
            {
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"},
                }
            },
            "--lr 2",
        ),
        ({"optimizer": {"type": None, "params": {"weight_decay": None}}}, "--weight-decay 0.3"),
        (
            {
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {
                        "warmup_type": "linear",
                        "warmup_min_lr": "auto",
                        "warmup_max_lr": "auto",
                        "warmup_num_steps": "auto",
                    },
                }
            },
            "--lr-warmup-iters 10 --lr-warmup-init 1e-4 --lr-decay-style constant",
        ),
        ({"scheduler": {"params": {"warmup_num_steps": "auto"}}}, "--lr-warmup-iters 10"),
        ({"zero_optimization": {"offload_optimizer": {"device": "auto"}}}, "--lr 2"),
        ({"steps_per_print": "auto", "tensorboard": {"enabled": "auto"}}, "--log-interval 7"),
    ],
)
def test_auto_leaves_a_value_to_the_flags(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    ours, theirs = read(tmp_path, content, words).config, parse(words).config
    assert flatten(ours) == flatten(theirs)


def test_reports_have_defaults_where_there_is_no_flag(tmp_path: Path) -> None:
    content = {"tensorboard": {"enabled": True, "output_path": None, "job_name": "auto"}}
    run = read(tmp_path, content, "")
    assert run.config.logging.tensorboard_dir == "DeepSpeedJobName"


def test_the_log_interval_of_the_flag_holds(tmp_path: Path) -> None:
    run = read(tmp_path, {"steps_per_print": 2000}, "--log-interval 10")
    assert run.config.logging.log_interval == 10
    (line,) = run.notices
    assert line.endswith("the log line is printed every --log-interval 10 iterations")


def test_mistakes_of_the_run_name_the_keys_that_set_it(tmp_path: Path) -> None:
    (line,) = wrong(tmp_path, {"fp16": {"enabled": True}}, "--bf16")
    assert "--bf16" in line
    assert line.endswith("[--fp16 is from fp16.enabled (ds.json, line 3)]")
    content = {"activation_checkpointing": {"partition_activations": True}}
    (line,) = wrong(tmp_path, content)
    assert line.startswith("--distribute-saved-activations requires --recompute-granularity full")
    assert "from activation_checkpointing.partition_activations (ds.json, line 3)]" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', "line 1, column "),
        ('{\n"gradient_clipping": 1.0, // norm\n"fp16": {}}', "line 2, column 27: not valid JSON"),
        ('{"gradient_clipping": NaN}', "not valid JSON: NaN is not a number in JSON"),
        ('{"fp16": {"enabled": true,\n"enabled": true}}', "fp16.enabled appears on lines 1 and 2"),
        ('{"bf16": {}, "bf16": {}}', "bf16 appears on lines 1 and 1"),
        ('{"gradient_clipping": 1' + "0" * 400 + "}", "not valid JSON: a number has 401 digits"),
        ("[1]", "expected an object, {...}, got list"),
        ("[" * 100_000, "not valid JSON"),
        ("", "line 1, column 1: not valid JSON"),
        (" " * (2**20 + 1), "larger than 1,048,576 characters"),
    ],
)
def test_files_that_are_not_strict_json(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = wrong(tmp_path, text)
    assert line.startswith(f"--deepspeed_config ds.json: {expected}")


def test_a_file_that_is_not_there_and_one_with_a_byte_order_mark(tmp_path: Path) -> None:
    (line,) = problems(f"--deepspeed-config {tmp_path}/none.json")
    assert line.startswith(f"--deepspeed_config {tmp_path}/none.json: cannot be read: ")
    path = tmp_path / "ds.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"steps_per_print": 3}')
    assert parse(f"--deepspeed-config {path}").config.logging.log_interval == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"fp16": {"enabeld": True}},
            "fp16.enabeld (ds.json, line 3) is not a DeepSpeed key: did ",
        ),
        ({"frobnicate": 1}, "frobnicate (ds.json, line 2) is not a DeepSpeed key: remove it (docs"),
        ({"train_batch_size": "many"}, "train_batch_size (ds.json, line 2): expected a whole num"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage (ds.json, line 3): expe"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage (ds.json, line 3): expecte"),
        ({"zero_optimization": True}, "zero_optimization (ds.json, line 2): expected an object"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps (ds.json, line 2): expe"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type (ds.json, line 3): expected one o"),
        ({"optimizer": {"params": {"betas": 1}}}, "optimizer.params.betas (ds.json, line 4): exp"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 1e9}},
            "fp16.initial_scale_power (ds.json, line 4): expected a finite number",
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            "scheduler.type (ds.json, line 3): 'OneCycle' is not",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "root"}}},
            "scheduler.params.warmup_type (ds.json, line 5): expected one of linear, log, got ",
        ),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "low"}}},
            "scheduler.params.cos_min_ratio (ds.json, line 5): expected a",
        ),
        (
            {"scheduler": {"params": {"warmup_num_steps": 1}}},
            "scheduler.params (ds.json, line 3): scheduler.type is missing: add it",
        ),
        (
            {"curriculum_learning": {"enabled": True}},
            "curriculum_learning (ds.json, line 2): curriculum_learning.min_difficulty is missing",
        ),
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_type": "vocab",
                    "min_difficulty": 8,
                    "max_difficulty": 128,
                    "schedule_type": "fixed_linear",
                }
            },
            "curriculum_learning.curriculum_type (ds.json, line 4): expected seqlen, got 'vocab'",
        ),
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    "min_difficulty": 8,
                    "max_difficulty": 64,
                    "schedule_type": "fixed_discrete",
                    "schedule_config": {"difficulty": [8, 128], "max_step": [5]},
                }
            },
            "curriculum_learning.max_difficulty (ds.json, line 5): 64 is not the last of",
        ),
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    "min_difficulty": 8,
                    "max_difficulty": 64,
                    "schedule_type": "fixed_discrete",
                    "schedule_config": {"difficulty": 64, "max_step": [5]},
                }
            },
            "--curriculum-schedule fixed_discrete requires --curriculum-lengths with two or more",
        ),
        (
            {"curriculum_learning": {"enabled": "no"}},
            'curriculum_learning.enabled (ds.json, line 3): expected true or false, got "no"',
        ),
        ({"wall_clock_breakdown": 2}, "wall_clock_breakdown (ds.json, line 2): expected true or"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype (ds.json, li"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device (ds.json, line 4): expected cpu or none",
        ),
    ],
)
def test_mistakes_name_key_and_line(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    assert wrong(tmp_path, content)[0].startswith(expected)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return a file with one key, in a section that is enabled."""
    for name in reversed(key.split(".")):
        value = {name: value}
    for part in {*value} & {"flops_profiler", "wandb"}:
        value[part] = {"enabled": True, **value[part]}
    return value


@pytest.mark.parametrize("key", key_table().untranslated)
def test_keys_without_translation_are_refused_or_noticed(tmp_path: Path, key: str) -> None:
    """DeepSpeed's default is accepted silently; anything else is refused or gets a notice."""
    answer = key_table().untranslated[key]
    on = read(tmp_path, _nested(key, None)).notices
    assert len(on) == (key.partition(".")[0] in ("flops_profiler", "wandb"))
    for idle in (answer.default, "auto"):
        assert read(tmp_path, _nested(key, idle)).notices == on
    content = _nested(key, {"enabled": True} if answer.default == {} else 12345)
    if answer.is_refused:
        (line,) = wrong(tmp_path, content)
        assert line.startswith(f"{key} (ds.json, line ")
        assert line.endswith(f": {answer.reason}")
        assert "remove the key" in line
    else:
        (line,) = set(read(tmp_path, content).notices) - set(on)
        assert line.startswith(f"{key} (")
        assert line.endswith(f"): no effect: {answer.reason}")


@pytest.mark.parametrize("part", ["fp16", "tensorboard", "curriculum_learning", "autotuning"])
def test_parts_that_are_off_change_nothing(tmp_path: Path, part: str) -> None:
    run = read(tmp_path, {part: {"enabled": False, "loss_scale": 8}})
    (line,) = run.notices
    assert line.endswith(f"no effect: {part}.enabled is not true")
    assert run.config == parse().config
    assert read(tmp_path, {part: {"enabled": False}}).notices == ()


_LIST_KEYS = """
import typing
from pydantic import BaseModel
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import config, constants
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig)

def show(part, kind):
    for name, field in kind.model_fields.items():
        for one in (name, field.alias):
            if one:
                print("KEY", f"{part}.{one}")

show("zero_optimization", DeepSpeedZeroConfig)
show("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig)
show("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig)
show("fp16", DeepSpeedFP16Config)
show("bf16", DeepSpeedBF16Config)
for part, field in DeepSpeedMonitorConfig.model_fields.items():
    print("KEY", part)
    if part in ("tensorboard", "wandb"):
        show(part, field.annotation)
for name in ACT_CHKPT_DEFAULT:
    print("KEY", f"activation_checkpointing.{name}")
for name in vars(DeepSpeedFlopsProfilerConfig({})):
    print("KEY", f"flops_profiler.{name}")
for name in config.get_pipeline_config({}):
    print("KEY", f"pipeline.{name}")
for name in ("TRAIN_BATCH_SIZE", "TRAIN_MICRO_BATCH_SIZE_PER_GPU", "GRADIENT_ACCUMULATION_STEPS",
    "STEPS_PER_PRINT", "DUMP_STATE", "DISABLE_ALLGATHER", "COMMUNICATION_DATA_TYPE",
    "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE", "PRESCALE_GRADIENTS", "GRADIENT_PREDIVIDE_FACTOR",
    "SPARSE_GRADIENTS", "GRADIENT_CLIPPING", "GRAPH_HARVESTING", "ZERO_ALLOW_UNTESTED_OPTIMIZER",
    "ZERO_FORCE_DS_CPU_OPTIMIZER", "SCHEDULER", "OPTIMIZER", "WALL_CLOCK_BREAKDOWN",
    "MEMORY_BREAKDOWN", "USE_DATA_BEFORE_EXPERT_PARALLEL", "SPARSE_ATTENTION", "CHECKPOINT",
    "DATA_TYPES", "DATALOADER_DROP_LAST", "PROGRESSIVE_LAYER_DROP", "AMP", "VOCABULARY_SIZE",
    "BFLOAT16", "BFLOAT16_OLD", "FP16"):
    if hasattr(constants, name):  # some versions define a few of them elsewhere
        print("KEY", getattr(constants, name))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install deepspeed",
)
def test_every_key_of_the_installed_deepspeed_is_known() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIST_KEYS],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    keys = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("KEY ")}
    table = key_table()
    known = {*table.translated, *table.untranslated}
    parts = {".".join(key.split(".")[:n]) for key in known for n in range(1, key.count(".") + 1)}
    assert len(keys) > 100
    assert keys - known - parts == set()


FLAGS: dict[str, dict[str, Any]] = {
    "--deepspeed": {},
    "--deepspeed_mpi": {"parallel.use_mpi": True},
    "--no-pipeline-parallel": {"parallel.pipeline_model_parallel_size": 1},
    "--no-pipeline-parallel --pipeline-model-parallel-size 1": {},
    "--cpu-optimizer": {"optimizer.optimizer_cpu_offload": True},
    "--profile-backward": {"logging.timing_log_level": 2},
    "--profile-backward --timing-log-level 1": {"logging.timing_log_level": 1},
    "--ds-sequence-parallel-size 1": {"parallel.context_parallel_size": 1},
    "--num-key-value-heads 2": {"model.num_query_groups": 2, "model.group_query_attention": True},
    "--rotary-position-embeddings-theta 500000 --position-embedding-type rope": {
        "model.rotary_base": 500000
    },
    **{
        f"--use-flash-attn-{kind} --fp16": {"model.use_flash_attn": True}
        for kind in ("v1", "v2", "triton", "builder")
    },
    "--enable-zbh1-pipeline --pipeline-model-parallel-size 2": {
        "parallel.pipeline_schedule": "zero-bubble"
    },
    "--partition-activations --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --tensor-model-parallel-size 2": {
        "parallel.distribute_saved_activations": True
    },
    "--deepspeed-activation-checkpointing": {"training.recompute_granularity": None},
    "--contigious-checkpointing": {},
    "--synchronize-each-layer": {},
    "--zero-contigious-gradients": {},
    "--zero-reduce-scatter": {},
    "--zero-reduce-bucket-size 500000000": {},
}


@pytest.mark.parametrize("words", FLAGS)
def test_flags_of_megatron_deepspeed_have_one_notice(words: str) -> None:
    run = parse(words, world_size=2 if "parallel-size 2" in words else 1)
    values = flatten(run.config)
    assert {path: values[path] for path in FLAGS[words]} == FLAGS[words]
    assert len(run.notices) == 1
    assert run.notices[0].startswith(words.partition(" --")[0])


def test_every_flag_of_megatron_deepspeed_is_known() -> None:
    """Flags of Microsoft's and BigScience's versions, as listed by their parsers."""
    path = Path(__file__).with_name("megatron_deepspeed_flags.json")
    table = other_flags()
    known = {*by_spelling(sections().values()), *NAMES}
    known |= {flag.name for flag in (*table.unsupported, *table.translated, *table.removed)}
    for source, flags in json.loads(path.read_text()).items():
        assert set(flags) - known == set(), source


def test_ulysses() -> None:
    run = parse("--ds-sequence-parallel-size 2", world_size=2)
    assert run.config.parallel.context_parallel_size == 2
    assert run.config.parallel.cp_comm_type == "a2a"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--checkpoint-in-cpu",
            "--checkpoint-in-cpu: inputs of recomputed layers are never offloaded: use ",
        ),
        ("--remote-device cpu", "--remote-device cpu: weights are never offloaded: use "),
        (
            "--profile pt",
            "--profile pt was removed (last seen in Megatron-DeepSpeed): use --profile ",
        ),
        ("--deepscale", "--deepscale: DeepSpeed has dropped this name: use "),
        ("--deepspeed ds.json", "'ds.json' does not belong to a flag: drop it"),
        (
            "--pipeline-model-parallel-size 2 --no-pipeline-parallel",
            "--pipeline-model-parallel-size 2 and --no-pipeline-parallel contradict each other",
        ),
    ],
)
def test_flags_that_are_refused(words: str, expected: str) -> None:
    (line,) = problems(words, world_size=2)
    assert line.startswith(expected)


def test_deepspeed_with_experts_has_the_defaults_of_megatron_deepspeed() -> None:
    assert parse("--deepspeed --num-experts 4").config.model.moe_router_gating == "deepspeed"


def test_mpi_is_asked_for_by_its_name_in_deepspeed() -> None:
    assert asks_for_mpi(["--deepspeed", "--deepspeed_mpi"])
    assert not asks_for_mpi(["--deepspeed"])


def test_the_last_file_wins_and_flags_win_over_yaml(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    first.write_text('{"gradient_clipping": 3}')
    run = parse(f"--deepspeed_config {first}", f"--deepspeed_config {file_of(tmp_path, {})}")
    assert run.config.optimizer.clip_grad == 1.0
    (tmp_path / "run.yaml").write_text("optimizer: {clip_grad: 2.0}\n")
    run = parse(f"--config {tmp_path}/run.yaml --deepspeed_config {first}")
    assert run.config.optimizer.clip_grad == 3.0


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"gradient_clipping": -1, "amp": {"enabled": True}, "who": 1})
    with pytest.raises(ConfigError) as caught:
        parse(f"--deepspeed_config {path}", "--checkpoint-in-cpu")
    assert len(caught.value.problems) == 4
