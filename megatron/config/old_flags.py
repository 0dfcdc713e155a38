"""Flags of Megatron-LM from 2019 on that 23.08 no longer takes, and a later one that is no longer
meant to be used, said in today's words.

Where today's flags say the same, an old one is translated with one notice; where nothing does, it
is refused with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from megatron.config.command_line import Given

Translate = Callable[[Given, Sequence[Given]], list[Given]]


@dataclass(frozen=True)
class OldFlag:
    """One old flag.

    Attributes:
        name: its spelling.
        era: the versions that had it.
        now: what it is called today, for the documentation.
        translate: the flag and the whole command line to today's flags.
        program: the one that takes it, where that is not every one: by file and a flag it has.
    """

    name: str
    era: str
    now: str
    translate: Translate
    program: tuple[str, str] | None = None


@dataclass(frozen=True)
class GoneFlag:
    """An old flag, or one value of a flag, that nothing today stands for."""

    name: str
    era: str
    remedy: str
    value: str | None = None


@dataclass
class Translation:
    """A command line in today's flags, a notice for each old one, a problem for each gone one."""

    flags: list[Given] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def translate(flags: Sequence[Given], known: Container[str] = ()) -> Translation:
    """Today's command line for an old one; flags that the program has (`known`) are not old."""
    old = {flag.name: flag for flag in OLD_FLAGS if flag.name not in known}
    gone = {(flag.name, flag.value): flag for flag in GONE_FLAGS if flag.name not in known}
    result = Translation()
    for given in flags:
        value = given.values[0] if given.values else None
        lost = gone.get((given.name, None)) or gone.get((given.name, value))
        if lost is not None:
            shown = f"{lost.name} {lost.value}" if lost.value else lost.name
            result.problems.append(f"{shown} is gone (last seen {lost.era}): {lost.remedy}")
        elif given.name in old:
            entry = old[given.name]
            if entry.program is not None and entry.program[1] not in known:
                result.problems.append(
                    f"{given} is an old flag ({entry.era}) for {entry.program[0]} {entry.now}: "
                    "run that, or drop it"
                )
                continue
            now = entry.translate(given, flags)
            result.flags += now
            meaning = " ".join(str(flag) for flag in now) or f"nothing: {entry.now}"
            result.notices.append(f"{given} is an old flag ({entry.era}), read as {meaning}")
        else:
            result.flags.append(given)
    return result


def _renamed(*names: str) -> Translate:
    """The same values under new names."""
    return lambda given, _: [Given(name, given.values) for name in names]


def _nothing(given: Given, _: Sequence[Given]) -> list[Given]:
    return [Given("", given.values)] if given.values else []


def _is(name: str, value: str | None = None) -> Translate:
    """One fixed flag, whatever words followed the old one (which argparse then refuses)."""
    values = (value,) if value else ()
    return lambda given, _: [Given(name, values + given.values)]


_LAYER_COUNTS = (
    "--recompute-num-layers",
    "--checkpoint-num-layers",
    "--activations-checkpoint-num-layers",
)


def _recompute_all(method: str | None) -> Translate:
    """Whole layers recomputed, in groups of one layer unless the command line counts them."""

    def translate_one(given: Given, flags: Sequence[Given]) -> list[Given]:
        now = [Given("--recompute-granularity", ("full",))]
        values = given.values if method is None else (method, *given.values)
        now.append(Given("--recompute-method", values))
        if not any(flag.name in _LAYER_COUNTS for flag in flags):
            now.append(Given("--recompute-num-layers", ("1",)))
        return now

    return translate_one


def _no_position_embedding(given: Given, flags: Sequence[Given]) -> list[Given]:
    """Implied by rope; otherwise no positions at all."""
    for flag in flags:
        if flag.name == "--use-rotary-position-embeddings":
            return []
        if flag.name == "--position-embedding-type" and flag.values == ("rope",):
            return []
    return [Given("--position-embedding-type", ("none", *given.values))]


_EVALUATION = ("tasks/main.py", "--task")

OLD_FLAGS: tuple[OldFlag, ...] = (
    OldFlag("--batch-size", "to v2.0", "--micro-batch-size", _renamed("--micro-batch-size")),
    OldFlag("--warmup", "to v1", "--lr-warmup-fraction", _renamed("--lr-warmup-fraction")),
    OldFlag(
        "--model-parallel-size",
        "to v1",
        "--tensor-model-parallel-size",
        _renamed("--tensor-model-parallel-size"),
    ),
    OldFlag(
        "--checkpoint-activations",
        "to 2022",
        "--recompute-granularity full --recompute-method uniform",
        _recompute_all("uniform"),
    ),
    OldFlag(
        "--checkpoint-num-layers",
        "to v2.5",
        "--recompute-num-layers",
        _renamed("--recompute-num-layers"),
    ),
    OldFlag(
        "--distribute-checkpointed-activations",
        "to v2.5",
        "--distribute-saved-activations",
        _renamed("--distribute-saved-activations"),
    ),
    OldFlag(
        "--activations-checkpoint-method",
        "v2.6",
        "--recompute-granularity full --recompute-method",
        _recompute_all(None),
    ),
    OldFlag(
        "--activations-checkpoint-num-layers",
        "v2.6",
        "--recompute-num-layers",
        _renamed("--recompute-num-layers"),
    ),
    OldFlag(
        "--override-lr-scheduler",
        "to v2.6",
        "--override-opt_param-scheduler",
        _renamed("--override-opt_param-scheduler"),
    ),
    OldFlag(
        "--use-checkpoint-lr-scheduler",
        "to v2.6",
        "--use-checkpoint-opt_param-scheduler",
        _renamed("--use-checkpoint-opt_param-scheduler"),
    ),
    OldFlag(
        "--apply-query-key-layer-scaling",
        "v1",
        "on by default",
        _renamed("--apply-query-key-layer-scaling"),
    ),
    OldFlag(
        "--fp32-allreduce",
        "to v2.0",
        "--accumulate-allreduce-grads-in-fp32",
        _renamed("--accumulate-allreduce-grads-in-fp32"),
    ),
    OldFlag("--min-scale", "to v1", "--min-loss-scale", _renamed("--min-loss-scale")),
    OldFlag("--scaled-upper-triang-masked-softmax-fusion", "v2.0", "allowed by default", _nothing),
    OldFlag(
        "--no-scaled-masked-softmax-fusion",
        "v2.0",
        "--no-masked-softmax-fusion",
        _renamed("--no-masked-softmax-fusion"),
    ),
    OldFlag("--use-contiguous-buffers-in-ddp", "v2.5", "on by default", _nothing),
    OldFlag(
        "--enable-cuda-graph",
        "Core 0.8 to 0.14",
        "--cuda-graph-impl local",
        _is("--cuda-graph-impl", "local"),
    ),
    OldFlag("--fp8-e4m3", "23.04 to 23.06", "--fp8-format e4m3", _is("--fp8-format", "e4m3")),
    OldFlag("--fp8-hybrid", "23.04 to 23.06", "--fp8-format hybrid", _is("--fp8-format", "hybrid")),
    OldFlag(
        "--use-rotary-position-embeddings",
        "23.x",
        "--position-embedding-type rope",
        _is("--position-embedding-type", "rope"),
    ),
    OldFlag(
        "--no-position-embedding",
        "23.x",
        "rope has no table of positions; without rope --position-embedding-type none",
        _no_position_embedding,
    ),
    OldFlag(
        "--standalone-embedding-stage",
        "23.x",
        "--decoder-first-pipeline-num-layers 0",
        _is("--decoder-first-pipeline-num-layers", "0"),
    ),
    OldFlag(
        "--report-topk-accuracies",
        "v1 to v2.6",
        "--retriever-report-topk-accuracies",
        _renamed("--retriever-report-topk-accuracies"),
    ),
    OldFlag("--img-dim", "to v2.6", "--img-h and --img-w", _renamed("--img-h", "--img-w")),
    # Of 2019's evaluate_gpt2.py: a passage's last word, or a file of JSON lines; else WikiText.
    OldFlag("--cloze-eval", "2019", "--task LAMBADA", _is("--task", "LAMBADA"), _EVALUATION),
    OldFlag(
        "--webtext-eval", "2019", "--task PERPLEXITY", _is("--task", "PERPLEXITY"), _EVALUATION
    ),
)

_BINARIZE = "binarize the text with tools/preprocess_data.py and give --data-path"
_SAVES_ALL = "drop it: random states and optimizer are saved and loaded unless told not to"
_TOKENIZER = "give --tokenizer-type and --vocab-file, --merge-file or --tokenizer-model"

GONE_FLAGS: tuple[GoneFlag, ...] = (
    GoneFlag("--faiss-use-gpu", "v2.6", "retrieval with a bi-encoder (ICT, ORQA) is out of scope"),
    GoneFlag(
        "--lr-decay-style",
        "v2.6",
        "use constant, linear, cosine or inverse-square-root",
        value="exponential",
    ),
    GoneFlag("--intermediate-size", "2019", "use --ffn-hidden-size"),
    GoneFlag("--pretrained-bert", "2019", "load a checkpoint with --load and --finetune"),
    GoneFlag("--fp32-embedding", "2019", "use --embedding-weights-in-fp32"),
    GoneFlag("--fp32-layernorm", "2019", "drop it: normalizations compute in fp32"),
    GoneFlag("--fp32-tokentypes", "2019", "drop it: there are no token types in GPT"),
    GoneFlag("--epochs", "2019", "use --train-iters or --train-samples"),
    GoneFlag("--save-iters", "2019", "use --save-interval"),
    GoneFlag("--save-optim", "2019", _SAVES_ALL),
    GoneFlag("--save-rng", "2019", _SAVES_ALL),
    GoneFlag("--save-all-rng", "2019", _SAVES_ALL),
    GoneFlag("--load-optim", "2019", _SAVES_ALL),
    GoneFlag("--load-rng", "2019", _SAVES_ALL),
    GoneFlag("--load-all-rng", "2019", _SAVES_ALL),
    GoneFlag(
        "--resume-dataloader", "2019", "drop it: a resumed run goes on at its place in the data"
    ),
    GoneFlag("--eval-batch-size", "2019", "drop it: evaluation uses --micro-batch-size"),
    GoneFlag("--eval-seq-length", "2019", "drop it: evaluation uses --seq-length"),
    GoneFlag("--eval-max-preds-per-seq", "2019", "drop it: BERT's data is binarized beforehand"),
    GoneFlag("--max-preds-per-seq", "2019", "drop it: BERT's data is binarized beforehand"),
    GoneFlag("--train-data", "2019", _BINARIZE),
    GoneFlag("--valid-data", "2019", _BINARIZE),
    GoneFlag("--test-data", "2019", _BINARIZE),
    GoneFlag("--delim", "2019", _BINARIZE),
    GoneFlag("--text-key", "2019", "name the key by --json-keys of tools/preprocess_data.py"),
    GoneFlag("--eval-text-key", "2019", "name the key by --json-keys of tools/preprocess_data.py"),
    GoneFlag("--lazy-loader", "2019", "drop it: data files are memory-mapped"),
    GoneFlag("--loose-json", "2019", _BINARIZE),
    GoneFlag("--use-tfrecords", "2019", _BINARIZE),
    GoneFlag("--tokenizer-model-type", "2019", _TOKENIZER),
    GoneFlag("--tokenizer-path", "2019", _TOKENIZER),
    GoneFlag("--cache-dir", "2019", "drop it: nothing is downloaded; " + _TOKENIZER),
)
