"""The update: optimizer, weight decay, clipping, and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import LOADS, QK_NORM, Requirement, flag
from megatron.config.training import TOKEN_ARCHITECTURES, TrainingOptions

FORMAT_FIELDS = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype")
# Conditions for the flags below, used as their `needs` or `requires`.
_ADAM = Requirement(
    lambda run: run.optimizer.optimizer in ("adam", "muon"), "--optimizer adam or --optimizer muon"
)
_MUON = Requirement(lambda run: run.optimizer.optimizer == "muon", "--optimizer muon")
_SGD = Requirement(lambda run: run.optimizer.optimizer == "sgd", "--optimizer sgd")
_WARMS_UP = Requirement(
    lambda run: (
        run.schedule.lr_warmup_fraction
        or run.schedule.lr_warmup_iters
        or run.schedule.lr_warmup_samples
        or run.schedule.lr_warmup_tokens
    ),
    "a warm-up",
)
STATE_BLOCK = 256  # elements of an optimizer state that share a scale, in fp16 and fp8
_SCALE = 1 / STATE_BLOCK
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2 + _SCALE, "fp8": 1 + _SCALE}
"""Bytes per element of each format of optimizer states, including scales."""
_MOMENTS = tuple(STATE_BYTES)
_PRECISION_AWARE = Requirement(
    lambda run: run.optimizer.use_precision_aware_optimizer, "--use-precision-aware-optimizer"
)
_LOW_PRECISION = Requirement(
    lambda run: any(getattr(run.optimizer, name) != "fp32" for name in FORMAT_FIELDS),
    "--exp-avg-dtype, --exp-avg-sq-dtype, --main-params-dtype or --main-grads-dtype",
)
_OFFLOAD = Requirement(lambda run: run.optimizer.optimizer_cpu_offload, "--optimizer-cpu-offload")
_LAWA = Requirement(lambda run: run.optimizer.lawa_interval is not None, "--lawa-interval")
_DECOUPLED = Requirement(lambda run: run.schedule.decoupled_lr is not None, "--decoupled-lr")
_RANGE = Requirement(
    lambda run: run.schedule.lr_decay_style == "range-test", "--lr-decay-style range-test"
)
_BRANCHES = Requirement(lambda run: run.schedule.lr_wsd_branch_from, "--lr-wsd-branch-from")
_WSD = Requirement(lambda run: run.schedule.lr_decay_style == "WSD", "--lr-decay-style WSD")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer.

    Attributes:
        optimizer: Optimizer (adam is AdamW). muon orthogonalizes the updates of the matrices in the
            layers, and uses adam for embeddings, the output layer and vectors.
        weight_decay: Weight decay. It is decoupled with adam and muon, and added to gradients with
            sgd.
        start_weight_decay: Weight decay at the start of the ramp.
        end_weight_decay: Weight decay at the end of the ramp.
        weight_decay_incr_style: Shape of the weight-decay ramp.
        apply_wd_to_qk_layernorm: Apply weight decay to the norms of queries and keys too, as
            Qwen3-Next does. Other norms have none.
        clip_grad: Maximum global gradient norm. 0 disables clipping.
        adam_beta1: Decay rate of Adam's first moment.
        adam_beta2: Decay rate of Adam's second moment.
        adam_eps: Constant added to Adam's denominator.
        sgd_momentum: Momentum of --optimizer sgd.
        muon_momentum: Momentum of --optimizer muon.
        muon_use_nesterov: Use Nesterov's momentum in --optimizer muon.
        muon_split_qkv: Orthogonalize the projections of queries, keys and values separately. Off:
            as one combined matrix.
        muon_scale_mode: Scale of an orthogonalized update [out, in]: the square root of max(out,
            in) with spectral, of out / in with unit_rms_norm, and of max(1, out / in) with
            shape_scaling.
        muon_extra_scale_factor: Factor applied to all updates of --optimizer muon. With
            --muon-scale-mode spectral, 0.2 makes them as large as adam's.
        muon_num_ns_steps: Newton-Schulz iterations of each update.
        muon_coefficient_type: Coefficients of the iterations: one set for all (simple), or five
            sets in turn (quintic).
        muon_fp32_matmul_prec: Number format of the iterations: medium computes in bf16, high in
            TF32 where the device has it, and highest in fp32.
        muon_tp_mode: How a matrix that is split over tensor-parallel processes is orthogonalized.
            blockwise orthogonalizes each shard separately, so results depend on the number of
            processes. duplicated gathers the matrix on every process. distributed adds up matrix
            products over the processes.
        muon_scalar_optimizer: Optimizer of the parameters that are not matrices.
        use_precision_aware_optimizer: Allow fewer bits than fp32 for Adam's moments, master weights
            and gradients, as set by --exp-avg-dtype, --exp-avg-sq-dtype, --main-params-dtype and
            --main-grads-dtype.
        exp_avg_dtype: Number format of Adam's first moment. fp16 and fp8 have a scale for every 256
            elements.
        exp_avg_sq_dtype: Number format of Adam's second moment. fp8 suits --adam-beta2 up to 0.95.
        main_params_dtype: Number format of the master weights of 16-bit weights. fp16 has a scale
            for every 256 elements.
        main_grads_dtype: Number format in which gradients are accumulated and reduced with --bf16.
        ema_decay: Keep an exponential moving average of the weights in fp32 with this decay rate,
            for example 0.999. Checkpoints contain it along with the weights.
        lawa_interval: Keep the mean of the latest --lawa-window snapshots of the weights, taken
            once every this many updates (LAWA). Checkpoints contain it along with the weights.
        lawa_window: Number of snapshots in the mean of --lawa-interval. Each takes 4 bytes for
            every parameter that a process updates.
        optimizer_cpu_offload: Keep fp32 weights and optimizer states in host memory and compute the
            update there.
        overlap_cpu_optimizer_d2h_h2d: Make --optimizer-cpu-offload update some weights while
            gradients and weights of others are copied.
    """

    optimizer: str = flag("adam", choices=("adam", "sgd", "muon"))
    weight_decay: float = flag(0.01, at_least=0)
    start_weight_decay: float | None = flag(None, at_least=0)
    end_weight_decay: float | None = flag(None, at_least=0)
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    apply_wd_to_qk_layernorm: bool = flag(False, needs=QK_NORM)
    clip_grad: float = flag(1.0, at_least=0)
    adam_beta1: float = flag(0.9, at_least=0, below=1, needs=_ADAM)
    adam_beta2: float = flag(0.999, at_least=0, below=1, needs=_ADAM)
    adam_eps: float = flag(1e-8, above=0, needs=_ADAM)
    sgd_momentum: float = flag(0.9, at_least=0, below=1, needs=_SGD)
    muon_momentum: float = flag(0.9, above=0, below=1, needs=_MUON)
    muon_use_nesterov: bool = flag(
        False,
        names="--muon-use-nesterov --muon-nesterov",
        off="--muon-no-use-nesterov --no-muon-use-nesterov",
        needs=_MUON,
    )
    muon_split_qkv: bool = flag(True, off="--muon-no-split-qkv --no-muon-split-qkv", needs=_MUON)
    muon_scale_mode: str = flag(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"), needs=_MUON
    )
    muon_extra_scale_factor: float = flag(1.0, above=0, needs=_MUON)
    muon_num_ns_steps: int = flag(5, unit="iterations", at_least=1, at_most=99, needs=_MUON)
    muon_coefficient_type: str = flag("quintic", choices=("quintic", "simple"), needs=_MUON)
    muon_fp32_matmul_prec: str = flag("medium", choices=("medium", "high", "highest"), needs=_MUON)
    muon_tp_mode: str = flag(
        "blockwise", choices=("blockwise", "duplicated", "distributed"), needs=_MUON
    )
    muon_scalar_optimizer: str = flag("adam", choices=("adam",), needs=_MUON)
    use_precision_aware_optimizer: bool = flag(False, needs=_LOW_PRECISION)
    exp_avg_dtype: str = flag("fp32", choices=_MOMENTS, requires=_PRECISION_AWARE)
    exp_avg_sq_dtype: str = flag("fp32", choices=_MOMENTS, requires=_PRECISION_AWARE)
    main_params_dtype: str = flag("fp32", choices=("fp32", "fp16"), requires=_PRECISION_AWARE)
    main_grads_dtype: str = flag("fp32", choices=("fp32", "bf16"), requires=_PRECISION_AWARE)
    ema_decay: float | None = flag(None, above=0, below=1)
    lawa_interval: int | None = flag(None, unit="updates", at_least=1)
    lawa_window: int = flag(5, unit="snapshots", at_least=2, requires=_LAWA)
    optimizer_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, requires=_OFFLOAD)

    @property
    def averages_weights(self) -> bool:
        """Whether the run keeps an average of the weights."""
        return self.ema_decay is not None or self.lawa_interval is not None

    def state_format(self, kind: str) -> str:
        """Return the number format of an optimizer state, such as "exp_avg" or "master"."""
        formats = {
            "exp_avg": self.exp_avg_dtype,
            "exp_avg_sq": self.exp_avg_sq_dtype,
            "master": self.main_params_dtype,
        }
        return formats.get(kind, "fp32")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate.

    Attributes:
        lr: Peak learning rate.
        lr_decay_style: Shape of the learning-rate decay; range-test only raises the rate.
        lr_wsd_decay_style: With --lr-decay-style WSD (warm-up, stable, decay): shape of the decay
            at the end.
        lr_wsd_decay_iters: With --lr-decay-style WSD: length of the decay at the end.
        lr_wsd_decay_samples: With --lr-decay-style WSD: length of the decay at the end.
        lr_wsd_branch_from: With --lr-decay-style WSD: start this run as a branch of another one. It
            begins the final decay at the newest checkpoint in this folder and ends with the decay,
            so no length is given. If the run is started again, it continues from --save.
        lr_wsd_branch_step: Iteration of the checkpoint in --lr-wsd-branch-from. Default: the
            newest.
        lr_range_test_min_lr: First learning rate of a range test, which keeps raising the rate to
            find the largest one at which a network learns. --lr is not needed then.
        lr_range_test_step_size: Number of iterations in each step of a range test.
        lr_range_test_step_rate: Height of a step of a range test, in multiples of the first rate.
        lr_range_test_staircase: Raise the rate of a range test once at the end of each step. Off:
            in every iteration.
        lr_range_test_exponential: Make each step of a range test multiply the rate by 1 +
            --lr-range-test-step-rate, so that every order of magnitude takes equally long.
        lr_decay_iters: Length of the decay. Default: the whole run.
        lr_decay_samples: Length of the decay. Default: the whole run.
        lr_decay_tokens: Length of the decay, counted over all tokens read. Default: --train-tokens,
            if that alone sets the length of the run.
        lr_warmup_fraction: Length of the warm-up as a fraction of the decay length.
        lr_warmup_iters: Length of the warm-up.
        lr_warmup_samples: Length of the warm-up.
        lr_warmup_tokens: Length of the warm-up, if the decay is also in tokens.
        lr_warmup_init: Learning rate at the start of the warm-up.
        lr_warmup_style: Shape of the warm-up. log rises steeply at first and is the default of
            DeepSpeed's schedulers.
        min_lr: Minimum learning rate of the decay.
        decoupled_lr: Peak learning rate of the word embeddings and the output layer. Default: --lr.
        decoupled_min_lr: Minimum learning rate of the decay of --decoupled-lr. Default: --min-lr.
        override_opt_param_scheduler: On resuming, take the learning-rate and weight-decay schedule
            from the flags.
        use_checkpoint_opt_param_scheduler: On resuming, take the learning-rate and weight-decay
            schedule from the checkpoint.
    """

    lr: float | None = flag(None, required="required", at_least=0)
    lr_decay_style: str = flag(
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD", "range-test"),
        is_common=True,
    )
    lr_range_test_min_lr: float = flag(1e-3, above=0, requires=_RANGE)
    lr_range_test_step_size: int = flag(2000, unit="iterations", at_least=1, requires=_RANGE)
    lr_range_test_step_rate: float = flag(1.0, above=0, requires=_RANGE)
    lr_range_test_staircase: bool = flag(False, requires=_RANGE)
    lr_range_test_exponential: bool = flag(False, requires=_RANGE)
    lr_wsd_decay_style: str = flag(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"), requires=_WSD
    )
    lr_wsd_decay_iters: int | None = flag(None, unit="iterations", at_least=1, requires=_WSD)
    lr_wsd_decay_samples: int | None = flag(None, unit="samples", at_least=1, requires=_WSD)
    lr_wsd_branch_from: str | None = flag(None, requires=_WSD)
    lr_wsd_branch_step: int | None = flag(None, unit="iterations", at_least=0, requires=_BRANCHES)
    lr_decay_iters: int | None = flag(None, unit="iterations", at_least=1)
    lr_decay_samples: int | None = flag(None, unit="samples", at_least=1)
    lr_decay_tokens: int | None = flag(
        None, unit="tokens", at_least=1, only_for=TOKEN_ARCHITECTURES
    )
    lr_warmup_fraction: float | None = flag(None, unit="0 to 1", at_least=0, below=1)
    lr_warmup_iters: int = flag(0, unit="iterations", is_common=True, at_least=0)
    lr_warmup_samples: int = flag(0, unit="samples", at_least=0)
    lr_warmup_tokens: int = flag(0, unit="tokens", at_least=0, only_for=TOKEN_ARCHITECTURES)
    lr_warmup_init: float = flag(0.0, at_least=0, needs=_WARMS_UP)
    lr_warmup_style: str = flag("linear", choices=("linear", "log"), needs=_WARMS_UP)
    min_lr: float = flag(0.0, is_common=True, at_least=0)
    decoupled_lr: float | None = flag(None, at_least=0)
    decoupled_min_lr: float | None = flag(None, at_least=0, needs=_DECOUPLED)
    override_opt_param_scheduler: bool = flag(
        False, names="--override-opt_param-scheduler --override-opt-param-scheduler", needs=LOADS
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        names="--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
        needs=LOADS,
    )

    def in_tokens(self, training: TrainingOptions) -> bool:
        """Return whether the schedules count tokens instead of samples or iterations.

        Args:
            training: The options that set the length of the run.
        """
        if self.lr_decay_style == "range-test":
            return False  # the steps of a range test are iterations
        if self.lr_decay_tokens is not None or self.lr_warmup_tokens:
            return True
        return training.train_tokens is not None and not training.has_count
