"""Hostfiles: the machines of a cluster without a scheduler, as MPI and DeepSpeed write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError

_LINE = re.compile(
    r"([A-Za-z0-9][\w.-]*)(?:\s+slots\s*=\s*([1-9]\d*)|:([1-9]\d*))?(?:\s+max[_-]slots=\d+)?",
    re.ASCII,
)


class Host(NamedTuple):
    """A machine, and how many processes it takes (`None` if its line does not say)."""

    name: str
    slots: int | None


def read_hostfile(path: Path) -> list[Host]:
    """Read the machines of a hostfile, in order.

    Raises:
        ConfigError: The file cannot be read, names no machine or one twice, or a line is neither
            `HOST`, `HOST slots=N` nor `HOST:N`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--hostfile {path}: cannot be read: {reason}") from None
    hosts: list[Host] = []
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            problems.append(
                f"--hostfile {path}, line {number}: {text!r}: expected HOST, HOST slots=8 or HOST:8"
            )
            continue
        name, slots = match[1], match[2] or match[3]
        if name in [host.name for host in hosts]:
            problems.append(
                f"--hostfile {path}, line {number}: {name} appears twice: keep one line, with the "
                "sum of its slots"
            )
        hosts.append(Host(name, int(slots) if slots else None))
    if not hosts and not problems:
        problems.append(f"--hostfile {path}: no machine: write one per line, as HOST slots=8")
    if problems:
        raise ConfigError(problems)
    return hosts
