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
        "Samples of one forward pass of one process.",
        unit="samples",
        is_common=True,
        required="required",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    global_batch_size: int | None = flag(
        None,
        "Samples of one update over all processes. Default: micro batch x data-parallel size.",
        unit="samples",
        is_common=True,
        at_least=1,
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "Grow the global batch: START INCREMENT SAMPLES.", many=True
    )
    calculate_per_token_loss: bool = flag(
        False,
        "Average losses and gradients over all tokens of an update that count. Off: over those of "
        "each micro-batch, and these means over micro-batches.",
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
    skip_train: bool = flag(False, "Only evaluate.")
    iterations_to_skip: tuple[int, ...] | None = flag(
        None,
        "Iterations to leave out: their samples are read past, nothing is updated, evaluated or "
        "saved. Counted from 0, as Megatron Core does: N is the one that the log calls N + 1.",
        many=True,
        unit="iterations",
    )
    seed: int = flag(
        1234, "Seed of weights, sample order and dropout.", at_least=0, at_most=2**32 - 1
    )
    deterministic_mode: bool = flag(
        False, "Only algorithms that give the same bits on every run of the same layout."
    )
    recompute_activations: bool = flag(
        False,
        "Recompute the attention core in backward (same as --recompute-granularity selective).",
    )
    recompute_granularity: str | None = flag(
        None,
        "What to recompute in backward: whole layers or the attention core. Default: nothing.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "With full: recompute all layers in groups of --recompute-num-layers, or only that many.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None,
        "Layers a group (uniform) or layers recomputed (block). Default: 1.",
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
        "What to do when loss or gradients are not finite: stop with the sample ids, or skip the "
        "update and go on.",
        choices=("stop", "skip"),
    )
    max_nonfinite_skips: int = flag(
        10,
        "With --on-nonfinite skip: stop after this many in a row.",
        unit="iterations",
        at_least=1,
        needs=_SKIPS,
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Check loss and gradients every iteration; off: updates that are not finite are left out "
        "without end.",
        off="--no-check-for-nan-in-loss-and-grad",
    )
    manual_gc: bool = flag(
        True,
        "Collect Python garbage at fixed iterations on all ranks together.",
        names="--manual-gc",
        off="--no-manual-gc",
    )
    manual_gc_interval: int = flag(
        100,
        "Iterations between collections. 0: none until the run ends.",
        unit="iterations",
        at_least=0,
        needs=_COLLECTS,
    )
    empty_unused_memory_level: int = flag(
        0,
        "Return unused GPU memory: 0 never, 1 after each iteration, 2 also after evaluation.",
        choices=(0, 1, 2),
    )
    cuda_graph_impl: str = flag(
        "none",
        "Record the kernels of a micro-batch's forward and backward and start them all at once, "
        "where a GPU would wait for the host (small models). local: the whole model's.",
        choices=("none", "local", "transformer_engine", "full_iteration"),
    )
    cuda_graph_warmup_steps: int = flag(
        3, "With --cuda-graph-impl: iterations before the first recording.", unit="iterations"
    )
    dry_run: bool = flag(
        False, "Check everything, print parameters, layout, memory and tokens a step, and exit."
    )
    dry_run_world_size: int | None = flag(
        None,
        "Pretend this many processes with --dry-run. Default: as launched.",
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

    eval_iters: int = flag(100, "Global batches of one evaluation. 0: no evaluation.", at_least=0)
    eval_interval: int = flag(
        1000,
        "Iterations between evaluations.",
        unit="iterations",
        is_common=True,
        at_least=1,
        needs=_EVALUATES,
    )
