"""The formats of `tools/checkpoint/util.py`: a table of loaders and a table of savers.

To add a format, add a function to a table. A loader returns a `SourceModel`: a reader together with
the model's configuration and companion files. A saver writes one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.core.writer import convert_to_core
from megatron.checkpoint.entries import WORD_EMBEDDING
from megatron.checkpoint.find import scan
from megatron.checkpoint.huggingface import files
from megatron.checkpoint.huggingface.families import family_and_network
from megatron.checkpoint.huggingface.peft import peft_names
from megatron.checkpoint.huggingface.peft_writer import AdapterExport
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.huggingface.writer import Export, parse_bytes, write_folder
from megatron.checkpoint.legacy.arguments import legacy_run_settings
from megatron.checkpoint.legacy.writer import convert_to_legacy, megatron_rows
from megatron.checkpoint.loading import open_checkpoint, open_hf, why_no_checkpoint
from megatron.checkpoint.merged import AveragedReader, without_adapters
from megatron.checkpoint.reader import PaddedReader, Reader
from megatron.checkpoint.store import WEIGHTS, convert_to_native
from megatron.config.adapters import plain_network
from megatron.config.arguments import from_values
from megatron.config.data import TokenizerConfig
from megatron.config.fields import divisors
from megatron.config.model import ModelConfig, with_article
from megatron.config.parallel import ParallelConfig
from megatron.config.resolve import resolve
from megatron.config.rules_legacy import tensor_split_problem
from megatron.config.run import ModelRun, RunOptions, narrow
from megatron.config.stages import plan_model
from megatron.config.yaml_file import from_dict
from megatron.durable import Check, replace_file, storage_errors
from megatron.errors import CheckpointError, ConfigError, UserError
from megatron.models.adapters import adapted_layers
from megatron.tokenizer import build_tokenizer, files_of
from megatron.tokenizer.build import padded_vocab_size, with_file
from megatron.tokenizer.chat_template import find_template, special_tokens
from megatron.tokenizer.turn_end import find_turn_end

_POSITIONS = f"{WEIGHTS}embedding.position.weight"
_WORDPIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
_FILES = ("tokenizer_model", "vocab_file", "merge_file")  # fields of TokenizerConfig
# The name of the loader for each `Reader.format`.
LOADER_OF = {"native": "native"} | dict.fromkeys(("legacy", "core", "deepspeed"), "megatron")


@dataclass(frozen=True)
class SourceModel:
    """An opened checkpoint.

    Attributes:
        reader: Reader of the checkpoint's tensors.
        config: Configuration of the checkpoint's run.
        companions: The folder of the model's companion files (Hugging Face's config.json and
            tokenizer files), if any.
        family: The original `model_type`, or `None` if the model is not from Hugging Face.
        bare_names: Whether the Hugging Face tensor names lacked the family's prefix.
    """

    reader: Reader
    config: ModelRun
    companions: Path | None = None
    family: str | None = None
    bare_names: bool = False

    def companion_files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and content of each companion file.

        Raises:
            CheckpointError: A file is too large, outside the folder or not trusted.
            OSError: A file cannot be opened.
        """
        if self.companions is not None:
            trust = self.reader.allow_foreign
            yield from files.companions(self.companions, allow_foreign=trust)

    @property
    def rows(self) -> int:
        """The number of rows of the word embedding."""
        return self.reader.global_shape(WORD_EMBEDDING)[0]

    @property
    def is_gpt(self) -> bool:
        """Whether the model is a GPT."""
        return self.config.model.architecture == "gpt"


def check_target(options: argparse.Namespace) -> None:
    """Check that the target folder has no checkpoints yet.

    For a folder in Hugging Face's or PEFT's format, the writer checks this itself.

    Raises:
        ConfigError: The folder has checkpoints.
    """
    existing = [checkpoint.path.name for checkpoint in scan(options.save_dir)[0]]
    if options.saver not in ("hf", "peft") and existing:
        raise ConfigError(
            f"--save-dir {options.save_dir}: already contains {existing[0]}, which the conversion "
            "would replace or make obsolete: give another folder"
        )


def check_companions(options: argparse.Namespace) -> None:
    """Check that --hf-files names a folder with companion files of a model.

    Raises:
        ConfigError: The folder does not exist or contains no such files.
    """
    folder = options.hf_files
    if folder is None or any(os.path.isfile(folder / name) for name in files.COMPANIONS):
        return
    is_folder = os.path.isdir(folder)
    problem = "the folder has no model files" if is_folder else "there is no such folder"
    raise ConfigError(
        f"--hf-files {folder}: {problem}: give a folder with {files.CONFIG}, "
        f"{files.TOKENIZER_JSON} or similar files"
    )


def check_vocabulary(source: SourceModel, options: argparse.Namespace) -> None:
    """Check that --true-vocab-size fits the source, and keeps a row for every tokenizer entry.

    The second check is omitted if the tokenizer is unknown, and for adapters, which are written
    without a tokenizer.

    Raises:
        ConfigError: The source has fewer rows, or the tokenizer has more entries.
    """
    size = options.true_vocab_size
    if size is None:
        return
    if size > source.rows:
        raise ConfigError(
            f"--true-vocab-size {size}: {source.reader.path} has {source.rows} rows: give at most "
            "that many"
        )
    entries = None if options.saver == "peft" else _text_entries(source, options)
    if entries is not None and size < min(entries, source.rows):
        raise ConfigError(
            f"--true-vocab-size {size}: the tokenizer has {entries} entries, and the last ones "
            f"would have no rows: give at least {min(entries, source.rows)}, drop the flag, or "
            "give the files of a smaller tokenizer"
        )


def _text_entries(source: SourceModel, options: argparse.Namespace) -> int | None:
    """Return the number of entries in the files of the tokenizer, or `None` if it is unknown."""
    given, tokenizer = from_values(TokenizerConfig, vars(options)), source.config.tokenizer
    if options.saver == "megatron" and (listed := _listed_entries(given)) is not None:
        return listed
    if given != TokenizerConfig():
        tokenizer = _given_tokenizer(source, options)
    elif tokenizer.tokenizer_type is None and source.companions is not None:
        trust, kind = source.reader.allow_foreign, source.config.model.architecture
        tokenizer = files.tokenizer_in(source.companions, kind, allow_foreign=trust)
    if tokenizer.tokenizer_type is None:
        return None
    try:
        return build_tokenizer(tokenizer).text_vocab_size
    except UserError:  # the tokenizer's files cannot be read
        return None


def load_hf(options: argparse.Namespace) -> SourceModel:
    """Open a Hugging Face folder with safetensors and config.json.

    Raises:
        CheckpointError: The folder cannot be read, or contains checkpoints of another format.
    """
    if not files.is_model_folder(options.load_dir) and (checkpoints := scan(options.load_dir)[0]):
        raise _wrong_loader(options, options.load_dir, checkpoints[0].format)
    reader = open_hf(options.load_dir, allow_foreign=options.allow_foreign_checkpoints)
    return SourceModel(
        reader=reader,
        config=_complete(from_dict(reader.meta["config"], str(reader.path)), reader),
        companions=reader.path,
        family=reader.family.name,
        bare_names=reader.bare_names,
    )


def _wrong_loader(options: argparse.Namespace, path: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"--loader {options.loader}: {path} is in a different format: use --loader "
        f"{LOADER_OF[kind]}"
    )


def load_checkpoint(options: argparse.Namespace) -> SourceModel:
    """Open the newest checkpoint in --load-dir: native, Megatron-LM, Megatron Core or DeepSpeed.

    The reader merges adapters into the weights, except for --saver peft. With
    --load-averaged-weights it reads the averages of the weights.

    Raises:
        CheckpointError: The folder has no checkpoint, the checkpoint cannot be read or converted,
            or its format needs a different --loader.
    """
    folder, trust = options.load_dir, options.allow_foreign_checkpoints
    reader = None if os.path.isfile(folder) else open_checkpoint(folder, allow_foreign=trust)
    if reader is None:
        reason = why_no_checkpoint(folder)
        if os.path.isfile(folder / files.CONFIG):
            reason = "it is a Hugging Face folder: use --loader hf"
        raise CheckpointError(f"--load-dir {folder}: {reason}")
    if LOADER_OF[reader.format] != options.loader:
        raise _wrong_loader(options, reader.path, reader.format)
    if options.load_averaged_weights:
        reader = AveragedReader(reader)
    if options.saver != "peft":
        reader = without_adapters(reader, adapted_layers)
    sections = reader.meta["config"]
    is_foreign = reader.format in ("legacy", "core", "deepspeed")
    if is_foreign:
        sections = {**legacy_run_settings(reader.meta["legacy_args"]), **sections}
    config = _complete(from_dict(sections, str(reader.path)), reader)
    if is_foreign and _entries_or_none(config.tokenizer) is None:
        config = replace(config, tokenizer=TokenizerConfig())  # the files are on another machine
    config = replace(config, tokenizer=with_file(config.tokenizer))
    # Files that an import copied are in this folder or in the folder of the run's tokenizer.
    tokenizer = [getattr(config.tokenizer, field) for field in files_of(config.tokenizer)]
    beside = [parent / files.COMPANION_FOLDER for parent in (folder, folder.absolute().parent)]
    candidates = [*beside, *(Path(name).parent for name in tokenizer if name)]
    companions = (folder for folder in candidates if os.path.isfile(folder / files.CONFIG))
    origin = reader.meta.get("huggingface") or {}
    return SourceModel(
        reader=reader,
        config=config,
        companions=options.hf_files or next(companions, None),
        family=origin.get("family"),
        bare_names=origin.get("bare_names", False),
    )


def _complete(config: RunOptions, reader: Reader) -> ModelRun:
    """Resolve a model's configuration: derived sizes, sequence length and precision."""
    if config.model.architecture == "ict":
        raise CheckpointError(
            f"{reader.path}: bi-encoders cannot be converted: pretrain_ict.py and tasks/main.py "
            "load native and Megatron-LM checkpoints directly with --load"
        )
    positions = config.model.max_position_embeddings
    if positions is None and _POSITIONS in reader.names():
        positions = reader.global_shape(_POSITIONS)[0]
    model = replace(config.model, max_position_embeddings=positions)
    run = narrow(resolve(replace(config, model=model), world_size=1), ModelRun)
    dtype = reader.dtype(WORD_EMBEDDING)
    precision = replace(run.precision, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
    data, length = run.data, run.data.seq_length or run.model.max_position_embeddings
    decoder = data.decoder_seq_length
    if run.model.decoder_layers and decoder is None:
        decoder = length
    data = replace(data, seq_length=length, decoder_seq_length=decoder)
    return replace(run, precision=precision, data=data)


def save_native(source: SourceModel, options: argparse.Namespace, check: Check) -> Path:
    """Write a native checkpoint, copy the companion files, and return the checkpoint's path."""
    tokenizer = _copy_companions(source, options)
    stored_rows = rows = options.true_vocab_size or source.rows
    is_unchanged = tokenizer == source.config.tokenizer  # the files may have been moved
    entries = (_entries_or_none if is_unchanged else _entries)(tokenizer)
    multiple = source.config.model.make_vocab_size_divisible_by
    if entries is not None and entries > rows:  # our BERT tokenizer adds two entries
        rows = padded_vocab_size(entries, multiple, 1)
    elif entries is not None and source.family is not None:
        multiple = padding_multiple(entries, rows)
    model = replace(source.config.model, make_vocab_size_divisible_by=multiple)
    extra: dict[str, object] = {}
    if source.family:
        extra["huggingface"] = source.reader.meta["huggingface"]
    if "legacy_args" in source.reader.meta:  # needed to convert back
        extra["legacy_args"] = source.reader.meta["legacy_args"]
    if from_values(TokenizerConfig, vars(options)) == TokenizerConfig():
        extra["tokenizer"] = source.reader.meta.get("tokenizer")
    return convert_to_native(
        PaddedReader(source.reader, rows=rows, entries=stored_rows),
        options.save_dir,
        replace(source.config, model=model, tokenizer=tokenizer),
        extra,
        keep_optimizer=options.keep_optimizer,
        check=check,
    )


def save_megatron(source: SourceModel, options: argparse.Namespace, check: Check) -> Path:
    """Write a Megatron-LM 23.08 checkpoint, split as the flags specify or like the source.

    Return the checkpoint's path.
    """
    source_sizes = source.reader.meta.get("legacy_args") or vars(source.config.parallel)
    config = replace(
        source.config, parallel=target_parallel_config(source_sizes, source.config.model, options)
    )
    given = from_values(TokenizerConfig, vars(options))
    if given == TokenizerConfig():
        entries = _entries_or_none(config.tokenizer)
    elif (entries := _listed_entries(given)) is None:
        given = _given_tokenizer(source, options)
        config, entries = replace(config, tokenizer=given), _entries(given)
    entries = options.true_vocab_size or entries
    rows = source.rows if entries is None else megatron_rows(entries, config)
    stored_rows = min(entries or rows, source.rows)
    # Keep the padding rows that a model was trained with, unless a flag drops them.
    kept_rows = stored_rows if options.true_vocab_size else source.rows
    return convert_to_legacy(
        PaddedReader(
            PaddedReader(source.reader, rows=kept_rows, entries=kept_rows),
            rows=rows,
            entries=stored_rows,
        ),
        options.save_dir,
        config,
        keep_optimizer=options.keep_optimizer,
        check=check,
    )


def _listed_entries(given: TokenizerConfig) -> int | None:
    """Return the number of entries in a --vocab-file that is the only tokenizer flag.

    The result is `None` without --vocab-file, and with --tokenizer-type or --merge-file. Like
    Megatron's tool, count the keys of a JSON object, or the lines of a text.
    """
    if given.tokenizer_type is not None or not given.vocab_file or given.merge_file:
        return None
    data = _read(given.vocab_file, "vocab_file")
    try:
        return len(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return len(data.splitlines())


def save_core(source: SourceModel, options: argparse.Namespace, check: Check) -> Path:
    """Write a Megatron Core checkpoint with the source run's optimizer settings and layout.

    Return the checkpoint's path.
    """
    source_sizes = source.reader.meta.get("legacy_args") or vars(source.config.parallel)
    sizes = ("tensor", "pipeline", "expert")
    names = [f"{size}_model_parallel_size" for size in sizes] + ["use_distributed_optimizer"]
    source_parallel = {name: source_sizes[name] for name in names if source_sizes.get(name)}
    parallel = replace(ParallelConfig(), **source_parallel)
    rows = options.true_vocab_size or source.rows
    return convert_to_core(
        PaddedReader(source.reader, rows=rows, entries=rows),
        options.save_dir,
        replace(source.config, parallel=parallel),
        keep_optimizer=options.keep_optimizer,
        check=check,
    )


def target_parallel_config(
    source_sizes: Mapping[str, Any], model: ModelConfig, options: argparse.Namespace
) -> ParallelConfig:
    """Return the parallel sizes for splitting Megatron-LM's files, from the --target flags.

    Args:
        source_sizes: The source's parallel sizes by their names in `ParallelConfig`, which Megatron
            shares.
        model: The configuration of the network.
        options: The options of `util.py`.

    Raises:
        ConfigError: The heads cannot be divided among the ranks, or the layers among the stages,
            or a split rank is given for a model other than T5.
    """
    split = options.target_pipeline_parallel_split_rank
    if split is not None and not model.decoder_layers:
        raise ConfigError(f"--target-pipeline-parallel-split-rank {split} is for T5 only: drop it")
    if split is None and options.target_pipeline_parallel_size is None:
        split = source_sizes.get("pipeline_model_parallel_split_rank")
    tensor, stages = options.target_tensor_parallel_size, options.target_pipeline_parallel_size
    virtual = options.target_num_layers_per_virtual_pipeline_stage
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor or source_sizes.get("tensor_model_parallel_size") or 1,
        pipeline_model_parallel_size=stages
        or source_sizes.get("pipeline_model_parallel_size")
        or 1,
        pipeline_model_parallel_split_rank=split,
        num_layers_per_virtual_pipeline_stage=virtual,
    )
    problem = tensor_split_problem(model, parallel.tensor_model_parallel_size)
    if problem:
        raise ConfigError(f"--target-tensor-parallel-size: Megatron-LM 23.08 {problem}")
    try:
        plan_model(model, parallel)
    except ConfigError as error:
        flags = f"--target-pipeline-parallel-size {parallel.pipeline_model_parallel_size}"
        if virtual is not None:
            flags += f" --target-num-layers-per-virtual-pipeline-stage {virtual}"
        if model.decoder_layers:
            raise ConfigError(f"{flags}: {error}") from None
        raise ConfigError(
            f"{flags}: --num-layers {model.num_layers} cannot be split this way: in Megatron-LM's "
            "files all stages, and all virtual stages, have the same number of layers: use a "
            f"--target-pipeline-parallel-size of {divisors(model.num_layers)}"
            + (", and a divisor of a stage's layers for virtual stages" * (virtual is not None))
        ) from None
    return parallel


def padding_multiple(entries: int, rows: int) -> int:
    """Return the smallest --make-vocab-size-divisible-by that pads `entries` to `rows`.

    Training then continues with the same rows. This matters because the softmax includes padding.
    """
    return next(
        m for m in range(rows - entries + 1, rows + 1) if math.ceil(entries / m) * m == rows
    )


def _entries(config: TokenizerConfig) -> int | None:
    return build_tokenizer(config).vocab_size if config.tokenizer_type else None


def _entries_or_none(config: TokenizerConfig) -> int | None:
    try:
        return _entries(config)
    except UserError:  # the tokenizer's files cannot be read
        return None


def _copy_companions(source: SourceModel, options: argparse.Namespace) -> TokenizerConfig:
    """Copy the companion files into the checkpoint folder and return the tokenizer's settings."""
    folder = Path(options.save_dir).absolute() / files.COMPANION_FOLDER
    contents = dict(source.companion_files())
    given, stored = _given_tokenizer(source, options), source.config.tokenizer
    if given == TokenizerConfig() and not source.companions:
        return stored
    paths: dict[str, Any] = dict.fromkeys(_FILES)
    for field in _FILES:
        path = getattr(given, field)
        if path is not None:
            contents[Path(path).name] = _read(path, field)
            paths[field] = str(folder / Path(path).name)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            replace_file(folder / name, data)
    if given == TokenizerConfig() and stored.tokenizer_type is not None:
        return _with_copied_paths(stored, source.companions or folder, folder)
    if any(paths.values()):
        return replace(given, **paths)
    copied = files.tokenizer_in(folder, source.config.model.architecture)
    if copied.tokenizer_type is None:
        return given
    extra = copied.vocab_extra_ids or given.vocab_extra_ids
    return replace(
        given,
        tokenizer_type=copied.tokenizer_type,
        vocab_extra_ids=extra,
        **{field: getattr(copied, field) for field in _FILES},
    )


def _with_copied_paths(config: TokenizerConfig, old: Path, new: Path) -> TokenizerConfig:
    """Return a run's tokenizer settings with the paths of the files copied from `old` to `new`."""
    paths: dict[str, Any] = {}
    for field in _FILES:
        path = getattr(config, field)
        if path is not None and (new / Path(path).name).is_file():
            is_elsewhere = Path(path).absolute().parent != old.absolute()
            if not (os.path.isfile(path) and is_elsewhere):
                paths[field] = str(new / Path(path).name)
    return replace(config, **paths)


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        flag = f"--{field.replace('_', '-')}"
        raise CheckpointError(f"{flag} {path}: cannot be read: {error.strerror}") from error


def _given_tokenizer(source: SourceModel, options: argparse.Namespace) -> TokenizerConfig:
    """Return the tokenizer settings from the flags, or the defaults if no flag is given.

    Raises:
        UserError: The tokenizer cannot be built from these settings, or a file of it is missing or
            damaged.
    """
    given = from_values(TokenizerConfig, vars(options))
    if given.tokenizer_type is None and any(getattr(given, field) for field in _FILES):
        args = source.reader.meta.get("legacy_args")
        settings = args or vars(source.config.tokenizer)
        model = given.tokenizer_model
        if model is not None:
            is_hf = model.endswith(".json") or os.path.isdir(model)
            kind = "HuggingFaceTokenizer" if is_hf else "Llama2Tokenizer"
        elif source.is_gpt:
            kind = "GPT2BPETokenizer"
        else:  # WordPiece: use the type from the checkpoint's run
            kinds = (source.config.tokenizer.tokenizer_type, (args or {}).get("tokenizer_type"))
            kind = next(
                (str(candidate) for candidate in kinds if candidate in _WORDPIECES), _WORDPIECES[0]
            )
        extra = given.vocab_extra_ids or settings.get("vocab_extra_ids") or 0  # a T5's sentinels
        given = replace(given, tokenizer_type=kind, vocab_extra_ids=extra)
    _entries(given)
    return with_file(given)


def _template(source: SourceModel) -> dict[str, Any] | None:
    """Return the content of the original model's config.json, if there is one."""
    if source.companions is None or not os.path.isfile(source.companions / files.CONFIG):
        return None
    trust = source.reader.allow_foreign
    return read_json(source.companions / files.CONFIG, allow_foreign=trust)


def hf_export(source: SourceModel, options: argparse.Namespace) -> Export:
    """Return the checkpoint as the family of its export describes it.

    Raises:
        UserError: No family can express the network, or a file of the tokenizer is damaged.
    """
    given, template = _given_tokenizer(source, options), _template(source)
    vocab = _true_vocabulary(source, options, given, template)
    family_name = options.model_family or source.family or (template or {}).get("model_type")
    family, model = family_and_network(source.config.model, vocab, family_name)
    reader = PaddedReader(source.reader, rows=vocab, entries=vocab)
    return Export(reader, family, model, vocab, bare_names=source.bare_names)


def save_hf(source: SourceModel, options: argparse.Namespace, check: Check) -> Path:
    """Write a folder that `transformers` can load, and return its path."""
    companions, template = dict(source.companion_files()), _template(source)
    given = _given_tokenizer(source, options)
    export = hf_export(source, options)
    companions |= _tokenizer_files(source, given)
    written = export.config(template or _token_ids(source, given))
    if written != template:
        companions[files.CONFIG] = files.json_bytes(written)
    if files.GENERATION_CONFIG not in companions:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {key: written[key] for key in keys if written.get(key) is not None}
        companions[files.GENERATION_CONFIG] = files.json_bytes(ids)
    _add_chat(companions, source.config.tokenizer)
    max_shard_bytes = parse_bytes(options.max_shard_size)
    write_folder(options.save_dir, export, companions, max_shard_bytes=max_shard_bytes, check=check)
    return Path(options.save_dir)


def _add_chat(companions: dict[str, bytes], config: TokenizerConfig) -> None:
    """Add the run's chat template, and add its end-of-turn token to the `eos_token_id`s."""
    source = find_template(config.chat_template, config.tokenizer_model)
    if source is None or _entries_or_none(config) is None:
        return
    if config.chat_template is not None:
        companions[files.CHAT_TEMPLATE] = source.encode()
    special = special_tokens(config.tokenizer_model)
    end = find_turn_end(source, special, build_tokenizer(config))
    try:
        settings = json.loads(companions[files.GENERATION_CONFIG])
    except ValueError:
        return  # not JSON: the model's own file is copied unchanged
    if not isinstance(settings, dict):
        return
    eos_ids = settings.get("eos_token_id")
    eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids] * (eos_ids is not None)
    if end is not None and end not in eos_ids:
        settings["eos_token_id"] = [*eos_ids, end] if eos_ids else end
        companions[files.GENERATION_CONFIG] = files.json_bytes(settings)


def save_peft(source: SourceModel, options: argparse.Namespace, check: Check) -> Path:
    """Write the adapters, and a reward model's head, in PEFT's format, and return the folder.

    Raises:
        CheckpointError: The model has no adapters or is not a GPT.
    """
    model, path = source.config.model, source.reader.path
    if model.lora_rank is None:
        raise CheckpointError(
            f"--saver peft: {path} has no adapters: use --saver hf for the whole model"
        )
    if model.architecture != "gpt":
        raise CheckpointError(
            f"--saver peft: {path} holds {with_article(model.architecture)}, but PEFT's files are "
            "written only for a gpt: use --saver hf, which merges the adapters"
        )
    family_name = options.model_family or source.family
    rows = options.true_vocab_size or source.rows
    family, _ = family_and_network(plain_network(model), rows, family_name)
    names = peft_names(model, adapted_layers(model, rows), family, rows)
    export = AdapterExport(PaddedReader(source.reader, rows=rows, entries=rows), model, names)
    base = None if source.companions is None else str(source.companions)
    config = {files.ADAPTER_CONFIG: files.json_bytes(export.config(base))}
    write_folder(options.save_dir, export, config, max_shard_bytes=sys.maxsize, check=check)
    return Path(options.save_dir)


def _tokenizer_files(source: SourceModel, given: TokenizerConfig) -> dict[str, bytes]:
    """Return the tokenizer's files, from flags or configuration, under Hugging Face's names.

    A checkpoint may be untrusted and name other files, so only files that its tokenizer needs are
    copied.
    """
    config = given
    fields: tuple[str, ...] = _FILES
    if given == TokenizerConfig():
        config = source.config.tokenizer
        fields = () if _entries_or_none(config) is None else files_of(config)
    is_json = (config.tokenizer_model or "").endswith(".json")
    has_decoder = source.config.model.decoder_layers > 0
    pieces = files.SPIECE if has_decoder else files.TOKENIZER_MODEL
    is_wordpiece = config.tokenizer_type in _WORDPIECES
    names = {
        "tokenizer_model": files.TOKENIZER_JSON if is_json else pieces,
        "vocab_file": files.WORDPIECES if is_wordpiece else files.VOCAB,
        "merge_file": files.MERGES,
    }
    found = [(names[field], getattr(config, field), field) for field in fields]
    if fields and is_json:
        sibling = Path(config.tokenizer_model or "").with_name
        found += [(name, sibling(name), "tokenizer_model") for name in files.TOKENIZER_SETTINGS]
    return {
        name: _read(path, field)
        for name, path, field in found
        if path is not None and os.path.isfile(path)
    }


def _token_ids(source: SourceModel, given: TokenizerConfig) -> dict[str, int | None]:
    """Return the ids of a GPT's begin-of-text, end-of-text and padding tokens, from its tokenizer.

    A token that the tokenizer lacks has the id `None`. The result is empty for other models.

    A config.json without these ids implies the defaults of its model family, which may be other
    tokens in this vocabulary, or lie outside it: `transformers` then cannot build a Phi-3 with
    fewer than 32,001 tokens, and gradients never change the embedding of a Gemma's token 0.
    """
    if not source.is_gpt:
        return {}
    config = source.config.tokenizer if given == TokenizerConfig() else given
    try:
        tokenizer = build_tokenizer(config) if config.tokenizer_type else None
    except UserError:  # the tokenizer's files cannot be read
        tokenizer = None
    keys = {"bos_token_id": "bos", "eos_token_id": "eod", "pad_token_id": "pad"}
    special_ids = {
        key: tokenizer.special_ids(name) if tokenizer else () for key, name in keys.items()
    }
    return {key: next(iter(ids), None) for key, ids in special_ids.items()}


def _true_vocabulary(
    source: SourceModel,
    options: argparse.Namespace,
    given: TokenizerConfig,
    template: Mapping[str, object] | None,
) -> int:
    """Return the number of vocabulary rows to write.

    The number comes from the flag, the original model or the tokenizer. Without any of these, all
    rows are written.
    """
    if options.true_vocab_size is not None:
        return int(options.true_vocab_size)
    original = template.get("vocab_size") if template else None
    if isinstance(original, int) and original <= source.rows:
        return original
    tokenizer = source.config.tokenizer
    entries = _entries_or_none(tokenizer) if given == TokenizerConfig() else _entries(given)
    return entries if entries is not None and entries <= source.rows else source.rows


LOADERS: Mapping[str, Callable[[argparse.Namespace], SourceModel]] = {
    "native": load_checkpoint,
    "megatron": load_checkpoint,
    "hf": load_hf,
    "llama2_hf": load_hf,
}
SAVERS: Mapping[str, Callable[[SourceModel, argparse.Namespace, Check], Path]] = {
    "native": save_native,
    "megatron": save_megatron,
    "torch_dist": save_core,
    "hf": save_hf,
    "peft": save_peft,
}
