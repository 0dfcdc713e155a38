"""Megatron's flags that have no field here: refused by name, or honoured with nothing to do.

Each is known with its type, so that the rest of the command line is read correctly. A value equal
to Megatron's default asks for nothing and passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KnownFlag:
    """A flag of Megatron's that no field stands for.

    Attributes:
        name: its spelling.
        reason: one line for the user.
        kind: type of its value; None: it takes none.
        default: Megatron's, which passes; None passes for flags without value or default.
        choices: the accepted values.
        many: it takes any number of values.
    """

    name: str
    reason: str
    kind: type | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None
    many: bool = False


def _group(
    reason: str,
    *,
    switches: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    unset: Mapping[str, type] | None = None,
    choices: Mapping[str, tuple[str | None, ...]] | None = None,
) -> tuple[KnownFlag, ...]:
    """Flags with one reason: switches, values by default, unset by type, choices default first."""
    return (
        *(KnownFlag(name, reason) for name in switches),
        *(KnownFlag(name, reason, type(value), value) for name, value in (values or {}).items()),
        *(KnownFlag(name, reason, kind) for name, kind in (unset or {}).items()),
        *(
            KnownFlag(name, reason, str, words[0], tuple(word for word in words if word))
            for name, words in (choices or {}).items()
        ),
    )


REFUSED: tuple[KnownFlag, ...] = (
    *_group(
        "weights depend on --seed, their name and position only, never on the process: "
        "drop the flag",
        switches=("--data-parallel-random-init",),
    ),
    *_group(
        "mixtures of experts are not built: drop the flag",
        switches=("--expert-parallel",),
        unset={"--num-experts": int},
    ),
    KnownFlag(
        "--model-spec",
        "modules named on the command line are not loaded: the network's flags choose its layers",
        str,
        many=True,
    ),
    *_group(
        "--tp-comm-overlap has no parts that are chosen one by one: drop the flag",
        switches=(
            "--disable-tp-comm-overlap-ag",
            "--disable-tp-comm-overlap-rs",
            "--tp-comm-overlap-rs-dgrad",
            "--disable-tp-comm-bulk-dgrad",
            "--disable-tp-comm-bulk-wgrad",
        ),
        unset={"--tp-comm-overlap-cfg": str},
        choices={"--tp-comm-bootstrap-backend": ("nccl", "mpi", "gloo")},
    ),
    *_group(
        "Transformer Engine is not used: layers are our own, drop the flag",
        choices={"--transformer-impl": ("local", "transformer_engine")},
    ),
    KnownFlag(
        "--external-cuda-graph",
        "Transformer Engine is not used: record passes with --cuda-graph-impl local",
    ),
    *(
        KnownFlag(
            name, "--cuda-graph-impl local records whole passes: drop the flag", str, (), many=True
        )
        for name in ("--cuda-graph-scope", "--cuda-graph-modules")
    ),
    *_group(
        "embeddings of BERT are made for Retro, which is out of scope",
        switches=("--output-bert-embeddings",),
        choices={"--bert-embedder-type": ("megatron", "huggingface")},
    ),
    *_group(
        "NVIDIA's internal autoresume service is not used; SIGTERM saves and leaves, and --load "
        "goes on",
        switches=("--adlr-autoresume",),
        values={"--adlr-autoresume-interval": 1000},
    ),
    *_group(
        "retrieval-enhanced pretraining (Retro) is out of scope",
        switches=("--retro-add-retriever", "--retro-return-doc-ids"),
        values={
            "--retro-encoder-layers": 2,
            "--retro-encoder-hidden-dropout": 0.1,
            "--retro-encoder-attention-dropout": 0.1,
            "--retro-num-neighbors": 2,
            "--retro-num-retrieved-chunks": 2,
        },
        unset={"--retro-workdir": str, "--retro-cyclic-train-iters": int},
    ),
    *_group(
        "retrieval with a bi-encoder (ICT, ORQA) is out of scope",
        switches=(
            "--biencoder-shared-query-context-model",
            "--use-one-sent-docs",
            "--retriever-score-scaling",
            "--train-with-neg",
        ),
        values={
            "--biencoder-projection-dim": 0,
            "--query-in-block-prob": 0.1,
            "--indexer-batch-size": 128,
            "--indexer-log-interval": 1000,
            "--retriever-seq-length": 256,
            "--faiss-topk-retrievals": 100,
            "--train-hard-neg": 0,
            "--val-av-rank-hard-neg": 30,
            "--val-av-rank-other-neg": 30,
        },
        choices={"--faiss-match": ("string", "regex")},
        unset={
            "--qa-data-dev": str,
            "--qa-data-test": str,
            "--eval-micro-batch-size": int,
            "--ict-head-size": int,
            "--ict-load": str,
            "--bert-load": str,
            "--titles-data-path": str,
            "--evidence-data-path": str,
            "--block-data-path": str,
            "--embedding-path": str,
        },
    ),
    KnownFlag(
        "--retriever-report-topk-accuracies",
        "retrieval with a bi-encoder (ICT, ORQA) is out of scope",
        int,
        default=(),
        many=True,
    ),
    *_group(
        "vision models are out of scope",
        switches=("--vision-pretraining", "--dino-norm-last-layer"),
        values={
            "--num-classes": 1000,
            "--img-h": 224,
            "--img-w": 224,
            "--num-channels": 3,
            "--patch-dim": 16,
            "--classes-fraction": 1.0,
            "--data-per-class-fraction": 1.0,
            "--sample-rate": 1.0,
            "--head-lr-mult": 1.0,
            "--mask-factor": 1.0,
            "--iter-per-epoch": 1250,
            "--dino-local-img-size": 96,
            "--dino-local-crops-number": 10,
            "--dino-head-hidden-size": 2048,
            "--dino-bottleneck-size": 256,
            "--dino-freeze-last-layer": 1.0,
            "--dino-warmup-teacher-temp": 0.04,
            "--dino-teacher-temp": 0.07,
            "--dino-warmup-teacher-temp-epochs": 30,
        },
        choices={
            "--vision-pretraining-type": ("classify", "inpaint", "dino"),
            "--vision-backbone-type": ("vit", "mit", "swin"),
            "--swin-backbone-type": ("tiny", "base", "h3"),
            "--mask-type": ("random", "row"),
        },
    ),
)

HONOURED: tuple[KnownFlag, ...] = (
    KnownFlag(
        "--te-rng-tracker",
        "dropout draws from PyTorch's own generator, which CUDA graphs take as it is",
    ),
    KnownFlag(
        "--no-scatter-gather-tensors-in-pipeline",
        "each tensor-parallel process sends all that it holds to its neighbour: nothing is "
        "scattered",
    ),
    KnownFlag(
        "--overlap-p2p-communication",
        "stages always compute while their messages travel",
    ),
    KnownFlag(
        "--use-ring-exchange-p2p",
        "messages between stages go by PyTorch's sends and receives, which need no image of "
        "NVIDIA's: the same result",
    ),
    KnownFlag(
        "--no-delay-grad-reduce",
        "each gradient bucket is reduced as soon as it is complete: nothing is delayed",
    ),
    KnownFlag(
        "--lazy-mpu-init",
        "process groups are made once, by the entry script: no start-up is left to the caller",
        bool,
        default=False,
    ),
    *_group(
        "requests of any length are computed together: there is no threshold to pass",
        values={"--inference-batch-times-seqlen-threshold": 512},
    ),
    *_group(
        "the text generation server's; training generates nothing",
        values={"--max-tokens-to-oom": 12000},
    ),
)
