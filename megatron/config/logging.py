"""Options for the reports of a run: log lines, TensorBoard, Weights & Biases, timers, profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import Requirement, flag

# Conditions for the flags below, used as their `needs` or `requires`.
_RECORDS = Requirement(
    lambda run: (
        run.logging.tensorboard_dir or run.logging.wandb_project or run.logging.metrics_jsonl
    ),
    "--tensorboard-dir, --wandb-project or --metrics-jsonl",
)
_TENSORBOARD = Requirement(lambda run: run.logging.tensorboard_dir, "--tensorboard-dir")
_TIMES = Requirement(lambda run: run.logging.timing_log_level, "--timing-log-level")
_STRAGGLERS = Requirement(lambda run: run.logging.log_straggler, "--log-straggler")
_PROFILES = Requirement(lambda run: run.profiling.profile, "--profile")
_STEPS = Requirement(
    lambda run: run.profiling.profile and not run.profiling.profile_windows,
    "--profile, or with --profile-windows",
)
_PROJECT = Requirement(lambda run: run.logging.wandb_project, "--wandb-project")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging.

    Attributes:
        log_interval: Iterations between log lines.
        log_params_norm: Log the norm of all parameters.
        log_num_zeros_in_grad: Log the number of zero gradient entries.
        timing_log_level: Detail of timers. 0: whole iterations, 1: parts of an iteration, 2: finer
            parts of those.
        barrier_with_l1_time: Synchronize ranks around level-1 timers.
        timing_log_option: Statistic of timers over ranks: the maximum (max), the minimum and the
            maximum (minmax), or every rank's value (all).
        log_pipeline_bubble: Time every pipeline operation, and log the share of time that stages
            spend waiting, together with the share that the schedule predicts from the measured
            times.
        log_straggler: Time each rank's own work, excluding its waits for other ranks, log the
            slowest ranks with each log line, and report a rank that stays slow.
        straggler_minmax_count: With --log-straggler, number of slowest and of fastest ranks that
            each log line names.
        tensorboard_dir: Folder for TensorBoard. Off by default.
        tensorboard_log_interval: Iterations between points in TensorBoard, Weights & Biases and
            --metrics-jsonl. The flags for what is written to TensorBoard also apply to all three.
        tensorboard_queue_size: Points buffered before a write.
        log_timers_to_tensorboard: Write the iteration time and the timers of --timing-log-level to
            TensorBoard.
        log_batch_size_to_tensorboard: Write the batch size to TensorBoard.
        log_learning_rate_to_tensorboard: Write the learning rate to TensorBoard.
        log_loss_scale_to_tensorboard: Write the loss scale to TensorBoard.
        log_validation_ppl_to_tensorboard: Write the validation perplexity to TensorBoard.
        log_memory_to_tensorboard: Write memory use to TensorBoard.
        log_world_size_to_tensorboard: Write the world size to TensorBoard.
        log_optimizer_states_to_tensorboard: Write L1 norms, L2 norms and largest magnitudes of the
            weights, of Adam's momentum and variance and of the variance's square root.
        wandb_project: Weights & Biases project. Off by default.
        wandb_entity: Weights & Biases entity.
        wandb_name: Weights & Biases run name.
        wandb_save_dir: Folder for the files of Weights & Biases. Default: wandb in the --save
            folder; without --save, the current folder.
        wandb_id: Weights & Biases run id, to resume a run.
        metrics_jsonl: File to which JSON objects are appended, at full float precision: one for
            every --tensorboard-log-interval iterations, one for each evaluation and each event.
    """

    log_interval: int = flag(100, unit="iterations", is_common=True, at_least=1)
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    timing_log_level: int = flag(0, choices=(0, 1, 2))
    barrier_with_l1_time: bool = flag(True, off="--no-barrier-with-level-1-timing", needs=_TIMES)
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"), needs=_TIMES)
    log_pipeline_bubble: bool = False
    log_straggler: bool = False
    straggler_minmax_count: int = flag(1, unit="ranks", at_least=1, needs=_STRAGGLERS)
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = flag(1, unit="iterations", at_least=1, needs=_RECORDS)
    tensorboard_queue_size: int = flag(1000, unit="points", at_least=1, needs=_TENSORBOARD)
    log_timers_to_tensorboard: bool = flag(False, needs=_RECORDS)
    log_batch_size_to_tensorboard: bool = flag(False, needs=_RECORDS)
    log_learning_rate_to_tensorboard: bool = flag(
        True, off="--no-log-learnig-rate-to-tensorboard", needs=_RECORDS
    )
    log_loss_scale_to_tensorboard: bool = flag(
        True,
        off="--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
        needs=_RECORDS,
    )
    log_validation_ppl_to_tensorboard: bool = flag(False, needs=_RECORDS)
    log_memory_to_tensorboard: bool = flag(False, needs=_RECORDS)
    log_world_size_to_tensorboard: bool = flag(False, needs=_RECORDS)
    log_optimizer_states_to_tensorboard: bool = flag(False, needs=_RECORDS)
    wandb_project: str | None = None
    wandb_entity: str | None = flag(None, requires=_PROJECT)
    wandb_name: str | None = flag(None, names="--wandb-name --wandb-exp-name", requires=_PROJECT)
    wandb_save_dir: str | None = flag(None, requires=_PROJECT)
    wandb_id: str | None = flag(None, requires=_PROJECT)
    metrics_jsonl: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiling.

    Attributes:
        profile: Record a PyTorch profile.
        profile_step_start: First profiled iteration.
        profile_step_end: Iteration before which profiling stops.
        profile_windows: Several windows of iterations to profile, each with its own trace, instead
            of --profile-step-start and --profile-step-end: 10-12 1000-1002 profiles 10, 11, 1000
            and 1001.
        profile_ranks: Ranks to profile.
        profile_dir: Folder for traces. Default: profile in --tensorboard-dir, in --save or in the
            current folder.
        profile_callstack: Record the call stack of every operation. This slows the profiled
            iterations down considerably.
        profile_memory: Record every allocation of memory.
        profile_flops: Estimate the FLOPs of matrix products and convolutions.
        profile_modules: Record the calls of every module. This also records call stacks.
    """

    profile: bool = False
    profile_step_start: int = flag(10, unit="iteration", at_least=0, needs=_STEPS)
    profile_step_end: int = flag(12, unit="iteration", needs=_STEPS)
    profile_windows: tuple[str, ...] = flag((), needs=_PROFILES)
    profile_ranks: tuple[int, ...] = flag((0,), needs=_PROFILES)
    profile_dir: str | None = flag(None, needs=_PROFILES)
    profile_callstack: bool = flag(
        False, names="--pytorch-profiler-collect-callstack", needs=_PROFILES
    )
    profile_memory: bool = flag(False, needs=_PROFILES)
    profile_flops: bool = flag(False, needs=_PROFILES)
    profile_modules: bool = flag(False, needs=_PROFILES)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The profiled windows of iterations, as pairs of start and exclusive end.

        Raises:
            ValueError: An entry of `profile_windows` is not two whole numbers joined by a hyphen.
        """
        if not self.profile_windows:
            return [(self.profile_step_start, self.profile_step_end)]
        pairs = [window.split("-") for window in self.profile_windows]
        return [(int(start), int(end)) for start, end in pairs]
