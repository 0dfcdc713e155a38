"""The models that `benchmark_layouts.py` trains, and their layouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchmarkLayout:
    """A layout to measure.

    Attributes:
        processes: Number of processes, each with its own GPU if the machine has GPUs.
        name: The layout in words.
        flags: Flags in addition to the model's.
        max_iterations: Maximum number of iterations, for a slow layout, or `None`.
        predicted_milliseconds: The planner's time per iteration, or `None` if the planner was not
            used.
    """

    processes: int
    name: str
    flags: str
    max_iterations: int | None = None
    predicted_milliseconds: float | None = None


@dataclass(frozen=True)
class BenchmarkModel:
    """The flags of a network, its batch and its optimizer, and the layouts to compare."""

    flags: str
    layouts: tuple[BenchmarkLayout, ...]


_SP = "--sequence-parallel"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_ZERO_1 = f"--use-distributed-optimizer {_OVERLAP}"
_ZERO_BUBBLE = "--pipeline-schedule zero-bubble"
_COMMON = (
    "--attention-dropout 0 --hidden-dropout 0 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine "
    "--weight-decay 0.1 --adam-beta2 0.95 --eval-iters 0 --eval-interval 1000 "
)
_WARM_UP = "--lr-warmup-fraction 0.1 "


def _grid(tensor: int = 1, pipeline: int = 1, context: int = 1) -> str:
    sizes = {
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--context-parallel-size": context,
    }
    return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


def _micro(size: int, *flags: str) -> str:
    return " ".join((f"--micro-batch-size {size}", *flags))


_TOY = BenchmarkModel(
    _COMMON + _WARM_UP + "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --global-batch-size 8",
    (
        BenchmarkLayout(1, "one", _micro(2)),
        BenchmarkLayout(2, "data 2", _micro(2, "--zero-stage 1")),
        BenchmarkLayout(2, "tensor 2", _micro(2, _grid(tensor=2), _SP)),
        BenchmarkLayout(2, "pipeline 2", _micro(2, _grid(pipeline=2))),
        BenchmarkLayout(4, "tensor 2 x pipeline 2", _micro(2, _grid(2, 2), _SP)),
    ),
)

_350M = BenchmarkModel(
    _COMMON + _WARM_UP + "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 64 --bf16",
    (
        BenchmarkLayout(1, "one", _micro(8)),
        BenchmarkLayout(2, "data 2", _micro(8)),
        BenchmarkLayout(2, "data 2, stage 1", _micro(8, _ZERO_1)),
        BenchmarkLayout(2, "data 2, stage 3", _micro(8, "--zero-stage 3")),
        BenchmarkLayout(2, "tensor 2", _micro(8, _grid(tensor=2), _SP)),
        BenchmarkLayout(2, "pipeline 2", _micro(4, _grid(pipeline=2))),
        BenchmarkLayout(2, "pipeline 2, zero-bubble", _micro(4, _grid(pipeline=2), _ZERO_BUBBLE)),
        BenchmarkLayout(2, "context 2", _micro(8, _grid(context=2))),
        BenchmarkLayout(4, "data 4", _micro(8)),
        BenchmarkLayout(4, "data 4, stage 1", _micro(8, _ZERO_1)),
        BenchmarkLayout(4, "data 4, stage 2", _micro(16, "--zero-stage 2 --overlap-grad-reduce")),
        BenchmarkLayout(4, "data 4, stage 3", _micro(16, "--zero-stage 3")),
        BenchmarkLayout(
            4,
            "tensor 2 x data 2, stage 1",
            _micro(8, _grid(tensor=2), _SP, "--use-distributed-optimizer"),
        ),
        BenchmarkLayout(4, "tensor 4", _micro(8, _grid(tensor=4), _SP)),
        BenchmarkLayout(4, "pipeline 4", _micro(4, _grid(pipeline=4))),
        BenchmarkLayout(
            4,
            "pipeline 4, interleaved",
            _micro(4, _grid(pipeline=4), "--num-layers-per-virtual-pipeline-stage 3"),
        ),
        BenchmarkLayout(4, "pipeline 4, zero-bubble", _micro(4, _grid(pipeline=4), _ZERO_BUBBLE)),
        BenchmarkLayout(4, "tensor 2 x pipeline 2", _micro(4, _grid(2, 2), _SP)),
        BenchmarkLayout(4, "pipeline 2 x data 2, stage 1", _micro(4, _grid(pipeline=2), _ZERO_1)),
        BenchmarkLayout(4, "context 2 x data 2", _micro(8, _grid(context=2))),
        BenchmarkLayout(4, "context 4, ring", _micro(8, _grid(context=4))),
        BenchmarkLayout(
            4, "context 4, all-to-all", _micro(8, _grid(context=4), "--cp-comm-type a2a")
        ),
        BenchmarkLayout(
            8,
            "tensor 2 x pipeline 2 x data 2, stage 1",
            _micro(4, _grid(2, 2), _SP, "--use-distributed-optimizer"),
        ),
        BenchmarkLayout(8, "pipeline 8", _micro(4, _grid(pipeline=8))),
        BenchmarkLayout(8, "data 8, stage 1", _micro(8, _ZERO_1)),
    ),
)

_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# One sequence per update. The losses are comparable only among these rows.
_LONG = f"--seq-length 131072 --max-position-embeddings 131072 --global-batch-size 1 {_FULL}"

_7B = BenchmarkModel(
    _COMMON + "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--ffn-hidden-size 11008 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 4096 "
    "--max-position-embeddings 4096 --global-batch-size 16 --bf16 "
    # Llama's own warm-up. With a steeper one, the first losses jump up and down by amounts that
    # depend on the rounding in each layout.
    "--init-method-std 0.01 --lr-warmup-iters 2000 --lr-decay-iters 500000",
    (
        BenchmarkLayout(2, "tensor 2", _micro(1, _grid(tensor=2), _SP)),
        BenchmarkLayout(2, "pipeline 2", _micro(1, _grid(pipeline=2))),
        BenchmarkLayout(2, "data 2, stage 1", _micro(1, _ZERO_1)),
        BenchmarkLayout(2, "data 2, stage 3", _micro(1, "--zero-stage 3")),
        BenchmarkLayout(
            4,
            "tensor 2 x pipeline 2, stage 1",
            _micro(1, _grid(2, 2), _SP, "--use-distributed-optimizer"),
        ),
        BenchmarkLayout(4, "tensor 4", _micro(1, _grid(tensor=4), _SP)),
        BenchmarkLayout(4, "pipeline 4", _micro(1, _grid(pipeline=4))),
        BenchmarkLayout(4, "pipeline 4, zero-bubble", _micro(1, _grid(pipeline=4), _ZERO_BUBBLE)),
        BenchmarkLayout(4, "data 4, stage 1", _micro(1, _ZERO_1)),
        BenchmarkLayout(4, "data 4, stage 3", _micro(1, "--zero-stage 3")),
        BenchmarkLayout(
            4,
            "context 4, 131,072 tokens",
            _micro(1, _grid(context=4), _LONG, "--use-distributed-optimizer"),
            max_iterations=4,
        ),
        BenchmarkLayout(
            8,
            "tensor 2 x pipeline 2 x data 2, stage 1",
            _micro(1, _grid(2, 2), _SP, "--use-distributed-optimizer"),
        ),
        BenchmarkLayout(8, "tensor 8", _micro(1, _grid(tensor=8), _SP)),
        BenchmarkLayout(8, "pipeline 8", _micro(1, _grid(pipeline=8))),
        BenchmarkLayout(8, "data 8, stage 1", _micro(1, _ZERO_1)),
        BenchmarkLayout(8, "data 8, stage 3", _micro(1, "--zero-stage 3")),
        BenchmarkLayout(
            8,
            "context 8, 131,072 tokens",
            _micro(1, _grid(context=8), _LONG, "--use-distributed-optimizer"),
            max_iterations=4,
        ),
    ),
)


def models() -> dict[str, BenchmarkModel]:
    """Return the models that `--model` can select, by name."""
    return {"toy": _TOY, "350m": _350M, "7b": _7B}
