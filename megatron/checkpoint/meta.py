"""The types of the checkpoint metadata that the program reads.

They are checked when a checkpoint is opened. Code that reads `Reader.meta` later can therefore rely
on them, and a checkpoint with invalid metadata is refused in time to load an older one.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, NotRequired

from annotated_types import Ge, Le, Len, MaxLen

# Pydantic requires this TypedDict before Python 3.12.
from typing_extensions import TypedDict

from megatron.checkpoint.entries import WORD_EMBEDDING, Json
from megatron.checkpoint.manifest import ManifestError, Size, validate
from megatron.checkpoint.reader import Reader
from megatron.config.run import field_at
from megatron.config.yaml_file import from_dict
from megatron.errors import CheckpointError, ConfigError

_STYLES = {  # the flags that list the valid values
    "lr_decay_style": "schedule.lr_decay_style",
    "decay_style": "schedule.lr_decay_style",
    "lr_wsd_decay_style": "schedule.lr_wsd_decay_style",
    "wd_incr_style": "optimizer.weight_decay_incr_style",
}

_Seed = Annotated[int, Ge(0), Le((1 << 32) - 1)]
_Position = Annotated[float, Ge(0), Le(float(1 << 63))]
# Megatron's schedules contain None for values that the style does not use.
_Samples = _Position | None
_Nothing = Annotated[dict[str, Json], MaxLen(0)]


class LossScaleState(TypedDict):
    """The state of a dynamic loss scale (`LossScale.state`)."""

    scale: Annotated[float, Ge(0)]
    growth_tracker: Size
    hysteresis_tracker: int


class OptimizerScalars(TypedDict):
    """The optimizer's state apart from its tensors (`Optimizer.scalars`)."""

    step: Size
    loss_scale: LossScaleState | _Nothing


class SavedAverage(TypedDict):
    """The state of an average of the weights, apart from its tensors."""

    kind: Literal["ema", "lawa"]
    count: Size


class SavedSchedule(TypedDict, total=False):
    """The values of schedules under Megatron's names (`Schedules.to_dict`), old names included."""

    num_steps: _Position
    num_iters: _Position
    max_lr: float | None
    start_lr: float | None
    min_lr: float | None
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    lr_warmup_steps: _Samples
    warmup_iter: _Samples
    warmup_steps: _Samples
    lr_decay_steps: _Samples
    lr_warmup_tokens: _Samples
    lr_decay_tokens: _Samples
    lr_in_tokens: bool
    lr_warmup_log_update: _Samples
    lr_range_test_step_size: _Samples
    lr_range_test_step_rate: float | None
    lr_range_test_staircase: bool
    lr_range_test_exponential: bool
    end_iter: _Samples
    decay_steps: _Samples
    lr_decay_style: str | None
    decay_style: str | None
    wsd_decay_steps: _Samples
    lr_wsd_decay_style: str | None
    start_wd: float | None
    end_wd: float | None
    wd_incr_steps: _Samples
    wd_incr_style: str | None


class RandomState(TypedDict):
    """The random state that a checkpoint stores: the seed for dropout."""

    seed: _Seed


class LegacyArguments(TypedDict, total=False):
    """The fields of Megatron-LM's command line whose types are checked."""

    data_path: str | list[str] | None
    train_data_path: str | list[str] | None


class Origin(TypedDict, total=False):
    """The Hugging Face folder that a checkpoint was imported from."""

    family: str | None
    bare_names: bool


class TextPositions(TypedDict):
    """The positions at which streams of text continue (`data.text_stream.positions_state`)."""

    plan: str
    places: list[list[Annotated[list[Annotated[int, Ge(-1), Le(2**62)]], Len(4, 5)]]]


class Meta(TypedDict):
    """The metadata of a run's checkpoint. Additional keys are allowed."""

    iteration: Size
    consumed_train_samples: Size
    skipped_train_samples: NotRequired[Size]
    consumed_train_tokens: NotRequired[Size]
    useful_seconds: NotRequired[Annotated[float, Ge(0)]]
    run: NotRequired[str | None]
    padded_vocab_size: Size
    optimizer: NotRequired[OptimizerScalars | None]
    average: NotRequired[SavedAverage | None]
    schedule: NotRequired[SavedSchedule | None]
    rng: NotRequired[RandomState | None]
    tokenizer: NotRequired[str | None]
    corpus: NotRequired[str | None]
    text: NotRequired[TextPositions | None]
    validation_text: NotRequired[TextPositions | None]
    config: dict[str, dict[str, Json]]
    folder: NotRequired[str | None]
    spikes: NotRequired[dict[str, list[float]] | None]
    legacy_args: NotRequired[LegacyArguments | None]
    notices: NotRequired[list[str]]
    huggingface: NotRequired[Origin | None]


def check_meta(reader: Reader) -> None:
    """Check the metadata of an opened checkpoint.

    Raises:
        CheckpointError: A value is missing, has the wrong type, is out of range, or contradicts the
            checkpoint's tensors or iteration; or the stored configuration has an invalid setting.
    """
    try:
        text = json.dumps({"meta": reader.meta}).encode()  # messages begin with "meta."
        meta: Meta = validate(dict[str, Meta], text)["meta"]
        # Only the network's settings are used from checkpoints of other programs.
        is_other = reader.format in ("legacy", "core", "deepspeed")
        known = {"model": meta["config"]["model"]} if is_other else meta["config"]
        from_dict(known, "meta.config")
    except (ManifestError, ConfigError) as error:
        raise CheckpointError(str(error)) from None
    _check_schedule(meta, reader.format)
    values = {"iteration": reader.iteration}
    if WORD_EMBEDDING in reader.tensors:
        values["padded_vocab_size"] = reader.tensors[WORD_EMBEDDING].shape[0]
    for key, value in values.items():
        if reader.meta[key] != value:
            raise CheckpointError(
                f"meta.{key} is {reader.meta[key]}, but {value} in the checkpoint"
            )


def _check_schedule(meta: Meta, written_as: str) -> None:
    schedule = meta.get("schedule") or {}
    if meta.get("optimizer") and not schedule.keys() & {"num_steps", "num_iters"}:
        problem = "meta.schedule is missing or has no num_steps"
        raise CheckpointError(f"{problem}, but there is an optimizer's state")
    # Forks of Megatron-LM have their own styles, which --override-opt_param-scheduler replaces.
    for key, field in _STYLES.items() if written_as == "native" else ():
        style, known = schedule.get(key), field_at(field).info.choices or ()
        if style is not None and style not in known:
            problem = f"meta.schedule.{key} is {style!r:.80}"
            raise CheckpointError(f"{problem}, not one of {', '.join(known)}")
