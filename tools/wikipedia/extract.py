"""Extract the articles of a Wikipedia dump to JSON lines, with all cores.

    python tools/wikipedia/extract.py simplewiki-20261101-pages-articles.xml.bz2 --output articles

The command writes articles/part-00000.jsonl and so on, with id, url, title and text of each
article. Until all parts are complete, the folder is called articles.unfinished. After an
interruption, the same command continues the work. The output does not depend on the number of
workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron import durable
from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.data.preprocess import map_in_order
from megatron.environment import usable_cores
from megatron.errors import ConfigError
from tools.wikipedia.dump import Page, Site, read_pages
from tools.wikipedia.plain import parser, plain_text

_FORMAT_VERSION = 1  # increase this when the output for the same dump changes
_BATCH = 1 << 20  # characters of wikitext that a worker gets at a time
_BATCHES = 64  # number of batches in each part
_MANIFEST = "extraction.json"
_REMEDY = "Lower --workers, or use a machine with more memory"


class Batch(NamedTuple):
    """Articles for a worker.

    Attributes:
        site: The wiki that the articles are from.
        pages: The articles.
    """

    site: Site
    pages: list[Page]


class ExtractedLines(NamedTuple):
    """The result of a worker.

    Attributes:
        lines: The JSON lines, one for each extracted article.
        counts: Number of extracted articles ("articles"), and of dropped articles by reason.
    """

    lines: bytes
    counts: Counter[str]


def batches(dump: Path, first: int) -> Iterator[Batch]:
    """Yield the articles of a dump in batches that depend only on the dump.

    Args:
        dump: The file of the dump, possibly compressed.
        first: Number of batches to skip.
    """
    index, pages, size = 0, list[Page](), 0
    site: Site | None = None
    for site, page in read_pages(dump):  # noqa: B007 - the last one is used below
        pages.append(page)
        size += len(page.text or "")
        if size >= _BATCH:
            if index >= first:
                yield Batch(site, pages)
            index, pages, size = index + 1, [], 0
    if pages and index >= first and site is not None:
        yield Batch(site, pages)


def extract_batch(batch: Batch) -> ExtractedLines:
    """Return the JSON lines of a batch, without articles that are empty, unparsable or too long."""
    lines, counts = list[str](), Counter[str]()
    for page in batch.pages:
        try:
            text = "" if page.text is None else plain_text(page.text, batch.site)
        except ValueError:
            counts["unparsable"] += 1
            continue
        if not text:
            counts["empty" if page.text is not None else "too long"] += 1
            continue
        counts["articles"] += 1
        url = batch.site.url(page.title)
        entry = {"id": page.id, "url": url, "title": page.title, "text": text}
        # XML cannot contain a lone surrogate, so every text can be encoded.
        lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
    return ExtractedLines("".join(lines).encode(), counts)


def extract(dump: Path, output: Path, workers: int) -> Counter[str]:
    """Extract a dump into a folder, or continue where an earlier extraction ended.

    Args:
        dump: The file of the dump, possibly compressed.
        output: The folder to create.
        workers: Number of processes; 0 does all work in this process.

    Returns:
        Number of extracted articles ("articles"), and of dropped articles by reason.

    Raises:
        ConfigError: The unfinished folder is from a different dump.
        DataError: The dump is damaged.
        StorageError: The folder cannot be written.
    """
    parser()  # report a missing mwparserfromhell before any work
    unfinished = output.with_name(output.name + ".unfinished")
    with durable.writing_to("--output", output):
        unfinished.mkdir(parents=True, exist_ok=True)
    finished = _open_manifest(unfinished, dump)
    num_done, total = len(finished), sum(map(Counter, finished), Counter[str]())
    if num_done:
        print(f"{unfinished}: continuing after {num_done} parts", flush=True)
    tasks = partial(batches, dump, num_done * _BATCHES)
    with map_in_order(extract_batch, tasks, workers, _REMEDY) as results:
        for part_index in itertools.count(num_done):
            part_results = itertools.islice(results, _BATCHES)
            first = next(part_results, None)
            if first is None:
                break
            counts = Counter[str]()
            with durable.writing_to("--output", output):
                with durable.atomic_file(unfinished / f"part-{part_index:05d}.jsonl") as file:
                    for lines, batch_counts in itertools.chain([first], part_results):
                        file.write(lines)
                        counts += batch_counts
                finished.append(dict(counts))
                text = json.dumps({**_identity(dump), "parts": finished})
                durable.replace_file(unfinished / _MANIFEST, text.encode())
            total += counts
            print(f"part {part_index}: {counts['articles']:,} articles", flush=True)
    with durable.writing_to("--output", output):
        unfinished.rename(output)
        durable.sync_folder(output.parent)
    return total


def _identity(dump: Path) -> dict[str, object]:
    return {"form": _FORMAT_VERSION, "dump": dump.name, "bytes": dump.stat().st_size}


def _open_manifest(folder: Path, dump: Path) -> list[dict[str, int]]:
    """Return the counts of the complete parts. All other parts must be written again.

    Raises:
        ConfigError: The folder is an extraction of a different dump.
    """
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        parts = manifest.pop("parts")
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, AttributeError):
        manifest, parts = {}, []
    if manifest != _identity(dump):
        raise ConfigError(
            f"{folder} is an unfinished extraction of a different dump ({manifest.get('dump')}): "
            "remove it, or give another --output"
        )
    return list(parts)


def report(total: Counter[str]) -> str:
    """Return a line about the extracted and the dropped articles."""
    dropped = [
        f"{count:,} {reason}" for reason, count in sorted(total.items()) if reason != "articles"
    ]
    return f"{total['articles']:,} articles; dropped: {', '.join(dropped) or 'none'}"


def run(options: argparse.Namespace) -> None:
    """Extract a dump, and print how many articles were extracted and dropped."""
    durable.expect_no_file("--output", [options.output], overwrite=False)
    if not options.dump.is_file():
        raise ConfigError(
            f"{options.dump}: no such file: download it with tools/wikipedia/download.py"
        )
    print(report(extract(options.dump, options.output, options.workers)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    arguments = ToolParser("extract.py", __doc__)
    arguments.add_argument("dump", type=Path, help="Dump: .xml, .xml.bz2, .xml.gz or .xml.xz.")
    arguments.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="New folder of JSON lines."
    )
    arguments.add_argument(
        "--workers",
        type=int,
        default=usable_cores(),
        metavar="N",
        help="Processes that extract (default: one per core). 0 does all work in this one.",
    )
    options = arguments.read(argv)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
