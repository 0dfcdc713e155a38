"""Branches of a run with a WSD schedule, which begin their decay at a checkpoint of the run."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.loading import open_root
from megatron.checkpoint.reader import Reader
from megatron.config import RunConfig
from megatron.config.run import with_values
from megatron.errors import CheckpointError
from megatron.optimizer.schedule import Schedules
from megatron.parallel.layout import Layout
from megatron.training.run import Run


def open_trunk(config: RunConfig, root: Path, layout: Layout) -> Reader:
    """Open the checkpoint from which a branch starts. Collective.

    Args:
        config: The run's configuration.
        root: The folder in --lr-wsd-branch-from.
        layout: The grid of processes as this process sees it.

    Raises:
        CheckpointError: The folder contains no intact checkpoint, or none of the iteration in
            --lr-wsd-branch-step.
    """
    reader = open_root(
        root,
        step=config.schedule.lr_wsd_branch_step,
        layout=layout,
        allow_foreign=config.checkpoint.allow_foreign_checkpoints,
    )
    if reader is None:
        raise CheckpointError(f"--lr-wsd-branch-from {root}: there is no checkpoint in this folder")
    return reader


def _starts_branch(config: RunConfig, reader: Reader) -> bool:
    """Return whether the run starts as a branch of the run that wrote the checkpoint."""
    root = config.schedule.lr_wsd_branch_from
    return root is not None and reader.path.resolve().is_relative_to(Path(root).resolve())


def with_branch_length(config: RunConfig, reader: Reader | None) -> RunConfig:
    """Return a branch's configuration with its number of iterations or samples filled in.

    The number depends on the checkpoint at which the branch starts. The configuration of a run that
    is not a branch is returned unchanged.
    """
    schedule = config.schedule
    if schedule.lr_wsd_branch_from is None:
        return config
    assert reader is not None, "a branch has a checkpoint"
    if not _starts_branch(config, reader):
        saved = reader.meta["config"]["training"]
        lengths = {f"training.{name}": saved.get(name) for name in ("train_iters", "train_samples")}
    elif schedule.lr_wsd_decay_iters is not None:
        lengths = {"training.train_iters": reader.iteration + schedule.lr_wsd_decay_iters}
    else:
        assert schedule.lr_wsd_decay_samples is not None, "a rule requires one of them"
        end = reader.meta["consumed_train_samples"] + schedule.lr_wsd_decay_samples
        lengths = {"training.train_samples": end}
    return with_values(config, lengths)


def resumed_schedules(run: Run, reader: Reader) -> tuple[Schedules, int]:
    """Return the schedules with which a run continues, and their position in samples.

    Raises:
        CheckpointError: The saved schedules are invalid, or do not fit the flags.
    """
    saved, options = reader.meta["schedule"], run.config.schedule
    if options.lr_wsd_branch_from is None:
        return run.schedules.resumed(
            saved,
            override=options.override_opt_param_scheduler or run.config.training.skip_train,
            use_checkpoint=options.use_checkpoint_opt_param_scheduler,
        )
    if _starts_branch(run.config, reader):
        return run.schedules.branched(saved)
    return run.schedules.resumed_branch(saved)
