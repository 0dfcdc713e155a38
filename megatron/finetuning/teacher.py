"""The teacher: loading it on the processes of a run, and writing its logits to files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.reader import PaddedReader, Reader, restore
from megatron.command import print_line
from megatron.config import RunConfig, rules_model, rules_parallel
from megatron.config.checks import find_problems
from megatron.config.data import TokenizerConfig
from megatron.config.run import ModelRun
from megatron.config.stages import (
    even_parts,
    layout_of,
    parts_of_stage,
    plan_model,
    possible_plan,
    with_layout,
)
from megatron.data.loader import build_loader
from megatron.data.logits import (
    TOP_IDS,
    TOP_REST,
    TOP_VALUES,
    LogitsHeader,
    begin_folder,
    digest_of_tokens,
    missing_files,
    new_header,
    write_file,
)
from megatron.data.sample import SampleDataset
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.finetuning.distillation import GPTTeacher, LearningRecipe
from megatron.inference.load import open_existing, saved_config
from megatron.models.build import build_model, run_context
from megatron.models.gpt import GPTModel
from megatron.parallel.collectives import all_gather
from megatron.parallel.context.split import join_sequence
from megatron.parallel.distillation import VocabularyPart, top_log_probs
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.executor import run_schedule
from megatron.parallel.pipeline.p2p import PipelineChannel
from megatron.parallel.pipeline.schedule import forward_only, make_schedule, schedule_kind
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.build import padded_vocab_size
from megatron.training.batches import BatchPlan, samples_needed
from megatron.training.build import without_epochs
from megatron.training.passes import message_shape
from megatron.training.recipe import Batch
from megatron.training.run import Progress

_REPORT_SECONDS = 60.0  # seconds between progress lines


def open_teacher(
    folder: str,
    config: RunConfig,
    *,
    flag: str = "--teacher-load",
    verify: bool = True,
    layout: Layout | None = None,
) -> tuple[Reader, ModelRun]:
    """Open a teacher's checkpoint. Collective over `layout`, if one is given.

    Args:
        folder: Folder of the teacher's checkpoints, in any supported format.
        config: The run's configuration.
        flag: The flag that names the folder, for messages.
        verify: Whether to check the checkpoint's files.
        layout: The processes that open the checkpoint together.

    Returns:
        The checkpoint and the configuration of its model.

    Raises:
        CheckpointError: There is no intact checkpoint, or it contains a different kind of network.
    """
    options = config.checkpoint
    reader = open_existing(
        folder,
        flag=flag,
        step=options.ckpt_step if flag == "--load" else None,
        verify=verify,
        layout=layout,
        allow_foreign=options.allow_foreign_checkpoints,
    )
    return reader, saved_config(reader, folder, "gpt", flag=flag)


def load_teacher(
    folder: str,
    config: RunConfig,
    tokenizer: Tokenizer,
    device: Device,
    layout: Layout,
    *,
    flag: str = "--teacher-load",
) -> GPTTeacher:
    """Load a second GPT model, split over the same processes as the run's own.

    Tensor and context ranks split the teacher as they split the run's model. The teacher has as
    many pipeline parts as the student, but its layers are divided as evenly as possible, even if
    the student's are not. The checkpoint defines the network. Number format and attention kernels
    are the same as in the run, except that FP8 is never used. Each process keeps its whole tensor
    shard, even if the run shards its weights over replicas. Collective.

    Args:
        folder: Folder of the teacher's checkpoints, in any supported format.
        config: The run's configuration.
        tokenizer: The run's tokenizer, which must be the teacher's.
        device: The device on which this process computes.
        layout: The grid of processes as this process sees it.
        flag: The flag that names the folder, for messages.

    Raises:
        CheckpointError: There is no intact checkpoint, or it contains a different kind of network
            or a network with a different tokenizer.
        ConfigError: The network cannot be split over the processes, or does not support the
            sequence length or the recorded passes of the run.
    """
    reader, saved = open_teacher(folder, config, flag=flag, layout=layout)
    _check_tokenizer(reader, saved.tokenizer, tokenizer, f"{flag} {folder}")
    student, parallel = config.model, replace(config.parallel, zero_stage=0)
    if layout.pipeline.size > 1:
        parts = len(plan_model(student, parallel))
        layers, stages = saved.model.num_layers, layout.pipeline.size
        parallel = with_layout(parallel, layout_of(even_parts(layers, parts)))
        if not possible_plan(saved.model, parallel):
            raise ConfigError(
                f"{flag} {folder}: the teacher's {layers} layers leave a stage of "
                f"--pipeline-model-parallel-size {stages} empty: use fewer stages, or a teacher "
                "with more layers"
            )
    teacher_config = replace(
        config,
        model=replace(
            saved.model,
            use_flash_attn=student.use_flash_attn,
            masked_softmax_fusion=student.masked_softmax_fusion,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        ),
        precision=config.precision.without_fp8(),
        parallel=parallel,
        training=replace(config.training, recompute_granularity=None),
    )
    # Recorded passes (CUDA graphs) include the teacher's passes.
    shapes = (rules_parallel.layout, rules_parallel.tensor_parallel, rules_model.positions)
    rules = (*shapes, rules_parallel.graphs)
    problems = find_problems(teacher_config, layout.world.size, rules=rules)
    if problems:
        remedy = "change the layout or length of this run, or use another teacher"
        reasons = (line.rpartition(": ")[0] for line in problems)  # without the student's remedy
        raise ConfigError(
            [
                f"{flag} {folder}: the teacher does not fit this run: {reason}: {remedy}"
                for reason in reasons
            ]
        )
    rows = padded_vocab_size(
        tokenizer.vocab_size, student.make_vocab_size_divisible_by, layout.tensor.size
    )
    padded = PaddedReader(reader, rows=rows, entries=tokenizer.vocab_size)
    context, pipeline = run_context(teacher_config, layout, device), layout.pipeline
    local_parts = parts_of_stage(
        plan_model(teacher_config.model, parallel), pipeline.rank, pipeline.size
    )
    models = [build_model(GPTModel, teacher_config, context, rows, part) for part in local_parts]
    required = ("model.",) if pipeline.size == 1 else ()
    restore(padded, model_state(models), prefixes=required, cast=True)
    dtype = str(config.precision.weight_dtype).removeprefix("torch.")
    size = f"{saved.model.num_layers} layers, hidden size {saved.model.hidden_size}, {dtype}"
    for model in models:
        model.requires_grad_(False).eval()
    return GPTTeacher(models, f"{folder}, iteration {reader.iteration}", size)


def _check_tokenizer(
    reader: Reader, config: TokenizerConfig, tokenizer: Tokenizer, prefix: str
) -> None:
    """Refuse a teacher with a different tokenizer.

    Checkpoints that this package wrote have a fingerprint. For other checkpoints, the vocabulary
    entries are compared if the checkpoint names its tokenizer at all.

    Raises:
        CheckpointError: The tokenizers differ.
    """
    remedy = (
        "student and teacher must share a tokenizer: give the teacher's tokenizer, or another "
        "teacher"
    )
    fingerprint = reader.meta.get("tokenizer")
    if fingerprint is not None:
        if fingerprint != tokenizer.fingerprint():
            raise CheckpointError(
                f"{prefix}: the teacher has a different tokenizer (fingerprint {fingerprint}, here "
                f"{tokenizer.fingerprint()}): {remedy}"
            )
    elif config.tokenizer_type is not None:
        teacher_tokenizer = build_tokenizer(config)
        if (
            teacher_tokenizer.fingerprint() != tokenizer.fingerprint()
            and teacher_tokenizer.vocab != tokenizer.vocab
        ):
            raise CheckpointError(f"{prefix}: the teacher has a different tokenizer: {remedy}")


def save_logits(config: RunConfig, recipe: LearningRecipe, device: Device, layout: Layout) -> None:
    """Write a teacher's top log-probabilities for every training sample to --logits-save-dir.

    Each data-parallel process computes whole files. Existing files are left as they are.
    Collective.

    Args:
        config: The run's configuration, with the data of the student's run.
        recipe: The recipe, which builds the samples.
        device: The device on which this process computes.
        layout: The grid of processes as this process sees it.

    Raises:
        DataError: The folder contains logits that were written with other settings.
        StorageError: A file cannot be written.
        CheckpointError: The teacher's checkpoint is missing, is not a GPT, or has a different
            tokenizer.
        ConfigError: The teacher does not fit the run (`load_teacher`), or there are no training
            samples.
    """
    options = config.distillation
    assert options.logits_save_dir is not None
    folder = Path(options.logits_save_dir)
    tokenizer = build_tokenizer(config.tokenizer)
    source, flag = options.teacher_load, "--teacher-load"
    if source is None:
        source, flag = config.checkpoint.load, "--load"
    assert source is not None, "a rule requires it"
    teacher = load_teacher(source, config, tokenizer, device, layout, flag=flag)
    batches = BatchPlan.from_config(config, layout.data.size)
    config = without_epochs(config, recipe, batches, tokenizer, layout)
    iterations = batches.iterations_of(config.training, Progress())
    counts = samples_needed(config, iterations, Progress())
    dataset = recipe.build_datasets(config, tokenizer, counts, layout).train
    if dataset is None:
        raise ConfigError(
            f"--split {config.data.split}: the training split is empty: give it a share"
        )
    # The cyclic loader shuffles the samples, so a run may need the logits of any of them.
    samples = len(dataset) if config.data.dataloader_type == "cyclic" else counts[0]
    header = new_header(config, tokenizer, samples=samples, teacher=teacher.name)
    begin_folder(folder, header)  # on every process: all of them write the same header
    if layout.world.rank == 0:
        print_line(f"teacher: {teacher.name}, {teacher.description}")
    channel = None
    if layout.pipeline.size > 1:
        channel = PipelineChannel(
            layout,
            ring=len(teacher.parts) > 1,
            device=device.torch_device,
            dtype=config.precision.stream_dtype,
        )
    writer = _Writer(config, recipe, tokenizer, teacher, layout, channel)
    _write_missing(folder, header, dataset, writer)
    layout.world.barrier()
    if layout.world.rank == 0:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print_line(f"the logits of {samples:,} samples are in {folder} ({size / 1e9:.3g} GB)")


class _Writer(NamedTuple):
    """A teacher, and everything needed to compute the logits of a file."""

    config: RunConfig
    recipe: LearningRecipe
    tokenizer: Tokenizer
    teacher: GPTTeacher
    layout: Layout
    channel: PipelineChannel | None

    def top_tokens(
        self, batches: Iterator[Batch], sizes: Sequence[int], device: torch.device
    ) -> tuple[list[dict[str, Tensor]], list[int]]:
        """Return the top log-probabilities (on the CPU) and the digest of each sample of one file.

        Pipeline stages other than the last return empty lists. Collective over the tensor, context
        and pipeline ranks.

        Args:
            batches: The micro-batches.
            sizes: The number of samples in each micro-batch of the file.
            device: The device on which this process computes.
        """
        layout, parts = self.layout, self.teacher.parts
        kind, stages = schedule_kind(self.config.parallel, len(parts)), layout.pipeline.size
        schedule = forward_only(make_schedule(kind, stages, len(parts), len(sizes)))
        tops: list[dict[str, Tensor]] = []
        digests: list[int] = []
        read_batches: list[Batch] = []

        def step(part: GPTModel, micro_batch: int, hidden: Tensor | None) -> Tensor:
            if micro_batch == len(read_batches):
                read_batches.append(next(batches))
            batch = {name: x.to(device) for name, x in read_batches[micro_batch].items()}
            inputs = self.recipe.inputs(batch, self.config, self.tokenizer, layout)
            result = self.teacher.run(part, inputs, hidden)
            if part.part.head:
                texts = read_batches[micro_batch]["text"]
                digests.extend(digest_of_tokens({"text": row.numpy()}) for row in texts)
                tops.extend(self._batch_top_tokens(result))
            return result

        def shape(micro_batch: int) -> tuple[int, int, int]:
            rows, _, _ = message_shape(self.config, layout, self.config.data.seq_length, 1)
            return rows, sizes[micro_batch], self.teacher.hidden

        run_schedule(
            schedule[layout.pipeline.rank],
            [partial(step, part) for part in parts],
            None if self.channel is None else self.channel.with_shapes(shape),
        )
        return tops, digests

    def _batch_top_tokens(self, logits: Tensor) -> list[dict[str, Tensor]]:
        """Return each sample's top log-probabilities, given a batch of logits [b, s, v/t]."""
        options = self.config.distillation
        assert options.logits_save_top_k is not None
        top = top_log_probs(
            logits.flatten(0, 1),
            VocabularyPart(self.layout.tensor, self.tokenizer.vocab_size),
            k=options.logits_save_top_k,
            p=options.logits_save_top_p,
            min_k=options.logits_save_top_p_min_k,
            temperature=options.kd_temperature,
        )
        context = self.layout.context
        parts = (all_gather(part.unflatten(0, logits.shape[:2]), context) for part in top)
        full = [join_sequence(part.chunk(context.size), dim=1).cpu() for part in parts]
        names = (TOP_IDS, TOP_VALUES, TOP_REST)
        return [dict(zip(names, tensors, strict=True)) for tensors in zip(*full, strict=True)]


def _write_missing(
    folder: Path, header: LogitsHeader, dataset: SampleDataset, writer: _Writer
) -> None:
    """Write this data-parallel process's share of the files that do not exist yet. Collective."""
    layout, config = writer.layout, writer.config
    device = next(writer.teacher.parts[0].parameters())
    # All processes use rank 0's list of missing files, because processes that share a model must
    # work on the same files.
    exchange = JsonExchange(layout.world)
    starts = set(exchange.on_main(lambda: [file.start for file in missing_files(folder, header)]))
    missing = [file for file in header.files() if file.start in starts]
    local_files = missing[layout.data.rank :: layout.data.size]
    micro_batch = config.training.micro_batch_size
    micro_batches = [
        list(file[i : i + micro_batch])
        for file in local_files
        for i in range(0, len(file), micro_batch)
    ]
    batches = build_loader(
        dataset,
        micro_batches,
        num_workers=config.data.num_workers,
        seed=config.training.seed,
        pin_memory=device.is_cuda,
    )
    last_report = time.monotonic()
    for index, samples in enumerate(local_files):
        sizes = [min(micro_batch, len(samples) - i) for i in range(0, len(samples), micro_batch)]
        tops, digests = writer.top_tokens(batches, sizes, device.device)
        if tops and layout.tensor.is_first and layout.context.is_first:
            write_file(header.path(folder, samples.start), header, tops, digests)
        if layout.world.rank == 0 and time.monotonic() - last_report > _REPORT_SECONDS:
            last_report = time.monotonic()
            print_line(f"  {index + 1} of this process's {len(local_files)} files are written")
