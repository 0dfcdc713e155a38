"""The file that describes a working folder's inputs, and the check that flags match them.

Megatron-LM writes every argument of the last call into `args.json`. Retro's training reads the
data, the split, the seed and the lengths from this file. This package writes the same file with an
additional key, `retro_made_from`: digests of the datasets and tokenizers, which detect different
data with the same name. A folder made by Megatron-LM has no digests. Its flags are compared as
text, and its files by name only, because they may have been moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.data import is_number
from megatron.config.fields import Field, fields_of, from_yaml
from megatron.config.retro import ARGUMENTS
from megatron.config.retro import read_arguments as read_json
from megatron.config.retro_preprocessing import RETRO_SECTIONS, RetroPreprocessing
from megatron.durable import TEMPORARY, replace_file, writing_to
from megatron.errors import DataError

_DIGESTS = "retro_made_from"
_DATA = "retro_gpt_data_path"

# The parts of a working folder, in the order in which they are made, and the flags on which each
# part depends. A part also depends on the flags of all earlier parts.
_FLAGS_OF: Mapping[str, tuple[str, ...]] = {
    "db": (
        *(_DATA, "split", "retro_gpt_chunk_length", "retro_gpt_tokenizer_type"),
        *("retro_bert_tokenizer_type", "retro_doc_block_size", "retro_index_ntrain"),
        "retro_compatible",
    ),
    "index": (
        *("bert_embedder_type", "retro_bert_max_chunk_length", "retro_block_size"),
        "retro_index_nfeats",  # different index types have different folders
    ),
    "query": (
        *("retro_gpt_seed", "retro_gpt_seq_length", "retro_gpt_split"),
        *("retro_index_type", "retro_index_str"),
        *("retro_index_train_load_fraction", "retro_index_add_load_fraction"),
        *("retro_query_ef_search", "retro_query_nprobe"),
        *("retro_query_num_neighbors_query", "retro_query_num_neighbors_save"),
    ),
}
# Flags that name files, by the key of their digest. Digests are compared if the folder has them.
_FILES: Mapping[str, tuple[str, ...]] = {
    "gpt_tokenizer": (
        *("retro_gpt_vocab_file", "retro_gpt_merge_file", "retro_gpt_tokenizer_model"),
    ),
    "bert_tokenizer": ("retro_bert_vocab_file",),
}


class FolderOrigin(NamedTuple):
    """The inputs from which a working folder is made, apart from the options.

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


def remove_leftovers(workdir: Path) -> None:
    """Remove temporary files that a killed run left in a working folder.

    Other programs' files in the folder are kept.
    """
    paths = list(workdir.glob(f"{ARGUMENTS}{TEMPORARY}*"))
    for part in _FLAGS_OF:
        paths += (workdir / part).rglob(f"*{TEMPORARY}*")
    for path in paths:
        with suppress(OSError):
            path.unlink()


def arguments_file(workdir: Path) -> Path:
    """Return the path of `args.json`."""
    return workdir / ARGUMENTS


def read_arguments(workdir: Path) -> RetroPreprocessing:
    """Return the options with which a working folder was made, by this program or Megatron-LM.

    Raises:
        ConfigError: `args.json` cannot be read.
        DataError: `args.json` does not exist, or a value in it is damaged.
    """
    arguments = _read(workdir)
    if arguments is None:
        raise DataError(
            f"{arguments_file(workdir)} does not exist: {workdir} is not a Retro working folder; "
            "make one with tools/retro/main.py"
        )
    return _options(arguments, arguments_file(workdir))


def read_digest(workdir: Path, name: str) -> str | None:
    """Return the digest of one of a folder's inputs, or `None` if the folder has none.

    A folder that Megatron-LM made has no digests, and neither has a folder without `args.json`.

    Args:
        workdir: The working folder.
        name: A field of `FolderOrigin`.

    Raises:
        ConfigError: `args.json` cannot be read.
    """
    digests = (_read(workdir) or {}).get(_DIGESTS)
    digest = digests.get(name) if isinstance(digests, dict) else None
    return digest if isinstance(digest, str) else None


def write_arguments(
    workdir: Path,
    options: RetroPreprocessing,
    origin: FolderOrigin,
    run_arguments: Mapping[str, Any],
) -> None:
    """Write the arguments to `args.json` under Megatron-LM's names.

    Args:
        workdir: The working folder, which is created if missing.
        options: The preprocessing options.
        origin: The inputs of the folder.
        run_arguments: The arguments of the BERT run.

    Raises:
        StorageError: The file cannot be written.
    """
    values = {**run_arguments, **options.values}
    values["retro_tasks"] = options.stages.retro_tasks.split(",")
    values[_DIGESTS] = origin._asdict()
    path = arguments_file(workdir)
    with writing_to("--retro-workdir", path):
        workdir.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(values, indent=4, default=str).encode())


def check_folder(workdir: Path, options: RetroPreprocessing, origin: FolderOrigin) -> None:
    """Check that a folder was made from the same inputs.

    Only the inputs of existing parts, and of the parts made before them, are compared. If the
    folder has no index and no neighbors, for example, the index flags may change.

    Args:
        workdir: The working folder.
        options: The options of this call.
        origin: The inputs of this call.

    Raises:
        ConfigError: `args.json` cannot be read.
        DataError: An option or a file differs, and the message names every difference. Or
            `args.json` is damaged, or missing although the folder has parts.
    """
    path = arguments_file(workdir)
    parts = [
        part for part in _FLAGS_OF if any(file.is_file() for file in (workdir / part).rglob("*"))
    ]
    arguments = _read(workdir)
    if arguments is None:
        if parts:
            raise DataError(
                f"{path} does not exist, but {workdir} has {', '.join(parts)}, and only args.json "
                "says what they were made from: restore it, or give another --retro-workdir"
            )
        return
    if not parts:
        return
    differences = list(_differences(arguments, path, parts[-1], options, origin))
    if differences:
        raise DataError(
            f"--retro-workdir {workdir} was made from different data or flags:\n  "
            + "\n  ".join(differences)
            + "\ngive the folder's values or another --retro-workdir, or delete the named parts of "
            "the folder and all later ones (the order is db, index, query)"
        )


def _read(workdir: Path) -> dict[str, Any] | None:
    if not arguments_file(workdir).exists():
        return None
    arguments = read_json(str(workdir))
    # A folder made by Megatron-LM has Megatron-LM's bugs.
    arguments.setdefault("retro_compatible", _DIGESTS not in arguments)
    return arguments


def _options(arguments: Mapping[str, Any], path: Path) -> RetroPreprocessing:
    tasks = arguments.get("retro_tasks")
    if isinstance(tasks, list):
        arguments = {**arguments, "retro_tasks": ",".join(map(str, tasks))}
    names = [field.name for field in fields(RetroPreprocessing)]
    parts = {}
    for name, section in zip(names, RETRO_SECTIONS, strict=True):
        known_fields = [field for field in fields_of(section) if field.name in arguments]
        parts[name] = section(
            **{field.name: _value(arguments, field, path) for field in known_fields}
        )
    return RetroPreprocessing(**parts)


def _value(arguments: Mapping[str, Any], field: Field, path: Path) -> Any:
    value = arguments[field.name]
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
    arguments: Mapping[str, Any],
    path: Path,
    last: str,
    options: RetroPreprocessing,
    origin: FolderOrigin,
) -> Iterator[str]:
    """Yield a line for each difference that affects the parts up to `last`."""
    recorded, requested = _options(arguments, path).values, options.values
    fields = {field.name: field for section in RETRO_SECTIONS for field in fields_of(section)}
    digests = arguments.get(_DIGESTS)
    recorded_digests = digests if isinstance(digests, dict) else {}
    parts = list(_FLAGS_OF)
    for part in parts[: parts.index(last) + 1]:
        for name in _FLAGS_OF[part]:
            if name == "split":
                before = recorded_digests.get("split", arguments.get("split", origin.split))
                if _split_values(before) != _split_values(origin.split):
                    flag = "--split" if options.stages.retro_compatible else "--retro-gpt-split"
                    yield f"{part}: {flag} {before} in the folder, {origin.split} here"
            elif name == _DATA:
                yield from _data_differences(
                    recorded[_DATA], requested[_DATA], recorded_digests.get("data"), origin.data
                )
            elif _normalized(name, recorded[name]) != _normalized(name, requested[name]):
                flag = fields[name].names[0]
                yield f"{part}: {flag} {recorded[name]} in the folder, {requested[name]} here"
    for key, names in _FILES.items():
        before, current = recorded_digests.get(key), getattr(origin, key)
        for name in names if before is None else names[:1]:
            flag = fields[name].names[0]
            if before is None and _base(recorded[name]) != _base(requested[name]):
                yield f"db: {flag} {recorded[name]} in the folder, {requested[name]} here"
            elif before is not None and current and before != current:
                yield (
                    f"db: {flag}: the tokenizer has changed: {before} in the folder, {current} here"
                )


def _data_differences(
    recorded: tuple[str, ...] | None,
    requested: tuple[str, ...] | None,
    recorded_digest: Any,
    digest: str,
) -> Iterator[str]:
    """Yield a line if the datasets, their order or their weights differ."""
    recorded_blend, requested_blend = _blend(recorded or ()), _blend(requested or ())
    label = f"db: --retro-gpt-data-path {' '.join(recorded or ())} in the folder"
    if recorded_blend != requested_blend:
        yield f"{label}, {' '.join(requested or ())} here"
    elif recorded_digest is not None and recorded_digest != digest:
        yield f"{label}; the files here have the same names, but different content"


def _blend(entries: tuple[str, ...]) -> list[float | str]:
    """Return the weights and names of datasets, without the paths of their folders."""
    return [float(entry) if is_number(entry) else os.path.basename(entry) for entry in entries]


def _base(path: str | None) -> str:
    return os.path.basename(path or "")


def _normalized(name: str, value: Any) -> Any:
    return _split_values(value) if name == "retro_gpt_split" else value


def _split_values(split: Any) -> tuple[str, ...]:
    """Return the values of a split, without spaces or trailing zeros."""
    values = [value.strip() for value in str(split).replace("/", ",").split(",")]
    while values and values[-1] in ("0", "0.0", ""):
        values.pop()
    return tuple(values)
