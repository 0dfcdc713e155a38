"""The command line of reports: `megatron report`, or `python -m megatron.report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.durable import expect_no_file, replace_file, writing_to
from megatron.errors import ConfigError
from megatron.report.sources import open_runs

_PORT = 6010
_DOC = """Write a report of a run as one HTML page.

    megatron report runs/demo
    megatron report runs/a runs/b --output compared.html
    megatron report runs/demo --live
"""


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("megatron report", _DOC)
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="Folder of one or more runs, or a metrics file.",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="Page to write (default: report.html in the folder of the first run).",
    )
    add("--live", action="store_true", help="Serve the page on this machine while the run trains.")
    add(
        "--port",
        type=int,
        metavar="N",
        help=f"Port of --live; 0 picks a free one (default: {_PORT}).",
    )
    add("--overwrite", action="store_true", help="Replace FILE even if it is not a report.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Write the page, or serve it.

    Raises:
        ConfigError: The output exists and is not a report, the port cannot be used, or flags
            contradict each other.
        DataError: A path does not exist, or there are no metrics.
        StorageError: The page cannot be written.
    """
    if options.live:
        from megatron.report.live import serve

        if options.output is not None or options.overwrite:
            flag = "--overwrite" if options.output is None else "--output"
            raise ConfigError(f"{flag} with --live: give only one: --live does not write a file")
        port = _PORT if options.port is None else options.port
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port {port}: use 0 to 65535")
        serve(options.runs, port)
        return
    if options.port is not None:
        raise ConfigError(f"--port {options.port}: only --live serves a page: add --live")
    from megatron.report.page import GENERATOR, render  # imports numpy, which --help does not need

    first: Path = options.runs[0]
    output: Path = options.output or (first if first.is_dir() else first.parent) / "report.html"
    page = render([source.history for source in open_runs(options.runs)]).encode()
    try:
        with output.open("rb") as file:
            is_report = GENERATOR.encode() in file.read(1024)  # an earlier report may be replaced
    except OSError:
        is_report = False
    if not is_report:
        expect_no_file("--output", [output], overwrite=options.overwrite)
    with writing_to("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, page)
    print(f"wrote {output} ({len(page) / 1e6:.2f} MB)")


if __name__ == "__main__":
    options = build_parser().read()
    sys.exit(run_command(lambda: run(options)))
