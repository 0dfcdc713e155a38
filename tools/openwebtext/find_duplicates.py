r"""Find near-duplicates among the documents of JSON lines files with MinHash.

    python tools/openwebtext/find_duplicates.py --inputs cc.json cc_id news.json news_id \
        --output duplicates.json

The command writes lines {"id": [{"other id": similarity}, ...]}, which group_duplicate_url.py
reads. By default, the similarity is the Jaccard similarity of 5-grams of words, estimated from the
fingerprints.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

if __package__ in (None, ""):
    # When this file is run as a script, the package may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron.command import exit_immediately, tool_main
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError, DataError

_SIMILAR = 0.5  # pairs with a lower similarity are not written
_BATCH = 4096  # documents


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("find_duplicates.py", __doc__)
    parser.add_argument("--seed", type=int, default=1234, help="Seed of the hash (default: 1234).")
    parser.add_argument(
        "--inputs",
        nargs="*",
        default=[],
        metavar="FILE KEY",
        help="Files, each followed by the key of its IDs.",
    )
    parser.add_argument(
        "--load-fingerprints",
        nargs="*",
        default=[],
        metavar="FILE",
        help="Files of fingerprints to add.",
    )
    parser.add_argument("--save-fingerprints", metavar="FILE", help="File for all fingerprints.")
    parser.add_argument("--output", metavar="FILE", help="File for the duplicates.")
    parser.add_argument(
        "--jaccard",
        default="union",
        choices=("union", "min", "max"),
        help="Set whose size divides the number of common n-grams: the union, the smaller or the "
        "larger document (default: union).",
    )
    parser.add_argument("--num-bands", type=int, default=10, help="Number of bands (default: 10).")
    parser.add_argument(
        "--num-seeds",
        type=int,
        default=100,
        help="Number of values in all bands together (default: 100).",
    )
    no_effect = "Accepted for old scripts; no effect."
    parser.add_argument("--heuristic-iter", type=int, help=no_effect)
    parser.add_argument("--jaccard-parallel", action="store_true", help=no_effect)
    return parser


def run(options: argparse.Namespace) -> None:
    """Compute fingerprints, compare them, and write the requested files.

    Raises:
        UserError: A flag or the input is invalid, or the output cannot be written.
    """
    import numpy as np

    from megatron.corpora.minhash import MinHash, similar_pairs, similarity
    from megatron.corpora.records import write_records

    bands, values = options.num_bands, options.num_seeds
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give at least 0")
    if bands < 1 or values % bands or values < bands:
        raise ConfigError(f"--num-seeds {values}: give a multiple of --num-bands {bands}")
    if len(options.inputs) % 2:
        raise ConfigError(f"--inputs {' '.join(options.inputs)}: give a key after each file")
    if not options.inputs and not options.load_fingerprints:
        raise ConfigError("--inputs: give files and keys, or --load-fingerprints")
    settings = MinHash(bands=bands, rows=values // bands, similarity=_SIMILAR, seed=options.seed)
    parts = [_load(file, settings) for file in options.load_fingerprints]
    for file, key in zip(options.inputs[::2], options.inputs[1::2], strict=True):
        parts.append(_fingerprints(file, key, settings))
    names = [name for part in parts for name in part[0]]
    counts = np.concatenate([part[1] for part in parts])
    signatures = np.concatenate([part[2] for part in parts], axis=1)
    print(f"{len(names):,} documents")
    if options.save_fingerprints:
        _save(options.save_fingerprints, (names, counts, signatures), settings)
    if not options.output:
        return
    first, second = similar_pairs(signatures, settings)
    similarities = similarity(signatures, first, second)
    if options.jaccard != "union":
        shared = similarities * (counts[first] + counts[second]) / (1 + similarities)
        is_min = options.jaccard == "min"
        set_sizes = (np.minimum if is_min else np.maximum)(counts[first], counts[second])
        similarities = np.minimum(shared / np.maximum(set_sizes, 1), 1.0)
    similar: dict[str, list[dict[str, float]]] = {}
    for a, b, value in zip(first.tolist(), second.tolist(), similarities.tolist(), strict=True):
        if names[a] != names[b]:
            similar.setdefault(names[a], []).append({names[b]: round(value, 4)})
    write_records(
        options.output, ({name: similar_names} for name, similar_names in similar.items())
    )
    print(f"{options.output}: {len(first):,} pairs of near-duplicates")


def _fingerprints(file: str, key: str, settings: Any) -> tuple[list[str], Any, Any]:
    """Return the IDs, word counts `[documents]` and signatures `[values, documents]` of a file."""
    import numpy as np

    from megatron.corpora.minhash import sign
    from megatron.corpora.records import read_records
    from megatron.corpora.words import count_words

    names: list[str] = []
    counts = [np.empty(0, np.int64)]
    signatures = [np.empty((settings.values, 0), np.uint16)]
    batch: list[bytes] = []

    def finish() -> None:
        counts.append(count_words(batch))
        signatures.append(sign(batch, settings))
        batch.clear()

    for record in read_records(file, ["text"]):
        if key not in record:
            raise DataError(f"{file}: document {len(names) + 1} has no key {key!r}: fix --inputs")
        names.append(str(record[key]))
        batch.append(record["text"].encode())
        if len(batch) == _BATCH:
            finish()
    finish()
    return names, np.concatenate(counts), np.concatenate(signatures, axis=1)


def _save(file: str, part: tuple[list[str], Any, Any], settings: Any) -> None:
    import json

    import numpy as np

    from megatron.durable import atomic_file, writing_to

    names, counts, signatures = part
    data = np.frombuffer(json.dumps(names).encode(), np.uint8)
    settings_values = np.array([settings.bands, settings.rows, settings.seed])
    with writing_to("--save-fingerprints", file), atomic_file(Path(file)) as target:
        np.savez(target, names=data, counts=counts, signatures=signatures, made=settings_values)


def _load(file: str, settings: Any) -> tuple[list[str], Any, Any]:
    import json

    import numpy as np

    try:
        with np.load(file, allow_pickle=False) as stored:
            settings_values = stored["made"].tolist()
            names = json.loads(stored["names"].tobytes())
            part = (names, stored["counts"], stored["signatures"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise DataError(
            f"--load-fingerprints {file}: not fingerprints of this tool ({error}): create them "
            "again with --save-fingerprints; Megatron-LM's pickles are not read, because they run "
            "code"
        ) from None
    if settings_values != [settings.bands, settings.rows, settings.seed]:
        raise DataError(
            f"--load-fingerprints {file}: made with --num-bands {settings_values[0]} --num-seeds "
            f"{settings_values[0] * settings_values[1]} --seed {settings_values[2]}: give these "
            "flags"
        )
    return part


main = tool_main(build_parser, run)

if __name__ == "__main__":
    exit_immediately(main())
