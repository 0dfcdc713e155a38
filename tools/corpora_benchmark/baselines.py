"""Deduplicate a folder of JSON lines with another program, in two processes.

    python tools/corpora_benchmark/baselines.py datatrove folder output

The remaining documents are written as JSON lines or, by text-dedup, in its own format.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.config.arguments import ToolParser

WORKERS = 2
_WORD = re.compile(r"\w+")


def datatrove(source: Path, output: Path) -> None:
    """Run datatrove's four MinHash steps with their defaults (14 bands of 8 values).

    Words are split at whitespace, which is much faster than spaCy, datatrove's default for English.
    datatrove 0.10 needs a version of xxhash below 4.
    """
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from loguru import logger

    logger.disable("datatrove")
    config = MinhashConfig()
    tasks = len(list(source.glob("*.jsonl")))
    folders = {name: str(output / name) for name in ("signatures", "buckets", "remove", "text")}

    def run(name: str, tasks: int, *blocks: Any) -> None:
        LocalPipelineExecutor(
            list(blocks), tasks, WORKERS, str(output / "logs" / name), start_method="fork"
        ).run()

    signer = MinhashDedupSignature(folders["signatures"], config, language="grt")
    run("1", tasks, JsonlReader(str(source)), signer)
    finder = MinhashDedupBuckets(folders["signatures"], folders["buckets"], config=config)
    run("2", config.num_buckets, finder)
    run("3", 1, MinhashDedupCluster(folders["buckets"], folders["remove"], config=config))
    writer = JsonlWriter(folders["text"], compression=None)
    run("4", tasks, JsonlReader(str(source)), MinhashDedupFilter(folders["remove"]), writer)


def _sketch(lines: list[bytes]) -> list[Any]:
    from datasketch import MinHash

    sets = []
    for line in lines:
        words = _WORD.findall(json.loads(line)["text"].lower())
        count = max(len(words) - 4, 1)
        sets.append({" ".join(words[i : i + 5]).encode() for i in range(count)})
    return list(MinHash.bulk(sets, num_perm=128))


def datasketch(source: Path, output: Path) -> None:
    """Compute signatures with MinHash.bulk in two processes, then query and fill a MinHashLSH."""
    from datasketch import MinHashLSH

    lines = [line for file in sorted(source.glob("*.jsonl")) for line in file.open("rb")]
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        parts = pool.map(_sketch, [lines[i : i + 500] for i in range(0, len(lines), 500)])
    index = MinHashLSH(threshold=0.6, num_perm=128)
    output.mkdir(parents=True)
    with (output / "kept.jsonl").open("wb") as file:
        for number, sketch in enumerate(sketch for part in parts for sketch in part):
            if not index.query(sketch):
                index.insert(number, sketch)
                file.write(lines[number])


def text_dedup(source: Path, output: Path) -> None:
    """Run text-dedup's MinHash command with its faster hash."""
    flags = ["--path", "json", "--data_dir", str(source), "--split", "train", "--column", "text"]
    flags += ["--cache_dir", str(output / "cache"), "--output", str(output / "kept")]
    flags += ["--num_proc", str(WORKERS), "--hash_func", "xxh3", "--threshold", "0.6"]
    flags += ["--batch_size", "10000"]
    subprocess.run([sys.executable, "-m", "text_dedup.minhash", *flags], check=True)


BASELINES: dict[str, Callable[[Path, Path], None]] = {
    "datatrove": datatrove,
    "datasketch": datasketch,
    "text-dedup": text_dedup,
}

if __name__ == "__main__":
    parser = ToolParser("baselines.py", __doc__)
    parser.add_argument("program", choices=BASELINES)
    parser.add_argument("source", type=Path, help="Folder with .jsonl files.")
    parser.add_argument("output", type=Path, help="New folder.")
    options = parser.read()
    BASELINES[options.program](options.source, options.output)
