"""Write the tables of flags into a document: `python -m megatron.config docs/compatibility.md`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.config.compatibility import BEGIN, END, insert_tables


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron.config", description=__doc__)
    parser.add_argument("document", type=Path, help="Markdown file with the two marks.")
    path = parser.parse_args().document
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    if END not in page.partition(BEGIN)[2]:
        parser.error(f"{path}: the two marks are not there:\n{BEGIN}\n{END}")
    path.write_text(insert_tables(page), encoding="utf-8")


if __name__ == "__main__":
    main()
