"""Options for training: batches, length, recomputation, exit and non-finite values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise

from megatron.config.fields import MAX_WIDTH, QK_NORM, RECOMPUTED, Requirement, flag

# Networks whose training may be measured in tokens, because all samples have the same length.
TOKEN_ARCHITECTURES = ("gpt", "bert", "retro")

# Conditions for the flags below, used as their `needs` or `requires`.
_MASKS_TOKENS = Requirement(
    lambda run: (
        run.model.architecture not in ("gpt", "retro")
        or run.data.eod_mask_loss
        or run.finetuning.sft
    ),
    "--eod-mask-loss or --sft: every token counts",
)
_AVERAGES = Requirement(
    lambda run: run.optimizer.averages_weights, "--ema-decay or --lawa-interval"
)
# The description leaves out --full-validation, which few kinds of network support.
_EVALUATES = Requirement(lambda run: run.evaluation.takes_place, "--eval-iters above 0")
_FULL_VALIDATION = Requirement(lambda run: run.evaluation.full_validation, "--full-validation")
_SEPARATE_SETS = Requirement(
    lambda run: run.evaluation.multiple_validation_sets, "--multiple-validation-sets"
)
_SKIPS = Requirement(lambda run: run.training.on_nonfinite == "skip", "--on-nonfinite skip")
_FINDS_SPIKES = Requirement(
    lambda run: run.training.on_spike != "none", "--on-spike skip or --on-spike rewind"
)
_MANUAL_GC = Requirement(lambda run: run.training.manual_gc, "--manual-gc")
_SELECTIVE = Requirement(
    lambda run: run.training.recompute_granularity == "selective",
    "--recompute-granularity selective",
)
_OFFLOADS = Requirement(
    lambda run: run.training.fine_grained_activation_offloading,
    "--fine-grained-activation-offloading",
)
_RECORDS = Requirement(
    lambda run: run.training.cuda_graph_impl == "local", "--cuda-graph-impl local"
)
_DRY_RUN = Requirement(lambda run: run.training.dry_run, "--dry-run")


RECOMPUTED_MODULES = (
    *("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
)
OFFLOADED_MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp"),
    *("expert_fc1", "moe_act"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Training.

    Attributes:
        micro_batch_size: Samples per process in one forward pass.
        global_batch_size: Samples per update over all processes. Default: --micro-batch-size x
            data-parallel size, or the largest of --step-batch-size-schedule.
        rampup_batch_size: Increase the global batch size during the run: START INCREMENT SAMPLES.
        step_batch_size_schedule: Global batch sizes over the course of the run, each with the
            number of tokens after which it applies, for example "0:768 250B:1536 500B:3072".
            --global-batch-size is the largest of them, with which evaluations run unless
            --eval-global-batch-size is given.
        calculate_per_token_loss: Average losses and gradients over all counted tokens of an update.
            Off: average over the tokens of each micro-batch, then over micro-batches.
        train_iters: Length of the run.
        train_samples: Length of the run.
        train_tokens: Length of the run: it ends with the first update that reaches this number of
            tokens. With --train-iters or --train-samples, whichever comes first ends the run.
        skip_train: Skip training and only evaluate.
        iterations_to_skip: Iterations to skip, with their samples. Nothing is updated, evaluated or
            saved in them. Iterations count from 0 as in Megatron Core: N is iteration N + 1 in the
            log.
        seed: Seed for initial weights, sample order and dropout.
        deterministic_mode: Use only algorithms that give bitwise identical results on every run of
            the same layout.
        recompute_activations: Recompute the attention core in the backward pass. Same as
            --recompute-granularity selective.
        recompute_granularity: What to recompute in the backward pass: whole layers (full) or the
            modules that --recompute-modules names (selective). Default: nothing.
        recompute_modules: With --recompute-granularity selective, recompute the attention core
            (core_attn), the output of each layer's normalizations (layernorm), the queries, keys
            and values of latent attention (mla_up_proj), dense MLPs (mlp), mixtures with routing
            and exchange (moe), the activation of experts (moe_act), or shared experts
            (shared_experts).
        recompute_method: With --recompute-granularity full, recompute all layers in groups of
            --recompute-num-layers (uniform), or only that many layers (block).
        recompute_num_layers: Layers per group (uniform) or layers to recompute (block). Default: 1.
        fine_grained_activation_offloading: Keep activations of --offload-modules in host memory
            until the backward pass. The copies in both directions overlap with the computation.
        offload_modules: Modules whose large activations go to host memory: the normalizations
            before attention (attn_norm) and before the MLP (mlp_norm), the projections to queries,
            keys and values (qkv_linear), the attention core (core_attn), the projection of its
            output (attn_proj), dense MLPs (mlp), and the first projection (expert_fc1) and the
            activation (moe_act) of experts.
        min_offloaded_tensor_size: Activations with fewer elements stay on the device.
        exit_interval: Save and exit when the iteration is a multiple of this.
        exit_duration_in_mins: Save and exit after this time.
        exit_signal_handler: Save and exit on SIGTERM or SIGINT.
        kill_switch_file: Save and exit as soon as this file exists. If the file exists when the run
            starts, nothing is trained.
        on_nonfinite: Action when the loss or gradients are not finite: stop and report the sample
            ids, or skip the update and continue.
        max_nonfinite_skips: With --on-nonfinite skip, stop after this many skipped updates in a
            row.
        check_for_nan_in_loss_and_grad: Check the loss and gradients every iteration. Off:
            non-finite updates are skipped without limit.
        on_spike: Action when a loss or the gradient norm is far above its running median: none;
            skip the update; or rewind, which restores the weights and the optimizer from the last
            checkpoint and continues with the next samples. The sample ids are printed.
        spike_window: With --on-spike, number of updates that the running medians cover. Nothing
            counts as a spike until this many updates have been made.
        spike_loss_threshold: With --on-spike, a loss is a spike if it exceeds its running median by
            more than this many standard deviations, and by more than this many percent.
        spike_grad_norm_threshold: Like --spike-loss-threshold, for the gradient norm.
        max_spikes: With --on-spike, stop after this many skipped updates in a row, or after going
            back to the same checkpoint this many times.
        check_weight_hash_across_dp_replicas_interval: Compare hashes of the weights, and of
            optimizer states that are not sharded, between replicas, at this interval and before
            each checkpoint. If they differ, stop and name the rank and the tensor. Default: no
            comparison.
        test_mode: Compare the norm weights of queries and keys after every update, between
            replicas and between tensor-parallel ranks, as Megatron Core does. If they differ, stop
            and name the rank and the tensor.
        manual_gc: Run Python's garbage collector at the same fixed iterations on all ranks.
        manual_gc_interval: Iterations between garbage collections. 0 disables them until the run
            ends.
        empty_unused_memory_level: When to release unused GPU memory. 0: never, 1: after each
            iteration, 2: also after evaluation.
        cuda_graph_impl: CUDA graphs: record a micro-batch's forward and backward kernels and launch
            them together, which helps small models whose GPU waits for the host. local records the
            whole model; auto does so if the GPU would wait and nothing prevents it.
        cuda_graph_warmup_steps: Iterations before the first recording with --cuda-graph-impl.
        dry_run: Check everything, print parameters, layout, memory and tokens per step, and exit.
        dry_run_world_size: Number of processes to assume with --dry-run. Default: as launched.
        dry_run_memory_gib: Memory of a device in GiB. With --dry-run, the plan of a mixture of
            experts reports the load imbalance at which this memory no longer suffices.
    """

    micro_batch_size: int | None = flag(
        None, unit="samples", required="required", at_least=1, at_most=MAX_WIDTH
    )
    global_batch_size: int | None = flag(None, unit="samples", is_common=True, at_least=1)
    rampup_batch_size: tuple[int, ...] | None = None
    step_batch_size_schedule: str | None = None
    calculate_per_token_loss: bool = flag(False, needs=_MASKS_TOKENS)
    train_iters: int | None = flag(
        None, unit="iterations", required="required unless --train-samples is given", at_least=0
    )
    train_samples: int | None = flag(None, unit="samples", at_least=1)
    train_tokens: int | None = flag(None, unit="tokens", at_least=1, only_for=TOKEN_ARCHITECTURES)
    skip_train: bool = False
    iterations_to_skip: tuple[int, ...] | None = flag(None, unit="iterations")
    seed: int = flag(1234, at_least=0, at_most=2**32 - 1)
    deterministic_mode: bool = False
    recompute_activations: bool = False
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",), choices=RECOMPUTED_MODULES, needs=_SELECTIVE
    )
    recompute_method: str | None = flag(None, choices=("uniform", "block"), requires=RECOMPUTED)
    recompute_num_layers: int | None = flag(None, unit="layers", at_least=1, requires=RECOMPUTED)
    fine_grained_activation_offloading: bool = flag(False, only_for=("gpt",))
    offload_modules: tuple[str, ...] = flag((), choices=OFFLOADED_MODULES, requires=_OFFLOADS)
    min_offloaded_tensor_size: int = flag(1048576, unit="elements", at_least=1, requires=_OFFLOADS)
    exit_interval: int | None = flag(None, unit="iterations", at_least=1)
    exit_duration_in_mins: int | None = flag(None, unit="minutes", at_least=1)
    exit_signal_handler: bool = True
    kill_switch_file: str | None = flag(None, names="--kill-switch-file --kill-switch-path")
    on_nonfinite: str = flag("stop", choices=("stop", "skip"))
    max_nonfinite_skips: int = flag(10, unit="iterations", at_least=1, needs=_SKIPS)
    check_for_nan_in_loss_and_grad: bool = True
    on_spike: str = flag("none", choices=("none", "skip", "rewind"))
    spike_window: int = flag(128, unit="iterations", at_least=2, needs=_FINDS_SPIKES)
    spike_loss_threshold: float = flag(10.0, above=0, needs=_FINDS_SPIKES)
    spike_grad_norm_threshold: float = flag(20.0, above=0, needs=_FINDS_SPIKES)
    max_spikes: int = flag(10, at_least=1, needs=_FINDS_SPIKES)
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, unit="iterations", at_least=1
    )
    test_mode: bool = flag(False, needs=QK_NORM)
    manual_gc: bool = True
    manual_gc_interval: int = flag(100, unit="iterations", at_least=0, needs=_MANUAL_GC)
    empty_unused_memory_level: int = flag(0, choices=(0, 1, 2))
    cuda_graph_impl: str = flag(
        "auto", choices=("auto", "none", "local", "transformer_engine", "full_iteration")
    )
    cuda_graph_warmup_steps: int = flag(3, unit="iterations", requires=_RECORDS)
    dry_run: bool = False
    dry_run_world_size: int | None = flag(None, unit="processes", at_least=1, requires=_DRY_RUN)
    dry_run_memory_gib: float | None = flag(None, unit="GiB", above=0, requires=_DRY_RUN)

    @property
    def has_count(self) -> bool:
        """Whether the length of the run is given as a number of iterations or samples."""
        return self.train_iters is not None or self.train_samples is not None


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainingOptions):
    """Training options after `resolve`, when both batch sizes are known."""

    micro_batch_size: int = field()
    global_batch_size: int = field()

    @property
    def samples_per_unit(self) -> int:
        """Number of samples in a unit of the run's length: an iteration, or a sample."""
        return 1 if self.train_iters is None else self.global_batch_size


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation.

    Attributes:
        eval_iters: Global batches per evaluation. 0 disables evaluation, unless
            --full-validation is given.
        eval_interval: Iterations between evaluations.
        start_eval_at_iter: Iteration before which no evaluation takes place.
        eval_global_batch_size: Samples in each of an evaluation's global batches. Default:
            --global-batch-size.
        eval_micro_batch_size: Samples per process in one forward pass of an evaluation. Default:
            --micro-batch-size.
        eval_averaged_weights: Also evaluate the average of the weights that --ema-decay or
            --lawa-interval keeps.
        full_validation: Use every sample of the validation data once in each evaluation, instead of
            --eval-iters global batches. --eval-iters remains the length of the test at the end.
        multiple_validation_sets: Evaluate each dataset of --valid-data-path separately, and log a
            loss for each.
        validation_set_names: Names of the datasets in --valid-data-path, in the same order, for the
            log. Default: numbers from 0.
    """

    eval_iters: int = flag(100, at_least=0)
    eval_interval: int = flag(1000, unit="iterations", is_common=True, at_least=1, needs=_EVALUATES)
    start_eval_at_iter: int | None = flag(None, unit="iterations", at_least=0, needs=_EVALUATES)
    eval_global_batch_size: int | None = flag(None, unit="samples", at_least=1, needs=_EVALUATES)
    eval_micro_batch_size: int | None = flag(
        None, unit="samples", at_least=1, at_most=MAX_WIDTH, needs=_EVALUATES
    )
    eval_averaged_weights: bool = flag(False, requires=_AVERAGES)
    full_validation: bool = flag(False, only_for=("gpt",))
    multiple_validation_sets: bool = flag(False, requires=_FULL_VALIDATION)
    validation_set_names: tuple[str, ...] | None = flag(None, requires=_SEPARATE_SETS)

    @property
    def takes_place(self) -> bool:
        """Whether the validation data is evaluated during training."""
        return self.full_validation or self.eval_iters > 0

    def is_due(self, iteration: int) -> bool:
        """Return whether an evaluation follows this number of iterations, if any `takes_place`."""
        return iteration % self.eval_interval == 0 and iteration >= (self.start_eval_at_iter or 0)

    def count(self, iterations: int) -> int:
        """Return how many evaluations are due in so many iterations, if any `takes_place`."""
        before = max(0, (self.start_eval_at_iter or 0) - 1) // self.eval_interval
        return max(0, max(0, iterations) // self.eval_interval - before)


_SCHEDULED = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", re.IGNORECASE)
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_batch_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Return the entries of --step-batch-size-schedule: numbers of tokens and batch sizes.

    Args:
        text: The entries TOKENS:BATCH, separated by spaces or commas. K, M, B and T after a number
            of tokens are thousands, millions, billions and trillions.

    Raises:
        ValueError: An entry is malformed, or the numbers of tokens do not increase from 0.
    """
    entries = []
    for entry in text.replace(",", " ").split():
        match = _SCHEDULED.fullmatch(entry)
        if match is None:
            raise ValueError(f"{entry}: expected TOKENS:BATCH, for example 250B:1536")
        number, power, batch = match.groups()
        entries.append((int(Decimal(number) * _POWERS[power.upper()]), int(batch)))
    tokens = [count for count, _ in entries]
    if tokens[:1] != [0] or any(late <= early for early, late in pairwise(tokens)):
        raise ValueError("the numbers of tokens must grow, and begin with 0")
    return tuple(entries)
