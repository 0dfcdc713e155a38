"""Megatron's flags taken with a note: what they tune is always so here, or is missing."""

from __future__ import annotations

from megatron.config.known_flag import KnownFlag, family

_COMPUTING = (
    *family(
        "there is one form of each network",
        "--use-mcore-models --use-legacy-models",
    ),
    *family(
        "layers are our own, and Transformer Engine is not used",
        """
        --transformer-impl=local|transformer_engine|inference_optimized --use-te-activation-func
        --use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp --fused-residual-rmsnorm
        """,
    ),
    *family(
        "dropout draws from PyTorch's own generator, which CUDA graphs take as it is",
        "--te-rng-tracker",
    ),
    *family(
        "CUDA graphs take PyTorch's own generator as it is",
        "--inference-rng-tracker",
    ),
    *family("nothing is compiled by PyTorch's JIT", "--disable-jit-fuser"),
    *family("there are no experimental features to enable", "--enable-experimental"),
    *family(
        "it decides on a copy in memory, which changes no result",
        "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding",
    ),
    *family(
        "garbage is collected between iterations, never around an evaluation",
        "--no-manual-gc-eval --disable-manual-gc-eval",
    ),
    *family(
        "the host reads the results of every update, and so is never far ahead",
        "--train-sync-interval:int",
    ),
)

_PROCESSES = (
    *family(
        "each tensor-parallel process sends all that it holds to its neighbour: nothing is "
        "scattered",
        "--no-scatter-gather-tensors-in-pipeline",
    ),
    *family(
        "stages always compute while their messages travel",
        "--overlap-p2p-communication --overlap-p2p-communication-warmup-flush",
    ),
    *family(
        "no pipeline stage waits for another's reduction or gathering: nothing is aligned",
        "--no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather",
    ),
    *family(
        "gradients are averaged as they are added up wherever the library can: NCCL",
        "--ddp-average-in-collective",
    ),
    *family(
        "messages between stages go by PyTorch's sends and receives, which need no image of "
        "NVIDIA's: the same result",
        "--use-ring-exchange-p2p",
    ),
    *family(
        "each gradient bucket is reduced as soon as it is complete: nothing is delayed",
        "--no-delay-grad-reduce",
    ),
    KnownFlag(
        "--lazy-mpu-init",
        "process groups are made once, by the entry script: no start-up is left to the caller",
        bool,
        default=False,
    ),
    *family(
        "SIGTERM and SIGINT save and leave, and loader processes leave them to training",
        "--exit-signal-handler-for-training --exit-signal-handler-for-dataloader",
    ),
)

_DATA = (
    *family("data files are memory-mapped: the same samples", "--no-mmap-bin-files"),
    *family(
        "the loader makes no masks of sequence by sequence",
        "--no-create-attention-mask-in-dataloader",
    ),
    *family(
        "it tunes how indices of data are built or opened: the same samples",
        """
        --num-dataset-builder-threads=1 --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap --per-dataset-sequences-path:str
        """,
    ),
    *family(
        "padding is known by its place in a sample, not by its id", "--allow-ambiguous-pad-tokens"
    ),
    *family("data are read from file systems alone", "--disable-msc"),
    *family(
        "each kind of tokenizer is there in one form",
        "--legacy-tokenizer --tokenizer-hf-use-fast",
    ),
)

_CHECKPOINTS = (
    *family("what a checkpoint under --load is gets found out anyway", "--auto-detect-ckpt-format"),
    *family(
        "an optimizer whose states are not loaded takes its fp32 weights from the model's anyway",
        "--load-main-params-from-ckpt",
    ),
    *family("digests are written and compared anyway", "--verify-integrity"),
    *family(
        "checkpoints load in any layout, optimizer and all",
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient",
    ),
    *family(
        "it tunes how processes share the work on a checkpoint, which they do in one way here",
        """
        --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load
        --ckpt-fully-parallel-load-exchange-algo=broadcast
        --ckpt-fully-parallel-save-process-group=dp --ckpt-fully-parallel-load-process-group=dp
        --ckpt-assume-constant-structure --dist-ckpt-workers=1
        """,
    ),
    *family(
        "--async-save writes by a thread of each process, with nothing to tune",
        """
        --async-strategy=nvrx --use-persistent-ckpt-worker --async-ckpt-cpu-priority=10
        --async-ckpt-io-priority=3 --async-ckpt-use-cpu-shm
        """,
    ),
    *family(
        "--use-checkpoint-args takes the network alone, the tokenizer never",
        """
        --no-use-tokenizer-model-from-checkpoint-args
        --disable-use-tokenizer-model-from-checkpoint-args
        """,
    ),
)

_WATCHING = (
    *family("every log line has tokens/s and MFU", "--log-throughput"),
    *family("NVIDIA's OneLogger is not used anyway", "--no-one-logger"),
    *family("--profile is PyTorch's profiler", "--use-pytorch-profiler"),
    *family("--profile records shapes anyway", "--record-shapes --pytorch-profiler-collect-shapes"),
)

_GENERATION = (
    *family(
        "requests are computed together as they come, of any length and at any time",
        "--inference-dynamic-batching",
    ),
    *family(
        "requests of any length are computed together: there is no threshold to pass",
        "--inference-batch-times-seqlen-threshold=512",
    ),
    *family(
        "the text generation server's; training generates nothing",
        "--max-tokens-to-oom=12000",
    ),
)

HONOURED: tuple[KnownFlag, ...] = (
    *_COMPUTING,
    *_PROCESSES,
    *_DATA,
    *_CHECKPOINTS,
    *_WATCHING,
    *_GENERATION,
)
