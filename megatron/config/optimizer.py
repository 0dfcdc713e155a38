"""The update: optimizer, weight decay, clipping, and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import Need, flag

# What some flags change nothing without.
_ADAM = Need(lambda run: run.optimizer.optimizer == "adam", "with --optimizer sgd")
_SGD = Need(lambda run: run.optimizer.optimizer == "sgd", "without --optimizer sgd")
_WARMS_UP = Need(
    lambda run: (
        run.schedule.lr_warmup_fraction
        or run.schedule.lr_warmup_iters
        or run.schedule.lr_warmup_samples
    ),
    "without a warm-up",
)
_DECOUPLED = Need(lambda run: run.schedule.decoupled_lr is not None, "without --decoupled-lr")
_LOADS = Need(lambda run: run.checkpoint.load is not None, "without --load")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer."""

    optimizer: str = flag("adam", "Optimizer (adam is AdamW).", choices=("adam", "sgd"))
    weight_decay: float = flag(
        0.01, "Weight decay. It is decoupled with adam and added to gradients with sgd.", at_least=0
    )
    start_weight_decay: float | None = flag(
        None, "Weight decay at the start of the ramp.", at_least=0
    )
    end_weight_decay: float | None = flag(None, "Weight decay at the end of the ramp.", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant", "Shape of the weight-decay ramp.", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "Maximum global gradient norm. 0 disables clipping.", at_least=0)
    adam_beta1: float = flag(
        0.9, "Decay rate of Adam's first moment.", at_least=0, below=1, needs=_ADAM
    )
    adam_beta2: float = flag(
        0.999, "Decay rate of Adam's second moment.", at_least=0, below=1, needs=_ADAM
    )
    adam_eps: float = flag(1e-8, "Constant added to Adam's denominator.", above=0, needs=_ADAM)
    sgd_momentum: float = flag(0.9, "Momentum of --optimizer sgd.", at_least=0, below=1, needs=_SGD)
    optimizer_cpu_offload: bool = flag(
        False, "Keep fp32 weights and optimizer states in host memory and compute the update there."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate."""

    lr: float | None = flag(
        None, "Peak learning rate.", is_common=True, required="required", at_least=0
    )
    lr_decay_style: str = flag(
        "linear",
        "Shape of the learning-rate decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        is_common=True,
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "With --lr-decay-style WSD (warm-up, stable, decay): shape of the decay at the end.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(
        None,
        "With --lr-decay-style WSD: length of the decay at the end.",
        unit="iterations",
        at_least=1,
    )
    lr_wsd_decay_samples: int | None = flag(
        None,
        "With --lr-decay-style WSD: length of the decay at the end.",
        unit="samples",
        at_least=1,
    )
    lr_decay_iters: int | None = flag(
        None, "Length of the decay. Default: the whole run.", unit="iterations", at_least=1
    )
    lr_decay_samples: int | None = flag(
        None, "Length of the decay. Default: the whole run.", unit="samples", at_least=1
    )
    lr_warmup_fraction: float | None = flag(
        None, "Linear warm-up as a share of the decay length.", unit="0 to 1", at_least=0, below=1
    )
    lr_warmup_iters: int = flag(0, "Linear warm-up.", unit="iterations", is_common=True, at_least=0)
    lr_warmup_samples: int = flag(0, "Linear warm-up.", unit="samples", at_least=0)
    lr_warmup_init: float = flag(
        0.0, "Learning rate at the start of the warm-up.", at_least=0, needs=_WARMS_UP
    )
    min_lr: float = flag(0.0, "Minimum learning rate of the decay.", is_common=True, at_least=0)
    decoupled_lr: float | None = flag(
        None,
        "Peak learning rate of the word embeddings and the output layer. Default: --lr.",
        at_least=0,
    )
    decoupled_min_lr: float | None = flag(
        None,
        "Minimum learning rate of the decay of --decoupled-lr. Default: --min-lr.",
        at_least=0,
        needs=_DECOUPLED,
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "On resuming, take the learning-rate and weight-decay schedule from the flags.",
        names=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
        needs=_LOADS,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "On resuming, take the learning-rate and weight-decay schedule from the checkpoint.",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
        needs=_LOADS,
    )
