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
        switches=(
            "--expert-parallel",
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            "--moe-shared-expert-overlap",
            "--overlap-moe-expert-parallel-comm",
        ),
        values={
            "--expert-model-parallel-size": 1,
            "--moe-router-topk": 2,
            "--moe-aux-loss-coeff": 0.0,
        },
        unset={
            "--num-experts": int,
            "--expert-tensor-parallel-size": int,
            "--moe-ffn-hidden-size": int,
            "--moe-router-load-balancing-type": str,
            "--moe-token-dispatcher-type": str,
        },
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
            "--disable-tp-comm-split-ag",
            "--disable-tp-comm-split-rs",
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
    # Of later versions, for speed.
    KnownFlag(
        "--attention-backend",
        "the fastest kernel that fits is taken: use --use-flash-attn for flash, "
        "--no-masked-softmax-fusion for unfused, or drop the flag",
        str,
        "auto",
        ("auto", "flash", "fused", "unfused", "local"),
    ),
    *_group(
        "SwiGLU's two forms are one kernel, taken wherever sizes allow: drop the flag",
        switches=("--no-bias-swiglu-fusion",),
    ),
    *_group(
        "stages always compute while their messages travel: drop the flag",
        switches=("--no-overlap-p2p-communication",),
    ),
    *_group(
        "an interleaved schedule takes groups of as many micro-batches as there are stages: drop "
        "the flag",
        unset={
            "--microbatch-group-size-per-virtual-pipeline-stage": int,
            "--microbatch-group-size-per-vp-stage": int,
        },
    ),
    *_group(
        "weight gradients are deferred by --pipeline-schedule zero-bubble: use that, or drop the "
        "flag",
        switches=("--defer-embedding-wgrad-compute", "--delay-wgrad-compute"),
        values={"--wgrad-deferral-limit": 0},
    ),
    *_group(
        "no pipeline stage waits for another's reduction or gathering: drop the flag",
        switches=(
            "--delay-grad-reduce",
            "--delay-param-gather",
            "--align-grad-reduce",
            "--align-param-gather",
        ),
    ),
    *_group(
        "the gathering begins when the whole update is made, and is hidden behind forward: use "
        "--overlap-param-gather alone",
        switches=("--overlap-param-gather-with-optimizer-step",),
    ),
    *_group(
        "gradients travel in buckets of 64 MiB or more: drop the flag",
        switches=("--ddp-pad-buckets-for-high-nccl-busbw",),
        unset={
            "--ddp-bucket-size": int,
            "--ddp-num-buckets": int,
            "--suggested-communication-unit-size": int,
        },
    ),
    *_group(
        "NCCL is tuned by its own environment variables: drop the flag",
        switches=("--use-nccl-ub", "--use-sharp", "--disable-symmetric-registration"),
        unset={"--nccl-communicator-config-path": str},
    ),
    KnownFlag(
        "--high-priority-stream-groups",
        "all groups' communication has the same priority: drop the flag",
        str,
        (),
        many=True,
    ),
    *_group(
        "weights, gradients and states are sharded by --zero-stage: use that",
        switches=("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"),
        choices={
            "--data-parallel-sharding-strategy": (
                *("no_shard", "optim", "optim_grads", "optim_grads_params"),
            )
        },
    ),
    *_group(
        "gradients of --bf16, the optimizer's weights and its moments are in fp32: drop the flag",
        switches=("--use-precision-aware-optimizer", "--grad-reduce-in-bf16"),
        choices={
            "--main-grads-dtype": ("fp32", "bf16"),
            "--main-params-dtype": ("fp32", "fp16"),
            "--exp-avg-dtype": ("fp32", "bf16", "fp16", "fp8"),
            "--exp-avg-sq-dtype": ("fp32", "bf16", "fp16", "fp8"),
        },
    ),
    *_group(
        "--fp8-format is for the linear layers of every block: drop the flag",
        switches=("--first-last-layers-bf16",),
        values={"--num-layers-at-start-in-bf16": 1, "--num-layers-at-end-in-bf16": 1},
    ),
    *_group(
        "products are in 16 bits, or in 8 by --fp8-format and one of its recipes: drop the flag",
        switches=("--fp4-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
        unset={
            "--fp4-format": str,
            "--fp4-recipe": str,
            "--fp8-quantizer-factory": str,
            "--te-precision-config-file": str,
        },
    ),
    *_group(
        "--optimizer-cpu-offload has one way: drop the flag",
        switches=(
            "--overlap-cpu-optimizer-d2h-h2d",
            "--use-torch-optimizer-for-cpu-offload",
            "--no-pin-cpu-grads",
            "--no-pin-cpu-params",
        ),
        values={"--optimizer-offload-fraction": 1.0},
    ),
    KnownFlag(
        "--recompute-modules",
        "--recompute-granularity selective recomputes the core of attention: drop the flag",
        str,
        (),
        many=True,
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
    *_group(
        "stages always compute while their messages travel",
        switches=("--overlap-p2p-communication", "--overlap-p2p-communication-warmup-flush"),
    ),
    *_group(
        "no pipeline stage waits for another's reduction or gathering: nothing is aligned",
        switches=("--no-align-grad-reduce", "--no-align-param-gather"),
    ),
    KnownFlag(
        "--ddp-average-in-collective",
        "gradients are averaged as they are added up wherever the library can: NCCL",
    ),
    KnownFlag(
        "--inference-rng-tracker",
        "CUDA graphs take PyTorch's own generator as it is",
    ),
    KnownFlag(
        "--use-pytorch-profiler",
        "--profile is PyTorch's profiler",
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
