"""Write the tables of flags and keys into a document: `python -m megatron.config docs/FILE.md`.

The tables come from the code that reads the flags: tables of flags for docs/compatibility.md, and
tables of DeepSpeed's keys for docs/deepspeed.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megatron.config.arguments import default_text, title_of
from megatron.config.deepspeed import key_table
from megatron.config.fields import Field, fields_of
from megatron.config.other_flags import other_flags
from megatron.config.run import sections

BEGIN = "<!-- flags: written by `python -m megatron.config`, do not edit -->"
END = "<!-- end of flags -->"


KEYS_BEGIN = "<!-- keys: written by `python -m megatron.config`, do not edit -->"
KEYS_END = "<!-- end of keys -->"


def insert_tables(document: str) -> str:
    """Return the document with the current tables between the markers that it contains."""
    for begin, end, tables in ((BEGIN, END, flag_tables), (KEYS_BEGIN, KEYS_END, key_tables)):
        before, _, rest = document.partition(begin)
        _, mark, after = rest.partition(end)
        if mark:
            document = f"{before}{begin}\n\n{tables()}\n{end}{after}"
    return document


def key_tables() -> str:
    """Return Markdown tables of DeepSpeed's keys: translated, without effect, and refused."""
    table = key_table()
    lines = ["### Read as flags\n"]
    lines += _table(("Key", "Flag"), [(f"`{key}`", flag) for key, flag in table.translated.items()])
    for is_refused, title in ((False, "### Accepted without effect\n"), (True, "### Refused\n")):
        rows: dict[str, list[str]] = {}
        for key, answer in table.untranslated.items():
            if answer.is_refused == is_refused:
                default = "" if answer.default in (None, {}) else f" ({json.dumps(answer.default)})"
                rows.setdefault(answer.reason, []).append(f"`{key}`{default}")
        lines += [title, "DeepSpeed's default, which has no effect, is in parentheses.\n"]
        lines += _table(
            ("Keys", "Answer"), [(", ".join(keys), text) for text, keys in rows.items()]
        )
    return "\n".join(lines)


def flag_tables() -> str:
    """Return Markdown tables: our flags by section, flags without a field, and old flags."""
    return "\n".join([*_supported(), *_known(), *_old()])


def _supported() -> Iterator[str]:
    for config_type in sections().values():
        yield f"### {title_of(config_type)}\n"
        rows = [
            (
                _spellings(field),
                "accepted, no effect" if field.info.notice else "supported",
                default_text(field),
                _meaning(field),
            )
            for field in fields_of(config_type)
            if field.names
        ]
        yield from _table(("Flag", "Status", "Default", "Meaning"), rows)


def _spellings(field: Field) -> str:
    return ", ".join(f"`{name}`" for name in field.documented_names)


def _meaning(field: Field) -> str:
    facts = [field.help]
    if field.info.choices:
        facts.append("One of " + ", ".join(f"`{choice}`" for choice in field.info.choices) + ".")
    if field.info.unit:
        facts.append(f"Unit: {field.info.unit}.")
    return " ".join(facts)


def _known() -> Iterator[str]:
    yield "### Accepted without effect\n"
    yield from _table(("Flags", "Why"), _families(other_flags().accepted))
    yield "### Refused by name\n"
    yield "A value equal to Megatron's default is accepted.\n"
    yield from _table(("Flags", "Answer"), _families(other_flags().refused))


def _families(flags: Sequence[Field]) -> list[tuple[str, str]]:
    """Return one row for each group of consecutive flags that share a reason."""
    return [
        (", ".join(f"`{flag.name}`" for flag in group), reason)
        for reason, group in groupby(flags, key=lambda flag: flag.help)
    ]


def _old() -> Iterator[str]:
    yield "### Old flags, translated with one notice\n"
    rows = [
        (
            f"`{flag.name}`",
            flag.era,
            f"{flag.now} ({flag.program[0]})" if flag.program else flag.now,
        )
        for flag in other_flags().translated
    ]
    yield from _table(("Flag", "Megatron-LM", "Read as"), rows)
    yield "### Old flags, refused with the remedy\n"
    gone = [
        (f"`{flag.name} {flag.value or ''}".rstrip() + "`", flag.era, flag.remedy)
        for flag in other_flags().removed
    ]
    yield from _table(("Flag", "Last seen", "Remedy"), gone)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'|'.join(' --- ' for _ in titles)}|"
    for row in rows:
        cells = []
        for cell in row:  # outside code spans, escape what Markdown reads as a column or a tag
            parts = cell.split("`")
            parts[::2] = [part.replace("|", r"\|").replace("<", "&lt;") for part in parts[::2]]
            cells.append("`".join(parts))
        yield f"| {' | '.join(cells)} |"
    yield ""


def main() -> None:
    """Rewrite the tables of a document."""
    parser = argparse.ArgumentParser(prog="python -m megatron.config", description=__doc__)
    parser.add_argument("document", type=Path, help="Markdown file with the two markers.")
    path = parser.parse_args().document
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    if END not in page.partition(BEGIN)[2] and KEYS_END not in page.partition(KEYS_BEGIN)[2]:
        parser.error(f"{path}: the two markers are missing:\n{BEGIN}\n{END}")
    path.write_text(insert_tables(page), encoding="utf-8")


if __name__ == "__main__":
    main()
