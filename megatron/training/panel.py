"""The start-up panel: what a run is about to do, and why. `--dry-run` prints part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.command import PanelRow, format_panel
from megatron.config import RunConfig
from megatron.config.optimizer import FORMAT_FIELDS
from megatron.config.run import with_values
from megatron.data.chat import PackedDataset, describe_packing, members_of
from megatron.data.preferences import describe_pairs
from megatron.data.text_stream import text_members
from megatron.device import Device
from megatron.kernels.library import find_library
from megatron.kernels.recurrence import choose_recurrence
from megatron.models.adapters import count_adapters
from megatron.models.arithmetic import (
    count_active_parameters,
    count_parameters,
    flops_per_token,
)
from megatron.models.freezing import frozen_format
from megatron.models.plan import ModelPlan
from megatron.parallel.layout import Layout
from megatron.planner.memory import amount, checkpoint_bytes, largest_process
from megatron.planner.pipeline_balance import pipeline_rows
from megatron.training.curriculum import lengths_of
from megatron.training.expert_plan import expert_rows
from megatron.training.recorded_passes import RecordedPasses

if TYPE_CHECKING:
    from megatron.training.run import Run


def start_panel(run: Run, seconds: float) -> str:
    """Return the panel of all decisions and their reasons, shown before the first iteration.

    Args:
        run: The run, after its checkpoint has been loaded.
        seconds: The time that the setup took, in seconds.
    """
    rows = [*start_rows(run), ("set up in", f"{seconds:.1f} s")]
    return format_panel(f"{run.recipe.program}: {run.train_iterations:,} iterations", rows)


def start_rows(run: Run) -> list[PanelRow]:
    """Return the rows of the panel, after the checkpoint has been loaded."""
    config = run.config
    rows = device_rows(config, run.device, run.recipe.describe_kernels(run.parts[0]))
    if isinstance(run.forward, RecordedPasses):
        first, impl = config.training.cuda_graph_warmup_steps + 1, config.training.cuda_graph_impl
        reason = ": the GPU would wait for the host" if impl == "auto" else ""
        status = f"recorded in iteration {first}, then replayed"
        rows.append(("passes", f"{status} (--cuda-graph-impl {impl}{reason})"))
    return [
        *rows,
        *size_rows(config, run.layout.world.size, run.plan, memory=run.device.total_memory()),
        ("data", _describe_data(run)),
        *finetuning_rows(run),
        ("tokenizer", f"{config.tokenizer.tokenizer_type}, {run.tokenizer.vocab_size:,} entries"),
        ("checkpoints", _describe_checkpoints(run)),
    ]


def _describe_data(run: Run) -> str:
    data, preferences = run.config.data, run.config.preferences
    has_corpus = any((data.data_path, data.train_data_path, data.valid_data_path))
    if data.mock_data:
        source = "generated tokens (--mock-data)"
    elif run.config.finetuning.sft and preferences.trains_on_labels:
        source = "answers"
    elif run.config.finetuning.sft and preferences.preference_loss is not None:
        source = "pairs of answers"
    elif run.config.finetuning.sft:
        source = "conversations"
    elif any(text_members(split, 0) for split in run.datasets):
        source = "text, tokenized while training"
    else:
        source = "indexed files" if has_corpus else "the task's files"
    is_task = not has_corpus and not data.mock_data  # the task evaluates on its own files
    sizes = ", ".join(
        f"{name} {0 if split is None else len(split):,}"
        for name, split in zip(("training", "validation", "test"), run.datasets, strict=True)
        if split or not is_task
    )
    sequences = run.recipe.head.sequences
    lengths = [length for length in (data.seq_length, data.decoder_seq_length) if length]
    lengths_text = f"{sequences} x " * (sequences > 1) + " + ".join(map(str, lengths))
    separates_documents = data.reset_attention_mask and not run.config.finetuning.sft
    packing = ", 100% full, with separate documents" if separates_documents else ""
    return f"{source}; samples of {lengths_text} tokens{packing}{sizes and ': '}{sizes}"


def finetuning_rows(run: Run) -> list[PanelRow]:
    """Return the rows about finetuning with --sft: data, loss and packing; none without it."""
    options, training = run.config.finetuning, run.config.training
    if not options.sft:
        return []
    preferences = run.config.preferences
    if preferences.preference_loss is not None:
        unit = "answers of the same kind" if preferences.trains_on_labels else "pairs"
        weighting = f"{preferences.preference_loss}; all {unit} in an update have the same weight"
        return [("loss", weighting), ("packing", describe_pairs(run.datasets.train))]
    counted = "all turns count" if options.train_on_inputs else "the assistant's turns count"
    weighting = "all tokens of an update have the same weight (--calculate-per-token-loss)"
    if not training.calculate_per_token_loss:
        weighting = (
            "the mean over micro-batches (to weight tokens equally: --calculate-per-token-loss)"
        )
    members = members_of(run.datasets.train, PackedDataset)
    files = {member.examples.name: member.examples for member in members}
    rows = [("conversations", examples.summary()) for examples in files.values()]
    rows += [("loss", f"{counted}; {weighting}")]
    packing = describe_packing(run.datasets.train)
    return [*rows, ("packing", packing)] if packing else rows


def _describe_checkpoints(run: Run) -> str:
    options = run.config.checkpoint
    loaded = "starting from random weights"
    if run.progress.iteration:
        branch = run.config.schedule.lr_wsd_branch_from
        branch_text = f", a branch of {branch}," if branch is not None else ""
        loaded = f"continuing {options.load}{branch_text} at iteration {run.progress.iteration}"
    elif options.finetune or run.pretrained is not None:
        loaded = f"weights from {options.load if options.finetune else run.pretrained}"
    if not options.save:
        return f"{loaded}; not saving (--save is not given)"
    intervals = {"iterations": options.save_interval, "minutes": options.save_interval_in_mins}
    schedule = [f"{number:g} {unit}" for unit, number in intervals.items() if number is not None]
    schedule += ["epoch"] * bool(run.save_at)
    mode = " in the background" if options.async_save else ""
    latest, retained = options.keep_latest, options.save_retain_interval
    retention = ""
    if latest is not None or retained is not None:
        multiples = "" if retained is None else f" and those at multiples of {retained} iterations"
        retention = f", keeping the newest{'' if latest is None else f' {latest}'}{multiples}"
    saving = (
        f"saving to {options.save} every {' or '.join(schedule)}{mode}{retention}, and at the end"
    )
    return f"{loaded}; {saving}"


def size_rows(
    config: RunConfig, world_size: int, plan: ModelPlan, memory: float | None = None
) -> list[PanelRow]:
    """Return the rows that follow from the flags alone, for any world size.

    Args:
        config: The run's configuration.
        world_size: The number of processes.
        plan: The plan of the whole network.
        memory: Memory of a device in bytes; `None` if it is not known.
    """
    training = config.training
    layout = Layout.at(0, world_size, **config.parallel.grid)
    batch, micro = training.global_batch_size, training.micro_batch_size
    micro_batches = batch // (micro * layout.data.size)
    tokens = batch * plan.head_spec.sequences * config.data.sample_tokens
    flops = flops_per_token(
        plan,
        config.data.seq_length,
        config.data.decoder_seq_length,
        trains_adapters=config.model.lora_rank is not None,
    )
    lengths, growth = lengths_of(config), []
    if lengths is not None:
        growth = [("curriculum", f"{lengths.describe()}; the rest of a sample is not read")]
    causal = {layer.mixer.causal for layer in plan.layers if layer.mixer is not None}
    attention = "all of attention counted"
    if True in causal:
        owner = "the decoder's " if len(causal) > 1 else ""
        attention = f"half of {owner}causal attention counted"
    parameters, active = count_parameters(plan), count_active_parameters(plan)
    active_text = f", of which a token uses {active:,}" if active < parameters else ""
    condition = ", if all experts get the same number of tokens" if active_text else ""
    saved = []
    if config.checkpoint.save is not None:
        saved = [("checkpoint size", amount(checkpoint_bytes(config, plan)))]
    return [
        ("layout", layout.describe()),
        (
            "batch",
            f"{batch} samples = micro-batch size {micro} x DP {layout.data.size} x micro-batches "
            f"{micro_batches}",
        ),
        ("tokens per iteration", f"{tokens:,}{' of whole samples' * (lengths is not None)}"),
        *_validation_rows(config),
        *growth,
        (
            "parameters",
            f"{parameters:,}{active_text} (vocabulary padded to {plan.embedding.vocabulary:,})",
        ),
        *_adapter_rows(config, plan),
        ("model FLOPs per token", f"{flops / 1e9:.4g} GFLOP ({attention})"),
        (
            "memory per process",
            f"at most about {largest_process(config, plan, world_size).describe()}{condition}",
        ),
        *saved,
        *_state_rows(config, plan, world_size),
        *expert_rows(config, plan, micro_batches, world_size, memory),
        *pipeline_rows(config, plan, micro_batches, world_size),
    ]


def _validation_rows(config: RunConfig) -> list[PanelRow]:
    """Return the row about --full-validation, if it is given."""
    options = config.evaluation
    if not options.full_validation:
        return []
    text = "every sample of the validation data once"
    paths = config.data.valid_data_path
    if options.multiple_validation_sets and paths is not None:
        names = options.validation_set_names or range(len(paths))
        pairs = (f"{name} ({path})" for name, path in zip(names, paths, strict=True))
        text = f"every sample once, of each set separately: {', '.join(pairs)}"
    return [("validation", f"{text}; every {options.eval_interval} iterations and at the end")]


def _state_rows(config: RunConfig, plan: ModelPlan, world_size: int) -> list[PanelRow]:
    """Return the row about moments, master weights and gradients below 32 bits, if any."""
    options = config.optimizer
    formats = {name: getattr(options, name) for name in FORMAT_FIELDS}
    packed = {name: dtype for name, dtype in formats.items() if dtype != "fp32"}
    if not packed:
        return []
    changes: dict[str, Any] = {f"optimizer.{name}": "fp32" for name in packed}
    if "main_grads_dtype" in packed:
        changes["precision.accumulate_allreduce_grads_in_fp32"] = True
    fp32_config = with_values(config, changes)
    before, after = (largest_process(each, plan, world_size) for each in (fp32_config, config))
    saved = before.total + before.host - after.total - after.host
    text = ", ".join(f"{name.removesuffix('_dtype')} in {dtype}" for name, dtype in packed.items())
    text += f": {amount(saved)} per process less than in fp32"
    if packed.keys() - {"main_grads_dtype"}:
        text += "; PyTorch's operations update them, because the fused Adam kernel needs fp32"
    return [("optimizer states", text)]


def _adapter_rows(config: RunConfig, plan: ModelPlan) -> list[PanelRow]:
    """Return the row about the parameters that adapters train, if there are adapters."""
    model = config.model
    if model.lora_rank is None:
        return []
    trained = count_adapters(model, plan.embedding.vocabulary)
    kind = "DoRA" if model.use_dora else "LoRA"
    text = f"{trained:,} parameters ({kind} of rank {model.lora_rank}); all others are frozen"
    frozen = frozen_format(model)
    if frozen is not None:
        text += f", those of linear layers in {frozen}"
    return [("adapters", text)]


def device_rows(config: RunConfig, device: Device, attention: str) -> list[PanelRow]:
    """Return the rows for device, precision and kernels.

    Args:
        config: The run's configuration.
        device: This process's device.
        attention: A description of the attention kernel.
    """
    numbers, peak = config.precision, device.peak_flops
    precision = "fp32 (neither --bf16 nor --fp16 given)"
    if numbers.bf16:
        grads, params = config.optimizer.main_grads_dtype, config.optimizer.main_params_dtype
        precision = "bf16 (--bf16; gradients and master weights in fp32)"
        if (grads, params) != ("fp32", "fp32"):
            precision = f"bf16 (--bf16; gradients in {grads}, master weights in {params})"
    elif numbers.fp16:
        precision = f"fp16 (--fp16; master weights in {config.optimizer.main_params_dtype})"
    rows = [("device", device.description), ("precision", precision)]
    if numbers.fp8_format is not None:
        length = numbers.fp8_amax_history_len
        takes_max = numbers.fp8_amax_compute_algo == "max" and length > 1
        amax_source = (
            f"largest amax of {length} iterations" if takes_max else "last iteration's amax"
        )
        scales = {
            "tensorwise": "one scale per matrix",
            "rowwise": "one scale per row",
            "delayed": f"one scale per matrix, from the {amax_source}",
        }[numbers.fp8_recipe]
        ends = ""
        if numbers.first_last_layers_bf16:
            first, last = numbers.num_layers_at_start_in_bf16, numbers.num_layers_at_end_in_bf16
            ends = f"; the first {first} and last {last} layers in 16 bits"
        rows.append(("linear layers", f"fp8 {numbers.fp8_format}, {scales}{ends}"))
    mfu = "n/a: this device's peak FLOP/s is unknown"
    if peak is not None:
        ratio = f"tokens/s x model FLOPs per token / {peak / 1e12:.0f} TFLOP/s"
        mfu = f"{ratio} (dense 16-bit peak)"
    rows.append(("attention", attention))
    if config.model.has_states:
        states = choose_recurrence(config.model, numbers, device.torch_device)
        rows.append(("recurrent layers", f"{states.name} ({states.reason})"))
    return [
        *rows,
        ("other kernels", str(find_library(device.torch_device))),
        ("MFU", mfu),
    ]
