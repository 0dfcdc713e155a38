"""Clean a list of URLs: remove unwanted sites, files that are not pages, and duplicates.

    python tools/openwebtext/blacklist_urls.py urls/ clean_urls.txt

The command reads all .txt files of the folder, one URL per line, and writes the good URLs in order.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError

_PRINTED_PER_REASON = 3  # URLs to show for each reason


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("blacklist_urls.py", __doc__)
    parser.add_argument("path", metavar="DIR", help="Folder with .txt files, or one such file.")
    parser.add_argument("output", metavar="FILE", help="File to write.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the good URLs and print what was removed.

    Raises:
        UserError: The input is invalid, or the output cannot be written.
    """
    from megatron.corpora.cleaning import judge_url
    from megatron.corpora.plan import UrlStep
    from megatron.durable import atomic_file, writing_to

    path = Path(options.path)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{path}: no such file, or a folder without .txt files")
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    with writing_to("output", options.output), atomic_file(Path(options.output)) as output:
        for file in files:
            for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
                url = line.strip()
                if not url:
                    continue
                reason = judge_url(url, UrlStep()) or ("duplicate" if url in seen else "")
                counts[reason or "kept"] += 1
                if not reason:
                    seen.add(url)
                    output.write(f"{url}\n".encode())
                elif counts[reason] <= _PRINTED_PER_REASON:
                    print(f"{reason}: {url}")
    print(f"{counts.total():,} URLs from {len(files):,} files")
    for reason, count in sorted(counts.items()):
        print(f"  {reason:<20}{count:>12,}")


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
