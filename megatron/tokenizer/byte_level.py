"""GPT-2's spelling of bytes: every byte has a printable character that stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType


@cache
def byte_of_character() -> Mapping[str, int]:
    """Character to byte. Printable Latin-1 stands for itself; the other 68 bytes, in order, are
    U+0100 and up (so a space is U+0120 and a newline U+010A).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return MappingProxyType(table)
