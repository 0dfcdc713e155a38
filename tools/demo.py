"""From raw text to a trained, evaluated GPT that writes text: what `make demo` runs.

    python tools/demo.py --out runs/demo
    python tools/demo.py --out runs/mine --input my.jsonl

Without --input the text is this Python's own standard library. Every step prints the command that
it runs, so that each can be repeated by hand with other values.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.command import run_command
from megatron.errors import DataError, StorageError

ROOT = Path(__file__).resolve().parent.parent
MARKER = ".megatron-demo"  # says that a folder is ours to overwrite
# Folders of the standard library's place that hold other things than its code, or tables only.
NOT_LIBRARY = {
    *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data"),
}

VOCAB_SIZE = 2048
SEQ_LENGTH = 128
GLOBAL_BATCH = 8
# Small enough for 2 CPU cores to see about a million tokens in two minutes.
MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 "
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0"
)
OPTIMIZER_FLAGS = (
    "--lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
    "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.06"
)


@dataclass(frozen=True)
class Validation:
    """What the validation documents hold.

    Attributes:
        entropy: unigram entropy of their tokens, nats per token: the loss of a model that knows
            how frequent each of these tokens is and nothing else.
        bytes_per_token: UTF-8 bytes of their text over their tokens.
        start: how the first of them begins.
    """

    entropy: float
    bytes_per_token: float
    start: str


def write_standard_library(path: Path) -> None:
    """One `{"text": source}` line for each module, in an order that is the same every time."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        file
        for file in root.rglob("*.py")
        if NOT_LIBRARY.isdisjoint(file.relative_to(root).parts[:-1])
        and not file.name.startswith("_sysconfigdata")  # how Python was built, generated
    )
    # Shuffled, so that the validation documents at the end are not all of one package.
    random.Random(1234).shuffle(files)
    size = count = 0
    with path.open("w", encoding="utf-8") as output:
        for file in files:
            try:
                source = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few modules are kept in an old encoding
            output.write(json.dumps({"text": source}) + "\n")
            size, count = size + len(source.encode()), count + 1
    print(f"wrote {path}: {count} modules of {root}, {size / 1e6:.1f} MB")


def open_folder(out: Path) -> None:
    """Make `out`, or empty it of what an earlier demo left there.

    Raises:
        StorageError: it holds something else.
    """
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise StorageError(f"--out {out}: not empty and not from a demo; name another folder")
    if (out / MARKER).is_file():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def run(title: str, command: Sequence[str]) -> None:
    """Print and run one command of the tutorial; leave with its exit code where it fails."""
    print(f"\n=== {title}\n$ {shown(command)}\n", flush=True)
    start = time.perf_counter()
    # The commands of this environment come first, so that what is printed is what runs.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False)
    if code.returncode:
        print(f"\ndemo: the step above failed ({title}); its message says why", file=sys.stderr)
        raise SystemExit(code.returncode)
    print(f"[{time.perf_counter() - start:.0f} s]", flush=True)


def shown(command: Sequence[str]) -> str:
    """The command for reading and pasting: a flag and its values stay on one line."""
    lines = [shlex.quote(command[0])]
    for word in command[1:]:
        quoted = shlex.quote(word)
        if word.startswith("--") and len(lines[-1]) > 70:
            lines.append("    " + quoted)
        else:
            lines[-1] += " " + quoted
    return " \\\n".join(lines)


def processes() -> tuple[int, bool]:
    """How many processes train, and whether on GPUs: one for each GPU, else two on the CPU."""
    import torch

    from megatron.device import Device

    if Device.pick().is_gpu:
        return torch.accelerator.device_count(), True
    return 2, False


def training_command(
    out: Path, prefix: Path, split: str, iterations: int, count: int, gpu: bool
) -> list[str]:
    """torchrun and pretrain_gpt.py with everything that the demo asks for."""
    micro_batch = max(1, GLOBAL_BATCH // count)
    return [
        *f"torchrun --standalone --nproc-per-node {count} pretrain_gpt.py".split(),
        *MODEL_FLAGS.split(),
        *f"--micro-batch-size {micro_batch} --global-batch-size {micro_batch * count}".split(),
        *f"--train-iters {iterations}".split(),
        *OPTIMIZER_FLAGS.split(),
        *(["--bf16"] if gpu else []),
        *["--data-path", str(prefix), "--split", split, "--num-workers", "0"],
        *tokenizer_flags(out),
        *f"--eval-interval {max(1, iterations // 4)} --eval-iters 40".split(),
        *["--save", str(out / "checkpoints"), "--save-interval", str(iterations)],
        *["--tensorboard-dir", str(out / "tensorboard")],
        *["--metrics-jsonl", str(out / "metrics.jsonl")],
        *f"--log-interval {max(1, iterations // 20)}".split(),
    ]


def tokenizer_flags(out: Path) -> list[str]:
    """GPT-2's form of the trained tokenizer: ids as with tokenizer.json, and faster in bulk."""
    folder = out / "tokenizer"
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def split_of(documents: int) -> tuple[str, int]:
    """`--split` that keeps every 20th document for validation, and the first of those.

    Raises:
        DataError: there is only one document.
    """
    if documents < 2:
        raise DataError(
            f"the input has {documents} document(s); give at least 2, one on each line, so that "
            "one can be kept for validation"
        )
    held_out = max(1, documents // 20)
    return f"{documents - held_out},{held_out},0", documents - held_out


def describe_validation(dataset: Any, first: int, tokenizer_file: Path) -> Validation:
    """Measure the documents of `dataset` from number `first` on."""
    import numpy as np
    from tokenizers import Tokenizer

    bounds = dataset.document_indices
    tokens = np.concatenate([dataset.get(i) for i in range(int(bounds[first]), len(dataset))])
    text = Tokenizer.from_file(str(tokenizer_file)).decode(tokens.tolist())
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return Validation(
        entropy=float(-(shares * np.log(shares)).sum()),
        bytes_per_token=len(text.encode()) / len(tokens),
        start=text[:40].partition("\n")[0],
    )


def report(out: Path, validation: Validation, loss: float, seconds: float) -> None:
    """The result, and what to look at next."""
    per_byte = math.log(2) * validation.bytes_per_token
    entropy, saved = validation.entropy, out / "checkpoints"
    print(f"""
=== Result
validation loss  {loss:.3f} nats per token, {loss / per_byte:.3f} bits per byte
unigram entropy  {entropy:.3f} nats per token, {entropy / per_byte:.3f} bits per byte
                 (of the validation tokens: the loss of knowing only how frequent each token is)
time             {seconds:.0f} s

Loss curve     {out / "loss.png"}
TensorBoard    .venv/bin/tensorboard --logdir {out / "tensorboard"}
Metrics        {out / "metrics.jsonl"}
Checkpoint     {saved}
Train on       the torchrun command above with a larger --train-iters, --load {saved}
               and --override-opt_param-scheduler (a longer run has another learning rate)
Your own text  make demo INPUT=my.jsonl OUT=runs/mine (a {{"text": ...}} object a line)""")


def demo(out: Path, source: Path | None, iterations: int) -> None:
    """Run all the steps."""
    start = time.perf_counter()
    open_folder(out)
    corpus = out / "corpus.jsonl" if source is None else source
    if source is None:
        print("=== Text: the source of Python's standard library")
        write_standard_library(corpus)
    run(
        "Train a byte-level BPE tokenizer",
        ["python", "tools/train_tokenizer.py", "--input", str(corpus)]
        + ["--vocab-size", str(VOCAB_SIZE), "--output-dir", str(out / "tokenizer")],
    )
    run(
        "Turn the text into token ids",
        ["python", "tools/preprocess_data.py", "--input", str(corpus)]
        + ["--output-prefix", str(out / "corpus"), *tokenizer_flags(out)]
        + ["--append-eod", "--workers", "2"],
    )
    from megatron.data.indexed import IndexedDataset

    prefix = out / "corpus_text_document"
    dataset = IndexedDataset(prefix)
    split, first = split_of(len(dataset.document_indices) - 1)
    validation = describe_validation(dataset, first, out / "tokenizer" / "tokenizer.json")
    count, gpu = processes()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // count)))
    where = f"{count} GPU(s)" if gpu else f"{count} processes on the CPU"
    run(
        f"Pretrain a small GPT on {where}",
        training_command(out, prefix, split, iterations, count, gpu),
    )
    run(
        "Draw the loss curve",
        ["python", "tools/plot_loss.py", "--metrics", str(out / "metrics.jsonl")]
        + ["--output", str(out / "loss.png"), "--entropy", f"{validation.entropy:.4f}"],
    )
    prompt = "    def __init__(self" if source is None else validation.start
    run(
        "Let it write",
        ["python", "tools/generate_text.py", "--load", str(out / "checkpoints")]
        + ["--prompt", prompt, "--max-new-tokens", "200", "--num-samples", "2"]
        + ["--temperature", "0.7", "--top-k", "40", "--seed", "1"],
    )
    loss = last_validation_loss(out / "metrics.jsonl")
    report(out, validation, loss, time.perf_counter() - start)


def last_validation_loss(metrics: Path) -> float:
    """Nats per token, from the last record that has it."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return float([r["lm loss validation"] for r in records if "lm loss validation" in r][-1])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="From raw text to a trained, evaluated GPT that writes text."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for everything it writes"
    )
    parser.add_argument(
        "--input", type=Path, help='jsonl with {"text": ...} lines; unset: the standard library'
    )
    parser.add_argument(
        "--iters", type=int, default=1000, help="training iterations (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def checked_demo(options: argparse.Namespace) -> None:
    if options.input is not None and not options.input.is_file():
        raise DataError(f"--input {options.input}: no such file")
    if options.iters < 1:
        raise DataError(f"--iters {options.iters}: give at least 1")
    demo(options.out, options.input, options.iters)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return run_command(lambda: checked_demo(options))


if __name__ == "__main__":
    sys.exit(main())
