"""Rules for curriculum learning: its lengths, and the numbers that must divide them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gcd, lcm

from megatron.config.curriculum import CurriculumConfig
from megatron.config.fields import near_multiples
from megatron.config.rules_model import MULTIPLE
from megatron.config.run import RunOptions, field_at


def curriculum(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the schedule of lengths."""
    options, longest = config.curriculum, config.data.seq_length
    if options.curriculum_schedule is None or longest is None:
        return
    flag = f"--curriculum-schedule {options.curriculum_schedule}"
    if options.curriculum_schedule == "fixed_discrete":
        yield from _discrete(options, longest)
    else:
        for name in ("curriculum_min_length", "curriculum_steps"):
            if getattr(options, name) is None:
                yield f"{flag} requires {field_at(f'curriculum.{name}').names[0]}: add it"
        yield from _growing(options, longest)
    parts, why = _divisor(config)
    for path, length in _lengths(options, longest):
        if length % parts:
            yield (
                f"{path} {length} is not divisible by {parts}, as {why} requires: use "
                f"{near_multiples(length, parts)}"
            )


def _growing(options: CurriculumConfig, longest: int) -> Iterator[str]:
    last = options.curriculum_max_length
    step, first = options.curriculum_length_step, options.curriculum_min_length or 1
    limit_text = f"--seq-length {longest}" if last is None else f"--curriculum-max-length {last}"
    if last is not None and last > longest:
        yield f"{limit_text} is above --seq-length {longest}: use at most {longest}"
    last = longest if last is None else last
    if first > last:
        yield f"--curriculum-min-length {first} is above {limit_text}: lower it"
    if last % max(step, 1):
        yield (
            f"{limit_text} is not a multiple of --curriculum-length-step {step}: use a step that "
            "divides it"
        )


def _discrete(options: CurriculumConfig, longest: int) -> Iterator[str]:
    lengths, until = options.curriculum_lengths or (), options.curriculum_until or ()
    if not until or len(lengths) != len(until) + 1:
        yield (
            "--curriculum-schedule fixed_discrete requires --curriculum-lengths with two or more "
            "lengths, and --curriculum-until with the last iteration of each length except "
            f"the final one: got {len(lengths)} lengths and {len(until)} iterations"
        )
    for name in ("curriculum_lengths", "curriculum_until"):
        numbers = getattr(options, name) or ()
        if any(previous >= following for previous, following in pairwise(numbers)):
            values_text = field_at(f"curriculum.{name}").spell(numbers)
            yield f"{values_text}: each number must exceed the previous one"
    if lengths and max(lengths) > longest:
        yield f"--curriculum-lengths {max(lengths)} is above --seq-length {longest}: lower it"


def _lengths(options: CurriculumConfig, longest: int) -> Iterator[tuple[str, int]]:
    """Yield the flag and value of each length, and of the step between lengths if there is one."""
    for length in options.curriculum_lengths or ():
        yield "--curriculum-lengths", length
    if options.curriculum_schedule != "fixed_discrete":
        yield "--curriculum-length-step", options.curriculum_length_step


def _divisor(config: RunOptions) -> tuple[int, str]:
    """Return the number that must divide every length, and the flags that require it."""
    parallel, needs = config.parallel, {}
    context = max(parallel.context_parallel_size, 1)
    if context > 1:
        needs[f"--context-parallel-size {context}"] = 2 * context
    if parallel.sequence_parallel:
        tensor = max(parallel.tensor_model_parallel_size, 1)
        needs[f"--sequence-parallel with --tensor-model-parallel-size {tensor}"] = tensor * context
    if config.precision.fp8_format is not None:
        rows = MULTIPLE * context
        divisor = rows // gcd(rows, config.training.micro_batch_size or 1)
        needs[f"--fp8-format {config.precision.fp8_format}"] = divisor
    return lcm(*needs.values()), " and ".join(needs)


def slow_lengths(config: RunOptions) -> Iterator[str]:
    """Yield a notice for each length that slows down 16-bit matrix products on GPUs."""
    options, precision = config.curriculum, config.precision
    if options.curriculum_schedule is None or not (precision.bf16 or precision.fp16):
        return
    for name, length in _lengths(options, 0):
        if length % 8:
            yield (
                f"{name} {length}: 16-bit matrix products on GPUs are fast only with multiples of "
                "8: expect a lower speed"
            )
