"""Files of documents that tests write and read: JSON lines, and tables in parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write a record in each line; return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the object in each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def parquet_table(**columns: list[Any]) -> bytes:
    """Return the bytes of a table."""
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data
