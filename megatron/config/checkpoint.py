"""Options for saving and loading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import LOADS, SAVES, Requirement, flag

AVERAGES, SNAPSHOTS = "average.", "snapshot"  # prefixes of averaged weights in checkpoints
_CORE_FORMATS = ("torch_dcp", "zarr", "fsdp_dtensor")


def _written_format(text: str) -> str:
    """Check and return a value of --ckpt-format.

    Raises:
        ValueError: The format is a Megatron Core format that cannot be written.
    """
    if text in _CORE_FORMATS:
        raise ValueError(
            "this is a Megatron Core format, which cannot be written: drop the flag (native "
            "checkpoints load in any layout), or use torch_dist or torch for a GPT of Megatron "
            "Core, or legacy for Megatron-LM 23.08"
        )
    return text


def _non_persistent_type(text: str) -> str:
    """Check and return a value of --non-persistent-ckpt-type.

    Raises:
        ValueError: The type is not supported.
    """
    if text == "in_memory":
        raise ValueError(
            "processes lose their memory when they end: use local, with "
            "--non-persistent-local-ckpt-dir in /dev/shm"
        )
    return text


# Conditions for the flags below, used as their `needs` or `requires`.
_NON_PERSISTENT = Requirement(
    lambda run: run.checkpoint.non_persistent_save_interval is not None,
    "--non-persistent-save-interval",
)
_GLOBAL = Requirement(
    lambda run: run.checkpoint.non_persistent_ckpt_type == "global",
    "--non-persistent-ckpt-type global",
)
_LOCAL = Requirement(
    lambda run: run.checkpoint.non_persistent_ckpt_type == "local",
    "--non-persistent-ckpt-type local",
)
_REPLICATED = Requirement(lambda run: run.checkpoint.replication, "--replication")
_FOR_CORE = Requirement(
    lambda run: run.checkpoint.ckpt_format in ("torch", "torch_dist"),
    "--ckpt-format torch_dist or torch",
)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        save: Folder to write checkpoints to. By default none are written.
        save_interval: Iterations between checkpoints.
        ckpt_format: Format of written checkpoints: native, legacy for files that Megatron-LM 23.08
            can load, or torch_dist or torch for files that Megatron Core can load with the same
            flag. All of them can be read.
        transformer_impl: Layer implementation of the Megatron Core run that will load a torch_dist
            or torch checkpoint. Implementations name a few parameters differently. The layers
            of this package do not depend on the flag.
        save_interval_in_mins: Time between checkpoints. With --save-interval, a checkpoint is
            written whenever either is due.
        async_save: Write checkpoints in the background. Training continues while the state is
            copied to host memory, and only the next update waits for the copy.
        keep_latest: Keep only this many of the newest checkpoints in --save.
        save_retain_interval: Keep checkpoints at multiples of this number, which must be a multiple
            of --save-interval. Others are deleted once the next checkpoint is written, or according
            to --keep-latest.
        mean_hours_between_failures: Mean time between failures of the whole job, used to suggest
            how often to save. Default: 50,000 GPU hours, as in Llama 3's training.
        non_persistent_save_interval: Iterations between non-persistent checkpoints. The two newest
            are kept, and a run that resumes from its own --save folder prefers them if they are
            newer.
        non_persistent_ckpt_type: Where non-persistent checkpoints are kept: in a folder shared by
            all processes (global), or on each machine's own disk or in its memory (local).
        non_persistent_global_ckpt_dir: Folder for global non-persistent checkpoints. Default:
            non_persistent in --save.
        non_persistent_local_ckpt_dir: Folder for local non-persistent checkpoints, for example in
            /dev/shm.
        replication: Copy each process's local checkpoint to the folders of other processes, so that
            it survives the loss of a machine.
        replication_jump: Distance in ranks between a process and the one that stores its copy.
            Default: the number of processes per machine, which puts the copy on the next machine.
        replication_factor: Number of machines that store each process's local checkpoint, including
            its own.
        no_save_optim: Leave the optimizer out of checkpoints.
        no_save_rng: Leave random states out of checkpoints.
        load: Folder to load the newest checkpoint from.
        pretrained_checkpoint: Folder with the weights to start from, as with --finetune, as long as
            --load contains no checkpoint. With the same folder under --load and --save, one command
            serves the first start and every restart.
        ckpt_step: Load the checkpoint of this iteration from --load instead of the newest.
        allow_foreign_checkpoints: Load checkpoints even if another user owns them or they are
            world-writable. Anyone who can write to them controls their values.
        load_averaged_weights: Load the average of the weights (--ema-decay, --lawa-interval)
            instead of the weights themselves. Training from it requires --finetune or
            --no-load-optim.
        no_load_optim: Start with a fresh optimizer.
        no_load_rng: Start with fresh random states.
        finetune: Load weights only and start at iteration 0 with a fresh optimizer.
        use_checkpoint_args: Take the network's shape from the checkpoint in --load. It overrides
            flags and YAML.
        exit_on_missing_checkpoint: Exit with an error if --load contains no checkpoint, even if it
            is also the --save folder, in which a run otherwise starts fresh.
    """

    save: str | None = flag(None, is_common=True)
    save_interval: int | None = flag(
        None,
        unit="iterations",
        names="--save-interval --persistent-save-interval",
        is_common=True,
        at_least=1,
        needs=SAVES,
    )
    ckpt_format: str = flag(
        "native",
        choices=("native", "legacy", "torch_dist", "torch"),
        convert=_written_format,
        needs=SAVES,
    )
    transformer_impl: str = flag(
        "transformer_engine",
        choices=("local", "transformer_engine", "inference_optimized"),
        needs=_FOR_CORE,
    )
    save_interval_in_mins: float | None = flag(None, unit="minutes", above=0, needs=SAVES)
    async_save: bool = flag(False, needs=SAVES)
    keep_latest: int | None = flag(None, unit="checkpoints", at_least=1, needs=SAVES)
    save_retain_interval: int | None = flag(None, unit="iterations", at_least=1, needs=SAVES)
    mean_hours_between_failures: float | None = flag(None, unit="hours", above=0, needs=SAVES)
    non_persistent_save_interval: int | None = flag(
        None, unit="iterations", at_least=1, requires=SAVES
    )
    non_persistent_ckpt_type: str | None = flag(
        None, choices=("global", "local"), convert=_non_persistent_type, needs=_NON_PERSISTENT
    )
    non_persistent_global_ckpt_dir: str | None = flag(None, requires=_GLOBAL)
    non_persistent_local_ckpt_dir: str | None = flag(None, requires=_LOCAL)
    replication: bool = flag(False, requires=_LOCAL)
    replication_jump: int | None = flag(None, unit="ranks", at_least=1, requires=_REPLICATED)
    replication_factor: int = flag(2, unit="machines", at_least=2, requires=_REPLICATED)
    no_save_optim: bool = flag(False, needs=SAVES)
    no_save_rng: bool = flag(False, needs=SAVES)
    load: str | None = flag(None, is_common=True)
    pretrained_checkpoint: str | None = flag(None, requires=LOADS)
    ckpt_step: int | None = flag(None, unit="iterations", at_least=0, requires=LOADS)
    allow_foreign_checkpoints: bool = False
    load_averaged_weights: bool = flag(False, requires=LOADS)
    no_load_optim: bool = flag(False, needs=LOADS)
    no_load_rng: bool = flag(False, needs=LOADS)
    finetune: bool = flag(False, needs=LOADS)
    use_checkpoint_args: bool = flag(False, requires=LOADS)
    exit_on_missing_checkpoint: bool = flag(False, requires=LOADS)
