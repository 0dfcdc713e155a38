"""Loading a trained model from a checkpoint, which also stores its shape, tokenizer and precision.

This module also parses the command line of programs that run such a model, and creates their rows
in the start-up panel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.compatibility import check_network
from megatron.checkpoint.entries import model_state
from megatron.checkpoint.huggingface.files import COMPANION_FOLDER, tokenizer_in
from megatron.checkpoint.legacy.arguments import legacy_run_settings
from megatron.checkpoint.loading import open_root
from megatron.checkpoint.merged import AveragedReader, without_adapters
from megatron.checkpoint.reader import PaddedReader, Reader, restore
from megatron.command import PanelRow
from megatron.config import ParsedRun, parse_config, rules_data, rules_model, rules_parallel
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checks import Rule, bounds, find_problems, requirements
from megatron.config.data import DataOptions, TokenizerConfig
from megatron.config.fields import fields_of
from megatron.config.model import ModelOptions, with_article
from megatron.config.parallel import ParallelOptions
from megatron.config.parser import Program
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, RunConfig, RunOptions, narrow, with_values
from megatron.config.stages import parts_of_stage, plan_parts
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.engine import BatchEngine
from megatron.kernels.row_product import GRANULE, choose_row_product
from megatron.models.adapters import adapted_layers
from megatron.models.build import build_model, run_context
from megatron.models.gpt import GPTModel
from megatron.models.retro import RetroModel
from megatron.parallel.adapter_stack import AdapterRows
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.parallel.products import PLAIN, RowByRow
from megatron.tokenizer import Tokenizer, build_tokenizer

# The kind of a checkpoint that scores answers, used like an architecture's name in messages.
REWARD_MODEL = "reward model"


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run, with its tokenizer and configuration.

    Attributes:
        model: The model in evaluation mode. In a parallel layout, this process's part: the tensor
            rank's shard of the pipeline stage's layers.
        tokenizer: The tokenizer that the model was trained with.
        config: The run's configuration, without settings that only training needs (`saved_config`).
        iteration: Number of training steps taken.
        layout: This process's position in the parallel layout.
        adapters: The model's adapters, of which each request selects one or none
            (`adapters.add_to`); `None` if the model has no adapters.
        earlier_parts: The model parts on this process that run before `model`, if a training run
            has virtual pipeline stages.
    """

    model: GPTModel
    tokenizer: Tokenizer
    config: RunConfig
    iteration: int
    layout: Layout
    adapters: AdapterRows | None = None
    earlier_parts: Sequence[GPTModel] = ()


def serving_context(config: ModelRun, layout: Layout, device: Device) -> BuildContext:
    """Return the context for building a model that generates text.

    If the device allows it, each row of a matrix product is bitwise independent of the other rows
    in the batch.

    Args:
        config: Configuration that the model was trained with.
        layout: This process's position in the parallel layout.
        device: Device to run on.
    """
    row_product = choose_row_product(device.torch_device)
    products = PLAIN if row_product is None else RowByRow(row_product)
    context = run_context(config, layout, device)
    return context.multiplying_by(lambda: products, for_output=products)


def load_gpt(
    folder: str,
    device: Device,
    layout: Layout | None = None,
    *,
    config: RunConfig | None = None,
    row_by_row: bool = True,
    kinds: Sequence[str] = ("gpt",),
) -> Loaded:
    """Load the newest complete checkpoint in a folder, regardless of the layout it was saved in.

    If the configuration sets --ckpt-step, load that iteration's checkpoint instead. Collective
    over `layout`.

    Args:
        folder: Folder of checkpoints.
        device: Device to run on.
        layout: This process's position in the parallel layout. `None` means a single process.
        config: A resolved run to use instead of the checkpoint's. It must describe the same
            network, have the layout's parallel sizes, and give each stage a single part of the
            model.
        row_by_row: Whether to build the model in a `serving_context` and without sequence
            parallelism, which engines need. Otherwise matrix products are computed as in training.
        kinds: Architectures that the caller accepts: "gpt", "retro" or both.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its network does not match
            `kinds` or `config`.
        ConfigError: The network cannot be split over the layout, or the tokenizer's settings are
            missing or invalid.
        DataError: One of the tokenizer's files is missing or damaged.
    """
    layout = layout or Layout.single()
    options = CheckpointConfig() if config is None else config.checkpoint
    reader = open_existing(
        folder,
        step=options.ckpt_step,
        layout=layout,
        allow_foreign=options.allow_foreign_checkpoints,
        averaged=options.load_averaged_weights,
    )
    saved = saved_config(reader, folder, *kinds)
    if config is None:
        config = _with_layout(saved, layout)
    else:
        check_network(config, reader)
    if row_by_row:
        # A step of an engine has too few tokens to divide them among tensor ranks.
        layout = replace(layout, sequence_parallel=False)
        config = replace(config, parallel=replace(config.parallel, sequence_parallel=False))
    tokenizer = build_tokenizer(config.tokenizer)
    # Each rank's share is a multiple of the granule of matrix products. With an odd size, such as
    # GPT-2's 50257 entries, products would not always be summed in the same order.
    multiple = layout.tensor.size * GRANULE
    rows = -(-int(reader.meta["padded_vocab_size"]) // multiple) * multiple
    reader = PaddedReader(reader, rows=rows, entries=tokenizer.vocab_size)
    plan = plan_parts(config.model.num_layers, config.parallel)
    (part,) = parts_of_stage(plan, layout.pipeline.rank, layout.pipeline.size)
    is_retro = config.model.architecture == "retro"
    context = (serving_context if row_by_row else run_context)(config, layout, device)
    network = RetroModel if is_retro else GPTModel
    model = build_model(network, config, context, rows, part)
    # In a pipeline no rank holds every parameter.
    required = () if layout.pipeline.size > 1 else ("model.",)
    restore(reader, model_state([model]), prefixes=required, cast=True)
    return Loaded(model.eval(), tokenizer, config, reader.iteration, layout)


def open_existing(
    folder: str,
    *,
    flag: str = "--load",
    step: int | None = None,
    verify: bool = True,
    layout: Layout | None = None,
    allow_foreign: bool = False,
    averaged: bool = False,
) -> Reader:
    """Open the checkpoint that a flag names. Collective over `layout`, if one is given.

    Adapters are merged into the weights (`without_adapters`).

    Args:
        folder: Folder of checkpoints.
        flag: The flag, for error messages.
        step: Iteration to open (--ckpt-step). `None` opens the newest.
        verify: Whether to check the checkpoint's files.
        layout: Layout of the processes that open the checkpoint together.
        allow_foreign: Whether to accept files owned by other users (--allow-foreign-checkpoints).
        averaged: Whether to read the averages of the weights (--load-averaged-weights).

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it contains no averages.
    """
    reader = open_root(
        Path(folder), step=step, verify=verify, layout=layout, allow_foreign=allow_foreign
    )
    if reader is None:
        location = " in this folder" if Path(folder).is_dir() else ": no such folder"
        raise CheckpointError(f"{flag} {folder}: there is no checkpoint{location}")
    return without_adapters(AveragedReader(reader) if averaged else reader, adapted_layers)


def saved_config(reader: Reader, folder: str, *kinds: str, flag: str = "--load") -> ModelRun:
    """Return the resolved configuration with which a checkpoint's model runs.

    It has the network, precision, tokenizer and sequence length of the run that wrote the
    checkpoint. FP8 is left out, because it is an approximation that speeds up training, and the
    weights have 16 bits. Settings for initialization are left out, and so are settings for kernels,
    because this device may be different. Experts have no capacity limit, because the tokens that
    such a limit drops depend on the other tokens of the batch.

    Args:
        reader: Reader of the checkpoint.
        folder: Folder of checkpoints, where an imported model's tokenizer may be.
        kinds: Architectures that the caller accepts, or `REWARD_MODEL`. If none are given, all are
            accepted.
        flag: The flag that names the folder, for error messages.

    Raises:
        CheckpointError: The checkpoint contains a different kind of network, or the settings of its
            Hugging Face tokenizer cannot be read.
        ConfigError: The checkpoint's configuration has unknown settings or invalid values.
    """
    sections = reader.meta["config"]
    if reader.format in ("legacy", "core", "deepspeed"):
        sections = {**sections, **legacy_run_settings(reader.meta["legacy_args"])}
    run = narrow(resolve(from_dict(sections, str(reader.path)), 1), ModelRun)
    kind = REWARD_MODEL if run.model.reward_head else run.model.architecture
    if kinds and kind not in kinds:
        accepted = with_article(" or ".join(kinds))
        raise CheckpointError(
            f"{flag} {folder}: holds {with_article(kind)}, but {accepted} is needed"
        )
    if reader.format == "hf" and run.tokenizer.tokenizer_type is None:
        tokenizer = tokenizer_in(
            reader.path, run.model.architecture, allow_foreign=reader.allow_foreign
        )
        run = replace(run, tokenizer=tokenizer)
    model = replace(
        run.model,
        use_flash_attn=False,
        batch_invariant_mode=False,
        masked_softmax_fusion=run.model.masked_softmax_fusion or run.model.use_flash_attn,
        perform_initialization=True,
        moe_token_dropping=False,
    )
    return ModelRun(
        model=model,
        precision=run.precision.without_fp8(),
        tokenizer=_with_existing_files(
            run.tokenizer, Path(folder) / COMPANION_FOLDER, reader.meta.get("folder")
        ),
        data=DataOptions(
            seq_length=run.data.seq_length or run.model.max_position_embeddings,
            decoder_seq_length=run.data.decoder_seq_length,
        ),
    )


def _with_layout(config: ModelRun, layout: Layout) -> RunConfig:
    """Return the configuration with the layout's parallel sizes.

    Raises:
        ConfigError: The network cannot be split over the layout.
    """
    parallel = ParallelOptions(
        tensor_model_parallel_size=layout.tensor.size,
        pipeline_model_parallel_size=layout.pipeline.size,
        context_parallel_size=layout.context.size,
        sequence_parallel=layout.sequence_parallel,
    )
    batch = {"training.micro_batch_size": 1, "training.global_batch_size": 1}
    options = with_values(replace(config, parallel=parallel), batch)
    run = narrow(resolve(options, 1), RunConfig)
    rules = (rules_parallel.layout, rules_parallel.pipeline, rules_parallel.tensor_parallel)
    problems = find_problems(run, layout.world.size, rules=rules)
    if problems:
        raise ConfigError(problems)
    return run


def _with_existing_files(
    config: TokenizerConfig, companions: Path, folder: str | None
) -> TokenizerConfig:
    """Return the tokenizer's settings with missing files replaced by those that exist.

    Args:
        config: The tokenizer's settings.
        companions: The folder in which an imported model keeps its tokenizer's files, so that its
            checkpoint can be moved.
        folder: The folder in which the run that saved the checkpoint was started, to which its
            relative paths refer.
    """
    found: dict[str, Any] = {}
    for name in ("tokenizer_model", "vocab_file", "merge_file", "chat_template"):
        path = getattr(config, name)
        if path is None or os.path.exists(path):
            continue
        companion = companions / Path(path).name
        if companion.is_file():
            found[name] = str(companion)
        elif folder is not None and os.path.exists(Path(folder) / path):
            found[name] = str(Path(folder) / path)
    return replace(config, **found)


def parse_generation(
    arguments: Sequence[str],
    world_size: int,
    program: Program,
    *,
    has_replicas: bool = False,
    kinds: Sequence[str] = ("gpt",),
) -> ParsedRun:
    """Parse and check the command line of a program that generates text.

    The settings are those of the checkpoint under `--load`, changed by any other flags, so `--load`
    alone is enough. Megatron's own scripts also pass flags that describe the network. These flags
    are compared with the checkpoint when it is loaded, and must agree with it.

    Args:
        arguments: The command line.
        world_size: Number of processes.
        program: The program's name, and the flags and checks that only it has.
        has_replicas: Whether additional processes may hold more copies of the model.
        kinds: Architectures that the program accepts. Without --load, the first one is used.

    Raises:
        ConfigError: The command line has mistakes. The error lists all of them.
        CheckpointError: --load does not name a checkpoint with one of these architectures.
    """
    reads = SAVED_MODEL_READS | {"training.seed"}
    rules = (
        *SAVED_MODEL_RULES,
        _no_sequence_parallel,
        *(() if has_replicas else (_single_replica,)),
    )
    start = partial(saved_run, kinds=kinds)
    program = replace(program, find_start=start, rules=rules, reads=lambda given: reads)
    return parse_config(arguments, world_size=world_size, program=program)


def saved_run(
    flags: Mapping[str, Any], *, micro_batch: int = 1, kinds: Sequence[str] = ("gpt",)
) -> RunOptions:
    """Return the settings of the model under --load, for `parse_config`'s `find_start`.

    Args:
        flags: Flags on the command line. Without --load, the defaults are returned.
        micro_batch: Micro-batch size of the run.
        kinds: Architectures that the program accepts. Without --load, the first one is used.

    Raises:
        CheckpointError: There is no checkpoint, or its architecture is not in `kinds`.
    """
    folder = flags.get("load")
    if folder is None:
        return RunOptions(model=ModelOptions(architecture=kinds[0]))
    reader = open_existing(
        folder,
        step=flags.get("ckpt_step"),
        verify=False,
        allow_foreign=flags.get("allow_foreign_checkpoints", False),
    )
    config = saved_config(reader, folder, *kinds)
    return replace(config, training=replace(config.training, micro_batch_size=micro_batch))


def _needs_model(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error if the model or the tokenizer is missing.

    Old checkpoints do not name a tokenizer.
    """
    if config.checkpoint.load is None:
        yield "--load is required: give the folder of a trained model's checkpoints"
    else:
        yield from rules_data.tokenizer(config, world_size)


def _no_training(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that only training supports."""
    parallel, fp8 = config.parallel, config.precision.fp8_format
    context = parallel.context_parallel_size
    layers = parallel.num_layers_per_virtual_pipeline_stage
    stages = parallel.num_virtual_stages_per_pipeline_rank
    divided = "stages are divided only in training"
    refused = {
        "--dry-run is for training": config.training.dry_run,
        f"--context-parallel-size {context}: sequences are split only in training": context != 1,
        f"--num-layers-per-virtual-pipeline-stage {layers}: {divided}": layers is not None,
        f"--num-virtual-stages-per-pipeline-rank {stages}: {divided}": stages is not None,
        f"--fp8-format {fp8} is for training; a trained model computes in 16 bits": fp8 is not None,
        "--zero-stage 3 shards the weights only in training": parallel.zero_stage == 3,
        "--tp-comm-overlap splits matrix products only in training": parallel.tp_comm_overlap,
    }
    yield from (f"{line}: drop it" for line, is_given in refused.items() if is_given)


def _single_replica(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error unless the launched ranks hold a single copy of the model."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tensor * pipeline != world_size:
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} "
            f"is not the number of launched processes, {world_size}: text generation runs a "
            f"single copy of the model, so launch {tensor * pipeline}"
        )


def _no_sequence_parallel(config: RunOptions, world_size: int) -> Iterator[str]:
    if config.parallel.sequence_parallel:
        yield "--sequence-parallel is for training: drop it"


# Model fields that matter only for training or for a new network.
_TRAINING_FIELDS = (
    *("attention_dropout", "hidden_dropout", "init_method_std", "init_method_xavier_uniform"),
    *("perform_initialization", "make_vocab_size_divisible_by"),
)
_READ_FIELDS: dict[str, tuple[str, ...]] = {
    "model": tuple(f.name for f in fields_of(ModelOptions) if f.name not in _TRAINING_FIELDS),
    "tokenizer": tuple(f.name for f in fields_of(TokenizerConfig)),
    "precision": (
        *("fp16", "bf16", "fp8_format", "fp32_residual_connection", "embedding_weights_in_fp32"),
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
    ),
    "parallel": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        *("pipeline_model_parallel_layout", "pipeline_model_parallel_split_rank"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("sequence_parallel", "tp_comm_overlap", "distributed_backend"),
        *("distributed_timeout_minutes", "local_rank", "use_mpi"),
    ),
    "data": ("retro_workdir", "retro_compatible"),
    "training": ("deterministic_mode", "dry_run"),
    "checkpoint": (
        *("load", "ckpt_step", "allow_foreign_checkpoints", "use_checkpoint_args"),
        "load_averaged_weights",
    ),
}
# Fields that every program running a saved model either uses or rejects by name.
SAVED_MODEL_READS = frozenset(
    f"{section}.{name}" for section in _READ_FIELDS for name in _READ_FIELDS[section]
)

# Rules that every program running a saved model checks.
SAVED_MODEL_RULES: tuple[Rule, ...] = (
    _needs_model,
    _no_training,
    bounds,
    rules_parallel.layout,
    rules_parallel.tensor_parallel,
    rules_parallel.pipeline,
    rules_model.heads,
    rules_model.positions,
    partial(requirements, paths=SAVED_MODEL_READS),
    rules_model.activation_function,
    rules_model.normalization,
    rules_model.precision,
    rules_model.retro,
)


def model_rows(loaded: Loaded, device: Device) -> list[PanelRow]:
    """Return the panel's rows about the model, its device, number format and layout."""
    config = loaded.config
    model = config.model
    dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    return [
        ("checkpoint", f"{config.checkpoint.load}, iteration {loaded.iteration:,}"),
        ("network", f"{model.num_layers} layers, hidden size {model.hidden_size}"),
        ("tokenizer", f"{loaded.tokenizer.kind}, {loaded.tokenizer.vocab_size:,} entries"),
        ("device", device.description),
        ("precision", f"{dtype} weights"),
        ("layout", loaded.layout.describe()),
    ]


def engine_rows(loaded: Loaded, engine: BatchEngine, device: Device) -> list[PanelRow]:
    """Return the panel's rows about the model, as in `model_rows`, and about text generation."""
    window = f"{engine.limits.max_length:,} tokens, for a prompt and its answer together"
    names = () if loaded.adapters is None else loaded.adapters.names
    adapters = [("adapters", ", ".join(names))] if names else []
    return [*model_rows(loaded, device), *adapters, ("window", window), *engine.panel_rows]
