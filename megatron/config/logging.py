"""What a run tells: log line, TensorBoard, Weights & Biases, timers, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import Need, flag

# What some flags change nothing without.
_RECORDS = Need(
    lambda run: (
        run.logging.tensorboard_dir or run.logging.wandb_project or run.logging.metrics_jsonl
    ),
    "without --tensorboard-dir, --wandb-project or --metrics-jsonl",
)
_TENSORBOARD = Need(lambda run: run.logging.tensorboard_dir, "without --tensorboard-dir")
_TIMES = Need(lambda run: run.logging.timing_log_level, "without --timing-log-level")
_PROFILES = Need(lambda run: run.profiling.profile, "without --profile")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging."""

    log_interval: int = flag(
        100, "Iterations between log lines.", unit="iterations", is_common=True, at_least=1
    )
    log_params_norm: bool = flag(False, "Log the norm of all parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Log the number of zero gradient entries.")
    timing_log_level: int = flag(
        0,
        "Detail of timers. 0: whole iterations, 1: parts of an iteration, 2: finer parts of those.",
        choices=(0, 1, 2),
    )
    barrier_with_l1_time: bool = flag(
        True,
        "Synchronize ranks around level-1 timers.",
        off="--no-barrier-with-level-1-timing",
        needs=_TIMES,
    )
    timing_log_option: str = flag(
        "minmax",
        "Statistic of timers over ranks: the maximum, minimum and maximum, or every rank.",
        choices=("max", "minmax", "all"),
        needs=_TIMES,
    )
    log_pipeline_bubble: bool = flag(
        False,
        "Time every pipeline operation, and log the share of time that stages spend waiting, "
        "together with the share that the schedule predicts from the measured times.",
    )
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard. Off by default.")
    tensorboard_log_interval: int = flag(
        1, "Iterations between TensorBoard points.", unit="iterations", at_least=1, needs=_RECORDS
    )
    tensorboard_queue_size: int = flag(
        1000, "Points buffered before a write.", unit="points", at_least=1, needs=_TENSORBOARD
    )
    log_timers_to_tensorboard: bool = flag(
        False,
        "Write the iteration time and the timers of --timing-log-level to TensorBoard.",
        needs=_RECORDS,
    )
    log_batch_size_to_tensorboard: bool = flag(
        False, "Write the batch size to TensorBoard.", needs=_RECORDS
    )
    log_learning_rate_to_tensorboard: bool = flag(
        True,
        "Write the learning rate to TensorBoard.",
        off="--no-log-learnig-rate-to-tensorboard",
        needs=_RECORDS,
    )
    log_loss_scale_to_tensorboard: bool = flag(
        True,
        "Write the loss scale to TensorBoard.",
        off=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
        needs=_RECORDS,
    )
    log_validation_ppl_to_tensorboard: bool = flag(
        False, "Write the validation perplexity to TensorBoard.", needs=_RECORDS
    )
    log_memory_to_tensorboard: bool = flag(
        False, "Write memory use to TensorBoard.", needs=_RECORDS
    )
    log_world_size_to_tensorboard: bool = flag(
        False, "Write the world size to TensorBoard.", needs=_RECORDS
    )
    wandb_project: str | None = flag(None, "Weights & Biases project. Off by default.")
    wandb_entity: str | None = flag(None, "Weights & Biases entity.")
    wandb_name: str | None = flag(
        None, "Weights & Biases run name.", names=("--wandb-name", "--wandb-exp-name")
    )
    wandb_save_dir: str | None = flag(
        None,
        "Folder for the files of Weights & Biases. Default: wandb in the --save folder; without "
        "--save, the current folder.",
    )
    wandb_id: str | None = flag(None, "Weights & Biases run id, to resume a run.")
    metrics_jsonl: str | None = flag(
        None, "File to which one JSON object per iteration is appended, at full float precision."
    )


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiling."""

    profile: bool = flag(False, "Record a PyTorch profile.")
    profile_step_start: int = flag(
        10, "First profiled iteration.", unit="iteration", at_least=0, needs=_PROFILES
    )
    profile_step_end: int = flag(
        12, "Iteration before which profiling stops.", unit="iteration", needs=_PROFILES
    )
    profile_ranks: tuple[int, ...] = flag((0,), "Ranks to profile.", many=True, needs=_PROFILES)
    profile_dir: str | None = flag(
        None,
        "Folder for traces. Default: profile in --tensorboard-dir, in --save or in the current "
        "folder.",
        needs=_PROFILES,
    )
