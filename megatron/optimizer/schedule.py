"""Learning rate and weight decay as functions of the samples consumed by successful updates.

An update uses the values for the number of samples consumed before it, so the first update of a
warm-up has the initial learning rate. All lengths are in samples, so they do not depend on the
batch size. With --lr-decay-tokens or --lr-warmup-tokens, or if only --train-tokens sets the length
of the run, lengths are in tokens, except those of a range test. As in Megatron-DeepSpeed, the
tokens of unsuccessful and skipped updates also count, and a sequence shortened by a curriculum
advances the schedule less than a whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import cos, exp, floor, isfinite, log, log1p, pi, sqrt
from typing import Any

from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.run import field_at
from megatron.config.training import TrainingConfig
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class LearningRateSchedule:
    """A learning rate with a warm-up followed by a decay.

    Attributes:
        peak: The learning rate at the end of the warm-up.
        minimum: The learning rate after the decay, and the lower bound during it; with a range
            test, the initial learning rate.
        initial: The learning rate at the start of the warm-up.
        warmup: The length of the warm-up in samples. It need not be an integer.
        decay: The number of samples, including the warm-up, after which the minimum is reached.
        style: "constant", "linear", "cosine", "inverse-square-root", "WSD" (warm-up, stable, decay;
            Hu et al., "MiniCPM", 2024), which stays at the peak until `anneal` samples are left, or
            "range-test" (Smith, "A disciplined approach to neural network hyper-parameters", 2018),
            which only raises the rate.
        anneal: The length in samples of the decay at the end of WSD; `None` with other styles.
        anneal_style: The shape of the decay at the end of WSD: "exponential", "linear", "cosine" or
            "minus_sqrt"; `None` with other styles.
        in_tokens: Whether all lengths are in tokens instead of samples.
        log_update: The number of samples per update, for a logarithmic warm-up (DeepSpeed's);
            `None` with a linear warm-up.
        step: The length in samples of a step of a range test; `None` with other styles.
        step_rate: The height of a step in multiples of `minimum`, the initial rate; `None` with
            other styles.
        staircase: Whether the rate stays the same within a step.
        exponential: Whether a step multiplies the rate by 1 + `step_rate` instead of adding to it.
    """

    peak: float
    minimum: float
    initial: float
    warmup: float
    decay: float
    style: str
    anneal: float | None = None
    anneal_style: str | None = None
    in_tokens: bool = False
    log_update: float | None = None
    step: float | None = None
    step_rate: float | None = None
    staircase: bool = False
    exponential: bool = False

    def at(self, samples: float) -> float:
        """Return the learning rate of the next update after `samples` consumed samples."""
        if self.style == "range-test":
            return self._range_test_at(samples)
        if self.warmup > 0 and samples <= self.warmup:
            done = samples / self.warmup
            if self.log_update is not None:
                # DeepSpeed's warm-up reaches the peak one update before its end.
                updates = max(2.0, self.warmup / self.log_update)
                done = min(1.0, log1p(samples / self.log_update) / log(updates))
            return self.initial + (self.peak - self.initial) * done
        if self.style == "constant":
            return self.peak
        if samples > self.decay or self.decay <= self.warmup:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * sqrt(max(self.warmup, 1) / max(samples, 1)))
        begin, shape = self.warmup, self.style
        if self.style == "WSD":
            assert self.anneal is not None, "given by flags, or by the checkpoint"
            assert self.anneal_style is not None, "given by flags, or by the checkpoint"
            begin, shape = self.decay - self.anneal, self.anneal_style
        done = max(0.0, (samples - begin) / (self.decay - begin))
        return self.minimum + _SHAPES[shape](done) * (self.peak - self.minimum)

    def _range_test_at(self, samples: float) -> float:
        assert self.step is not None, "given by flags, or by the checkpoint"
        assert self.step_rate is not None, "given by flags, or by the checkpoint"
        steps = samples / self.step
        if self.staircase:
            steps = floor(steps)
        if not self.exponential:
            return self.minimum * (1 + self.step_rate * steps)
        power = steps * log(1 + self.step_rate)
        return self.minimum * exp(min(power, _LARGEST_POWER))


# The maximum power of e, far beyond useful rates, so that a long test does not overflow.
_LARGEST_POWER = 200.0


# The fraction of the difference between peak and minimum that remains, given the completed fraction
# of the decay (0 to 1).
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (cos(pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - sqrt(done),
}


@dataclass(frozen=True)
class WeightDecaySchedule:
    """A weight decay that is constant, or changes over the run.

    Attributes:
        start: The weight decay at the start of the run.
        end: The weight decay after `length` samples.
        length: The length of the change in samples, or in tokens if the learning rate's lengths are
            in tokens.
        style: "constant" (always `end`), "linear" or "cosine".
    """

    start: float
    end: float
    length: float
    style: str

    def at(self, samples: float) -> float:
        """Return the weight decay of the next update after `samples` consumed samples."""
        if self.style == "constant" or samples > self.length:
            return self.end
        done = samples / self.length
        height = done if self.style == "linear" else 0.5 * (1.0 - cos(pi * done))
        return self.start + height * (self.end - self.start)


@dataclass(frozen=True)
class Schedules:
    """The schedules of a run.

    Attributes:
        learning_rate: The schedule of the learning rate.
        weight_decay: The schedule of the weight decay.
        decoupled: The schedule of the learning rate of the word embeddings and the output layer,
            with the same warm-up and decay as `learning_rate`; `None` if it is not decoupled.
    """

    learning_rate: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    decoupled: LearningRateSchedule | None = None

    def decoupled_at(self, samples: float) -> float | None:
        """Return the decoupled learning rate of the next update after `samples` consumed samples.

        The result is `None` if the learning rate is not decoupled.
        """
        return None if self.decoupled is None else self.decoupled.at(samples)

    @classmethod
    def from_config(
        cls,
        schedule: ScheduleConfig,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        *,
        global_batch: int,
        seq_length: int,
    ) -> Schedules:
        """Return the schedules that the flags specify.

        The flags must have passed the checks of `megatron.config`. With --skip-train the schedules
        are never used, so a learning rate and the length of a final decay may be missing.

        Args:
            schedule: The learning-rate flags.
            optimizer: The weight-decay flags.
            training: The flags for the length of the run.
            global_batch: The full global batch size, used to convert iterations to samples.
            seq_length: The number of tokens of a whole sample, used to convert samples to tokens.
        """
        run = _samples(training.train_iters, training.train_samples, global_batch)
        in_tokens = schedule.in_tokens(training)
        if in_tokens and training.train_tokens is not None:
            run = training.train_tokens
        elif in_tokens and run is not None:
            run *= seq_length
        elif run is None and training.train_tokens is not None:
            run = -(-training.train_tokens // seq_length)
        assert run is not None, "the checks require a length"
        if schedule.lr_decay_style == "range-test":
            return cls(_range_test(schedule, global_batch), _weight_decay(optimizer, run))
        assert schedule.lr is not None or training.skip_train, "the checks require a learning rate"
        decay = _samples(schedule.lr_decay_iters, schedule.lr_decay_samples, global_batch)
        warmup: float = schedule.lr_warmup_iters * global_batch or schedule.lr_warmup_samples
        update = global_batch * (seq_length if in_tokens else 1)
        if in_tokens:
            decay, warmup = schedule.lr_decay_tokens, schedule.lr_warmup_tokens
        decay = run if decay is None else decay
        if schedule.lr_warmup_fraction is not None:
            warmup = schedule.lr_warmup_fraction * decay
        assert warmup <= decay or training.skip_train, "the checks refuse a longer warm-up"
        anneal = None
        if schedule.lr_decay_style == "WSD" and not training.skip_train:
            lengths = schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_samples
            anneal = _samples(*lengths, global_batch)
            assert anneal is not None, "the checks require a length"
        learning_rate = LearningRateSchedule(
            peak=schedule.lr or 0.0,
            minimum=schedule.min_lr,
            initial=schedule.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            style=schedule.lr_decay_style,
            anneal=anneal,
            anneal_style=None if anneal is None else schedule.lr_wsd_decay_style,
            in_tokens=in_tokens,
            log_update=update if schedule.lr_warmup_style == "log" and warmup > 0 else None,
        )
        return cls(
            learning_rate,
            _weight_decay(optimizer, run),
            _decoupled(learning_rate, schedule.decoupled_lr, schedule.decoupled_min_lr),
        )

    def to_dict(self, samples: int) -> dict[str, Any]:
        """Return the schedules and their position, under Megatron's `opt_param_scheduler` names.

        Values that are unset or switched off are omitted.

        Args:
            samples: The position: the number of consumed samples or tokens.
        """
        values = {
            key: getattr(getattr(self, part), field, None)
            for key, (part, field, _) in _FIELDS.items()
        }
        return {"num_steps": samples} | {
            key: value for key, value in values.items() if value is not None and value is not False
        }

    def resumed(
        self, saved: dict[str, Any], *, override: bool = False, use_checkpoint: bool = False
    ) -> tuple[Schedules, int]:
        """Return the schedules of a resumed run, and the number of samples or tokens so far.

        Args:
            saved: The saved run's state from `to_dict`, or Megatron's, possibly under older names.
            override: Whether to keep these schedules regardless of the saved ones.
            use_checkpoint: Whether to use the saved schedules even if they differ.

        Raises:
            CheckpointError: `saved` has no valid position. Without `override` also: `saved`
                contains an invalid value; or `use_checkpoint` is not set and the schedules differ;
                or the settings of a saved WSD decay or range test are missing in both the
                checkpoint and the flags; or the saved learning rate is decoupled and the flags' is
                not.
        """
        original = saved
        saved = {_OLD_NAMES.get(key, key): value for key, value in saved.items()}
        decay = saved.get("lr_decay_tokens")
        if decay is not None:  # Megatron-DeepSpeed's lengths in tokens
            warmup = saved.get("lr_warmup_tokens") or 0
            saved |= {"lr_decay_steps": decay, "lr_warmup_steps": warmup, "lr_in_tokens": True}
        num_steps: Any = saved.get("num_steps")
        if not _is_number(num_steps):
            problem = f"num_steps {num_steps!r}, which is not a number"
            if num_steps is None:
                problem = "no num_steps"
            raise CheckpointError(
                f"the checkpoint's opt_param_scheduler has {problem}: use --no-load-optim or "
                "--finetune to restart the schedule"
            )
        samples = int(num_steps)
        if override:
            return self, samples
        _check_saved(original)
        resumed = self._with_saved(saved)
        if resumed.learning_rate.style == "WSD" and resumed.learning_rate.anneal is None:
            raise CheckpointError(
                "the checkpoint has a WSD schedule but does not record the decay at its end: "
                "give --lr-decay-style WSD with --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )
        rate = resumed.learning_rate
        if rate.style == "range-test" and not (rate.step and rate.step_rate):
            raise CheckpointError(
                "the checkpoint's schedule is a learning-rate range test, but the length and the "
                "height of its steps are missing: add --override-opt_param-scheduler"
            )
        if not use_checkpoint:
            _check_equal(self, resumed)
        elif self.decoupled is None and resumed.decoupled is not None:
            raise CheckpointError(
                "the checkpoint's schedule has a learning rate for the word embeddings and the "
                "output layer, but this run has none: give --decoupled-lr "
                f"{resumed.decoupled.peak:g}"
            )
        return resumed, samples

    def branched(self, saved: dict[str, Any]) -> tuple[Schedules, int]:
        """Return the schedules of a WSD branch that begins its final decay at a checkpoint.

        The peak, the warm-up and the weight decay come from the saved run. The decay and the
        minimum rate come from these schedules.

        Args:
            saved: The saved run's state from `to_dict`.

        Returns:
            The schedules, and the number of samples consumed so far.

        Raises:
            CheckpointError: The saved state is invalid (see `resumed`), the saved run is not in a
                phase with a constant rate, or it has a different peak, weight decay or unit of
                lengths (samples or tokens).
        """
        trunk, samples = self.resumed(saved, use_checkpoint=True)
        own_rate, trunk_rate = self.learning_rate, trunk.learning_rate
        assert own_rate.anneal is not None, "given by flags"
        if trunk_rate.style not in ("WSD", "constant"):
            raise CheckpointError(
                f"the checkpoint's run has --lr-decay-style {trunk_rate.style}, without a stable "
                "phase from which to branch: use --override-opt_param-scheduler instead of "
                "--lr-wsd-branch-from"
            )
        if samples < trunk_rate.warmup:
            raise CheckpointError(
                f"the checkpoint is at sample {samples:,}, in the warm-up, which ends at "
                f"{trunk_rate.warmup:,.0f}: give a later one with --lr-wsd-branch-step"
            )
        if trunk_rate.anneal is not None and samples > trunk_rate.decay - trunk_rate.anneal:
            raise CheckpointError(
                f"the checkpoint is at sample {samples:,}, in the final decay, which began at "
                f"{trunk_rate.decay - trunk_rate.anneal:,.0f}: give an earlier one with "
                "--lr-wsd-branch-step"
            )
        _check_branch(self, trunk)
        return self._with_decay(trunk, samples + own_rate.anneal), samples

    def resumed_branch(self, saved: dict[str, Any]) -> tuple[Schedules, int]:
        """Return the schedules of a resumed branch, and the number of samples consumed so far.

        Args:
            saved: The branch's state from `to_dict`.

        Raises:
            CheckpointError: The saved state is invalid (see `resumed`), or the flags have a
                different peak, decay, minimum rate, weight decay or unit of lengths.
        """
        saved_schedules, samples = self.resumed(saved, use_checkpoint=True)
        branch = self._with_decay(saved_schedules, saved_schedules.learning_rate.decay)
        _check_equal(branch, saved_schedules)
        _check_branch(self, saved_schedules)
        return branch, samples

    def _with_decay(self, trunk: Schedules, decay: float) -> Schedules:
        """Return the schedules of `trunk` with the final decay and minimum rate of this run.

        Args:
            trunk: The schedules of another run.
            decay: The number of samples after which the minimum is reached.
        """
        own_rate = self.learning_rate
        rate = replace(
            trunk.learning_rate,
            minimum=own_rate.minimum,
            decay=decay,
            style="WSD",
            anneal=own_rate.anneal,
            anneal_style=own_rate.anneal_style,
        )
        own = self.decoupled
        decoupled = None if own is None else replace(rate, peak=own.peak, minimum=own.minimum)
        return Schedules(rate, trunk.weight_decay, decoupled)

    def _with_saved(self, saved: dict[str, Any]) -> Schedules:
        """Return these schedules with their values replaced by the saved values."""
        changes: dict[str, dict[str, Any]] = {
            # Switches that were not saved are off.
            "learning_rate": {_FIELDS[key][1]: False for key in _SWITCHES} | {"log_update": None},
            "weight_decay": {},
            "decoupled": {"peak": None, "minimum": None},  # unless saved, the rate is not decoupled
        }
        for key, (part, field, _) in _FIELDS.items():
            if key in saved:
                changes[part][field] = saved[key]
        if changes["learning_rate"].get("style", self.learning_rate.style) != "WSD":
            changes["learning_rate"] |= {"anneal": None, "anneal_style": None}
        if changes["learning_rate"].get("style", self.learning_rate.style) != "range-test":
            changes["learning_rate"] |= {"step": None, "step_rate": None}
        learning_rate = replace(self.learning_rate, **changes["learning_rate"])
        return Schedules(
            learning_rate,
            replace(self.weight_decay, **changes["weight_decay"]),
            # `to_dict` writes both decoupled rates or neither. Other programs may write only one.
            _decoupled(learning_rate, **changes["decoupled"]),
        )


_RUN = "--train-iters or --train-samples"
_WARMUP = "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction"
_DECAY = f"--lr-decay-iters or --lr-decay-samples, by default {_RUN}"
_ANNEAL = "--lr-wsd-decay-iters or --lr-wsd-decay-samples"
_DECOUPLED_MIN = "--decoupled-min-lr (by default --min-lr) of --decoupled-lr"
_WEIGHT_DECAY = f"the run's length ({_RUN}), which weight decay follows"

# Megatron's name: (the schedule, its field, the flags that set the field).
_FIELDS = {
    "max_lr": ("learning_rate", "peak", "--lr"),
    "min_lr": ("learning_rate", "minimum", "--min-lr"),
    "decoupled_lr": ("decoupled", "peak", "--decoupled-lr"),
    "decoupled_min_lr": ("decoupled", "minimum", _DECOUPLED_MIN),
    "lr_warmup_steps": ("learning_rate", "warmup", f"the warm-up ({_WARMUP}), in samples,"),
    "lr_decay_steps": ("learning_rate", "decay", f"the decay's length ({_DECAY}), in samples,"),
    "lr_in_tokens": ("learning_rate", "in_tokens", "counting in tokens (--lr-decay-tokens)"),
    "lr_warmup_log_update": (
        "learning_rate",
        "log_update",
        "--lr-warmup-style log, or its update, in samples,",
    ),
    "lr_decay_style": ("learning_rate", "style", "--lr-decay-style"),
    "lr_range_test_step_size": (
        "learning_rate",
        "step",
        "--lr-range-test-step-size, in samples,",
    ),
    "lr_range_test_step_rate": ("learning_rate", "step_rate", "--lr-range-test-step-rate"),
    "lr_range_test_staircase": ("learning_rate", "staircase", "--lr-range-test-staircase"),
    "lr_range_test_exponential": ("learning_rate", "exponential", "--lr-range-test-exponential"),
    "wsd_decay_steps": (
        "learning_rate",
        "anneal",
        f"the decay at the end ({_ANNEAL}), in samples,",
    ),
    "lr_wsd_decay_style": ("learning_rate", "anneal_style", "--lr-wsd-decay-style"),
    "start_wd": ("weight_decay", "start", "--start-weight-decay (by default --weight-decay)"),
    "end_wd": ("weight_decay", "end", "--end-weight-decay (by default --weight-decay)"),
    "wd_incr_steps": ("weight_decay", "length", f"{_WEIGHT_DECAY}, in samples,"),
    "wd_incr_style": ("weight_decay", "style", "--weight-decay-incr-style"),
}

_OLD_NAMES = {  # before 2022
    "start_lr": "max_lr",
    "warmup_iter": "lr_warmup_steps",
    "warmup_steps": "lr_warmup_steps",
    "end_iter": "lr_decay_steps",
    "decay_steps": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "num_iters": "num_steps",
}


# Switches that are saved only if they are on.
_SWITCHES = ("lr_in_tokens", "lr_range_test_staircase", "lr_range_test_exponential")
_STYLES = {  # the options that list the valid values
    "lr_decay_style": "schedule.lr_decay_style",
    "lr_wsd_decay_style": "schedule.lr_wsd_decay_style",
    "wd_incr_style": "optimizer.weight_decay_incr_style",
}


def _check_saved(saved: dict[str, Any]) -> None:
    """Raise `CheckpointError` if a saved value is not valid.

    The checkpoint may come from another program, which may support other styles.
    """
    for key, value in saved.items():
        name = _OLD_NAMES.get(key, key)
        if name in _STYLES:
            choices = field_at(_STYLES[name]).info.choices or ()
            is_known, expected = value in choices, f"one of {', '.join(choices)}"
        elif name in _SWITCHES:
            is_known, expected = value is True, "true"
        else:
            is_known, expected = name not in _FIELDS or _is_number(value), "a number"
        if not is_known:
            raise CheckpointError(
                f"the checkpoint's opt_param_scheduler has {key} {value!r} instead of {expected}: "
                "add --override-opt_param-scheduler to continue with this run's values"
            )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _check_equal(current: Schedules, saved: Schedules) -> None:
    current_values, saved_values = current.to_dict(0), saved.to_dict(0)
    if current.weight_decay.style == "constant":  # a constant has no length
        current_values["wd_incr_steps"] = saved_values["wd_incr_steps"]
    differences = [
        f"{flags} is {current_values.get(key, 'unset')} here and "
        f"{saved_values.get(key, 'unset')} in the checkpoint"
        for key, (_, _, flags) in _FIELDS.items()
        if current_values.get(key) != saved_values.get(key)
    ]
    if current.learning_rate.in_tokens:
        differences = [line.replace(", in samples,", ", in tokens,") for line in differences]
    if differences:
        raise CheckpointError(
            "the schedule of learning rate and weight decay differs from the checkpoint's:\n  "
            + "\n  ".join(differences)
            + "\nadd --override-opt_param-scheduler to continue with this run's values, or "
            "--use-checkpoint-opt_param-scheduler to continue with the checkpoint's"
        )


def _check_branch(branch: Schedules, trunk: Schedules) -> None:
    """Raise `CheckpointError` if a branch does not agree with the run from which it branches."""
    own_rate = branch.learning_rate
    rate = replace(trunk.learning_rate, peak=own_rate.peak, in_tokens=own_rate.in_tokens)
    decay = replace(branch.weight_decay, length=trunk.weight_decay.length)
    peak = None if branch.decoupled is None else branch.decoupled.peak
    minimum = None if trunk.decoupled is None else trunk.decoupled.minimum
    _check_equal(Schedules(rate, decay, _decoupled(rate, peak, minimum)), trunk)


def _samples(iterations: int | None, samples: int | None, global_batch: int) -> int | None:
    """Convert a length in iterations or samples to samples; `None` if neither was given."""
    return samples if iterations is None else iterations * global_batch


def _range_test(schedule: ScheduleConfig, global_batch: int) -> LearningRateSchedule:
    first = schedule.lr_range_test_min_lr
    return LearningRateSchedule(
        peak=first,
        minimum=first,
        initial=0.0,  # unused, because there is no warm-up
        warmup=0,
        decay=0,
        style="range-test",
        step=schedule.lr_range_test_step_size * global_batch,
        step_rate=schedule.lr_range_test_step_rate,
        staircase=schedule.lr_range_test_staircase,
        exponential=schedule.lr_range_test_exponential,
    )


def _weight_decay(optimizer: OptimizerConfig, length: float) -> WeightDecaySchedule:
    ends = optimizer.start_weight_decay, optimizer.end_weight_decay
    start, end = (optimizer.weight_decay if value is None else value for value in ends)
    return WeightDecaySchedule(start, end, length, optimizer.weight_decay_incr_style)


def _decoupled(
    common: LearningRateSchedule, peak: float | None, minimum: float | None
) -> LearningRateSchedule | None:
    """Return the decoupled schedule, or `None` if there is no decoupled peak.

    Args:
        common: The schedule that is not decoupled.
        peak: The decoupled peak.
        minimum: The decoupled minimum; `None` means the minimum of `common`.
    """
    if peak is None:
        return None
    return replace(common, peak=peak, minimum=common.minimum if minimum is None else minimum)
