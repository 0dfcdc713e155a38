"""What a working folder was made from: `args.json`, and the refusal of flags that do not fit it.

Megatron-LM writes every argument of the last call into `args.json`, and reads the data, the split,
the seed and the lengths from it when Retro is trained. We write the same file, with one more key,
`retro_made_from`: digests of the datasets and tokenizers, which tell other data of the same name.
A folder of Megatron-LM's has no digests. There the words of the flags are compared, and files by
their names, because they may have been moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.data import is_number
from megatron.config.fields import Field, fields_of, from_yaml
from megatron.config.retro import ARGUMENTS
from megatron.config.retro import read_arguments as read_json
from megatron.config.retro_preprocessing import RETRO_SECTIONS, RetroPreprocessing
from megatron.durable import replace_file, writing_to
from megatron.errors import DataError

_DIGESTS = "retro_made_from"
_DATA = "retro_gpt_data_path"

# The parts of a working folder, in the order in which they are made, and the flags that each
# depends on. A part depends on the flags of the parts before it, too.
_FLAGS_OF: Mapping[str, tuple[str, ...]] = {
    "db": (
        *(_DATA, "split", "retro_gpt_chunk_length", "retro_gpt_tokenizer_type"),
        *("retro_bert_tokenizer_type", "retro_doc_block_size", "retro_index_ntrain"),
        "retro_compatible",
    ),
    "index": (
        *("bert_embedder_type", "retro_bert_max_chunk_length", "retro_block_size"),
        "retro_index_nfeats",  # other kinds of index have other folders
    ),
    "query": (
        *("retro_gpt_seed", "retro_gpt_seq_length", "retro_gpt_split"),
        *("retro_index_type", "retro_index_str"),
        *("retro_index_train_load_fraction", "retro_index_add_load_fraction"),
        *("retro_query_ef_search", "retro_query_nprobe"),
        *("retro_query_num_neighbors_query", "retro_query_num_neighbors_save"),
    ),
}
# Files, for which digests are compared if the folder has them: flag and key of the digest.
_FILES: Mapping[str, tuple[str, ...]] = {
    "gpt_tokenizer": (
        *("retro_gpt_vocab_file", "retro_gpt_merge_file", "retro_gpt_tokenizer_model"),
    ),
    "bert_tokenizer": ("retro_bert_vocab_file",),
}


class FolderOrigin(NamedTuple):
    """What a working folder is made from, besides the options.

    Attributes:
        split: The split of the documents (see `plan_corpora`).
        data: A digest of the datasets.
        gpt_tokenizer: The fingerprint of the datasets' tokenizer.
        bert_tokenizer: The fingerprint of BERT's tokenizer, or "" if there is none.
    """

    split: str
    data: str
    gpt_tokenizer: str
    bert_tokenizer: str = ""


def arguments_file(workdir: Path) -> Path:
    """Return the path of `args.json`."""
    return workdir / ARGUMENTS


def read_arguments(workdir: Path) -> RetroPreprocessing:
    """Return the options that a working folder was made with, ours or Megatron-LM's.

    Raises:
        ConfigError: `args.json` cannot be read.
        DataError: There is no `args.json`, or a value in it is damaged.
    """
    found = _read(workdir)
    if found is None:
        raise DataError(
            f"{arguments_file(workdir)} does not exist: {workdir} is not a working folder of "
            "Retro; make one with tools/retro/main.py"
        )
    return _options(found, arguments_file(workdir))


def read_digest(workdir: Path, name: str) -> str | None:
    """Return a digest of what a folder was made from; Megatron-LM's folders have none.

    Args:
        workdir: The working folder.
        name: A field of `FolderOrigin`.
    """
    known = (_read(workdir) or {}).get(_DIGESTS)
    found = known.get(name) if isinstance(known, dict) else None
    return found if isinstance(found, str) else None


def write_arguments(
    workdir: Path, options: RetroPreprocessing, origin: FolderOrigin, others: Mapping[str, Any]
) -> None:
    """Write `args.json` under Megatron-LM's names.

    Args:
        workdir: The working folder, which is created.
        options: The options of the preprocessing.
        origin: What the folder is made from.
        others: The arguments of the run of the BERT.

    Raises:
        StorageError: The file cannot be written.
    """
    values = {**others, **options.values}
    values["retro_tasks"] = options.stages.retro_tasks.split(",")
    values[_DIGESTS] = origin._asdict()
    path = arguments_file(workdir)
    with writing_to("--retro-workdir", path):
        workdir.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(values, indent=4, default=str).encode())


def check_folder(workdir: Path, options: RetroPreprocessing, origin: FolderOrigin) -> None:
    """Refuse to continue in a folder that was made from something else.

    Only what the folder already has is compared: without an index, its flags may change.

    Raises:
        ConfigError: `args.json` cannot be read.
        DataError: A flag or a file differs from what the folder was made from, or `args.json` is
            missing or has a damaged value. The message names every difference.
    """
    path = arguments_file(workdir)
    parts = [part for part in _FLAGS_OF if _has_files(workdir / part)]
    found = _read(workdir)
    if found is None:
        if parts:
            raise DataError(
                f"{path} does not exist, but {workdir} has {', '.join(parts)}: it does not say "
                "what they were made from; restore args.json, or give another --retro-workdir"
            )
        return
    if not parts:
        return
    differences = list(_differences(found, path, parts[-1], options, origin))
    if differences:
        raise DataError(
            f"--retro-workdir {workdir} was made from something else:\n  "
            + "\n  ".join(differences)
            + "\ngive the folder's values or another --retro-workdir, or delete in it the parts "
            "that are named, and those after them (db, index, query)"
        )


def _has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def _read(workdir: Path) -> dict[str, Any] | None:
    if not arguments_file(workdir).exists():
        return None
    found = read_json(str(workdir))
    # A folder of Megatron-LM's has its faults.
    found.setdefault("retro_compatible", _DIGESTS not in found)
    return found


def _options(found: Mapping[str, Any], path: Path) -> RetroPreprocessing:
    tasks = found.get("retro_tasks")
    if isinstance(tasks, list):
        found = {**found, "retro_tasks": ",".join(map(str, tasks))}
    names = [field.name for field in fields(RetroPreprocessing)]
    parts = {}
    for name, section in zip(names, RETRO_SECTIONS, strict=True):
        known = [field for field in fields_of(section) if field.name in found]
        parts[name] = section(**{field.name: _value(found, field, path) for field in known})
    return RetroPreprocessing(**parts)


def _value(found: Mapping[str, Any], field: Field, path: Path) -> Any:
    value = found[field.name]
    if value is None and field.many:
        return None
    try:
        read = from_yaml(field, value)
        rule = "" if field.many else field.out_of_bounds(read)
    except ValueError as error:
        rule = str(error)
    if rule:
        raise DataError(f"{path}: {field.name}: {rule}: the file is damaged; restore it")
    return read


def _differences(
    found: Mapping[str, Any],
    path: Path,
    last: str,
    options: RetroPreprocessing,
    origin: FolderOrigin,
) -> Iterator[str]:
    """Yield a line for each difference that the parts up to `last` depend on."""
    theirs, ours = _options(found, path).values, options.values
    fields = {field.name: field for section in RETRO_SECTIONS for field in fields_of(section)}
    digests = found.get(_DIGESTS)
    known = digests if isinstance(digests, dict) else {}
    parts = list(_FLAGS_OF)
    for part in parts[: parts.index(last) + 1]:
        for name in _FLAGS_OF[part]:
            if name == "split":
                was = known.get("split", found.get("split", origin.split))
                if _numbers(was) != _numbers(origin.split):
                    flag = "--split" if options.stages.retro_compatible else "--retro-gpt-split"
                    yield f"{part}: {flag} {was} in the folder, {origin.split} here"
            elif name == _DATA:
                yield from _other_data(theirs[_DATA], ours[_DATA], known.get("data"), origin.data)
            elif _plain(name, theirs[name]) != _plain(name, ours[name]):
                flag = fields[name].names[0]
                yield f"{part}: {flag} {theirs[name]} in the folder, {ours[name]} here"
    for key, names in _FILES.items():
        was, now = known.get(key), getattr(origin, key)
        for name in names if was is None else names[:1]:
            flag = fields[name].names[0]
            if was is None and _base(theirs[name]) != _base(ours[name]):
                yield f"db: {flag} {theirs[name]} in the folder, {ours[name]} here"
            elif was is not None and now and was != now:
                yield f"db: {flag}: the tokenizer has changed: {was} in the folder, {now} here"


def _other_data(
    theirs: tuple[str, ...] | None, ours: tuple[str, ...] | None, was: Any, now: str
) -> Iterator[str]:
    """Yield a line if the datasets, their order or their weights differ."""
    known, asked = _blend(theirs or ()), _blend(ours or ())
    shown = f"db: --retro-gpt-data-path {' '.join(theirs or ())} in the folder"
    if known != asked:
        yield f"{shown}, {' '.join(ours or ())} here"
    elif was is not None and was != now:
        yield f"{shown}; the files have these names here too, but another content"


def _blend(words: tuple[str, ...]) -> list[float | str]:
    """Return the weights and the names of datasets, without their folders."""
    return [float(word) if is_number(word) else os.path.basename(word) for word in words]


def _base(path: str | None) -> str:
    return os.path.basename(path or "")


def _plain(name: str, value: Any) -> Any:
    return _numbers(value) if name == "retro_gpt_split" else value


def _numbers(split: Any) -> tuple[str, ...]:
    """Return the numbers of a split, without spaces and zeros at the end."""
    words = [word.strip() for word in str(split).replace("/", ",").split(",")]
    while words and words[-1] in ("0", "0.0", ""):
        words.pop()
    return tuple(words)
