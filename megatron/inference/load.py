"""A trained model from its checkpoint alone: shape, tokenizer and precision are in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.huggingface.files import COMPANION_FOLDER, tokenizer_in
from megatron.checkpoint.legacy.arguments import legacy_surroundings
from megatron.checkpoint.loading import open_root
from megatron.checkpoint.reader import PaddedReader, Reader, restore
from megatron.config import RunConfig, rules_model
from megatron.config.data import DataOptions, TokenizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, RunOptions, narrow, with_values
from megatron.config.stages import parts_of_stage, plan_parts
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.kernels.row_product import GRANULE
from megatron.models.build import build_model
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.checkpointing import model_state
from megatron.training.loaded_settings import check_network


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what it was trained with.

    Attributes:
        model: in evaluation mode; in a layout this process's part of it: its tensor rank's share
            of its pipeline stage's layers.
        tokenizer: the one that it was trained with.
        config: the run's, without what only training needs: see `saved_config`.
        iteration: training steps taken.
        layout: who this process is.
        padded_vocab_size: rows of the word embeddings over all tensor ranks.
    """

    model: GPTModel
    tokenizer: Tokenizer
    config: RunConfig
    iteration: int
    layout: Layout
    padded_vocab_size: int


def load_gpt(
    folder: str, device: Device, layout: Layout | None = None, *, config: RunConfig | None = None
) -> Loaded:
    """The newest complete checkpoint under `folder`, or that of the configuration's --ckpt-step,
    whatever the layout that it was saved in.

    Collective over `layout`.

    Args:
        folder: of checkpoints.
        device: where to run.
        layout: who this process is; None: one process.
        config: a resolved run to take instead of the checkpoint's, whose network must be the same
            and whose parallel sizes those of the layout; one part of the model a stage.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another network.
        ConfigError: the network does not divide over the layout.
        DataError: a file of the tokenizer is missing.
    """
    layout = layout or Layout.single()
    step = None if config is None else config.checkpoint.ckpt_step
    reader = open_existing(folder, step=step, layout=layout)
    saved = saved_config(reader, folder)
    check_architecture(saved, "gpt", f"--load {folder}")
    if config is None:
        config = _over(saved, layout)
    else:
        check_network(config, reader)
    layout = replace(layout, sequence_parallel=config.parallel.sequence_parallel)
    tokenizer = build_tokenizer(config.tokenizer)
    rows = _rows(reader, layout.tensor.size)
    reader = PaddedReader(reader, rows=rows, entries=tokenizer.vocab_size)
    plan = plan_parts(config.model.num_layers, config.parallel)
    (part,) = parts_of_stage(plan, layout.pipeline.rank, layout.pipeline.size)
    model = build_model(GPTModel, config, layout, device, rows, part)
    # Under a pipeline no rank has a place for every parameter.
    whole = () if layout.pipeline.size > 1 else ("model.",)
    restore(reader, model_state([model]), prefixes=whole, cast=True)
    return Loaded(model.eval(), tokenizer, config, reader.iteration, layout, rows)


def open_existing(
    folder: str,
    *,
    flag: str = "--load",
    step: int | None = None,
    verify: bool = True,
    layout: Layout | None = None,
) -> Reader:
    """The checkpoint that a flag names, of the iteration `step` where there is one (--ckpt-step).

    Collective over `layout`, where one is given.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    reader = open_root(Path(folder), step=step, verify=verify, layout=layout)
    if reader is None:
        where = " in this folder" if Path(folder).is_dir() else ": no such folder"
        raise CheckpointError(f"{flag} {folder}: there is no checkpoint{where}")
    return reader


def check_architecture(config: RunOptions, expected: str, where: str) -> None:
    """Whether a checkpoint is of the kind of network that is needed.

    Raises:
        CheckpointError: it is of another.
    """
    found = config.model.architecture
    if found != expected:
        raise CheckpointError(f"{where}: holds a {found}, where a {expected} is needed")


def saved_config(reader: Reader, folder: str) -> ModelRun:
    """Of the run that wrote a checkpoint, what its model runs with: network, precision, tokenizer
    and window. Resolved.

    Products in 8 bits are an approximation that speeds training up: the weights have 16 bits, and
    so they are used. What only said how that run was to compute on its device, or to begin, is not
    taken: another has another device.
    """
    sections = reader.meta["config"]
    if reader.format == "legacy":
        sections = {**sections, **legacy_surroundings(reader.meta["legacy_args"])}
    run = narrow(resolve(from_dict(sections, str(reader.path)), 1), ModelRun)
    if reader.format == "hf" and run.tokenizer.tokenizer_type is None:
        run = replace(run, tokenizer=tokenizer_in(reader.path, run.model.architecture))
    model = replace(
        run.model,
        use_flash_attn=False,
        masked_softmax_fusion=run.model.masked_softmax_fusion or run.model.use_flash_attn,
        perform_initialization=True,
    )
    return ModelRun(
        model=model,
        precision=run.precision.without_fp8(),
        tokenizer=_found_again(run.tokenizer, Path(folder) / COMPANION_FOLDER),
        data=DataOptions(
            seq_length=run.data.seq_length or run.model.max_position_embeddings,
            decoder_seq_length=run.data.decoder_seq_length,
        ),
    )


def _over(config: ModelRun, layout: Layout) -> RunConfig:
    """`config` in the layout.

    Raises:
        ConfigError: the network does not divide over it.
    """
    parallel = ParallelConfig(
        tensor_model_parallel_size=layout.tensor.size,
        pipeline_model_parallel_size=layout.pipeline.size,
        context_parallel_size=layout.context.size,
        sequence_parallel=layout.sequence_parallel,
    )
    batch = {"training.micro_batch_size": 1, "training.global_batch_size": 1}
    asked = with_values(replace(config, parallel=parallel), batch)
    run = narrow(resolve(asked, 1), RunConfig)
    problems = [
        line
        for rule in (rules_model.layout, rules_model.pipeline, rules_model.tensor_parallel)
        for line in rule(run, layout.world.size)
    ]
    if problems:
        raise ConfigError(problems)
    return run


def _rows(reader: Reader, ranks: int) -> int:
    """Vocabulary rows as saved, and as many more as it takes for every rank to have as many, by
    the granule of matrix products (GPT-2's 50257 entries would keep to no order of sums)."""
    unit = ranks * GRANULE
    return -(-int(reader.meta["padded_vocab_size"]) // unit) * unit


def _found_again(config: TokenizerConfig, beside: Path) -> TokenizerConfig:
    """An imported model's tokenizer files are in `beside`, wherever the folder was moved to."""

    def find(path: str | None) -> str | None:
        if path is None or Path(path).exists():
            return path
        moved = beside / Path(path).name
        return str(moved) if moved.is_file() else path

    return replace(
        config,
        tokenizer_model=find(config.tokenizer_model),
        vocab_file=find(config.vocab_file),
        merge_file=find(config.merge_file),
    )
