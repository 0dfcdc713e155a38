"""The layouts that are compared with one process, and the comparison, both used by the tests and by
`tools/compare_layouts.py`, which writes its table into the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from megatron.parallel.layout import Layout, grid_sizes
from tests.distributed import run_distributed
from tests.training.toy import train_toy

ITERATIONS, OTHER_ITERATIONS = 20, 8  # for a GPT, for the other kinds
LOSS_TOLERANCE = 1e-5  # relative, at every iteration
NORM_TOLERANCE = 1e-4
_GLOBAL_BATCH = 8
_BASE = f"""
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size {_GLOBAL_BATCH}
    --eval-interval 100 --eval-iters 0
""".split()
_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform"


@dataclass(frozen=True)
class LayoutCase:
    """One way to train the toy model.

    Attributes:
        processes: The number of processes; those that the three sizes do not use are data parallel.
        tensor, context, pipeline: The sizes of the grid.
        flags: More flags of the layout, which change no number.
        network: More flags, which the single process also gets.
        kind: The kind of network.
    """

    processes: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    flags: str = ""
    network: str = ""
    kind: str = "gpt"

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes as `Layout.at` takes them."""
        return {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}

    @property
    def name(self) -> str:
        """Return the grid in words, for example "tensor 2 x data 4"."""
        sizes = grid_sizes(self.processes, **self.sizes)
        return " x ".join(f"{axis} {size}" for axis, size in reversed(sizes.items()) if size > 1)

    @property
    def shown_flags(self) -> str:
        return " ".join(f"{self.flags} {self.network}".split())

    @property
    def iterations(self) -> int:
        """Return the number of iterations in its training."""
        return ITERATIONS if self.kind == "gpt" else OTHER_ITERATIONS

    def words(self, iterations: int | None = None) -> list[str]:
        """Return the command line: four micro-batches fill a pipeline, two accumulate gradients."""
        data = grid_sizes(self.processes, **self.sizes)["data"]
        micro_batches = 4 if self.pipeline > 1 else 2
        micro_batch = max(1, _GLOBAL_BATCH // data // micro_batches)
        if self.kind != "gpt":
            # Fixed, because the loss is the mean of the micro-batches' means over masked tokens,
            # whose numbers differ.
            micro_batch = 2
        return [
            *_BASE,
            *("--train-iters", str(iterations or self.iterations)),
            *("--tensor-model-parallel-size", str(self.tensor)),
            *("--context-parallel-size", str(self.context)),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--micro-batch-size", str(micro_batch)),
            *self.flags.split(),
            *self.network.split(),
        ]


# Together these test every size, schedule and sharding both alone and in combination.
_SP = "--sequence-parallel"
_BESIDE = "--tp-comm-overlap"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
_WINDOWS = (
    "--window-size 4,0 --window-attn-skip-freq 3 --position-embedding-type rope --no-rope-freq 4 "
    "--rope-type yarn --rotary-scaling-factor 2 --yarn-original-max-position-embeddings 8"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 "
    "--qk-pos-emb-head-dim 6 --v-head-dim 14 --qk-layernorm --position-embedding-type rope "
    "--normalization RMSNorm --rope-type yarn --rotary-scaling-factor 2 "
    "--yarn-original-max-position-embeddings 8 --mscale-all-dim 1"
)
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 3 --linear-key-head-dim 5 --linear-value-head-dim 7 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --attention-output-gate "
    f"{_LLAMA} --apply-layernorm-1p --qk-layernorm"
)
_SINKS = "--softmax-type learnable --init-method-std 0.1"
_GEMMA = (
    "--geglu --normalization RMSNorm --apply-layernorm-1p --norm-placement both "
    "--scale-embeddings --softmax-scale 0.3 --attn-logit-softcapping 2 "
    "--final-logit-softcapping 3 --window-size 4,0 --window-attn-skip-freq 2 "
    "--window-rotary-base 100 --position-embedding-type rope --qk-layernorm"
)
# At the toy's learning rate, training without norms in front of blocks is unstable.
_AFTER = (
    f"{_LLAMA} --norm-placement after --qk-layernorm --qk-layernorm-scope projection --lr 0.002"
)
_WIDE_NORMS = "--qk-layernorm --qk-layernorm-scope projection"
# In fp32, because bf16 Newton-Schulz iterations amplify differences in summation order.
MUON = (
    "--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2 "
    "--muon-fp32-matmul-prec highest"
)
MUON_DISTRIBUTED = f"{MUON} --muon-tp-mode distributed"
MUON_DUPLICATED = f"{MUON} --muon-tp-mode duplicated"
_MUON_LAYOUTS: tuple[LayoutCase, ...] = (
    LayoutCase(2, network=MUON),
    LayoutCase(2, flags="--zero-stage 1", network=MUON),
    LayoutCase(2, flags="--zero-stage 2", network=MUON),
    LayoutCase(2, flags="--zero-stage 3", network=MUON),
    LayoutCase(2, flags="--DDP-impl torch", network=MUON),
    LayoutCase(4, flags=f"--use-distributed-optimizer {_OVERLAP}", network=MUON),
    LayoutCase(4, flags=f"--zero-stage 2 {_OVERLAP}", network=f"{_LLAMA} {MUON}"),
    LayoutCase(4, flags="--zero-stage 3", network=f"{_LLAMA} {MUON}"),
    LayoutCase(2, tensor=2, network=MUON_DISTRIBUTED),
    LayoutCase(2, tensor=2, flags=_SP, network=MUON_DUPLICATED),
    LayoutCase(4, tensor=4, flags=_SP, network=f"{_LLAMA} {MUON_DUPLICATED}"),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 1", network=f"{_LLAMA} {MUON_DISTRIBUTED}"),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=f"{_LLAMA} {MUON_DISTRIBUTED}"),
    LayoutCase(4, tensor=2, flags="--zero-stage 3", network=MUON_DUPLICATED),
    LayoutCase(2, pipeline=2, flags="--pipeline-schedule zero-bubble", network=MUON),
    LayoutCase(4, pipeline=2, flags=f"--zero-stage 1 {_VIRTUAL}", network=MUON),
    LayoutCase(4, context=2, flags="--zero-stage 1", network=MUON),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 2", network=MUON_DISTRIBUTED),
)
MULTI_TOKEN = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.4"
_TIED_AHEAD = f"{MULTI_TOKEN} --position-embedding-type rope"
_UNTIED_AHEAD = f"{_LLAMA} {MULTI_TOKEN}"
_LINEAR_LOSS = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
_MULTI_TOKEN_LAYOUTS: tuple[LayoutCase, ...] = (
    LayoutCase(2, flags="--DDP-impl torch", network=_TIED_AHEAD),
    LayoutCase(4, flags=f"--zero-stage 1 {_OVERLAP}", network=_TIED_AHEAD),
    LayoutCase(2, flags="--zero-stage 2", network=_UNTIED_AHEAD),
    LayoutCase(4, flags=f"--zero-stage 3 {_RECOMPUTE}", network=_TIED_AHEAD),
    LayoutCase(2, tensor=2, network=_UNTIED_AHEAD),
    LayoutCase(2, tensor=2, flags=f"{_SP} {_LINEAR_LOSS}", network=_TIED_AHEAD),
    LayoutCase(4, tensor=4, flags=f"{_SP} {_BESIDE} {_RECOMPUTE}", network=_TIED_AHEAD),
    LayoutCase(2, pipeline=2, network=_TIED_AHEAD),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL, network=_UNTIED_AHEAD),
    LayoutCase(2, pipeline=2, flags="--pipeline-schedule zero-bubble", network=_TIED_AHEAD),
    LayoutCase(
        2,
        pipeline=2,
        flags="--pipeline-model-parallel-layout Ettt|tmmL --recompute-granularity selective",
        network=_UNTIED_AHEAD,
    ),
    LayoutCase(4, pipeline=2, flags=f"--zero-stage 2 {_VIRTUAL} {_OVERLAP}", network=_TIED_AHEAD),
    LayoutCase(4, pipeline=2, flags=f"--zero-stage 3 {_VIRTUAL}", network=_UNTIED_AHEAD),
    LayoutCase(2, context=2, network=_TIED_AHEAD),
    LayoutCase(4, tensor=2, context=2, flags=f"{_SP} --cp-comm-type a2a", network=_TIED_AHEAD),
    LayoutCase(4, context=2, pipeline=2, flags="--zero-stage 1", network=_TIED_AHEAD),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 1", network=_TIED_AHEAD),
)
# Every kind of layer, with groups of several heads.
HYBRID = (
    "--hybrid-layer-pattern M-M* --mamba-num-groups 4 --mamba-num-heads 8 --mamba-head-dim 6 "
    "--mamba-state-dim 5 --normalization RMSNorm --position-embedding-type none "
    "--disable-bias-linear --squared-relu"
)
_HYBRID_MIXTURE = f"{HYBRID.replace('M-M*', 'ME*M')} --num-experts 4 --moe-router-topk 2"
PARALLEL_MAMBA = (
    f"--parallel-mamba --mamba-num-groups 4 --mamba-num-heads 8 --mamba-head-dim 6 "
    f"--mamba-state-dim 5 --disable-mamba-norm {_LLAMA} --embedding-multiplier 1.5 "
    "--key-multiplier 0.6 --attention-input-multiplier 1.2 --attention-output-multiplier 0.7 "
    "--mamba-input-multiplier 0.9 --mamba-multipliers 0.8 1.1 0.9 1.3 0.7 "
    "--mamba-output-multiplier 0.8 --mlp-multipliers 0.9 1.2 --logit-scale 0.8"
)
_HYBRID_LAYOUTS: tuple[LayoutCase, ...] = (
    LayoutCase(4, flags=f"--zero-stage 3 {_RECOMPUTE}", network=HYBRID),
    LayoutCase(4, tensor=4, flags=f"{_SP} --recompute-granularity selective", network=HYBRID),
    LayoutCase(4, tensor=2, flags=f"{_SP} {_BESIDE} --zero-stage 2", network=HYBRID),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL, network=HYBRID),
    LayoutCase(2, pipeline=2, network=HYBRID.replace("M-M*", "M|-M*")),
    LayoutCase(2, context=2, flags="--cp-comm-type a2a", network=HYBRID),
    LayoutCase(8, tensor=2, context=2, pipeline=2, flags=_SP, network=HYBRID),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=_HYBRID_MIXTURE),
    LayoutCase(4, tensor=2, flags=f"{_SP} {_BESIDE} --zero-stage 3", network=PARALLEL_MAMBA),
    LayoutCase(2, pipeline=2, flags=f"{_VIRTUAL} {_RECOMPUTE}", network=PARALLEL_MAMBA),
    LayoutCase(
        4, tensor=2, context=2, flags=f"{_SP} --recompute-activations", network=PARALLEL_MAMBA
    ),
)
LAYOUTS: tuple[LayoutCase, ...] = (
    LayoutCase(2),
    LayoutCase(4),
    LayoutCase(2, flags="--zero-stage 1"),
    LayoutCase(4, flags=f"--zero-stage 1 {_OVERLAP}"),
    LayoutCase(2, flags="--zero-stage 2"),
    LayoutCase(4, flags=f"--zero-stage 2 {_OVERLAP}"),
    LayoutCase(4, flags="--zero-stage 3"),
    LayoutCase(2, flags="--zero-stage 1 --optimizer-cpu-offload"),
    LayoutCase(2, flags="--DDP-impl torch"),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3"),
    LayoutCase(4, context=2, flags="--zero-stage 3"),
    LayoutCase(4, pipeline=2, flags=f"--zero-stage 3 {_VIRTUAL}"),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 3"),
    LayoutCase(2, tensor=2),
    LayoutCase(2, tensor=2, flags=_SP),
    LayoutCase(2, tensor=2, flags=f"{_RECOMPUTE} --distribute-saved-activations"),
    LayoutCase(2, tensor=2, network="--qk-layernorm --disable-bias-linear --add-qkv-bias"),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=_WIDE_NORMS),
    LayoutCase(4, tensor=4, flags=f"{_SP} {_BESIDE}"),
    LayoutCase(4, tensor=4, flags=_SP, network=_LLAMA),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 1 --overlap-grad-reduce"),
    LayoutCase(4, tensor=2, flags="--zero-stage 2"),
    LayoutCase(8, tensor=4, flags=f"{_SP} --zero-stage 1"),
    LayoutCase(8, tensor=2, flags=f"{_SP} --zero-stage 2"),
    LayoutCase(2, pipeline=2),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL),
    LayoutCase(2, pipeline=2, flags="--pipeline-schedule gpipe"),
    LayoutCase(2, pipeline=2, flags="--pipeline-schedule zero-bubble"),
    LayoutCase(2, pipeline=2, flags="--decoder-first-pipeline-num-layers 1"),
    LayoutCase(2, pipeline=2, flags="--pipeline-model-parallel-layout Et|tttL"),
    LayoutCase(2, pipeline=2, network="--untie-embeddings-and-output-weights"),
    LayoutCase(4, pipeline=4),
    LayoutCase(4, pipeline=4, flags=_VIRTUAL, network="--num-layers 8"),
    LayoutCase(4, pipeline=4, flags="--pipeline-schedule zero-bubble"),
    LayoutCase(4, pipeline=4, flags="--pipeline-model-parallel-layout Et|tt|t|L"),
    LayoutCase(4, pipeline=2),
    LayoutCase(4, pipeline=2, flags=f"--zero-stage 1 {_OVERLAP}"),
    LayoutCase(4, pipeline=2, flags=f"{_VIRTUAL} --overlap-grad-reduce"),
    LayoutCase(4, pipeline=2, flags="--pipeline-schedule zero-bubble --overlap-grad-reduce"),
    LayoutCase(4, pipeline=2, flags="--zero-stage 2"),
    LayoutCase(4, pipeline=2, flags=f"--zero-stage 2 {_VIRTUAL} {_OVERLAP}"),
    LayoutCase(4, pipeline=2, flags="--zero-stage 2 --pipeline-schedule zero-bubble"),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 2 {_OVERLAP}"),
    LayoutCase(8, pipeline=4, flags=f"--zero-stage 1 {_OVERLAP}"),
    LayoutCase(8, pipeline=2, flags=f"--zero-stage 1 {_VIRTUAL}"),
    LayoutCase(2, context=2),
    LayoutCase(2, context=2, flags="--cp-comm-type a2a"),
    LayoutCase(4, context=2, flags="--zero-stage 1"),
    LayoutCase(4, context=2, flags="--zero-stage 2"),
    LayoutCase(4, context=4),
    LayoutCase(4, tensor=2, context=2, flags=f"{_SP} {_BESIDE} {_RECOMPUTE}"),
    LayoutCase(4, context=2, pipeline=2),
    LayoutCase(4, context=2, pipeline=2, flags=f"--cp-comm-type a2a {_VIRTUAL}"),
    LayoutCase(4, tensor=2, pipeline=2),
    LayoutCase(4, tensor=2, pipeline=2, flags=_SP),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_VIRTUAL}"),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_BESIDE} --pipeline-schedule zero-bubble"),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 1"),
    LayoutCase(8, tensor=2, pipeline=2, flags=f"{_SP} --zero-stage 1 {_OVERLAP} {_VIRTUAL}"),
    LayoutCase(8, tensor=2, context=2, flags=f"{_SP} --zero-stage 1"),
    LayoutCase(8, tensor=2, context=2, pipeline=2, flags=_SP),
    LayoutCase(8, tensor=2, context=2, pipeline=2, flags=_SP, network=_LLAMA),
    LayoutCase(8, tensor=2, pipeline=4, flags=_SP),
    LayoutCase(8, tensor=4, pipeline=2, flags=_SP),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=_WINDOWS),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL, network=_WINDOWS),
    LayoutCase(4, tensor=2, context=2, flags="--cp-comm-type a2a", network=_WINDOWS),
    *_MUON_LAYOUTS,
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=f"{_SINKS} {_WINDOWS}"),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_VIRTUAL} {_RECOMPUTE}", network=_SINKS),
    LayoutCase(2, context=2, network=_SINKS),
    LayoutCase(4, tensor=2, context=2, flags="--cp-comm-type a2a", network=_SINKS),
    *_MULTI_TOKEN_LAYOUTS,
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=_GEMMA),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_VIRTUAL} {_RECOMPUTE}", network=_GEMMA),
    LayoutCase(4, tensor=2, context=2, flags="--cp-comm-type a2a", network=_GEMMA),
    LayoutCase(2, tensor=2, flags=_SP, network=_AFTER),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network="--parallel-residual"),
    LayoutCase(2, tensor=2, network=LATENT),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=LATENT),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_VIRTUAL}", network=LATENT),
    LayoutCase(4, tensor=2, context=2, flags="--cp-comm-type a2a", network=LATENT),
    LayoutCase(2, context=2, network=LATENT),
    *_HYBRID_LAYOUTS,
    LayoutCase(2, tensor=2, flags=_SP, network=DELTA),
    LayoutCase(2, context=2, flags="--recompute-activations", network=DELTA),
    LayoutCase(4, tensor=4, flags=_RECOMPUTE, network=DELTA),
    LayoutCase(4, tensor=2, flags=f"{_SP} --zero-stage 3", network=DELTA),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_VIRTUAL} --zero-stage 1", network=DELTA),
)


# What is specific to BERT and T5: masks, more tables and heads, a two-part message.
_OTHERS = (
    LayoutCase(2, flags="--zero-stage 1"),
    LayoutCase(2, flags="--zero-stage 3"),
    LayoutCase(2, tensor=2),
    LayoutCase(2, tensor=2, flags=f"{_SP} --cross-entropy-fusion-impl linear"),
    LayoutCase(2, pipeline=2),
    LayoutCase(2, pipeline=2, flags=_VIRTUAL),
    LayoutCase(2, pipeline=2, flags="--pipeline-schedule zero-bubble"),
    LayoutCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_RECOMPUTE}"),
)
_GOOGLE_S_T5 = (
    "--position-embedding-type relative --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 9 --normalization RMSNorm --disable-bias-linear "
    "--disable-output-bias --softmax-scale 1.0 --geglu --scale-decoder-outputs"
)
OTHER_LAYOUTS: tuple[LayoutCase, ...] = (
    *(replace(case, kind="bert") for case in _OTHERS),
    *(replace(case, kind="t5") for case in _OTHERS),
    LayoutCase(2, pipeline=2, network="--bert-no-binary-head", kind="bert"),
    LayoutCase(2, tensor=2, flags=_SP, network="--position-embedding-type rope", kind="t5"),
    LayoutCase(2, flags=f"--zero-stage 1 {_OVERLAP}", kind="t5"),
    LayoutCase(4, pipeline=2, flags="--zero-stage 2 --overlap-grad-reduce", kind="t5"),
    LayoutCase(
        3,
        pipeline=3,
        flags="--pipeline-model-parallel-split-rank 1",
        network="--decoder-num-layers 2",
        kind="t5",
    ),
    LayoutCase(2, flags=f"--zero-stage 2 {_OVERLAP}", network=_GOOGLE_S_T5, kind="t5"),
    LayoutCase(2, tensor=2, flags=f"{_SP} {_BESIDE}", network=_GOOGLE_S_T5, kind="t5"),
    LayoutCase(
        4,
        pipeline=2,
        flags=f"--zero-stage 1 {_OVERLAP} {_VIRTUAL}",
        network=_GOOGLE_S_T5,
        kind="t5",
    ),
    LayoutCase(4, pipeline=2, flags="--zero-stage 3", network=_GOOGLE_S_T5, kind="t5"),
    LayoutCase(
        3,
        pipeline=3,
        flags="--pipeline-model-parallel-split-rank 2",
        network=f"{_GOOGLE_S_T5} --decoder-num-layers 2",
        kind="t5",
    ),
)


class Curves(NamedTuple):
    """What one process recorded: one value per iteration; several losses follow each other."""

    losses: list[float]
    norms: list[float]


class Difference(NamedTuple):
    """The largest relative difference from one process, over ranks and iterations."""

    loss: float
    norm: float


def train_curves(layout: Layout, words: Sequence[str], kind: str = "gpt") -> Curves:
    """Train the toy model to the end."""
    recorder, run = train_toy(layout, words, kind)
    losses = [recorder.values(name) for name in run.recipe.loss_names(run.config)]
    return Curves([value for curve in losses for value in curve], recorder.values("grad-norm"))


@cache
def single_process(network: str, kind: str = "gpt", iterations: int | None = None) -> Curves:
    """Return the curves of the same training on one process."""
    words = LayoutCase(1, network=network, kind=kind).words(iterations)
    return train_curves(Layout.single(), words, kind)


def compare(
    case: LayoutCase,
    run: Callable[..., list[Curves]] = run_distributed,
    iterations: int | None = None,
) -> Difference:
    """Train in processes as `case` says, and on one; return the differences.

    Args:
        case: The layout and the training.
        run: Starts the processes, and determines how they communicate.
        iterations: The length of the training, if it is not the case's own.
    """
    expected = single_process(case.network, case.kind, iterations)
    got = run(case.processes, train_curves, case.words(iterations), case.kind, **case.sizes)
    return Difference(
        max(largest_difference(curves.losses, expected.losses) for curves in got),
        max(largest_difference(curves.norms, expected.norms) for curves in got),
    )


def largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return a curve's relative difference; infinite for other lengths or non-finite values."""
    if len(values) != len(expected) or not expected:
        return math.inf
    pairs = zip(values, expected, strict=True)
    return max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)
