"""The command `tools/retro/main.py`, which runs Retro's preprocessing.

    python tools/retro/main.py --retro-tasks build --retro-workdir WORKDIR --load BERT ...
    torchrun --nproc-per-node 8 tools/retro/main.py ...

The command accepts Megatron-LM's flags: those of a BERT run and those of preprocessing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.legacy.arguments import megatron_arguments
from megatron.checkpoint.lock import save_lock
from megatron.command import format_panel, print_line
from megatron.config import ParsedRun, Program, RunConfig, parse_config, rules_training
from megatron.config.checks import RULES
from megatron.config.data import DataConfig
from megatron.config.parser import help_if_asked
from megatron.config.retro_preprocessing import (
    RETRO_SECTIONS,
    RetroPreprocessing,
    find_mistakes,
)
from megatron.config.run import RunOptions, flatten, with_values
from megatron.data.datasets import DataRequest, corpus_fingerprint
from megatron.device import Device
from megatron.errors import EXIT_OK, ConfigError
from megatron.inference.load import open_existing, saved_config
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.processes.process import print_notices, processes
from megatron.retro.blocks import on_first
from megatron.retro.database import (
    ChunkCutter,
    ChunkDatabase,
    build_database,
    plan_corpora,
)
from megatron.retro.embedding import Embedder, EmbedderOptions, Masking, build_embedder
from megatron.retro.estimate import describe_work
from megatron.retro.index import ChunkTexts, IndexOptions, add_to_index, check_factory, train_index
from megatron.retro.neighbors import QueryChunks, QueryOptions, query_chunks, query_neighbors
from megatron.retro.workdir import FolderOrigin, check_folder, remove_leftovers, write_arguments
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.build import padded_vocab_size
from megatron.training.batches import BatchPlan, samples_needed
from megatron.training.run import Progress

PROGRAM = "tools/retro/main.py"
# Rules that do not apply, because every process embeds with a complete BERT and nothing is trained.
_SKIPPED_RULES = (rules_training.batch_size, rules_training.batch_size_ramp)


def main(argv: Sequence[str] | None = None) -> int:
    """Run preprocessing on this process, and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    help_if_asked(PROGRAM, RETRO_SECTIONS, trains=False, argv=args)
    from megatron.processes.process import run_process

    return run_process(args, lambda launch: run(args, launch))


def parse(args: Sequence[str], world_size: int) -> ParsedRun:
    """Parse and check a command line.

    Args:
        args: The command line, without the program's name.
        world_size: The number of processes.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: The flags do not describe the network, and --load has no BERT.
    """
    return parse_config(
        args,
        world_size=world_size,
        architecture="bert",
        program=Program(
            name=PROGRAM,
            extra=RETRO_SECTIONS,
            find_start=_start,
            rules=[*(rule for rule in RULES if rule not in _SKIPPED_RULES), _no_model_parallelism],
            check_extra=find_mistakes,
        ),
    )


def _start(given: Mapping[str, Any]) -> RunOptions:
    """Return the run's initial options, derived from the preprocessing flags."""
    values = {
        "data.data_path": given.get("retro_gpt_data_path"),
        "data.seq_length": given.get("retro_bert_max_chunk_length", 256),
        "tokenizer.tokenizer_type": given.get("retro_bert_tokenizer_type"),
        "tokenizer.vocab_file": given.get("retro_bert_vocab_file"),
        "training.micro_batch_size": 1,
        "training.global_batch_size": given.get("retro_gpt_global_batch_size"),
        "schedule.lr": 1e-4,  # nothing is trained
    }
    if given.get("bert_embedder_type") == "huggingface" and not values["tokenizer.tokenizer_type"]:
        # A BERT run must have a tokenizer, even if the embedder has its own.
        values |= {"tokenizer.tokenizer_type": "NullTokenizer", "tokenizer.vocab_size": 1}
    if "retro_gpt_split" in given:
        values["data.split"] = given["retro_gpt_split"]
    network: dict[str, Any] = {}
    if not {"num_layers", "hidden_size", "num_attention_heads"} & given.keys():
        network = _network(given)
    return with_values(RunOptions(), {**network, **values, "model.architecture": "bert"})


def _network(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network options of the BERT checkpoint, by "section.field"."""
    load = given.get("bert_embedder_load") or given.get("load")
    if given.get("bert_embedder_type") == "huggingface" or load is None:
        # A BERT run must have a network, even if no stage loads it.
        sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1}
        sizes["max_position_embeddings"] = given.get("retro_bert_max_chunk_length", 256)
        return {f"model.{name}": size for name, size in sizes.items()}
    foreign = bool(given.get("allow_foreign_checkpoints"))
    reader = open_existing(load, verify=False, allow_foreign=foreign)
    saved = flatten(saved_config(reader, load, "bert"))
    return {path: value for path, value in saved.items() if path.startswith("model.")}


def _no_model_parallelism(config: RunOptions, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    for flag, size in (
        ("--tensor-model-parallel-size", parallel.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
        ("--context-parallel-size", parallel.context_parallel_size),
    ):
        if size != 1:
            yield f"{flag} {size}: every process embeds with a complete BERT: drop the flag"


def run(args: Sequence[str], launch: Launch) -> int:
    """Run the preprocessing on one of the launched processes, and return the exit code.

    Args:
        args: The command line, without the program's name.
        launch: This process's rank and the number of processes.

    Raises:
        UserError: A flag, a file or the working folder must be changed.
    """
    parsed = parse(args, launch.world_size)
    print_notices(parsed.notices, launch)
    with processes(parsed.config, launch) as (device, layout):
        Preprocessing(parsed.config, RetroPreprocessing(*parsed.extra), device, layout).run()
    return EXIT_OK


class Preprocessing:
    """The preprocessing stages, on one of the processes that share the work.

    Args:
        config: The configuration of the BERT run, which also has the number of GPT samples.
        options: The preprocessing options.
        device: The device of this process.
        layout: The layout of all processes.

    Attributes:
        workdir: The working folder.
        options: The preprocessing options.

    Raises:
        UserError: A flag or a file must be changed.
    """

    def __init__(
        self, config: RunConfig, options: RetroPreprocessing, device: Device, layout: Layout
    ) -> None:
        """Open the datasets and build the tokenizers."""
        self.options, self.workdir = options, Path(str(options.stages.retro_workdir))
        self._config, self._device, self._world = config, device, layout.world
        self._compatible = options.stages.retro_compatible
        # Megatron-LM splits the database by --split and the GPT samples by --retro-gpt-split.
        split = config.data.split if self._compatible else options.gpt.retro_gpt_split
        self.corpora = plan_corpora(options, split)
        gpt = build_tokenizer(options.gpt.tokenizer)
        has_bert = options.embedding.retro_bert_tokenizer_type is not None
        bert = build_tokenizer(options.embedding.tokenizer) if has_bert else None
        length = options.gpt.retro_gpt_chunk_length
        self._gpt, self._cutter = gpt, ChunkCutter(length, gpt, bert or gpt)
        self._origin = FolderOrigin(
            split,
            corpus_fingerprint(self._gpt_data()) or "",
            gpt.fingerprint(),
            bert.fingerprint() if bert is not None else "",
        )
        # The checkpoint is read at most once, when a stage needs it.
        self._embedder = cache(self._build_embedder)

    def run(self) -> None:
        """Run the stages that the flags name. Collective.

        Raises:
            UserError: The working folder was made from different data or flags, or a file or flag
                is wrong.
        """
        stages = self.options.stages.stages
        check_folder(self.workdir, self.options, self._origin)
        if "index-train" in stages:
            check_factory(IndexOptions.of(self.options))
        chunks = self._query_chunks() if "query-pretraining-neighbors" in stages else {}
        self._world.barrier()  # no process may change the folder until all have checked it
        with ExitStack() as at_end:
            if self._world.is_first:
                at_end.enter_context(save_lock(self.workdir, "--retro-workdir"))
            on_first(lambda: self._begin(stages, chunks), self._world)
            for stage in stages:
                self._say(f"{stage} ...")
                self._run_stage(stage, chunks)
                self._world.barrier()
        self._say(f"{self.workdir} is complete")

    def _run_stage(self, stage: str, chunks: Mapping[str, QueryChunks]) -> None:
        common = (self._embedder, self._world)
        index = IndexOptions.of(self.options)
        match stage:
            case "db-build":
                build_database(self.options, self.corpora, self._cutter, self._world)
            case "index-train":
                train_index(self.workdir, index, self._texts("sampled"), *common)
            case "index-add":
                add_to_index(self.workdir, index, self._texts("train"), *common)
            case _:
                query_neighbors(
                    self.workdir,
                    index,
                    QueryOptions.of(self.options),
                    chunks,
                    database=self._database("train"),
                    build_embedder=self._embedder,
                    device=self._device,
                    world=self._world,
                )

    def _begin(self, stages: Sequence[str], chunks: Mapping[str, QueryChunks]) -> None:
        """Print the plan, write `args.json`, and remove temporary files left by a killed run."""
        rows = describe_work(
            self.options,
            [data for _, data in self.corpora],
            {split: len(queries) for split, queries in chunks.items()},
            cutter=self._cutter,
            embedder=self._embedder,
            processes=self._world.size,
        )
        about = [
            ("stages", ", ".join(stages)),
            ("Megatron-LM's bugs", "reproduced" if self._compatible else "fixed"),
            ("processes", f"{self._world.size}, {self._device.description}"),
        ]
        print_line(format_panel(f"{PROGRAM}: {self.workdir}", [*about, *rows]))
        remove_leftovers(self.workdir)
        write_arguments(self.workdir, self.options, self._origin, self._run_arguments())

    def _run_arguments(self) -> dict[str, Any]:
        """Return the arguments of the BERT run, by Megatron-LM's names."""
        config = self._config
        entries = self._cutter.bert.vocab_size
        rows = padded_vocab_size(entries, config.model.make_vocab_size_divisible_by, 1)
        dtype = torch.float16 if config.precision.fp16 else torch.float32
        dtype = torch.bfloat16 if config.precision.bf16 else dtype
        arguments = megatron_arguments(
            config, {}, rows=rows, dtype=dtype, data_parallel=self._world.size
        )
        return vars(arguments)

    def _build_embedder(self) -> Embedder:
        embedding, config = self.options.embedding, self._config
        load = embedding.bert_embedder_load or config.checkpoint.load
        if load is None:
            raise ConfigError(
                "--load is required to embed chunks: give the checkpoints of a BERT, or "
                "--bert-embedder-type huggingface --bert-embedder-load FOLDER"
            )
        has_tokenizer = embedding.retro_bert_tokenizer_type is not None
        masking = Masking(config.training.seed, config.data.mask_prob)
        precision = config.precision
        return build_embedder(
            EmbedderOptions(
                kind=embedding.bert_embedder_type,
                load=load,
                tokenizer=embedding.tokenizer if has_tokenizer else None,
                batch_size=embedding.retro_bert_batch_size,
                max_length=embedding.retro_bert_max_chunk_length,
                dtype="bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32",
                masking=masking if self._compatible else None,
                allow_foreign=config.checkpoint.allow_foreign_checkpoints,
                flag="--bert-embedder-load" if embedding.bert_embedder_load else "--load",
            ),
            self._device,
        )

    def _database(self, name: str) -> ChunkDatabase:
        length = self.options.gpt.retro_gpt_chunk_length
        return ChunkDatabase(self.workdir, length, self._gpt.eod, name)

    def _texts(self, name: str) -> ChunkTexts:
        return ChunkTexts(self._database(name), self._gpt, self._compatible)

    def _gpt_data(self) -> DataConfig:
        """Return the data options of the GPT run."""
        gpt = self.options.gpt
        return replace(
            self._config.data,
            data_path=gpt.retro_gpt_data_path,
            train_data_path=None,
            valid_data_path=None,
            test_data_path=None,
            mock_data=False,
            split=gpt.retro_gpt_split,
        )

    def _query_chunks(self) -> dict[str, QueryChunks]:
        """Return the chunks of each split's GPT samples. Collective."""
        gpt, config = self.options.gpt, self._config
        seq_length = gpt.retro_gpt_seq_length or 0
        evaluation = replace(
            config.evaluation,
            eval_interval=gpt.retro_gpt_eval_interval or 1,
            eval_iters=gpt.retro_gpt_eval_iters or 0,
        )
        batches = BatchPlan(1, config.training.global_batch_size, seq_length=seq_length)
        updates = batches.iterations_of(config.training, Progress())
        counts = samples_needed(replace(config, evaluation=evaluation), updates, Progress())
        request = DataRequest(
            self._gpt_data(),
            gpt.retro_gpt_seed,
            counts,
            is_builder=self._world.is_first,
            barrier=self._world.barrier,
        )
        return query_chunks(
            request,
            seq_length=seq_length,
            chunk_length=gpt.retro_gpt_chunk_length,
            tokenizer=self._gpt,
            compatible=self._compatible,
        )

    def _say(self, text: str) -> None:
        if self._world.is_first:
            print_line(text)
