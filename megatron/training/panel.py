"""What a run is about to do and why, printed once on rank 0; and `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from megatron.config import RunConfig
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.device import Device
from megatron.kernels.library import find_library
from megatron.models.arithmetic import count_parameters, flops_per_token
from megatron.models.build import model_plan
from megatron.models.plan import ModelPlan
from megatron.parallel.layout import Layout
from megatron.training.memory import largest_process
from megatron.training.pipeline_balance import pipeline_rows

if TYPE_CHECKING:
    from megatron.training.run import Run

Row = tuple[str, str]


def format_panel(title: str, rows: Iterable[Row]) -> str:
    """Aligned `name  value` lines between rules."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    body = [f"  {name.ljust(width)}  {value}" for name, value in rows]
    rule = "-" * min(100, max(len(line) for line in [title, *body]))
    return "\n".join([rule, title, rule, *body, rule])


def start_panel(run: Run, seconds: float) -> str:
    """Every decision and its reason, before the first iteration."""
    config = run.config
    plan = model_plan(config.model, run.padded_vocab_size, run.recipe.head)
    rows: list[Row] = [
        *device_rows(config, run.device, run.recipe.describe_kernels(run.parts[0])),
        *_recording_rows(config.training),
        *size_rows(config, run.layout.world.size, plan),
        ("data", _describe_data(run)),
        ("tokenizer", f"{config.tokenizer.tokenizer_type}, {run.tokenizer.vocab_size:,} entries"),
        ("checkpoints", _describe_checkpoints(run)),
        ("set up in", f"{seconds:.1f} s"),
    ]
    return format_panel(f"{run.recipe.program}: {run.train_iterations:,} iterations", rows)


def _recording_rows(training: TrainingConfig) -> list[Row]:
    if training.cuda_graph_impl == "none":
        return []
    first = training.cuda_graph_warmup_steps + 1
    return [("passes", f"recorded in iteration {first} and run again (--cuda-graph-impl)")]


def _describe_data(run: Run) -> str:
    data = run.config.data
    has_corpus = any((data.data_path, data.train_data_path, data.valid_data_path))
    source = "indexed files" if has_corpus else "the task's files"
    source = "generated tokens (--mock-data)" if data.mock_data else source
    of_task = not has_corpus and not data.mock_data  # which evaluates on files of its own
    sizes = ", ".join(
        f"{name} {0 if split is None else len(split):,}"
        for name, split in zip(("training", "validation", "test"), run.datasets, strict=True)
        if split or not of_task
    )
    texts = run.recipe.head.sequences
    of_each = f"{texts} x " * (texts > 1) + describe_lengths(data)
    return f"{source}; samples of {of_each} tokens{sizes and ': '}{sizes}"


def _describe_checkpoints(run: Run) -> str:
    options = run.config.checkpoint
    loaded = (
        f"continuing {options.load} at iteration {run.progress.iteration}"
        if run.progress.iteration
        else f"weights from {options.load}"
        if options.finetune
        else f"weights from {run.pretrained}"
        if run.pretrained is not None
        else "starting fresh"
    )
    return f"{loaded}; {_describe_saving(options, has_epochs=bool(run.save_at))}"


def _describe_saving(options: CheckpointConfig, *, has_epochs: bool) -> str:
    if not options.save:
        return "not saving (--save is not given)"
    every = [
        f"{number:g} {unit}"
        for number, unit in (
            (options.save_interval, "iterations"),
            (options.save_interval_in_mins, "minutes"),
        )
        if number is not None
    ]
    every += ["epoch"] * has_epochs
    how = " in the background" if options.async_save else ""
    return (
        f"saving to {options.save} every {' or '.join(every)}{how}{_describe_kept(options)}, and "
        "at the end"
    )


def _describe_kept(options: CheckpointConfig) -> str:
    latest, retained = options.keep_latest, options.save_retain_interval
    if latest is None and retained is None:
        return ""
    multiples = "" if retained is None else f" and those of multiples of {retained} iterations"
    return f", keeping the newest{'' if latest is None else f' {latest}'}{multiples}"


def model_flops(config: RunConfig, plan: ModelPlan) -> int:
    """Return the model FLOPs of one token (`flops_per_token`)."""
    return flops_per_token(plan, config.data.seq_length, config.data.decoder_seq_length)


def _describe_attention(plan: ModelPlan) -> str:
    """Say how attention is counted."""
    kinds = {layer.mixer.causal for layer in plan.layers}
    if kinds == {True, False}:
        return "the decoder's causal attention counted half"
    return "causal attention counted half" if True in kinds else "attention counted whole"


def describe_lengths(data: DataConfig) -> str:
    """Tokens of a sample: `128`, or `512 + 128` in encoder and decoder."""
    lengths = (data.seq_length, data.decoder_seq_length)
    return " + ".join(str(length) for length in lengths if length is not None)


def size_rows(config: RunConfig, world_size: int, plan: ModelPlan) -> list[Row]:
    """Return what follows from the flags alone, for any world size: nothing is touched.

    Args:
        config: of the run.
        world_size: processes.
        plan: of the network.
    """
    layout = Layout.at(
        0,
        world_size,
        tensor=config.parallel.tensor_model_parallel_size,
        context=config.parallel.context_parallel_size,
        pipeline=config.parallel.pipeline_model_parallel_size,
    )
    assert config.training.global_batch_size and config.training.micro_batch_size
    parameters, sequences = count_parameters(plan), plan.head_spec.sequences
    flops = model_flops(config, plan)
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    memory = largest_process(config, plan, world_size)
    micro_batches = batch // (micro * layout.data.size)
    return [
        ("layout", layout.describe()),
        (
            "batch",
            f"{batch} samples = {micro_batches} micro-batch(es) x "
            f"{micro} samples x {layout.data.size} data-parallel process(es)",
        ),
        (
            "tokens an iteration",
            f"{batch * sequences * config.data.sample_tokens:,}",
        ),
        ("parameters", f"{parameters:,} (vocabulary padded to {plan.embedding.vocabulary:,})"),
        (
            "model FLOPs a token",
            f"{flops / 1e9:.4g} GFLOP ({_describe_attention(plan)})",
        ),
        ("memory a process", f"at most about {memory.describe()}"),
        *pipeline_rows(config, plan, micro_batches, world_size),
    ]


def device_row(device: Device) -> Row:
    """Where it runs."""
    return "device", f"{device.name}, torch {torch.__version__}"


def device_rows(config: RunConfig, device: Device, attention: str) -> list[Row]:
    """Where it runs and in what precision."""
    peak = device.peak_flops
    precision = "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32"
    reason = {
        "fp32": "neither --bf16 nor --fp16 given",
        "bf16": "--bf16; gradients and master weights in fp32",
        "fp16": "--fp16; master weights in fp32",
    }[precision]
    return [
        device_row(device),
        ("precision", f"{precision} ({reason})"),
        *_fp8_rows(config),
        ("attention", attention),
        ("other kernels", str(find_library(device.torch_device))),
        (
            "MFU",
            "n/a: no peak FLOP/s known for this device"
            if peak is None
            else f"tokens/s x model FLOPs a token / {peak / 1e12:.0f} TFLOP/s (dense 16-bit peak)",
        ),
    ]


def _fp8_rows(config: RunConfig) -> list[Row]:
    numbers = config.precision
    if numbers.fp8_format is None:
        return []
    length, algorithm = numbers.fp8_amax_history_len, numbers.fp8_amax_compute_algo
    largest = algorithm == "max" and length > 1
    taken = f"the largest amax of {length} iterations" if largest else "the last iteration's amax"
    scales = {
        "tensorwise": "one scale a matrix",
        "rowwise": "a scale for each row",
        "delayed": f"one scale a matrix, by {taken}",
    }[numbers.fp8_recipe]
    return [("linear layers", f"fp8 {numbers.fp8_format}, {scales}")]
