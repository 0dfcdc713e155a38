"""Measure precision, recall and speed of the corpus pipeline, compared with other programs.

    python tools/benchmark_corpora.py --out docs/benchmarks/corpora.md

The tool plants 1,000 near-duplicates, 500 overlaps with tasks and 300 foreign-language pages in
20,000 documents made from ../shared/data, builds the corpus, and compares the output with what was
planted. Then it times deduplication alone, alternating with datatrove, text-dedup and datasketch if
these are installed.

With --prove, nothing is timed. The same corpus is built by 1, 2 and 4 processes, by datatrove's
executors, and by runs that are killed at every step. The bytes are compared, and only the section
of the page about this comparison is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.durable import replace_file
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from tests.corpora.planted import Planted

HERE = Path(__file__).resolve().parent
_WORKERS = "2"
_DOCUMENTS, _FILES = 4_000, 8  # input for deduplication; other programs take minutes for it
_OURS = "this package"
_MODULES = {"datatrove": "datatrove", "text-dedup": "text_dedup", "datasketch": "datasketch"}


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_corpora.py", __doc__)
    parser.add_argument("--out", metavar="FILE", help="Markdown file to write (default: stdout).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the corpus (default: 1).")
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each program (default: 3).")
    parser.add_argument(
        "--prove", action="store_true", help="Compare the bytes of the output instead of measuring."
    )
    parser.add_argument("--small", action="store_true", help="Use a corpus of 500 documents.")
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure or compare, and write the page.

    Raises:
        ConfigError: ../shared/data is missing and --small is not given, or a number is too small.
    """
    if problems := minimum_problems(options, repeats=1, seed=0):
        raise ConfigError(problems)
    from tests.corpora.planted import FULL, SHARED, SMALL, plant

    if not options.small and not SHARED.is_dir():
        raise ConfigError(f"{SHARED} is missing: give --small for a corpus from templates")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = SMALL if options.small else FULL
        planted = plant(folder / "corpus", sizes, options.seed, shared=not options.small)
        if options.prove:
            _write(options.out, _prove(planted, folder), keeps_proof=False)
            return
        lines = _find(planted, folder / "whole", options.seed)
        print("\n".join(lines), file=sys.stderr, flush=True)
        lines += _time(planted, folder, options.repeats)
    load = (
        f"On average, {os.getloadavg()[2]:.1f} processes were ready to run during the measurement, "
        "including other programs' processes."
    )
    _write(options.out, "\n".join([*_HEAD, load, "", *lines, ""]), keeps_proof=True)


def _write(out: str | None, section: str, *, keeps_proof: bool) -> None:
    """Print a section, or replace the section of this kind in the page `out`.

    The page has a section of measurements, and a section that proves equal bytes.

    Args:
        out: The page, or `None` to print the section.
        section: The text of the section.
        keeps_proof: Whether the section has measurements, so that the proof in the page is kept.
    """
    if out is None:
        print(section)
        return
    page = Path(out).read_text() if Path(out).exists() else ""
    measured, _, proof = page.partition(_PROOF)
    if keeps_proof:
        section += f"\n{_PROOF}{proof}" if proof else ""
    else:
        section = f"{measured.rstrip()}\n\n{section}".lstrip()
    replace_file(Path(out), section.encode())


_PROOF = "## The same bytes every time\n"
_HEAD = [
    "# Corpora: recall, precision and speed",
    "",
    "Written by `python tools/benchmark_corpora.py --out docs/benchmarks/corpora.md` on two cores.",
    "",
]


def _build(*args: str) -> float:
    """Run build_corpus.py with two workers, and return the seconds, including start-up."""
    command = [sys.executable, str(HERE / "build_corpus.py"), *args, "--workers", _WORKERS]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def _pipeline_args(planted: Planted) -> list[str]:
    """Return the command-line arguments for the whole pipeline, without the output folder."""
    args = ["--input", str(planted.folder), "--tasks", *map(str, planted.tasks)]
    args += ["--task-keys", "text", "question"]
    gpt2 = HERE.parent.parent / "shared" / "data" / "tokenizers" / "gpt2"
    if not gpt2.is_dir():
        return args
    args += ["--tokenizer-type", "GPT2BPETokenizer"]
    args += ["--vocab-file", str(gpt2 / "gpt2-vocab.json")]
    return [*args, "--merge-file", str(gpt2 / "gpt2-merges.txt")]


def _prove(planted: Planted, folder: Path) -> str:
    """Compare the bytes of the outputs, and return the section of the page about the comparison.

    Raises:
        RuntimeError: The bytes differ, or a run could not be killed.
    """
    from tools.corpora_benchmark.reproducibility import prove

    lines = [
        _PROOF,
        f"The planted corpus of {len(planted.texts):,} documents passes through all steps. The "
        "text, the lists of omitted documents, the dataset, the report and the picture are "
        "compared byte for byte with those of a run with one process. "
        '"Killed" means that all processes receive '
        "SIGKILL. Written by `python tools/benchmark_corpora.py --prove --out "
        "docs/benchmarks/corpora.md`.",
        "",
        "| run | same bytes |",
        "| --- | --- |",
    ]
    for name, is_same in prove(_pipeline_args(planted), folder):
        print(f"{name}: {'same' if is_same else 'DIFFERENT'}", file=sys.stderr, flush=True)
        if not is_same:
            raise RuntimeError(f"{name}: the output differs from the one of a single process")
        lines.append(f"| {name} | yes |")
    return "\n".join([*lines, ""])


def _find(planted: Planted, output: Path, seed: int) -> list[str]:
    """Build the corpus, and return tables of the planted items found and of each step's speed."""
    from megatron.corpora.report import measured_seconds
    from tests.corpora.planted import score

    seconds = _build(*_pipeline_args(planted), "--output", str(output))
    size = sum(len(text.encode()) for text in planted.texts.values()) / 1e6
    lines = [
        f"{len(planted.texts):,} documents ({size:.1f} MB of text, seed {seed}) in six formats: "
        "JSON lines (plain, .gz, .zst), parquet, WARC, WET.",
        "",
        "| planted items | number | precision | recall |",
        "| --- | --- | --- | --- |",
    ]
    numbers = map(len, (planted.duplicates, planted.overlaps, planted.foreign))
    for (name, result), count in zip(score(planted, output).items(), numbers, strict=True):
        lines.append(f"| {name} | {count:,} | {result.precision:.4f} | {result.recall:.4f} |")
    report = json.loads((output / "report.json").read_bytes())
    lines += ["", f"{report['kept']['documents']:,} documents remain."]
    lines += ["", "| step | seconds | MB/s per core |", "| --- | --- | --- |"]
    for name, step_seconds in measured_seconds(output / "logs").items():
        lines.append(f"| {name} | {step_seconds:.2f} | {size / max(step_seconds, 1e-9):.1f} |")
    lines += [
        "",
        f"End to end, including start-up: {seconds:.1f} s, {size / seconds:.2f} MB/s.",
        "",
    ]
    return lines


def _time(planted: Planted, folder: Path, repeats: int) -> list[str]:
    """Time deduplication alone, alternating between the programs, and return the table."""
    source = folder / "lines"
    source.mkdir()
    items = list(planted.texts.items())[:_DOCUMENTS]
    for i in range(_FILES):
        part = items[i::_FILES]
        text = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in part)
        (source / f"{i}.jsonl").write_text(text)
    programs = [_OURS, *(n for n, module in _MODULES.items() if importlib.util.find_spec(module))]
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name in programs:
            output = folder / "output"
            seconds[name].append(_time_one(name, source, output))
            print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
            shutil.rmtree(output)
    size, own_seconds = (
        sum(len(text.encode()) for _, text in items) / 1e6,
        statistics.median(seconds[_OURS]),
    )
    lines = [
        f"MinHash deduplication alone, of {len(items):,} documents ({size:.1f} MB), from JSON "
        f"lines to JSON lines, on two cores, including start-up. Values are medians of {repeats} "
        "alternating runs:",
        "",
        "| program | seconds | MB/s | time relative to ours |",
        "| --- | --- | --- | --- |",
    ]
    for name, times in seconds.items():
        median = statistics.median(times)
        if median == float("inf"):
            lines.append(f"| {name} | failed | | |")
        else:
            lines.append(
                f"| {name} | {median:.1f} | {size / median:.2f} | {median / own_seconds:.1f} |"
            )
    return lines


def _time_one(name: str, source: Path, output: Path) -> float:
    """Return the run time of a program in seconds, or infinity if the program fails."""
    if name == _OURS:
        skip_flags = ["--skip-steps", "urls", "extract", "fix", "language", "quality"]
        return _build("--input", str(source), "--output", str(output), *skip_flags)
    baselines_script = str(HERE / "corpora_benchmark" / "baselines.py")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, baselines_script, name, str(source), str(output)],
        check=False,
        capture_output=True,
        text=True,
    )
    output.mkdir(exist_ok=True)
    if done.returncode:
        print(f"{name} failed: {done.stderr[-500:]}", file=sys.stderr)
        return float("inf")
    return time.monotonic() - started


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
