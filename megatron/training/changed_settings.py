"""Changes in settings and data since the checkpoint from which a run continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.reader import Reader
from megatron.config import RunConfig
from megatron.config.run import field_at
from megatron.config.run import flatten as flatten_options
from megatron.config.yaml_file import from_dict

_LOST = "the order of samples changes, and some are seen again"
_ROUNDING = "data.split_rounding"
_PATHS = ("data.data_path", "data.train_data_path")
_LENGTHS = ("training.train_iters", "training.train_samples", "training.train_tokens")
# Settings that determine which sample is the k-th of a run. A checkpoint's position in the data is
# only a count.
_ORDER = (
    *_PATHS,
    "training.seed",
    "data.mock_data",
    "data.split",
    _ROUNDING,
    "data.seq_length",
    "data.decoder_seq_length",
    "data.dataloader_type",
    "data.data_sharding",
    "data.mask_prob",
    "data.short_seq_prob",
)

# Flags in the schedule's section whose values a saved schedule does not replace.
_NOT_OF_SCHEDULES = (
    "schedule.lr_warmup_init",
    "schedule.override_opt_param_scheduler",
    "schedule.use_checkpoint_opt_param_scheduler",
)


def changed_settings(config: RunConfig, reader: Reader) -> Iterator[str]:
    """Yield a log line for each setting that has changed since the checkpoint.

    Settings for checkpoints, logging, profiling and reliability are not compared. Megatron-LM's
    checkpoints contain some flags that we do not have. For these checkpoints, and for those
    converted from them, only the settings that determine the order of samples are compared. There
    are no lines for a Hugging Face model, because it was not trained by a run.
    """
    current, meta = flatten_options(config), reader.meta
    # Determine whether the schedules continue as they were saved (`Schedules.resumed`).
    restarts_schedule = config.checkpoint.no_load_optim or config.training.skip_train
    keeps_schedule = config.schedule.use_checkpoint_opt_param_scheduler and not restarts_schedule
    if not meta.get("iteration") and not meta.get("consumed_train_samples"):
        return
    if reader.format == "native" and "legacy_args" not in meta:
        old = from_dict(reader.meta["config"], str(reader.path))
        old = dataclasses.replace(
            old,
            checkpoint=config.checkpoint,
            logging=config.logging,
            profiling=config.profiling,
            reliability=config.reliability,
        )
        saved = flatten_options(old)
    else:
        args = meta.get("legacy_args") or {}
        named = {path: args.get(path.partition(".")[2]) for path in (*_ORDER, *_LENGTHS)}
        recorded = ((path, value) for path, value in named.items() if value is not None)
        saved = {path: tuple(v) if isinstance(v, list) else v for path, v in recorded}
    current[_ROUNDING] = current[_ROUNDING] or "sizes"
    saved[_ROUNDING] = meta["config"].get("data", {}).get("split_rounding") or "sizes"
    for path, value in saved.items():
        if current[path] == value:
            continue
        field = field_at(path)
        current_text, saved_text = field.spell(current[path]), field.spell(value)
        is_rate = path.startswith("schedule.") and path not in _NOT_OF_SCHEDULES
        change = f"changed since the checkpoint: {current_text} instead of {saved_text}"
        if keeps_schedule and (is_rate or "weight_decay" in path):
            flag = "--use-checkpoint-opt_param-scheduler"
            yield f"  {flag}: continues with {saved_text}, not {current_text}"
        elif path in _ORDER and not (path in _PATHS and _moved(value, current[path])):
            yield f"WARNING: {change}: {_LOST}"
        else:
            yield f"  {change}"
        if path in _LENGTHS:
            yield f"  if the corpus is read more than once, {_LOST}"


def changed_corpus(corpus: str | None, reader: Reader) -> Iterator[str]:
    """Yield a warning if the content of the training data is known to have changed.

    Args:
        corpus: The fingerprint of the run's data, or `None` if it is unknown.
        reader: The checkpoint.
    """
    saved = reader.meta.get("corpus")
    if None not in (corpus, saved) and corpus != saved:
        yield (
            "WARNING: changed since the checkpoint: the training data itself (fingerprint "
            f"{corpus} instead of {saved}): {_LOST}"
        )


def _moved(old: tuple[str, ...] | None, new: tuple[str, ...] | None) -> bool:
    """Return whether only the folders of files differ, probably because the files were moved."""
    return [Path(path).name for path in old or ()] == [Path(path).name for path in new or ()]
