"""DeepSpeed's JSON file (`--deepspeed_config`) as values of a run.

`deepspeed_keys.json` lists DeepSpeed's keys, grouped by how they are handled:

    translated      the flags that a key sets, for the documentation; `_Translation` sets them
    accepted        keys that have no effect here, with the reason and DeepSpeed's default
    refused         keys of unsupported features, with what to do instead and DeepSpeed's default

DeepSpeed's defaults, "auto" and null have no effect, nor does a section of the file whose "enabled"
is false.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.arguments import ParsedFlag
from megatron.config.fields import from_yaml, suggestion
from megatron.config.resolve import data_parallel_size
from megatron.config.run import Findings, RunOptions, field_at
from megatron.errors import ConfigError

NAMES = ("--deepspeed_config", "--deepspeed-config")
_FILE = Path(__file__).with_name("deepspeed_keys.json")
_MAX_BYTES = 2**20
_MAX_DIGITS = 100
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]')
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}
_RANGE_TEST = ("min_lr", "step_size", "step_rate", "staircase")  # preceded by lr_range_test_
_DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_STEPS = "gradient_accumulation_steps"
# Keys whose values are copied to a field.
_COPIED_KEYS = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_clipping": "optimizer.clip_grad",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.overlap_comm": "parallel.overlap_grad_reduce",
    "zero_optimization.cpu_offload": "optimizer.optimizer_cpu_offload",
    "fp16.enabled": "precision.fp16",
    "fp16.loss_scale_window": "precision.loss_scale_window",
    "fp16.hysteresis": "precision.hysteresis",
    "fp16.min_loss_scale": "precision.min_loss_scale",
    "bf16.enabled": "precision.bf16",
    "bfloat16.enabled": "precision.bf16",
    "optimizer.params.lr": "schedule.lr",
    "optimizer.params.eps": "optimizer.adam_eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.momentum": "optimizer.sgd_momentum",
    "optimizer.params.max_grad_norm": "optimizer.clip_grad",
    "activation_checkpointing.partition_activations": "parallel.distribute_saved_activations",
    "memory_breakdown": "logging.log_memory_to_tensorboard",
    "wandb.team": "logging.wandb_entity",
    "curriculum_learning.schedule_type": "curriculum.curriculum_schedule",
    "curriculum_learning.schedule_config.total_curriculum_step": "curriculum.curriculum_steps",
    "curriculum_learning.schedule_config.difficulty_step": "curriculum.curriculum_length_step",
    "curriculum_learning.schedule_config.root_degree": "curriculum.curriculum_root_degree",
    "curriculum_learning.schedule_config.difficulty": "curriculum.curriculum_lengths",
    "curriculum_learning.schedule_config.max_step": "curriculum.curriculum_until",
}
# Sections that are off unless "enabled" is true. For other sections, --fp16 and --bf16 decide.
_OFF_BY_DEFAULT = ("curriculum_learning", "flops_profiler", "tensorboard", "wandb")
# Boolean keys that are read in this module and are not the value of a field.
_SWITCHES = ("wall_clock_breakdown", "activation_checkpointing.profile")
# Values that DeepSpeed uses for the second key if a file has only the first one.
_DEFAULTS = (
    ("fp16.enabled", "fp16.initial_scale_power", 16),
    ("optimizer.type", "optimizer.params.lr", 1e-3),
    ("optimizer.type", "optimizer.params.weight_decay", 0.0),
    ("flops_profiler.enabled", "flops_profiler.profile_step", 1),
    ("tensorboard.enabled", "tensorboard.output_path", ""),
    ("tensorboard.enabled", "tensorboard.job_name", "DeepSpeedJobName"),
    ("wandb.enabled", "wandb.project", "deepspeed"),
)


@dataclass(frozen=True)
class KeyHandling:
    """The handling of a key that is not translated into flags.

    Attributes:
        reason: Why the key has no effect, or why it is refused and what to do instead.
        default: DeepSpeed's default; `{}` for a section of the file.
        is_refused: Whether values other than the default are an error.
    """

    reason: str
    default: Any
    is_refused: bool

    def accepts(self, value: Any) -> bool:
        """Return whether a value is the default, or an object whose "enabled" is false."""
        is_off = isinstance(value, dict) and value.get("enabled", True) is False
        return value == self.default or is_off


@dataclass(frozen=True)
class KeyTable:
    """The contents of `deepspeed_keys.json`: translated keys, and the handling of others."""

    translated: Mapping[str, str]
    untranslated: Mapping[str, KeyHandling]


@dataclass(frozen=True)
class DeepSpeedFile:
    """The values that a file sets. By default there is no file, and nothing is set.

    Attributes:
        path: The file, or `None` if there is none.
        values: The values by "section.field", without those given on the command line.
        origins: The key that sets each of them, as shown in messages.
        accumulation_steps: The number of micro-batches per update on each process, or `None` if it
            is not given.
    """

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    accumulation_steps: int | None = None

    def explain(self, problems: Sequence[str]) -> list[str]:
        """Return a run's mistakes, with the keys that set the flags named in each of them."""
        origins = {
            name: origin
            for field_path, origin in self.origins.items()
            for name in field_at(field_path).spellings
        }
        lines = []
        for problem in problems:
            names = dict.fromkeys(re.findall(r"--[\w-]+", problem))
            keys = [f"{name} is from {origins[name]}" for name in names if name in origins]
            lines.append(f"{problem} [{'; '.join(keys)}]" if keys else problem)
        return lines


@functools.cache
def key_table() -> KeyTable:
    """Return the contents of the file of keys, which is read once."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    answers = {
        key: KeyHandling(family["reason"], default, group == "refused")
        for group in ("accepted", "refused")
        for family in content[group]
        for key, default in family["keys"].items()
    }
    return KeyTable(content["translated"], answers)


def read(path: Path, given: Mapping[str, Any], findings: Findings) -> DeepSpeedFile:
    """Read a file, and add its mistakes and its conflicts with the command line to `findings`.

    Args:
        path: The JSON file.
        given: The values on the command line, by "section.field".
        findings: The findings, to which problems are added, and a notice for everything that is
            translated or has no effect.

    Raises:
        ConfigError: The file cannot be read, is too large, is not strict JSON, or has a key twice.
    """
    content, lines = _parse(path)
    sources = {key: f"{key} ({path}, line {line})" for key, line in lines.items()}
    keys = _collect(content, "", sources, findings)
    for key in [key for key in keys if key.endswith(".enabled") or key in _SWITCHES]:
        if type(keys[key]) not in (bool, type(None)):
            findings.problems.append(
                f"{sources[key]}: expected true or false, got {json.dumps(keys.pop(key))}"
            )
    for first, second, default in _DEFAULTS:
        # "auto" leaves a value to the flags. No flags set the keys of profiler, TensorBoard and
        # Weights & Biases, so these get the default.
        is_open = first.startswith(_OFF_BY_DEFAULT) and keys.get(second) is None
        if keys.get(first) and (second not in keys or is_open):
            keys[second] = default
            sources[second] = f"DeepSpeed's default {second} {default} (for {sources[first]})"
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    translated = []
    for key, field_path, value_in_file in _Translation(keys, given, sources, findings).settings():
        if value_in_file is None:
            continue
        field = field_at(field_path)
        try:
            value = from_yaml(field, value_in_file)
        except (ValueError, TypeError) as error:
            findings.problems.append(f"{sources[key]}: {error}")
            findings.unknown_fields.add(field.name)
            continue
        if values.get(field_path, value) != value:
            findings.problems.append(
                f"{sources[key]} and {origins[field_path]} contradict each other: remove one of "
                "them"
            )
        elif given.get(field_path, value) != value:
            flag = field.spell(given[field_path])
            findings.problems.append(
                f"{flag} and {sources[key]} ({field.spell(value)}) contradict each other: change "
                "one of them"
            )
        elif field_path not in given:
            values[field_path], origins[field_path] = value, sources[key]
            translated += [f"{field.spell(value)} ({key})"] if value != field.default else []
    if translated:
        findings.notices.append(f"{path}: read as {', '.join(translated)}")
    steps = keys.get(_STEPS)
    if steps is not None and (type(steps) is not int or steps < 1):
        findings.problems.append(
            f"{sources[_STEPS]}: expected a whole number above 0, got {steps!r}"
        )
        steps = None
    return DeepSpeedFile(path, values, origins, steps)


def batch_sizes(
    config: RunOptions, file: DeepSpeedFile, world_size: int, findings: Findings
) -> dict[str, int]:
    """Compute the missing batch size of a run from the other one and the accumulation steps.

    Args:
        config: The run, with the values of the file.
        file: The values of DeepSpeed's file, as returned by `read`.
        world_size: The number of processes.
        findings: The findings, to which an error is added if the sizes contradict each other.

    Returns:
        The batch sizes that can be computed, by "section.field".
    """
    if file.path is None:
        return {}
    replicas = data_parallel_size(config, world_size)
    micro, total = config.training.micro_batch_size, config.training.global_batch_size
    computed: dict[str, int] = {}
    if micro is None and total is not None:
        micro = total // (replicas * (file.accumulation_steps or 1))
        computed["training.micro_batch_size"] = micro
    if file.accumulation_steps is None or micro is None:
        return computed
    product = micro * file.accumulation_steps * replicas
    if total is None:
        computed["training.global_batch_size"] = product
    elif product != total:
        findings.problems.append(
            f"{_STEPS} {file.accumulation_steps} in {file.path} and --global-batch-size {total} "
            f"contradict each other: with --micro-batch-size {micro} and {replicas} replicas the "
            f"batch size is {product}; change one of them, or remove {_STEPS}"
        )
    return computed


def check_flags(flags: Sequence[ParsedFlag], findings: Findings) -> None:
    """Add an error if --no-pipeline-parallel contradicts the number of pipeline stages."""
    sizes = [flag for flag in flags if flag.name == "--pipeline-model-parallel-size"]
    has_no_pipeline = any(flag.name == "--no-pipeline-parallel" for flag in flags)
    if has_no_pipeline and sizes and sizes[-1].values[:1] != ("1",):
        findings.problems.append(
            f"{sizes[-1]} and --no-pipeline-parallel contradict each other: drop one of them"
        )


_Setting = tuple[str, str, Any]  # the key, "section.field", and the value as in YAML


@dataclass(frozen=True)
class _Translation:
    """The translation of a file's keys to fields.

    Attributes:
        keys: The values of translated keys in the file, by path. A value of `None` leaves the
            choice to the flags.
        given: The values on the command line, by "section.field".
        sources: The place of each key, for messages.
        findings: The findings, to which problems and notices are added.
    """

    keys: Mapping[str, Any]
    given: Mapping[str, Any]
    sources: Mapping[str, str]
    findings: Findings

    def settings(self) -> Iterator[_Setting]:
        """Yield each setting of the keys: the key, "section.field", and the value as in YAML.

        The value is `None` if the file leaves it to the flags.
        """
        for key, field_path in _COPIED_KEYS.items():
            if key in self.keys:
                yield key, field_path, self.keys[key]
        yield from self._precision()
        yield from self._optimizer()
        yield from self._scheduler()
        yield from self._curriculum()
        yield from self._reports()
        steps = self.keys.get("steps_per_print")
        if steps is not None:
            interval = self.given.get("logging.log_interval")
            if interval in (None, steps):
                yield "steps_per_print", "logging.log_interval", steps
            else:
                self.findings.notices.append(
                    f"{self.sources['steps_per_print']}: the log line is printed every "
                    f"--log-interval {interval} iterations"
                )

    def _precision(self) -> Iterator[_Setting]:
        if self.keys.get("fp16.loss_scale"):  # 0 means a dynamic scale
            yield "fp16.loss_scale", "precision.loss_scale", self.keys["fp16.loss_scale"]
        elif (power := self.keys.get("fp16.initial_scale_power")) is not None:
            is_power = type(power) is int and 0 <= power < 128
            scale = 2.0**power if is_power else f"2 to the power of {power}"
            yield "fp16.initial_scale_power", "precision.initial_loss_scale", scale
        for key in ("data_types.grad_accum_dtype", "communication_data_type"):
            kind = self.keys.get(key)
            if kind in ("fp32", "fp16"):
                yield key, "precision.accumulate_allreduce_grads_in_fp32", kind == "fp32"
            elif kind is not None:
                self._add_problem(
                    key,
                    f"expected fp32 or fp16, got {kind!r}: gradients are summed in fp32 with "
                    "--bf16",
                )

    def _optimizer(self) -> Iterator[_Setting]:
        key = "zero_optimization.offload_optimizer.device"
        if self.keys.get(key) in ("cpu", "none"):
            yield key, "optimizer.optimizer_cpu_offload", self.keys[key] == "cpu"
        elif self.keys.get(key) is not None:
            self._add_problem(key, f"expected cpu or none, got {self.keys[key]!r}")
        if self.keys.get("optimizer.type") is not None:
            name = str(self.keys["optimizer.type"])
            yield "optimizer.type", "optimizer.optimizer", _OPTIMIZERS.get(name.lower(), name)
        key, betas = "optimizer.params.betas", self.keys.get("optimizer.params.betas")
        if betas is not None:
            if isinstance(betas, list) and len(betas) == 2:
                yield key, "optimizer.adam_beta1", betas[0]
                yield key, "optimizer.adam_beta2", betas[1]
            else:
                self._add_problem(key, f"expected two numbers, got {json.dumps(betas)}")

    def _scheduler(self) -> Iterator[_Setting]:
        params = {
            key.removeprefix("scheduler.params."): value
            for key, value in self.keys.items()
            if key.startswith("scheduler.params.")
        }
        key, kind = "scheduler.type", self.keys.get("scheduler.type")
        if kind is None:
            if any(value is not None for value in params.values()):
                self._add_problem("scheduler.params", "scheduler.type is missing: add it")
        elif kind == "LRRangeTest":
            yield key, "schedule.lr_decay_style", "range-test"
            for name in (f"lr_range_test_{part}" for part in _RANGE_TEST):
                if name in params:
                    yield f"scheduler.params.{name}", f"schedule.{name}", params[name]
        elif not isinstance(kind, str) or kind not in _DECAYS:
            self._add_problem(
                key,
                f"{kind!r} is not supported: use {', '.join(_DECAYS)} or LRRangeTest, or remove "
                "scheduler and use --lr-decay-style and --lr-warmup-iters",
            )
        else:
            yield from self._warm_up(kind, params)
            if kind == "WarmupCosineLR":
                yield from self._cosine_rates()
            if kind != "WarmupLR" and params.get("total_num_steps") is None:
                self.findings.notices.append(
                    f"{self.sources[key]}: total_num_steps is not given: the decay takes "
                    f"{self._length()}"
                )

    def _warm_up(self, kind: str, params: Mapping[str, Any]) -> Iterator[_Setting]:
        """Yield the settings of DeepSpeed's schedules with a warm-up."""
        key, shape = "scheduler.type", "scheduler.params.warmup_type"
        yield (
            (shape if shape in self.keys else key),
            "schedule.lr_warmup_style",
            self.keys.get(shape, "log"),
        )
        steps = params.get("warmup_num_steps", 1000)
        yield key, "schedule.lr_warmup_iters", 2 if steps == 1 else steps  # as DeepSpeed does
        yield key, "schedule.lr_decay_style", _DECAYS[kind]
        if kind != "WarmupLR":
            yield key, "schedule.lr_decay_iters", params.get("total_num_steps")
        if kind == "WarmupCosineLR":
            return
        yield key, "schedule.lr_warmup_init", params.get("warmup_min_lr", 0.0)
        if "warmup_max_lr" in params:
            yield "scheduler.params.warmup_max_lr", "schedule.lr", params["warmup_max_lr"]
        elif kind == "WarmupDecayLR":
            yield key, "schedule.lr", 1e-3
        if kind == "WarmupDecayLR":
            yield key, "schedule.min_lr", params.get("warmup_min_lr", 0.0)

    def _length(self) -> str:
        """Return the decay length that applies if the file sets none, as text for a message."""
        for name in ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"):
            if self.given.get(f"schedule.{name}") is not None:
                return field_at(f"schedule.{name}").spell(self.given[f"schedule.{name}"])
        lengths = [f"training.train_{unit}" for unit in ("iters", "samples", "tokens")]
        flag_texts = [
            field_at(path).spell(self.given[path])
            for path in lengths
            if self.given.get(path) is not None
        ]
        return f"the whole run ({', '.join(flag_texts)})" if flag_texts else "the whole run"

    def _cosine_rates(self) -> Iterator[_Setting]:
        """Yield the rates of WarmupCosineLR, which the file gives as multiples of the peak."""
        kind, peak = "scheduler.type", self.keys.get("optimizer.params.lr")
        if peak is None:
            peak = self.given.get("schedule.lr")
        for name, default, path in (
            ("warmup_min_ratio", 0.0, "schedule.lr_warmup_init"),
            ("cos_min_ratio", 1e-4, "schedule.min_lr"),
        ):
            key = f"scheduler.params.{name}"
            ratio = self.keys.get(key, default)
            if type(ratio) in (int, float) and type(peak) in (int, float):
                ratio *= peak
            yield (key if key in self.keys else kind), path, ratio
        if peak is None:
            self._add_problem(
                kind,
                "WarmupCosineLR gives rates as multiples of the peak: add optimizer.params.lr, or "
                "--lr",
            )

    def _curriculum(self) -> Iterator[_Setting]:
        section = "curriculum_learning"
        if not self.keys.get(f"{section}.enabled"):
            return
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if self.keys.get(f"{section}.{name}") is None:
                self._add_problem(section, f"{section}.{name} is missing: add it")
        kind = self.keys.get(f"{section}.curriculum_type")
        if kind not in (None, "seqlen"):
            self._add_problem(
                f"{section}.curriculum_type",
                f"expected seqlen, got {kind!r}: sequences can only be ordered by their length",
            )
        last = self.keys.get(f"{section}.max_difficulty")
        lengths = self.keys.get(f"{section}.schedule_config.difficulty")
        if self.keys.get(f"{section}.schedule_type") != "fixed_discrete":
            for bound in ("min", "max"):
                key = f"{section}.{bound}_difficulty"
                if key in self.keys:
                    yield key, f"curriculum.curriculum_{bound}_length", self.keys[key]
        elif isinstance(lengths, list) and lengths[-1:] != [last]:
            self._add_problem(
                f"{section}.max_difficulty",
                f"{last} is not the last of {section}.schedule_config.difficulty: make them equal",
            )

    def _reports(self) -> Iterator[_Setting]:
        level = self.given.get("logging.timing_log_level", -1)
        if self.keys.get("activation_checkpointing.profile") and level < 2:
            yield "activation_checkpointing.profile", "logging.timing_log_level", 2
        elif self.keys.get("wall_clock_breakdown") and level < 1:
            yield "wall_clock_breakdown", "logging.timing_log_level", 1
        if self.keys.get("flops_profiler.enabled"):
            step = self.keys["flops_profiler.profile_step"]
            yield "flops_profiler.enabled", "profiling.profile", True
            if type(step) is int:  # DeepSpeed counts updates from 0, --profile-step-start from 1
                yield "flops_profiler.profile_step", "profiling.profile_step_start", step + 1
                yield "flops_profiler.profile_step", "profiling.profile_step_end", step + 2
            else:
                yield "flops_profiler.profile_step", "profiling.profile_step_start", step
        if self.keys.get("tensorboard.enabled"):
            parts = (self.keys["tensorboard.output_path"], self.keys["tensorboard.job_name"])
            yield "tensorboard.output_path", "logging.tensorboard_dir", str(Path(*map(str, parts)))
        if self.keys.get("wandb.enabled"):
            yield "wandb.project", "logging.wandb_project", self.keys["wandb.project"]

    def _add_problem(self, key: str, problem: str) -> None:
        self.findings.problems.append(f"{self.sources[key]}: {problem}")


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a file's content, and the line number of each key by path, such as "fp16.enabled".

    Raises:
        ConfigError: The file cannot be read, is too large, is not strict JSON, or has a key twice.
    """
    name = f"{NAMES[0]} {path}"
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{name}: larger than {_MAX_BYTES:,} characters")

    def refuse_constant(word: str) -> None:
        raise ValueError(f"{word} is not a number in JSON: write a finite number")

    def whole_number(word: str) -> int:
        if len(word) > _MAX_DIGITS:
            raise ValueError(f"a number has {len(word)} digits: write a smaller one")
        return int(word)

    try:
        content = json.loads(text, parse_constant=refuse_constant, parse_int=whole_number)
    except json.JSONDecodeError as error:
        remedy = "correct it (JSON has no comments and no comma after the last value)"
        raise ConfigError(
            f"{name}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}: "
            f"{remedy}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected an object, {{...}}, got {type(content).__name__}")
    return content, _lines(text, name)


def _lines(text: str, name: str) -> dict[str, int]:
    """Return the line number of each key of valid JSON, by its path.

    Raises:
        ConfigError: An object has a key twice.
    """
    lines: dict[str, int] = {}
    keys: list[str] = []  # keys of the objects around the current position
    scopes: list[dict[str, int]] = []  # the keys of each of these objects so far
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            keys.append("")
            scopes.append({})
        elif token[0] == "}":
            keys.pop()
            scopes.pop()
        elif token[2]:
            keys[-1] = json.loads(token[1])
            line = text.count("\n", 0, token.start()) + 1
            if keys[-1] in scopes[-1]:
                first = scopes[-1][keys[-1]]
                raise ConfigError(
                    f"{name}: {'.'.join(keys)} appears on lines {first} and {line}: remove one"
                )
            scopes[-1][keys[-1]] = lines[".".join(keys)] = line
    return lines


def _collect(
    section: Mapping[str, Any], prefix: str, sources: Mapping[str, str], findings: Findings
) -> dict[str, Any]:
    """Return the values of translated keys in a section of the file, or in the whole file, by path.

    The value is `None` for a key that leaves the choice to the flags. Unknown and refused keys are
    added to `findings` as problems, and keys without effect as notices.
    """
    table = key_table()
    keys: dict[str, Any] = {}
    without_effect: dict[str, list[str]] = {}  # the keys that have no effect, by the reason
    for name, value in section.items():
        key = prefix + name
        nested_keys = [
            known_key
            for known_key in (*table.translated, *table.untranslated)
            if known_key.startswith(f"{key}.")
        ]
        handling = table.untranslated.get(key)
        if value is None or value == "auto":
            keys |= dict.fromkeys(table.translated.keys() & {key})
            continue
        if handling is not None:
            if isinstance(value, dict) and value.get("enabled") is False and len(value) > 1:
                without_effect.setdefault(f"{key}.enabled is not true", []).append(key)
            elif not handling.accepts(value) and handling.is_refused:
                value_text = "" if isinstance(value, dict) else f" {json.dumps(value)}"
                findings.problems.append(f"{sources[key]}{value_text}: {handling.reason}")
            elif not handling.accepts(value):
                without_effect.setdefault(handling.reason, []).append(key)
        elif key in table.translated:
            keys[key] = value
        elif not nested_keys:
            hint = suggestion(key, (*table.translated, *table.untranslated))
            remedy = hint or ": remove it (docs/deepspeed.md lists all keys)"
            findings.problems.append(f"{sources[key]} is not a DeepSpeed key{remedy}")
        elif not isinstance(value, dict):
            example = json.dumps(nested_keys[0][len(key) + 1 :])
            findings.problems.append(
                f"{sources[key]}: expected an object such as {{{example}: ...}}, got "
                f"{json.dumps(value)}"
            )
        elif value.get("enabled", key not in _OFF_BY_DEFAULT) is False:
            keys |= {f"{key}.enabled": False}
            if value.keys() - {"enabled"}:
                without_effect.setdefault(f"{key}.enabled is not true", []).append(key)
        else:
            keys |= _collect(value, f"{key}.", sources, findings)
    findings.notices += [
        f"{', '.join(sources[key] for key in names)}: no effect: {reason}"
        for reason, names in without_effect.items()
    ]
    return keys
