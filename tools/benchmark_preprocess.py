r"""Measure tools/preprocess_data.py: end to end, including process start, and encoding alone.

    python tools/benchmark_preprocess.py --vocab-file vocab.json --merge-file merges.txt \
        --text 100_english_novels.tar.xz

The tool cuts the text into documents of about 4 KB, up to --megabytes in total, and encodes them
with GPT-2's BPE. Without --text, the text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.errors import ConfigError, DataError

_TOOL = Path(__file__).resolve().with_name("preprocess_data.py")
_DOCUMENT_CHARACTERS = 4050


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("benchmark_preprocess.py", __doc__)
    parser.add_argument("--vocab-file", required=True, help="GPT-2's vocabulary (vocab.json).")
    parser.add_argument("--merge-file", required=True, help="GPT-2's merges (merges.txt).")
    parser.add_argument("--text", help="Folder or tar file of .txt files.")
    parser.add_argument(
        "--megabytes", type=float, default=20.7, help="Size of the corpus in MB (default: 20.7)."
    )
    parser.add_argument("--workers", type=int, help="Value of --workers for preprocess_data.py.")
    parser.add_argument("--repeat", type=int, default=5, help="Number of runs (default: 5).")
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure and print the speeds.

    Raises:
        ConfigError: A number is too small.
        DataError: There is no text.
    """
    if problems := minimum_problems(options, repeat=1, workers=1):
        raise ConfigError(problems)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        documents = _write_corpus(corpus, options.text, int(options.megabytes * 1e6))
        size = corpus.stat().st_size / 1e6
        print(f"corpus: {size:.1f} MB, {documents:,} documents")
        if sys.dont_write_bytecode:
            print("PYTHONDONTWRITEBYTECODE is set: each run compiles all modules (30 ms)")
        seconds, cpu = zip(
            *(_run_tool(options, corpus) for _ in range(options.repeat)), strict=True
        )
        for name, value in (("best", min(seconds)), ("median", sorted(seconds)[len(seconds) // 2])):
            print(
                f"end to end, {name} of {options.repeat}: {value:.3f} s, {size / value:.1f} MB/s, "
                f"{documents / value:,.0f} documents/s"
            )
        print(f"user + system time, best: {min(cpu):.3f} s")
        _measure_encoding(options, corpus)


def _write_corpus(corpus: Path, text: str | None, limit: int) -> int:
    import orjson

    documents = size = 0
    with corpus.open("wb") as file:
        for content in _contents(text):
            for start in range(0, len(content), _DOCUMENT_CHARACTERS):
                document = content[start : start + _DOCUMENT_CHARACTERS]
                size += file.write(orjson.dumps({"text": document}) + b"\n")
                documents += 1
                if size >= limit:
                    return documents
    if not documents:
        exists = os.path.exists(text) if text else True
        raise DataError(
            f"--text {text}: {'contains no text' if exists else 'no such file or folder'}: give a "
            "folder or tar file of .txt files"
        )
    return documents


def _contents(text: str | None) -> Iterator[str]:
    """Yield the contents of the text files, in the order of their names."""
    if text is not None and os.path.isfile(text):
        try:
            with tarfile.open(text) as archive:
                for member in sorted(archive.getmembers(), key=lambda member: member.name):
                    file = archive.extractfile(member)
                    if file is not None:
                        yield file.read().decode("utf-8", errors="replace")
        except tarfile.TarError as error:
            raise DataError(f"--text {text}: not a folder and not a tar file ({error})") from error
        return
    folder = Path(text or sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.txt" if text else "*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _run_tool(options: argparse.Namespace, corpus: Path) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of one run."""
    command = [sys.executable, str(_TOOL), "--input", str(corpus), "--append-eod"]
    command += ["--overwrite"]
    command += ["--output-prefix", str(corpus.with_suffix(""))]
    command += ["--tokenizer-type", "GPT2BPETokenizer"]
    command += ["--vocab-file", options.vocab_file, "--merge-file", options.merge_file]
    if options.workers:
        command += ["--workers", str(options.workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise DataError(f"preprocess_data.py failed: {done.stderr.strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu


def _measure_encoding(options: argparse.Namespace, corpus: Path) -> None:
    import orjson

    from megatron.config.data import TokenizerConfig
    from megatron.tokenizer import build_tokenizer

    texts = [orjson.loads(line)["text"] for line in corpus.read_bytes().splitlines()]
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
        )
    )
    for name in ("first time", "again"):
        start = time.perf_counter()
        tokenizer.tokenize_batch(texts)
        print(
            f"encoding alone, one thread, {name}: {size / (time.perf_counter() - start):.1f} MB/s"
        )


main = tool_main(build_parser, run)

if __name__ == "__main__":
    sys.exit(main())
