r"""Compute a vector for each text with a BERT or a Hugging Face sentence encoder.

    python tools/bert_embedding/main.py --input texts.jsonl --load runs/bert --output-dir vectors
    torchrun --nproc-per-node 8 tools/bert_embedding/main.py --input texts.jsonl \
        --bert-embedder-type huggingface --load sentence-encoder --output-dir vectors

This writes vectors/<a>-<b>.hdf5, whose dataset `data` contains the float32 vectors of texts a to
b - 1. Several processes divide these blocks among themselves. If a run is interrupted, the next one
continues with the first missing block.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.command import print_line, tool_main
from megatron.config.arguments import ToolParser, minimum_problems
from megatron.durable import replace_file, writing_to
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.retro.embedding import EmbedderOptions

_ORIGIN_FILE = "made_from.json"  # the file in --output-dir that records the sources of the vectors


def build_parser() -> ToolParser:
    """Build the command-line parser. Megatron-LM's flag names are also accepted."""
    parser = ToolParser("bert_embedding/main.py", __doc__, shows_defaults=True)
    group = parser.add_argument_group("Input and output")
    group.add_argument(
        "--input", nargs="+", required=True, help="JSON lines, text files, Parquet, or folders"
    )
    group.add_argument("--json-key", default="text", help="Key of the text")
    group.add_argument("--output-dir", required=True, metavar="DIR", help="Folder for the blocks")
    group.add_argument(
        "--block-size", "--retro-block-size", type=int, default=100_000, help="Texts per block"
    )
    group = parser.add_argument_group("Network")
    group.add_argument(
        "--bert-embedder-type",
        choices=("megatron", "huggingface"),
        default="megatron",
        help="A BERT of this package, or an encoder that transformers loads",
    )
    group.add_argument(
        "--load",
        "--bert-embedder-load",
        required=True,
        help="Folder of the BERT's checkpoints, or folder or name of a Hugging Face model",
    )
    group.add_argument("--tokenizer-type", help="BERT's tokenizer type, if not the checkpoint's")
    group.add_argument("--vocab-file", help="BERT's vocabulary, if not the checkpoint's")
    group.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="Number format")
    group.add_argument(
        "--batch-size", "--retro-bert-batch-size", type=int, default=128, help="Texts per batch"
    )
    group.add_argument(
        "--max-length",
        "--retro-bert-max-chunk-length",
        type=int,
        default=256,
        help="Maximum number of tokens in a text, including special tokens; the rest is cut off",
    )
    parser.add_trust()
    group = parser.add_argument_group("Compatibility")
    group.add_argument(
        "--retro-compatible",
        action="store_true",
        help="Mask the texts as in training, like Megatron-LM 23.08",
    )
    group.add_argument("--seed", type=int, default=1234, help="Seed of the masks")
    group.add_argument("--mask-prob", type=float, default=0.15, help="Fraction of tokens to mask")
    group.add_argument(
        "--output-bert-embeddings", action="store_true", help="Accepted for old scripts; no effect"
    )
    return parser


def run(options: argparse.Namespace) -> None:
    """Embed the texts.

    Raises:
        UserError: A flag is invalid, a file or the checkpoint cannot be read, or the output cannot
            be written.
    """
    if problems := minimum_problems(options, block_size=1, batch_size=1):
        raise ConfigError(problems)
    if not 0 <= options.mask_prob <= 1:
        raise ConfigError(f"--mask-prob {options.mask_prob}: give a number from 0 to 1")
    from megatron.data.text_input import find_inputs
    from megatron.device import Device
    from megatron.parallel.layout import Axis
    from megatron.processes.launch import read_launch
    from megatron.retro.blocks import DataSet, TableBlock, blocks_to_do, plan_blocks, write_block
    from megatron.retro.embedding import build_embedder

    launch, folder = read_launch(), Path(options.output_dir)
    paths = find_inputs(options.input)
    count, digest = 0, hashlib.sha256()
    for text in read_texts(paths, options.json_key):
        count += 1
        digest.update(text.encode() + b"\0")
    if not count:
        raise DataError(f"--input {' '.join(options.input)}: there is no text")
    device = Device.pick(launch.local_rank)
    device.activate()
    embedder = build_embedder(_embedder_options(options), device)
    origin = {
        "input": [str(Path(path).resolve()) for path in paths],
        "texts": count,
        "sha256 of the texts": digest.hexdigest(),
        "width": embedder.width,
        **{name: getattr(options, name) for name in _ORIGIN_FLAGS},
        _ITERATION: embedder.iteration,
    }
    _check_origin(folder / _ORIGIN_FILE, origin)

    def contents(block: TableBlock) -> dict[str, DataSet]:
        return {"data": DataSet("f4", (block.rows, embedder.width))}

    # Each process writes its own blocks without waiting for the others.
    own_blocks = plan_blocks(folder, count, options.block_size)[launch.rank :: launch.world_size]
    texts, position = read_texts(paths, options.json_key), 0
    for block in blocks_to_do(own_blocks, contents, Axis()):
        batch = list(islice(texts, block.start - position, block.stop - position))
        position = block.stop
        write_block(block, {"data": embedder.embed(batch)})
        print_line(
            f"{block.path}: {block.rows:,} of {count:,} vectors, {embedder.width} numbers each"
        )


# The flags that determine the vectors.
_ORIGIN_FLAGS = (
    *("json_key", "block_size", "bert_embedder_type", "load", "tokenizer_type", "vocab_file"),
    *("dtype", "max_length", "retro_compatible", "seed", "mask_prob"),
)
_ITERATION = "iteration of --load"  # a run may have saved a newer checkpoint in the same folder


def _embedder_options(options: argparse.Namespace) -> EmbedderOptions:
    from megatron.config.data import TokenizerConfig
    from megatron.retro.embedding import EmbedderOptions, Masking

    if (options.tokenizer_type is None) != (options.vocab_file is None):
        raise ConfigError("give both --tokenizer-type and --vocab-file, or neither")
    tokenizer = None
    if options.vocab_file is not None:
        tokenizer = TokenizerConfig(
            tokenizer_type=options.tokenizer_type, vocab_file=options.vocab_file
        )
    return EmbedderOptions(
        options.bert_embedder_type,
        options.load,
        tokenizer,
        batch_size=options.batch_size,
        max_length=options.max_length,
        dtype=options.dtype,
        masking=Masking(options.seed, options.mask_prob) if options.retro_compatible else None,
        allow_foreign=options.allow_foreign_checkpoints,
        length_flag="--max-length",
    )


def read_texts(paths: Sequence[str], key: str) -> Iterator[str]:
    """Yield the texts of files listed by `find_inputs`, in order. Sentences are joined by spaces.

    Raises:
        DataError: A file cannot be read, or a line has no text.
    """
    from megatron.data.text_input import parse_block, read_blocks

    for block in read_blocks(paths, [key]):
        documents = parse_block(block, [key])
        for line, _, reason in documents.bad:
            raise DataError(
                f"--input {block.path}: line {line + 1} after byte {block.offset:,}: "
                f"{reason}: fix or remove the line"
            )
        for (value,) in documents.values:
            yield value if isinstance(value, str) else " ".join(value)


def _check_origin(path: Path, origin: dict[str, Any]) -> None:
    """Record the sources of the vectors, or compare them with an earlier record.

    Raises:
        ConfigError: The folder contains vectors made from other sources or with other flags.
        DataError: The earlier record cannot be read.
        StorageError: The record cannot be written.
    """
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        with writing_to("--output-dir", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(origin, indent=1).encode())
        return
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}): give another --output-dir, or delete the folder"
        ) from error
    recorded = recorded if isinstance(recorded, dict) else {}
    changed = [
        name
        for name, value in origin.items()
        # Records of earlier versions do not contain the iteration.
        if recorded.get(name) != value and (name != _ITERATION or name in recorded)
    ]
    if changed:
        raise ConfigError(
            f"--output-dir {path.parent} contains vectors that were made with {changed[0]} "
            f"{recorded.get(changed[0])!r}, not {origin[changed[0]]!r}: give another folder, or "
            "delete it"
        )


main = tool_main(build_parser, run)
