r"""Remove text from a corpus that also occurs in the files of evaluation tasks.

    python tools/openwebtext/filter_ngrams.py --tasks lambada squad.jsonl \
        --lambada-path lambada_test.jsonl --dedup-dataset data.json text --output clean.json

A 13-gram of words that also occurs in a task is cut out. The cut includes 200 characters on each
side, and is extended outward to the nearest sentence boundary. The remaining text on each side
becomes a separate document.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError, DataError

_LAMBADA = "lambada"


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("filter_ngrams.py", __doc__)
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="Task files (JSON lines, TSV, text), or lambada, whose file is --lambada-path.",
    )
    parser.add_argument("--lambada-path", metavar="FILE", help="LAMBADA's test set.")
    parser.add_argument(
        "--dedup-dataset",
        nargs=2,
        required=True,
        metavar=("FILE", "KEY"),
        help="JSON lines and the key of the text.",
    )
    parser.add_argument("--output", metavar="FILE", help="File to write.")
    parser.add_argument(
        "--num-threads",
        type=int,
        default=40,
        help="Maximum number of processes (default: 40, at most one per core).",
    )
    sizes = (
        ("--max-ngram-size", 13, "Number of words in an n-gram."),
        (
            "--min-ngram-size",
            8,
            "Number of words below which a task's text is ignored.",
        ),
        (
            "--filter-text-char-len",
            200,
            "Remaining parts of up to this many characters are dropped.",
        ),
        (
            "--key-threshold",
            10,
            "N-grams that occur at least this often in the corpus are kept.",
        ),
        ("--splits-count", 10, "Documents that are cut into more parts are dropped."),
        ("--remove-char-each-side", 200, "Number of characters to cut on each side."),
    )
    for name, default, text in sizes:
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument("--save-dictionary", metavar="FILE", help="File for the tasks' n-grams.")
    parser.add_argument(
        "--load-dictionary", metavar="FILE", help="N-grams to read instead of tasks."
    )
    return parser


def _count(
    ngrams: Any, key: str, records: list[dict[str, Any]]
) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    counts: Counter[str] = Counter()
    for overlaps in ngrams.find([record[key] for record in records]):
        counts.update(str(overlap.ngram) for overlap in overlaps)
    return [], counts


def _cut(
    ngrams: Any, step: Any, key: str, records: list[dict[str, Any]]
) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    from megatron.corpora.overlaps import cut_out

    results, counts = [], Counter({"docs": len(records)})
    overlaps_by_record = ngrams.find([record[key] for record in records])
    for record, overlaps in zip(records, overlaps_by_record, strict=True):
        parts = cut_out(record[key], overlaps, step)
        counts["splitted"] += len(parts) > 1
        counts["ignored"] += not parts
        counts["trimmed"] += len(parts) == 1 and bool(overlaps)
        counts["splits > threshold"] += len(parts) > step.max_parts
        remaining = parts if len(parts) <= step.max_parts else []
        results.append({"record": record, "parts": remaining})
    return [results], counts


def run(options: argparse.Namespace) -> None:
    """Write the clean documents.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    import numpy as np

    from megatron.corpora.overlaps import TaskNgrams, read_tasks
    from megatron.corpora.plan import TasksStep
    from megatron.corpora.records import map_records, refuse_input, write_records
    from megatron.environment import usable_cores

    workers = min(options.num_threads, usable_cores())
    if workers < 1 or not 1 <= options.min_ngram_size <= options.max_ngram_size:
        raise ConfigError("--num-threads, --min-ngram-size, --max-ngram-size: give 1 or more")
    data, key = options.dedup_dataset
    if options.output:
        refuse_input(options.output, data)
    if options.load_dictionary:
        ngrams = _load(options.load_dictionary)
    else:
        texts = read_tasks(_task_files(options), ())
        ngrams = TaskNgrams.of_texts(texts, options.max_ngram_size, options.min_ngram_size)
        counts: Counter[str] = Counter()
        for _, block_counts in map_records(data, partial(_count, ngrams, key), [key], workers):
            counts += block_counts
        frequent_ngrams = [int(n) for n, count in counts.items() if count >= options.key_threshold]
        frequent = np.array(frequent_ngrams, np.uint64)
        remaining = {size: np.setdiff1d(hashes, frequent) for size, hashes in ngrams.hashes.items()}
        ngrams = TaskNgrams({size: hashes for size, hashes in remaining.items() if len(hashes)})
        print(
            f"{ngrams.count:,} runs of words; {len(frequent_ngrams):,} are too frequent to be "
            "overlaps"
        )
    if options.save_dictionary:
        _save(options.save_dictionary, ngrams)
    if not options.output:
        return
    step = TasksStep(
        margin=options.remove_char_each_side,
        min_characters=options.filter_text_char_len,
        max_parts=options.splits_count,
    )
    prefix = "-".join(Path(task).stem for task in options.tasks)
    total: Counter[str] = Counter()

    def parts() -> Any:
        number = 0
        for (results,), block_counts in map_records(
            data, partial(_cut, ngrams, step, key), [key], workers
        ):
            total.update(block_counts)
            for result in results:
                number += 1
                record = result["record"]
                split_prefix = f"{record['split_id']}-" if "split_id" in record else ""
                for i, part in enumerate(result["parts"]):
                    split = f"{split_prefix}{prefix}-{number:010d}-{i:04d}"
                    yield {**record, key: part, "split_id": split}

    write_records(options.output, parts())
    print(" ".join(f"{name} {count}" for name, count in total.items()))


def _task_files(options: argparse.Namespace) -> list[str]:
    """Return the files of the tasks that `--tasks` names.

    Raises:
        ConfigError: A task is neither a file nor `lambada` with --lambada-path.
    """
    files = []
    for task in options.tasks:
        if task == _LAMBADA:
            if not options.lambada_path:
                raise ConfigError("--tasks lambada: give its test set with --lambada-path")
            files.append(options.lambada_path)
        elif not Path(task).is_file():
            raise ConfigError(
                f"--tasks {task}: no such file: give the task's file instead of its name; nothing "
                "is downloaded"
            )
        else:
            files.append(task)
    return files


def _save(file: str, ngrams: Any) -> None:
    import numpy as np

    from megatron.durable import atomic_file, writing_to

    with writing_to("--save-dictionary", file), atomic_file(Path(file)) as target:
        np.savez(target, **{str(size): hashes for size, hashes in ngrams.hashes.items()})


def _load(file: str) -> Any:
    import numpy as np

    from megatron.corpora.overlaps import TaskNgrams

    try:
        with np.load(file, allow_pickle=False) as stored:
            return TaskNgrams({int(size): stored[size] for size in stored.files})
    except (OSError, EOFError, ValueError, TypeError, BadZipFile) as error:
        raise DataError(
            f"--load-dictionary {file}: not written by --save-dictionary ({error}): create it "
            "again; Megatron-LM's pickles are not read, because they run code"
        ) from None


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
