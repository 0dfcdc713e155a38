"""What differs between the demos of GPT, BERT and T5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 2048
# Small enough for 2 CPU cores to see millions of tokens in some minutes.
_NETWORK = (
    "--hidden-size 128 --num-attention-heads 4 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0"
)
_OPTIMIZER = (
    "--lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
    "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.06"
)


@dataclass(frozen=True)
class Kind:
    """One demo.

    Attributes:
        name: of the model.
        script: trains it.
        sentences: whether documents are cut into sentences: lines, where they are source code.
        vocabulary: kind of tokenizer, for a title.
        vocabulary_flags: for training it.
        tokenizer: flags that read the tokenizer in a folder.
        network: flags for the size of model and samples.
        global_batch: samples an update.
        iterations: updates, where the user names no number.
        title: of the last step, which shows what the model can do.
        show: that step's tool and flags, from texts of validation documents; None: source code.
        choice: what `make demo` needs beside.
    """

    name: str
    script: str
    sentences: bool
    vocabulary: str
    vocabulary_flags: tuple[str, ...]
    tokenizer: Callable[[Path], list[str]]
    network: str
    global_batch: int
    iterations: int
    title: str
    show: Callable[[Sequence[str] | None], list[str]]
    choice: str

    @property
    def training_flags(self) -> list[str]:
        """Network and optimizer."""
        return [*self.network.split(), *_NETWORK.split(), *_OPTIMIZER.split()]


def _bpe(folder: Path) -> list[str]:
    """GPT-2's form of the trained tokenizer: ids as with tokenizer.json, and faster in bulk."""
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    return ["--tokenizer-type", "GPT2BPETokenizer", *files]


def _wordpiece(folder: Path) -> list[str]:
    return ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]


def _go_on(texts: Sequence[str] | None) -> list[str]:
    prompt = "    def __init__(self" if texts is None else texts[0][:40].partition("\n")[0]
    return [
        *["tools/generate_samples_gpt.py", "--prompt", prompt, "--out-seq-length", "100"],
        *"--num-samples 2 --temperature 0.7 --top_k 40 --seed 1".split(),
    ]


_HOLES = (
    "for [MASK] in range(10):",
    "if [MASK] is None:",
    "def __init__([MASK], name):",
    "return [MASK].path.join(path, name)",
    "raise [MASK]('not a number')",
)


def _fill_in(texts: Sequence[str] | None) -> list[str]:
    holes = _HOLES if texts is None else [hide_a_word(text) for text in texts]
    return ["tools/fill_in.py", "--text", *holes]


def hide_a_word(text: str) -> str:
    """The first 30 words of `text`, with `[MASK]` for one near the middle, of letters if any is."""
    words = text.split()[:30]
    middle = len(words) // 2
    nearest = sorted(range(len(words)), key=lambda i: (not words[i].isalpha(), abs(i - middle)))
    words[nearest[0]] = "[MASK]"
    return " ".join(words)


KINDS = {
    "gpt": Kind(
        name="GPT",
        script="pretrain_gpt.py",
        sentences=False,
        vocabulary="byte-level BPE",
        vocabulary_flags=(),
        tokenizer=_bpe,
        network="--num-layers 4 --seq-length 128 --max-position-embeddings 128",
        global_batch=8,
        iterations=1000,
        title="Let it write",
        show=_go_on,
        choice="",
    ),
    "bert": Kind(
        name="BERT",
        script="pretrain_bert.py",
        sentences=True,
        vocabulary="WordPiece",
        vocabulary_flags=("--kind", "wordpiece"),
        tokenizer=_wordpiece,
        network="--num-layers 4 --seq-length 64 --max-position-embeddings 64",
        global_batch=16,
        iterations=2000,
        title="Let it fill in hidden words",
        show=_fill_in,
        choice=" MODEL=bert",
    ),
    "t5": Kind(
        name="T5",
        script="pretrain_t5.py",
        sentences=True,
        vocabulary="WordPiece",
        vocabulary_flags=("--kind", "wordpiece"),
        tokenizer=lambda folder: [*_wordpiece(folder), "--vocab-extra-ids", "100"],
        network="--num-layers 2 --encoder-seq-length 64 --decoder-seq-length 32 "
        "--max-position-embeddings 64",
        global_batch=16,
        iterations=2000,
        title="Let it fill in hidden words",
        show=_fill_in,
        choice=" MODEL=t5",
    ),
}
