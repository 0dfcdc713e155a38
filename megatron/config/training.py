"""What one run does: batches, length, recomputation, leaving, and how it treats bad numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.config.fields import MOST_WIDTH, Need, flag

# What some flags change nothing without.
_COUNTED = Need(
    lambda run: run.model.architecture != "gpt" or run.data.eod_mask_loss,
    "without --eod-mask-loss: every token counts",
)
_EVALUATES = Need(lambda run: run.evaluation.eval_iters, "with --eval-iters 0")
_SKIPS = Need(lambda run: run.training.on_nonfinite == "skip", "without --on-nonfinite skip")
_COLLECTS = Need(lambda run: run.training.manual_gc, "with --no-manual-gc")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Training."""

    micro_batch_size: int | None = flag(
        None,
        "Samples per process in one forward pass.",
        unit="samples",
        is_common=True,
        required="required",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    global_batch_size: int | None = flag(
        None,
        "Samples per update over all processes. Default: --micro-batch-size x data-parallel size.",
        unit="samples",
        is_common=True,
        at_least=1,
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "Increase the global batch size during the run: START INCREMENT SAMPLES.", many=True
    )
    calculate_per_token_loss: bool = flag(
        False,
        "Average losses and gradients over all counted tokens of an update. Off: average over "
        "the tokens of each micro-batch, then over micro-batches.",
        needs=_COUNTED,
    )
    train_iters: int | None = flag(
        None,
        "Length of the run.",
        unit="iterations",
        is_common=True,
        required="required unless --train-samples is given",
        at_least=0,
    )
    train_samples: int | None = flag(None, "Length of the run.", unit="samples", at_least=1)
    skip_train: bool = flag(False, "Skip training and only evaluate.")
    iterations_to_skip: tuple[int, ...] | None = flag(
        None,
        "Iterations to skip. Their samples are passed over, and nothing is updated, evaluated or "
        "saved. They are counted from 0 as in Megatron Core: N is iteration N + 1 in the log.",
        many=True,
        unit="iterations",
    )
    seed: int = flag(
        1234, "Seed of weights, sample order and dropout.", at_least=0, at_most=2**32 - 1
    )
    deterministic_mode: bool = flag(
        False,
        "Use only algorithms that give bitwise identical results on every run of the same layout.",
    )
    recompute_activations: bool = flag(
        False,
        "Recompute the attention core in the backward pass. Same as --recompute-granularity "
        "selective.",
    )
    recompute_granularity: str | None = flag(
        None,
        "What to recompute in the backward pass: whole layers (full) or the attention core "
        "(selective). Default: nothing.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "With --recompute-granularity full, recompute all layers in groups of "
        "--recompute-num-layers (uniform), or only that many layers (block).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None,
        "Layers per group (uniform) or layers to recompute (block). Default: 1.",
        unit="layers",
        at_least=1,
    )
    exit_interval: int | None = flag(
        None,
        "Save and exit when the iteration is a multiple of this.",
        unit="iterations",
        at_least=1,
    )
    exit_duration_in_mins: int | None = flag(
        None, "Save and exit after this time.", unit="minutes", at_least=1
    )
    exit_signal_handler: bool = flag(
        True,
        "Save and exit on SIGTERM or SIGINT.",
        names="--exit-signal-handler",
        off="--no-exit-signal-handler",
    )
    on_nonfinite: str = flag(
        "stop",
        "Action when the loss or gradients are not finite: stop and report the sample ids, or "
        "skip the update and continue.",
        choices=("stop", "skip"),
    )
    max_nonfinite_skips: int = flag(
        10,
        "With --on-nonfinite skip, stop after this many skipped updates in a row.",
        unit="iterations",
        at_least=1,
        needs=_SKIPS,
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Check the loss and gradients every iteration. Off: non-finite updates are skipped "
        "without limit.",
        off="--no-check-for-nan-in-loss-and-grad",
    )
    manual_gc: bool = flag(
        True,
        "Run Python's garbage collector at the same fixed iterations on all ranks.",
        names="--manual-gc",
        off="--no-manual-gc",
    )
    manual_gc_interval: int = flag(
        100,
        "Iterations between garbage collections. 0 disables them until the run ends.",
        unit="iterations",
        at_least=0,
        needs=_COLLECTS,
    )
    empty_unused_memory_level: int = flag(
        0,
        "When to release unused GPU memory. 0: never, 1: after each iteration, 2: also after "
        "evaluation.",
        choices=(0, 1, 2),
    )
    cuda_graph_impl: str = flag(
        "none",
        "CUDA graphs: record a micro-batch's forward and backward kernels and launch them "
        "together, which helps small models whose GPU waits for the host. local records the "
        "whole model.",
        choices=("none", "local", "transformer_engine", "full_iteration"),
    )
    cuda_graph_warmup_steps: int = flag(
        3, "Iterations before the first recording with --cuda-graph-impl.", unit="iterations"
    )
    dry_run: bool = flag(
        False, "Check everything, print parameters, layout, memory and tokens per step, and exit."
    )
    dry_run_world_size: int | None = flag(
        None,
        "Number of processes to assume with --dry-run. Default: as launched.",
        unit="processes",
        at_least=1,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainingOptions):
    """Training as resolved: both batch sizes are known."""

    micro_batch_size: int = field()
    global_batch_size: int = field()


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation."""

    eval_iters: int = flag(100, "Global batches per evaluation. 0 disables evaluation.", at_least=0)
    eval_interval: int = flag(
        1000,
        "Iterations between evaluations.",
        unit="iterations",
        is_common=True,
        at_least=1,
        needs=_EVALUATES,
    )
