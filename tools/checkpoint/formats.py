"""What `tools/checkpoint/util.py` reads and writes: a table of loaders and one of savers.

A new format is a function in a table. Between the two stands a `Source`: any reader, with the
configuration and the files that belong to it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.find import scan
from megatron.checkpoint.huggingface import files
from megatron.checkpoint.huggingface.families import family_for
from megatron.checkpoint.huggingface.files import is_model_folder, tokenizer_in
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.huggingface.writer import Export, write_folder
from megatron.checkpoint.legacy.arguments import legacy_surroundings
from megatron.checkpoint.legacy.writer import convert_to_legacy, megatron_rows
from megatron.checkpoint.loading import nothing_at, open_checkpoint
from megatron.checkpoint.reader import PaddedReader, Reader
from megatron.checkpoint.store import WEIGHTS, convert_to_native
from megatron.config.arguments import from_namespace
from megatron.config.data import TokenizerConfig
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, RunOptions, narrow
from megatron.config.yaml_file import from_dict
from megatron.durable import Check, replace_file, storage_errors
from megatron.errors import CheckpointError, ConfigError, UserError
from megatron.tokenizer import build_tokenizer, files_of
from megatron.tokenizer.build import padded_vocab_size
from tools.checkpoint.target import target

_EMBEDDING = f"{WEIGHTS}embedding.word.weight"
_POSITIONS = f"{WEIGHTS}embedding.position.weight"
_WORDPIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")


@dataclass(frozen=True)
class Source:
    """A checkpoint that was opened.

    Attributes:
        reader: its tensors.
        config: the run that it stands for.
        companions: folder of Hugging Face files that belong to it; None: there is none.
        family: `model_type` that it came as; None: it did not come from Hugging Face.
        bare_names: its Hugging Face names lacked the family's prefix.
        notices: lines for the user.
    """

    reader: Reader
    config: ModelRun
    companions: Path | None = None
    family: str | None = None
    bare_names: bool = False
    notices: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Of the word embedding."""
        return self.reader.global_shape(_EMBEDDING)[0]


def check_target(options: argparse.Namespace) -> None:
    """See that nothing is written over or put aside: what is read, a run, another conversion.

    Raises:
        ConfigError: the folder holds checkpoints. (A folder of Hugging Face is refused by its
            writer.)
    """
    held = [found.path.name for found in scan(options.save_dir)[0]]
    if options.saver != "hf" and held:
        raise ConfigError(
            f"--save-dir {options.save_dir}: holds {held[0]} already, which would be replaced, or "
            "no longer be the one that is loaded: give another folder"
        )


def check_companions(options: argparse.Namespace) -> None:
    """See that --hf-files names a folder with files that belong to a model.

    Raises:
        ConfigError: it does not.
    """
    folder = options.hf_files
    if folder is not None and not any((folder / name).is_file() for name in files.COMPANIONS):
        what = "holds no file of a model" if folder.is_dir() else "there is no such folder"
        raise ConfigError(
            f"--hf-files {folder}: {what}: give one with {files.CONFIG}, {files.TOKENIZER_JSON} or "
            "the like"
        )


def load_hf(options: argparse.Namespace) -> Source:
    """A folder of safetensors with config.json."""
    if not is_model_folder(options.load_dir) and scan(options.load_dir)[0]:
        kind = {"native": "native", "legacy": "megatron"}[scan(options.load_dir)[0][0].format]
        raise CheckpointError(
            f"--loader {options.loader}: {options.load_dir} is another kind: use --loader {kind}"
        )
    reader = HFReader(options.load_dir)
    return Source(
        reader=reader,
        config=_complete(from_dict(reader.meta["config"], str(reader.path)), reader),
        companions=reader.path,
        family=reader.family.name,
        bare_names=reader.bare_names,
        notices=reader.notices,
    )


def load_native(options: argparse.Namespace) -> Source:
    """The newest checkpoint that this program wrote."""
    return _load_own(options, "native")


def load_megatron(options: argparse.Namespace) -> Source:
    """The newest checkpoint that Megatron-LM up to 23.08 wrote."""
    return _load_own(options, "legacy")


def _load_own(options: argparse.Namespace, expected: str) -> Source:
    folder = options.load_dir
    reader = None if folder.is_file() else open_checkpoint(folder)
    if reader is None:
        why = nothing_at(folder)
        if (folder / files.CONFIG).is_file():
            why = "a folder of Hugging Face: use --loader hf"
        raise CheckpointError(f"--load-dir {folder}: {why}")
    loader = {"native": "native", "legacy": "megatron"}[reader.format]
    if reader.format != expected:
        raise CheckpointError(
            f"--loader {options.loader}: {reader.path} is another kind: use --loader {loader}"
        )
    sections = reader.meta["config"]
    if reader.format == "legacy":
        sections = {**legacy_surroundings(reader.meta["legacy_args"]), **sections}
    config = _complete(from_dict(sections, str(reader.path)), reader)
    if reader.format == "legacy" and _entries_if_there(config.tokenizer) is None:
        config = replace(config, tokenizer=TokenizerConfig())  # its files were elsewhere
    origin = reader.meta.get("huggingface") or {}
    return Source(
        reader=reader,
        config=config,
        companions=options.hf_files or _find_companions(options.load_dir, config),
        family=origin.get("family"),
        bare_names=origin.get("bare_names", False),
    )


def _find_companions(root: Path, config: ModelRun) -> Path | None:
    """The folder that an import left: in the same place, or where a run's tokenizer lies."""
    tokenizer = [getattr(config.tokenizer, field) for field in files_of(config.tokenizer)]
    beside = [one / files.COMPANION_FOLDER for one in (root, root.absolute().parent)]
    places = [*beside, *(Path(name).parent for name in tokenizer if name)]
    return next((place for place in places if (place / files.CONFIG).is_file()), None)


def _complete(config: RunOptions, reader: Reader) -> ModelRun:
    """What a converted model's configuration leaves open: derived sizes, window, precision."""
    positions = config.model.max_position_embeddings
    if positions is None and _POSITIONS in reader.names():
        positions = reader.global_shape(_POSITIONS)[0]
    model = replace(config.model, max_position_embeddings=positions)
    run = narrow(resolve(replace(config, model=model), world_size=1), ModelRun)
    dtype = reader.dtype(_EMBEDDING)
    precision = replace(run.precision, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
    data, length = run.data, run.data.seq_length or run.model.max_position_embeddings
    decoder = data.decoder_seq_length
    if run.model.architecture == "t5" and decoder is None:
        decoder = length
    data = replace(data, seq_length=length, decoder_seq_length=decoder)
    return replace(run, precision=precision, data=data)


def save_native(source: Source, options: argparse.Namespace, check: Check | None) -> Path:
    """A checkpoint of ours, with the model's small files beside it."""
    tokenizer = _adopt_files(source, options)
    held = rows = options.true_vocab_size or source.rows
    is_own = tokenizer == source.config.tokenizer  # its files may be elsewhere now
    entries = (_entries_if_there if is_own else _entries)(tokenizer)
    multiple = source.config.model.make_vocab_size_divisible_by
    if entries is not None and entries > rows:  # BERT's tokenizer here has two of its own
        rows = padded_vocab_size(entries, multiple, 1)
    elif entries is not None and source.family is not None:
        multiple = padding_multiple(entries, rows)
    model = replace(source.config.model, make_vocab_size_divisible_by=multiple)
    extra: dict[str, object] = {}
    if source.family:
        extra["huggingface"] = source.reader.meta["huggingface"]
    if "legacy_args" in source.reader.meta:  # for the way back
        extra["legacy_args"] = source.reader.meta["legacy_args"]
    if from_namespace(TokenizerConfig, options) == TokenizerConfig():
        extra["tokenizer"] = source.reader.meta.get("tokenizer")
    return convert_to_native(
        PaddedReader(source.reader, rows=rows, entries=held),
        options.save_dir,
        replace(source.config, model=model, tokenizer=tokenizer),
        extra,
        keep_optimizer=options.keep_optimizer,
        check=check,
    )


def save_megatron(source: Source, options: argparse.Namespace, check: Check | None) -> Path:
    """Files that Megatron-LM 23.08 loads, split as the flags ask, else as they were."""
    old = source.reader.meta.get("legacy_args") or vars(source.config.parallel)
    config = replace(source.config, parallel=target(old, source.config.model, options))
    given = from_namespace(TokenizerConfig, options)
    if given == TokenizerConfig():
        entries = _entries_if_there(config.tokenizer)
    elif given.tokenizer_type is None and given.vocab_file and not given.merge_file:
        entries = _count_entries(given.vocab_file)  # as Megatron's tool does
    else:
        given = _given_tokenizer(source, options)
        config, entries = replace(config, tokenizer=given), _entries(given)
    entries = options.true_vocab_size or entries
    rows = source.rows if entries is None else megatron_rows(entries, config)
    held = min(entries or rows, source.rows)
    # Rows of padding that a model was trained with stay, unless they are to be dropped.
    kept = held if options.true_vocab_size else source.rows
    return convert_to_legacy(
        PaddedReader(_with_rows(source.reader, kept), rows=rows, entries=held),
        options.save_dir,
        config,
        keep_optimizer=options.keep_optimizer,
        check=check,
    )


def _count_entries(path: str) -> int:
    """Of a vocabulary: keys of a JSON object, else lines."""
    data = _read(path, "vocab_file")
    try:
        return len(json.loads(data))
    except ValueError:
        return len(data.splitlines())


def padding_multiple(entries: int, rows: int) -> int:
    """The smallest --make-vocab-size-divisible-by that pads `entries` to `rows`, so that training
    goes on with the very rows that the model has: all of them take part in its softmax."""
    return next(
        m for m in range(rows - entries + 1, rows + 1) if math.ceil(entries / m) * m == rows
    )


def _entries(config: TokenizerConfig) -> int | None:
    return build_tokenizer(config).vocab_size if config.tokenizer_type else None


def _with_rows(reader: Reader, rows: int) -> Reader:
    return PaddedReader(reader, rows=rows, entries=rows)


def _adopt_files(source: Source, options: argparse.Namespace) -> TokenizerConfig:
    """Copy what belongs to the model into the folder of checkpoints; the tokenizer, from there."""
    folder = Path(options.save_dir).absolute() / files.COMPANION_FOLDER
    found = dict(files.companions(source.companions)) if source.companions else {}
    given, own = _given_tokenizer(source, options), source.config.tokenizer
    if given == TokenizerConfig() and not source.companions:
        return own
    paths = {}
    for field in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(given, field)
        if path is not None:
            found[Path(path).name] = _read(path, field)
            paths[field] = str(folder / Path(path).name)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in found.items():
            replace_file(folder / name, data)
    if given == TokenizerConfig() and own.tokenizer_type is not None:
        return _moved(own, source.companions, folder)
    if not paths:
        return _tokenizer_in(folder, given, source.config.model.architecture)
    return replace(
        given,
        tokenizer_model=paths.get("tokenizer_model"),
        vocab_file=paths.get("vocab_file"),
        merge_file=paths.get("merge_file"),
    )


def _moved(own: TokenizerConfig, old: Path | None, new: Path) -> TokenizerConfig:
    """A run's own tokenizer; files of it that were copied, where they are now."""

    def place(path: str | None) -> str | None:
        if path is None or not (new / Path(path).name).is_file():
            return path
        is_elsewhere = Path(path).absolute().parent != (old or new).absolute()
        return path if Path(path).is_file() and is_elsewhere else str(new / Path(path).name)

    return replace(
        own,
        tokenizer_model=place(own.tokenizer_model),
        vocab_file=place(own.vocab_file),
        merge_file=place(own.merge_file),
    )


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"--{field.replace('_', '-')} {path}: cannot be read: {error.strerror}"
        ) from error


def _given_tokenizer(source: Source, options: argparse.Namespace) -> TokenizerConfig:
    """The tokenizer of the flags, with its type where they name files; empty where there is none.

    Raises:
        ConfigError: it cannot be built from the files that are given.
    """
    given = from_namespace(TokenizerConfig, options)
    if given.tokenizer_type is None and (
        given.tokenizer_model or given.vocab_file or given.merge_file
    ):
        own = source.reader.meta.get("legacy_args") or vars(source.config.tokenizer)
        extra = given.vocab_extra_ids or own.get("vocab_extra_ids") or 0  # a T5's sentinels
        given = replace(given, tokenizer_type=_kind_of(given, source), vocab_extra_ids=extra)
    _entries(given)
    return given


def _kind_of(given: TokenizerConfig, source: Source) -> str:
    """By its files; of word pieces by the run that the checkpoint comes from, else the default."""
    model = given.tokenizer_model
    if model is not None:
        return "HuggingFaceTokenizer" if model.endswith(".json") else "Llama2Tokenizer"
    if source.config.model.architecture == "gpt":
        return "GPT2BPETokenizer"
    args = source.reader.meta.get("legacy_args") or {}
    kinds = (source.config.tokenizer.tokenizer_type, args.get("tokenizer_type"))
    return next((str(kind) for kind in kinds if kind in _WORDPIECES), _WORDPIECES[0])


def _tokenizer_in(folder: Path, given: TokenizerConfig, architecture: str) -> TokenizerConfig:
    """The tokenizer of a folder of Hugging Face files; without a type where it has none."""
    found = tokenizer_in(folder, architecture)
    if found.tokenizer_type is None:
        return given
    return replace(
        given,
        tokenizer_type=found.tokenizer_type,
        tokenizer_model=found.tokenizer_model,
        vocab_file=found.vocab_file,
        merge_file=found.merge_file,
        vocab_extra_ids=found.vocab_extra_ids or given.vocab_extra_ids,
    )


def save_hf(source: Source, options: argparse.Namespace, check: Check | None) -> Path:
    """A folder that `transformers` opens."""
    companions = dict(files.companions(source.companions)) if source.companions else {}
    template = None
    if files.CONFIG in companions:
        assert source.companions is not None
        template = read_json(source.companions / files.CONFIG)
    given = _given_tokenizer(source, options)
    vocab = _true_vocabulary(source, options, given, template)
    wanted = options.model_family or source.family
    if wanted is None and template is not None:
        wanted = template.get("model_type")
    export = Export(
        _with_rows(source.reader, vocab),
        family_for(source.config.model, vocab, wanted),
        source.config.model,
        vocab,
        bare_names=source.bare_names,
    )
    companions |= _tokenizer_files(source, given)
    written = export.config(template or _token_ids(source, given))
    if written != template:
        companions[files.CONFIG] = files.json_bytes(written)
    if files.GENERATION_CONFIG not in companions:
        companions[files.GENERATION_CONFIG] = files.json_bytes(_generation_config(written))
    most = parse_bytes(options.max_shard_size)
    write_folder(options.save_dir, export, companions, max_shard_bytes=most, check=check)
    return Path(options.save_dir)


def _tokenizer_files(source: Source, given: TokenizerConfig) -> dict[str, bytes]:
    """Those of the flags or of the checkpoint's configuration, under the names of Hugging Face.

    A checkpoint may come from a stranger: of what it names only files that its tokenizer is built
    from are passed on.
    """
    config = given
    fields: tuple[str, ...] = ("tokenizer_model", "vocab_file", "merge_file")
    if given == TokenizerConfig():
        config = source.config.tokenizer
        fields = () if _entries_if_there(config) is None else files_of(config)
    is_json = (config.tokenizer_model or "").endswith(".json")
    pieces = files.SPIECE if source.config.model.architecture == "t5" else files.TOKENIZER_MODEL
    is_wordpiece = config.tokenizer_type in _WORDPIECES
    names = {
        "tokenizer_model": files.TOKENIZER_JSON if is_json else pieces,
        "vocab_file": files.WORDPIECES if is_wordpiece else files.VOCAB,
        "merge_file": files.MERGES,
    }
    found = {}
    for field in fields:
        path = getattr(config, field)
        if path is not None and Path(path).is_file():
            found[names[field]] = _read(path, field)
    return found


def _token_ids(source: Source, given: TokenizerConfig) -> dict[str, int | None]:
    """Where a GPT's texts begin and end, by its tokenizer. A config.json that leaves that out means
    its family's own ids, which are other words of another vocabulary."""
    if source.config.model.architecture != "gpt":
        return {}
    config = source.config.tokenizer if given == TokenizerConfig() else given
    try:
        tokenizer = build_tokenizer(config) if config.tokenizer_type else None
    except UserError:  # its files are not here any more
        tokenizer = None
    keys = {"bos_token_id": "bos", "eos_token_id": "eod"}
    found = {key: tokenizer.special_ids(name) if tokenizer else () for key, name in keys.items()}
    return {key: next(iter(ids), None) for key, ids in found.items()}


def _generation_config(config: Mapping[str, object]) -> dict[str, object]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _true_vocabulary(
    source: Source,
    options: argparse.Namespace,
    given: TokenizerConfig,
    template: Mapping[str, object] | None,
) -> int:
    """Rows to write: as told, as the original had, as the tokenizer has, or all."""
    if options.true_vocab_size is not None:
        return int(options.true_vocab_size)
    original = template.get("vocab_size") if template else None
    if isinstance(original, int) and original <= source.rows:
        return original
    own = source.config.tokenizer
    entries = _entries_if_there(own) if given == TokenizerConfig() else _entries(given)
    return entries if entries is not None and entries <= source.rows else source.rows


def _entries_if_there(config: TokenizerConfig) -> int | None:
    try:
        return _entries(config)
    except UserError:  # its files are not here any more
        return None


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str) -> int:
    """`5GB` in bytes, as `transformers` counts them.

    Raises:
        CheckpointError: not a size.
    """
    number = text.rstrip("KMGB")
    unit = _UNITS.get(text[len(number) :])
    if not number.isdigit() or int(number) == 0 or unit is None:
        raise CheckpointError(f"--max-shard-size {text}: expected a size such as 5GB or 500MB")
    return int(number) * unit


LOADERS: Mapping[str, Callable[[argparse.Namespace], Source]] = {
    "native": load_native,
    "megatron": load_megatron,
    "hf": load_hf,
    "llama2_hf": load_hf,
}
SAVERS: Mapping[str, Callable[[Source, argparse.Namespace, Check | None], Path]] = {
    "native": save_native,
    "megatron": save_megatron,
    "hf": save_hf,
}
