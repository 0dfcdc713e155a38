"""Go from raw text to a trained and evaluated model; `make demo` runs this.

    python tools/demo.py --out runs/demo
    python tools/demo.py --out runs/mine --input my.jsonl
    python tools/demo.py --model bert --out runs/demo-bert

At the end, a GPT generates text, and a BERT or T5 fills in masked words. Without --input, the text
is the source of Python's standard library. Every step prints its command, so that you can repeat it
by hand with other values. A second run with the same settings renames the folder of the first one.
The files of a run with other settings are replaced only with --overwrite.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.command import tool_main
from megatron.config.arguments import ToolParser
from megatron.durable import replace_file, writing_to
from megatron.environment import environment_with_interpreter, share_cores
from megatron.errors import ConfigError, DataError
from megatron.tools.demo_kinds import DEFAULT_OUT, KINDS, VOCAB_SIZE, Kind

ROOT = Path(__file__).resolve().parents[2]
TEXTS = 5  # validation documents to show the trained model
MARKER = ".megatron-demo"  # a file with the settings of the run that wrote to the folder
# Everything that a demo writes. --overwrite removes nothing else.
OUTPUTS = (
    *("corpus.jsonl", "corpus_text_*.bin", "corpus_text_*.idx", "tokenizer"),
    *("checkpoints", "tensorboard", "metrics.jsonl", "loss.png"),
    *("corpus_sentences_*.bin", "corpus_sentences_*.idx", "wordpiece", "bert", "workdir"),
    *("retro.jsonl", "gpt.jsonl"),
    *("base", "conversations.jsonl*", "held-out.jsonl*", "answers.jsonl"),
)
CHAT = "chat"  # the steps of this demo are in megatron/tools/demo_chat.py
RETRO = "retro"  # the steps of this demo are in megatron/tools/demo_retro.py
# Folders that contain only tables, tests or code that is not part of the standard library.
NOT_LIBRARY = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data"),
}


@dataclass(frozen=True)
class Validation:
    """Statistics and examples of the validation documents.

    Attributes:
        entropy: The unigram entropy of the tokens in nats per token, which is the loss of a model
            that knows only the frequency of each token.
        bytes_per_token: The mean number of UTF-8 bytes of text per token.
        texts: The first texts (sentences or whole documents) of at least 8 tokens, or of any length
            if there are none.
    """

    entropy: float
    bytes_per_token: float
    texts: list[str]


def write_standard_library(path: Path, *, in_lines: bool) -> None:
    """Write the standard library, one `{"text": source}` line per module, always in the same order.

    Args:
        path: The file to write.
        in_lines: Whether to write the source as a list of lines, which then serve as sentences.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file
        for file in root.rglob("*.py")
        if NOT_LIBRARY.isdisjoint(file.relative_to(root).parts[:-1])
        and not file.name.startswith("_sysconfigdata")  # generated when Python was built
    )
    # Shuffle, so that the validation documents at the end are not all from one package.
    random.Random(1234).shuffle(files)
    size, lines = 0, []
    for file in files:
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few modules use an old encoding
        text = [line for line in source.split("\n") if line.strip()] if in_lines else source
        lines.append(json.dumps({"text": text}).encode() + b"\n")
        size += len(source.encode())
    replace_file(path, b"".join(lines))
    print(f"wrote {path}: {len(lines)} modules of {root}, {size / 1e6:.1f} MB")


def check_input(source: Path) -> None:
    """Check the whole input, before anything is written or moved.

    Raises:
        DataError: The file cannot be read, a line is invalid, or there are fewer than two
            documents.
    """
    from megatron.data.text_input import find_inputs, parse_block, read_blocks

    documents, line = 0, 1
    for block in read_blocks(find_inputs([str(source)]), ["text"]):
        parsed = parse_block(block, ["text"])
        for bad in parsed.bad[:1]:
            raise DataError(f"{source}:{line + bad.line}: {bad.reason}; fix or remove the line")
        documents, line = documents + len(parsed.values), line + parsed.lines
    split_of(documents)


def open_folder(out: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
    """Create the folder `out`, and rename the folder of an earlier run with the same settings.

    With `overwrite`, remove the files of an earlier demo from the folder instead. The settings are
    recorded in the folder.

    Raises:
        ConfigError: `out` contains anything else, and `overwrite` is false.
        StorageError: The folder cannot be written.
    """
    present = sorted(path for name in OUTPUTS for path in out.glob(name))
    with writing_to("--out", out):
        if overwrite:
            for path in present:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif out.is_dir() and any(out.iterdir()):
            if read_settings(out) != settings:
                existing = next(iter(present), next(out.iterdir()))
                raise ConfigError(
                    f"--out {out}: {existing} already exists and is not from a demo with these "
                    "settings: choose another folder (make demo OUT=...), or give --overwrite "
                    "(make demo OVERWRITE=1) to replace the files of an earlier run there"
                )
            names = (out.with_name(f"{out.name}.{i}") for i in itertools.count(1))
            moved_to = next(name for name in names if not os.path.lexists(name))
            out.rename(moved_to)
            print(f"An earlier run with the same settings in {out} was moved to {moved_to}.\n")
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / MARKER, json.dumps(settings).encode() + b"\n")


def read_settings(out: Path) -> Any:
    """Return the settings of the demo that wrote to `out`, or `None` if no demo did."""
    try:
        return json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def run_step(title: str, command: Sequence[str]) -> None:
    """Print and run one command of the demo, and exit with its code if it fails."""
    print(f"\n=== {title}\n$ {format_command(command)}\n", flush=True)
    start = time.perf_counter()
    # The command `megatron` exists only if the package is installed.
    argv = ["python", "-m", *command] if command[0] == "megatron" else command
    code = subprocess.run(argv, cwd=ROOT, env=environment_with_interpreter(), check=False)
    if code.returncode:
        print(
            f"\n{Path(sys.argv[0]).stem}: the step above failed ({title}); see its message",
            file=sys.stderr,
        )
        raise SystemExit(code.returncode)
    print(f"[{time.perf_counter() - start:.0f} s]", flush=True)


def format_command(command: Sequence[str]) -> str:
    """Format a command for reading and pasting, with line breaks only before flags."""
    lines = [shlex.quote(command[0])]
    for arg in command[1:]:
        quoted_arg = shlex.quote(arg)
        if arg.startswith("--") and len(lines[-1]) > 70:
            lines.append("    " + quoted_arg)
        else:
            lines[-1] += " " + quoted_arg
    return " \\\n".join(lines)


def processes() -> tuple[int, bool]:
    """Return the number of processes (one per GPU, or two on the CPU) and whether GPUs are used."""
    import torch

    from megatron.device import Device

    if Device.pick().is_gpu:
        return torch.accelerator.device_count(), True
    return 2, False


def training_command(
    kind: Kind, out: Path, prefix: Path, split: str, iterations: int, count: int, gpu: bool
) -> list[str]:
    """Return the training command: the launcher, the model's script and all its flags.

    Args:
        kind: The demo.
        out: The demo's folder.
        prefix: The prefix of the dataset.
        split: The value of --split.
        iterations: The number of updates.
        count: The number of processes.
        gpu: Whether the processes use GPUs.
    """
    micro_batch = max(1, kind.global_batch // count)
    return [
        *"python -m megatron.processes.torchrun --standalone".split(),
        *f"--nproc-per-node {count} {kind.script}".split(),
        *kind.training_flags,
        *f"--micro-batch-size {micro_batch} --global-batch-size {micro_batch * count}".split(),
        *f"--train-iters {iterations}".split(),
        *(["--bf16"] if gpu else []),
        *["--data-path", str(prefix), "--split", split, "--num-workers", "0"],
        *kind.tokenizer(out / "tokenizer"),
        *f"--eval-interval {max(1, iterations // 4)} --eval-iters {min(40, iterations)}".split(),
        *["--save", str(out / "checkpoints"), "--save-interval", str(iterations)],
        *["--tensorboard-dir", str(out / "tensorboard")],
        *["--metrics-jsonl", str(out / "metrics.jsonl")],
        *f"--log-interval {max(1, iterations // 20)}".split(),
    ]


def split_of(documents: int) -> tuple[str, int]:
    """Return a `--split` that holds out 1/20 of the documents, and the index of the first of them.

    Raises:
        DataError: There are fewer than two documents.
    """
    if documents < 2:
        raise DataError(
            f"the input has {documents or 'no'} document{'s' * (documents != 1)}; give at least 2, "
            "one per line, because one is needed for validation"
        )
    held_out = max(1, documents // 20)
    return f"{documents - held_out},{held_out},0", documents - held_out


def describe_validation(dataset: Any, first: int, tokenizer_file: Path) -> Validation:
    """Compute statistics of the validation documents, which begin at index `first` of `dataset`."""
    import numpy as np
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    start = int(dataset.document_indices[first])
    sequences = [dataset.get(i) for i in range(start, len(dataset))]
    tokens = np.concatenate(sequences)
    counts = np.bincount(tokens)
    probabilities = counts[counts > 0] / len(tokens)
    long_sequences = [sequence for sequence in sequences if len(sequence) >= 8]
    return Validation(
        entropy=float(-(probabilities * np.log(probabilities)).sum()),
        bytes_per_token=len(decode(tokens.tolist()).encode()) / len(tokens),
        texts=[decode(sequence.tolist()) for sequence in (long_sequences or sequences)[:TEXTS]],
    )


def report(kind: Kind, out: Path, validation: Validation, loss: float, seconds: float) -> None:
    """Print the result, and suggest what to do next.

    Args:
        kind: The demo.
        out: The demo's folder.
        validation: Statistics of the validation documents.
        loss: The last validation loss, in nats per token.
        seconds: The duration of the demo.
    """
    entropy, checkpoints = validation.entropy, out / "checkpoints"
    unit = "masked token" if kind.sentences else "token"
    untrained = ""
    if not loss < entropy:
        untrained = (
            "\nThe model does not yet know even how frequent each token is, so its output above\n"
            "makes no sense. Train it longer: increase --iters (make demo ITERS=...).\n"
        )
    print(f"""
=== Result
validation loss  {loss:.3f} nats per {unit}{bits_per_byte(kind, validation, loss)}
unigram entropy  {entropy:.3f} nats per token{bits_per_byte(kind, validation, entropy)}
                 (the loss of a model that knows only how frequent each validation token is)
time             {seconds:.0f} s
{untrained}
Loss curve     {out / "loss.png"}
TensorBoard    .venv/bin/tensorboard --logdir {out / "tensorboard"}
Metrics        {out / "metrics.jsonl"}
Checkpoint     {checkpoints}
Train longer   use the training command above with a larger --train-iters, --load {checkpoints}
               and --override-opt_param-scheduler (a longer run has a different learning rate)
Your own text  the same command with --input my.jsonl --out runs/mine, or
               make demo{kind.make_argument} INPUT=my.jsonl OUT=runs/mine
               (one {{"text": ...}} object per line)

{kind.next_steps(out)}""")


def bits_per_byte(kind: Kind, validation: Validation, nats: float) -> str:
    """Format nats per token as bits per byte, or return "" for a masked language model."""
    if kind.sentences:
        return ""
    return f", {nats / (math.log(2) * validation.bytes_per_token):.3f} bits per byte"


def prepare(kind: Kind, out: Path, source: Path | None) -> Path:
    """Prepare the text, the tokenizer and the dataset, and return the dataset's prefix."""
    corpus = out / "corpus.jsonl" if source is None else source
    if source is None:
        print("=== Text: the source of Python's standard library")
        write_standard_library(corpus, in_lines=kind.sentences)
    run_step(
        f"Train a {kind.vocabulary} tokenizer",
        ["megatron", "data", "tokenizer", "--input", str(corpus), *kind.vocabulary_flags]
        + ["--vocab-size", str(VOCAB_SIZE), "--output-dir", str(out / "tokenizer")],
    )
    split_sentences = kind.sentences and source is not None
    run_step(
        "Turn the text into token ids",
        ["megatron", "data", "preprocess", "--input", str(corpus)]
        + ["--output-prefix", str(out / "corpus"), *kind.tokenizer(out / "tokenizer")]
        + ([] if kind.sentences else ["--append-eod"])
        + (["--split-sentences"] if split_sentences else [])
        + ["--workers", "2"],
    )
    return out / ("corpus_text_sentence" if split_sentences else "corpus_text_document")


def demo(kind: Kind, out: Path, source: Path | None, iterations: int) -> None:
    """Run all the steps and report the result.

    Args:
        kind: The demo.
        out: An empty folder for everything that the demo writes.
        source: The text to train on, or `None` for the source of the standard library.
        iterations: The number of updates.
    """
    start = time.perf_counter()
    prefix = prepare(kind, out, source)
    from megatron.data.indexed import IndexedDataset

    dataset = IndexedDataset(prefix)
    split, first = split_of(dataset.num_documents)
    validation = describe_validation(dataset, first, out / "tokenizer" / "tokenizer.json")
    count, gpu = processes()
    share_cores(count)
    devices = f"{count} GPU{'s' * (count > 1)}" if gpu else f"{count} processes on the CPU"
    run_step(
        f"Pretrain a small {kind.name} on {devices}",
        training_command(kind, out, prefix, split, iterations, count, gpu),
    )
    run_step(
        "Draw the loss curve",
        ["megatron", "plot", "--metrics", str(out / "metrics.jsonl")]
        + ["--output", str(out / "loss.png"), "--entropy", f"{validation.entropy:.4f}"],
    )
    tool, *flags = kind.inference_command(None if source is None else validation.texts)
    run_step(kind.title, ["megatron", tool, "--load", str(out / "checkpoints"), *flags])
    loss = last_validation_loss(out / "metrics.jsonl")
    report(kind, out, validation, loss, time.perf_counter() - start)


def last_validation_loss(metrics: Path) -> float:
    """Return the last validation loss in a metrics file, in nats per token."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return float([r["lm loss validation"] for r in records if "lm loss validation" in r][-1])


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("demo.py", "Go from raw text to a trained and evaluated model.")
    parser.add_argument(
        "--model",
        choices=(*KINDS, CHAT, RETRO),
        default="gpt",
        help="Model to train (default: %(default)s).",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help="Folder for all output (default: %(default)s).",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace the files of an earlier run in that folder.",
    )
    parser.add_argument(
        "--input",
        type=Path,
        help='Text to train on, one {"text": ...} object per line (default: the source of '
        "Python's standard library).",
    )
    numbers = ", ".join(f"{kind.iterations} for {name}" for name, kind in KINDS.items())
    parser.add_argument("--iters", type=int, help=f"Training iterations (default: {numbers}).")
    return parser


def run(options: argparse.Namespace, kind: Kind | None = None) -> None:
    """Check the flags, the input and the folder, then run the demo.

    Args:
        options: The command line.
        kind: The demo to run instead of the one that --model names.

    Raises:
        UserError: A flag or the input is invalid, or the folder cannot be used.
    """
    from megatron.tools import demo_chat, demo_retro

    kind = kind or KINDS.get(options.model)
    is_chat = kind is None and options.model == CHAT
    special_demo = demo_chat if is_chat else demo_retro
    default_iterations = kind.iterations if kind else special_demo.ITERATIONS
    iterations = default_iterations if options.iters is None else options.iters
    if kind is None and not is_chat and options.input is not None:
        raise ConfigError("--input: the demo of Retro generates its own text: drop the flag")
    if options.input is not None and not options.input.is_file():
        raise DataError(f"--input {options.input}: no such file: give the path of a text file")
    if iterations < 1:
        raise ConfigError(f"--iters {iterations}: give at least 1")
    # Commands run in the repository, where short relative paths are easier to read.
    in_repository = Path.cwd() == ROOT
    out = options.out if in_repository else options.out.absolute()
    source = options.input if in_repository or options.input is None else options.input.absolute()
    if source is not None:
        if source.resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"--input {source}: is inside --out {out}: choose another folder")
        check_input(source)
    settings = {
        "model": options.model,
        "input": None if source is None else str(source.absolute()),
        "iterations": iterations,
    }
    open_folder(out, settings, overwrite=options.overwrite)
    if kind:
        demo(kind, out, source, iterations)
    elif is_chat:
        demo_chat.demo(out, source, iterations)
    else:
        demo_retro.demo(out, iterations)


main = tool_main(build_parser, run)
