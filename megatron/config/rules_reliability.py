"""Rules for saving, resuming and injected faults."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from megatron.config.fields import near_multiples
from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions, flatten
from megatron.environment import name_problem

_FOLDERS = ("checkpoint.save", "checkpoint.load", "checkpoint.pretrained_checkpoint")


def save_interval(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if --save has no interval."""
    checkpoint = config.checkpoint
    intervals = (checkpoint.save_interval, checkpoint.save_interval_in_mins)
    if checkpoint.save is not None and intervals == (None, None):
        yield (
            f"--save {checkpoint.save} needs --save-interval: give iterations between checkpoints, "
            "or minutes as --save-interval-in-mins"
        )


def pretrained(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each flag that cannot be combined with --pretrained-checkpoint."""
    checkpoint = config.checkpoint
    if checkpoint.pretrained_checkpoint is None:
        return
    for flag, is_given, reason in (
        ("--finetune", checkpoint.finetune, "a restart would begin again"),
        ("--ckpt-step", checkpoint.ckpt_step is not None, "a restart would not continue"),
        (
            "--lr-wsd-branch-from",
            config.schedule.lr_wsd_branch_from is not None,
            "a branch has the weights of its trunk",
        ),
    ):
        if is_given:
            yield f"--pretrained-checkpoint cannot be combined with {flag}: {reason}: drop one"


def retention(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if the checkpoints to retain would never be saved."""
    checkpoint = config.checkpoint
    retained, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if checkpoint.save is None or not retained or retained < 1:
        return
    if interval is None:
        yield (
            f"--save-retain-interval {retained} requires --save-interval: use a divisor of "
            f"{retained}"
        )
    elif interval > 0 and retained % interval:
        yield (
            f"--save-retain-interval {retained} is not divisible by --save-interval {interval}: "
            f"use {near_multiples(retained, interval)}"
        )


def checkpoint_names(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each path or other string that is not UTF-8.

    Indexes, logs and safetensors require UTF-8. A checkpoint's absolute path must be UTF-8 too,
    because safetensors opens it.
    """
    for name, value in flatten(config).items():
        for text in value if isinstance(value, tuple) else (value,):
            if not isinstance(text, str):
                continue
            of_checkpoint = name in _FOLDERS
            path = os.path.abspath(text) if of_checkpoint and text else text
            problem = name_problem(path)
            if problem is not None:
                flag = "--" + name.partition(".")[2].replace("_", "-")
                yield f"{flag} {text!a}: the path {path!a} {problem}"


def faults(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each fault of --fault-inject that could never be triggered."""
    flags = {"load": ("--load", config.checkpoint.load), "save": ("--save", config.checkpoint.save)}
    length = config.training.train_iters
    for text, fault in zip(config.reliability.fault_inject, config.reliability.faults, strict=True):
        flag_text = f"--fault-inject {text}"
        if fault.rank >= world_size:
            yield f"{flag_text}: there is no rank {fault.rank}: give one from 0 to {world_size - 1}"
        if length is not None and fault.step > length:
            yield f"{flag_text}: the run ends after --train-iters {length}: give an earlier step"
        flag, value = flags.get(fault.point, ("", ""))
        if value is None:
            yield f"{flag_text}: the run never reaches {fault.point} without {flag}: add it"


def rerun(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if an update could not be repeated exactly."""
    mode, precision = config.reliability.rerun_mode, config.precision
    if mode == "disabled":
        return
    if precision.fp8_format is not None and precision.fp8_recipe == "delayed":
        yield (
            f"--rerun-mode {mode} cannot be combined with --fp8-recipe delayed, because the scales "
            "of the first computation are gone: use --fp8-recipe tensorwise"
        )


# The values of other fields that --torchft-lighthouse allows, and why it excludes the rest.
_NOT_WITH_TORCHFT: Exclusions = {
    "parallel.ddp_impl": (("local",), "it averages gradients during the backward pass"),
    "parallel.zero_stage": (
        (None, 0, 1, 2),
        "a job that joins could not receive shards of weights",
    ),
    "training.calculate_per_token_loss": ((False,), "labels are not counted across jobs"),
    "training.on_spike": (("none", "skip"), "a job that has joined has no checkpoint to return to"),
    "training.iterations_to_skip": ((None, ()), "the jobs would not skip them together"),
    "reliability.rerun_mode": (
        ("disabled",),
        "an update cannot be computed again by one job alone",
    ),
    "reliability.on_crash_loop": (("stop",), "the jobs would not skip samples together"),
    "precision.fp8_recipe": (
        ("tensorwise", "rowwise"),
        "the scales would follow the activations of one job",
    ),
    "model.moe_router_enable_expert_bias": (
        (False,),
        "the biases would follow the loads of one job",
    ),
    "optimizer.ema_decay": ((None,), "a job that joins does not receive averages"),
    "optimizer.lawa_interval": ((None,), "a job that joins does not receive averages"),
}


def torchft(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that jobs that train together cannot have."""
    address = config.reliability.torchft_lighthouse
    if address is None:
        return
    flag_text = f"--torchft-lighthouse {address}"
    if not re.fullmatch(r"https?://[^\s/]+:[0-9]{1,5}/?", address):
        yield f"{flag_text}: expected an address such as http://10.0.0.1:29510"
    yield from excluded(config, flag_text, _NOT_WITH_TORCHFT)


def non_persistent(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the flags of non-persistent checkpoints."""
    options = config.checkpoint
    interval = options.non_persistent_save_interval
    if interval is None:
        return
    flag_text = f"--non-persistent-save-interval {interval}"
    if options.non_persistent_ckpt_type is None:
        yield f"{flag_text}: give --non-persistent-ckpt-type local or global"
    if options.non_persistent_ckpt_type == "local" and not options.non_persistent_local_ckpt_dir:
        yield f"{flag_text}: give --non-persistent-local-ckpt-dir, for example a folder in /dev/shm"
    if options.no_save_optim or options.no_save_rng:
        flag = "--no-save-optim" if options.no_save_optim else "--no-save-rng"
        yield f"{flag_text} cannot be combined with {flag}, because runs resume from them: drop one"
