"""Input and output of JSON lines, shared by the commands that run a single step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from megatron.data.preprocess import map_in_order
from megatron.data.text_input import TextBlock, load_line, read_blocks
from megatron.durable import atomic_file, writing_to
from megatron.errors import ConfigError, DataError

Record = dict[str, Any]
# A function of the records of a block. It returns the records for each output, and counts.
Transform = Callable[[list[Record]], tuple[list[list[Record]], Counter[str]]]
_SMALL = 1 << 20  # bytes; smaller files are processed without worker processes
_LESS_MEMORY = "To reduce memory, use fewer processes"


def parse_records(block: TextBlock, keys: Sequence[str] = ()) -> list[Record]:
    """Return the JSON objects of a block of lines.

    Args:
        block: The lines, with their file and byte offset for messages.
        keys: Keys that every object must have, with a string as the value.

    Raises:
        DataError: A line is not a JSON object, or lacks a key.
    """
    records = []
    offset = block.offset
    for line in block.read().removesuffix(b"\n").split(b"\n"):
        if line and not line.isspace():
            where = f"{block.path}: line at byte {offset}"
            try:
                record = load_line(line)
            except ValueError as error:
                raise DataError(f"{where}: {error}: fix or remove the line") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}: expected a JSON object: fix or remove the line")
            for key in keys:
                if not isinstance(record.get(key), str):
                    raise DataError(f"{where}: no text under the key {key!r}: fix the line or key")
            records.append(record)
        offset += len(line) + 1
    return records


def read_records(path: str, keys: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the JSON objects of a JSON lines file.

    Raises:
        ConfigError: The file does not exist or is not JSON lines.
        DataError: The file cannot be read, or `parse_records` rejects a line.
    """
    for block in _blocks(path):
        yield from parse_records(block, keys)


def transform_records(
    path: str, outputs: Sequence[str], transform: Transform, keys: Sequence[str], workers: int
) -> Counter[str]:
    """Apply a function to the records of a file and write the results, in order.

    Args:
        path: A JSON lines file.
        outputs: The files to write. They get their final names when all of them are complete.
        transform: The function. Worker processes call it on one block of records at a time.
        keys: Keys that every record must have, with a string as the value.
        workers: The number of worker processes, which files below 1 MiB do not use. The output does
            not depend on it.

    Returns:
        The sum of the counts that the function returned.

    Raises:
        ConfigError: The file does not exist or is not JSON lines, or an output is the input.
        DataError: The file cannot be read, or a line is malformed. No output files remain.
        StorageError: An output cannot be written.
    """
    for name in outputs:
        refuse_input(name, path)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        files = []
        for name in outputs:
            stack.enter_context(writing_to("output", name))
            files.append(stack.enter_context(atomic_file(Path(name))))
        for results, block_counts in map_records(path, transform, keys, workers):
            counts += block_counts
            for file, records in zip(files, results, strict=True):
                file.write(b"".join(map(dump_record, records)))
    return counts


def map_records(
    path: str, transform: Transform, keys: Sequence[str], workers: int
) -> Iterator[tuple[list[list[Record]], Counter[str]]]:
    """Apply a function to each block of a file's records and yield the results in order.

    The arguments are those of `transform_records`.

    Raises:
        ConfigError: The file does not exist or is not JSON lines.
        DataError: The file cannot be read, or a line is malformed.
    """
    work = partial(_transform_block, transform, tuple(keys))
    is_small = Path(path).is_file() and Path(path).stat().st_size < _SMALL
    blocks = partial(_blocks, path)
    with map_in_order(work, blocks, 0 if is_small else workers, _LESS_MEMORY) as results:
        yield from results


def refuse_input(output: str, path: str) -> None:
    """Raise `ConfigError` if the output is the input file, whose dropped texts would be lost."""
    if Path(output).exists() and Path(path).exists() and Path(output).samefile(path):
        raise ConfigError(f"output {output}: this is also the input: give another name")


def write_records(path: str, records: Iterator[Record]) -> int:
    """Write records to a JSON lines file atomically, and return how many were written.

    Raises:
        StorageError: The file cannot be written.
    """
    count = 0
    with writing_to("output", path), atomic_file(Path(path)) as file:
        for record in records:
            file.write(dump_record(record))
            count += 1
    return count


def dump_record(record: Record) -> bytes:
    """Serialize a record as a line of JSON."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a number has more than 64 bits
        return f"{json.dumps(record, ensure_ascii=False)}\n".encode()


def _transform_block(
    transform: Transform, keys: tuple[str, ...], block: TextBlock
) -> tuple[list[list[Record]], Counter[str]]:
    return transform(parse_records(block, keys))


def _blocks(path: str) -> Iterator[TextBlock]:
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file: fix the name")
    if path.lower().endswith((".txt", ".parquet")):
        raise ConfigError(f"{path}: expected JSON lines: give a .json or .jsonl file")
    yield from read_blocks([path], ["text"])
