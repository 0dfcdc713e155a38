"""The differences between the demos of GPT, a mixture of experts, BERT and T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.fields import fields_of
from megatron.config.model import ModelOptions
from megatron.errors import ConfigError

DEFAULT_OUT = Path("runs/demo")
VOCAB_SIZE = 2048
# The demos' network, small enough for 2 CPU cores to process millions of tokens in a few minutes.
_NETWORK = "--hidden-size 128 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0"
_BLOCKS = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
_LAYERS = "--num-layers 4 --seq-length 128 --max-position-embeddings 128"
# Each token uses two of eight experts, each half as wide as the GPT's MLP: the same work per token.
_EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 160 --moe-aux-loss-coeff 1e-2"
# The settings that a small model keeps from a recipe's network. The sizes are those of a demo.
_KEPT_FIELDS = (
    *("position_embedding_type", "normalization", "swiglu", "add_bias_linear", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "qk_layernorm", "squared_relu"),
)
_OPTIMIZER = (
    "--lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
    "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.06"
)


@dataclass(frozen=True)
class Kind:
    """A demo of one kind of model.

    Attributes:
        name: The name of the model.
        script: The script that trains it.
        sentences: Whether documents are split into sentences (source code: into lines).
        vocabulary: The kind of tokenizer, as shown in the title of a step.
        vocabulary_flags: The flags for training the tokenizer.
        tokenizer: A function that returns the flags for reading the tokenizer in a folder.
        network: The flags for the number of layers and the sample length.
        global_batch: The number of samples per update.
        iterations: The default number of updates.
        title: The title of the last step, which shows what the model can do.
        inference_command: A function that returns the command and the flags of the last step, given
            validation texts, or `None` if the text is source code.
        next_steps: A function that returns instructions for using the model, given the demo's
            folder.
        blocks: The flags for the structure of the layers.
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
    inference_command: Callable[[Sequence[str] | None], list[str]]
    next_steps: Callable[[Path], str]
    blocks: str = _BLOCKS

    @property
    def make_argument(self) -> str:
        """The argument for `make demo` that selects this demo, with a leading space."""
        return "" if self.name == "GPT" else f" MODEL={self.name.lower()}"

    @property
    def training_flags(self) -> list[str]:
        """The flags for the network and the optimizer."""
        return [*self.network.split(), *_NETWORK.split(), *self.blocks.split(), *_OPTIMIZER.split()]


def _wordpiece(folder: Path) -> list[str]:
    return ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]


def _generate(texts: Sequence[str] | None) -> list[str]:
    prompt = "    def __init__(self" if texts is None else texts[0][:40].partition("\n")[0]
    return [
        *["generate", "--prompt", prompt, "--out-seq-length", "100"],
        *"--num-samples 2 --temperature 0.7 --top_k 40 --seed 1".split(),
    ]


def _serve_steps(out: Path) -> str:
    make_out = "" if out == DEFAULT_OUT else f" OUT={out}"
    return f"""Talk to the model: run
    make serve{make_out}
and open http://127.0.0.1:5000/ in a browser, or without a browser run
    .venv/bin/megatron chat {out / "checkpoints"}"""


_MASKED_LINES = (
    "def __init__([MASK], name):",
    "def close([MASK]):",
    "class Error(Exception)[MASK]",
    "if [MASK] is None:",
    "return [MASK].path.join(path, name)",
)


def _fill_in(texts: Sequence[str] | None) -> list[str]:
    masked_texts = _MASKED_LINES if texts is None else [mask_a_word(text) for text in texts]
    return ["fill-in", "--text", *masked_texts]


def _fill_in_steps(out: Path) -> str:
    command = f".venv/bin/megatron fill-in --load {out / 'checkpoints'}"
    return f"Ask the model: run\n    {command} --text 'while [MASK]:'"


def mask_a_word(text: str) -> str:
    """Return the first 30 words of `text`, with `[MASK]` in place of one near the middle.

    A word that consists of letters is preferred.
    """
    words = text.split()[:30]
    middle = len(words) // 2
    nearest = sorted(range(len(words)), key=lambda i: (not words[i].isalpha(), abs(i - middle)))
    words[nearest[0]] = "[MASK]"
    return " ".join(words)


_GPT = Kind(
    name="GPT",
    script="pretrain_gpt.py",
    sentences=False,
    vocabulary="byte-level BPE",
    vocabulary_flags=(),
    # GPT-2's files give the same ids as tokenizer.json, and encode faster in bulk.
    tokenizer=lambda folder: [
        *["--tokenizer-type", "GPT2BPETokenizer"],
        *["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")],
    ],
    network=_LAYERS,
    global_batch=8,
    iterations=1000,
    title="Generate text",
    inference_command=_generate,
    next_steps=_serve_steps,
)
KINDS = {
    "gpt": _GPT,
    "moe": replace(_GPT, name="MoE", network=f"{_LAYERS} {_EXPERTS}"),
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
        title="Fill in masked words",
        inference_command=_fill_in,
        next_steps=_fill_in_steps,
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
        title="Fill in masked words",
        inference_command=_fill_in,
        next_steps=_fill_in_steps,
    ),
}


def small_kind(architecture: str, model: Mapping[str, Any]) -> Kind:
    """Return a demo with the network and layers of a recipe, at the sizes of a demo.

    Args:
        architecture: The kind of network, such as gpt, bert or t5.
        model: The values of the recipe's section `model`, by field name.

    Raises:
        ConfigError: There is no demo for this kind of network.
    """
    if architecture not in KINDS:
        raise ConfigError(
            f"--small: there is no demo for this kind of network ({architecture}): use "
            "--mock-data with smaller sizes instead"
        )
    kind = KINDS["moe" if model.get("num_experts") else architecture]
    fields = {field.name: field for field in fields_of(ModelOptions)}
    flags = [fields[name].spell(model[name]) for name in _KEPT_FIELDS if name in model]
    if model.get("num_query_groups"):
        flags.append("--group-query-attention --num-query-groups 2")
    return replace(kind, blocks=" ".join(flags), iterations=kind.iterations // 3)
