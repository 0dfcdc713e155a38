"""The layouts of a mixture of experts that are compared with one process, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor

from megatron.parallel.layout import Layout, grid_sizes
from tests.distributed import run_sharing_memory
from tests.parity.layouts import MUON, MUON_DISTRIBUTED, largest_difference
from tests.training.toy import train_toy

_BASE = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size 4 --train-iters 20
    --micro-batch-size 1 --eval-interval 100 --eval-iters 0 --num-experts 8
    --moe-layer-freq [0]*1+[1]*3 --moe-ffn-hidden-size 16
""".split()
_CHOICE = "--moe-router-topk 2"
_SHARED = "--moe-shared-expert-intermediate-size 16"
SOFTMAX = f"{_CHOICE} {_SHARED} --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
BALANCED = f"{_CHOICE} --moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 1e-3"
GLOBAL = (
    f"{_CHOICE} --moe-router-load-balancing-type global_aux_loss seq_aux_loss "
    "--moe-aux-loss-coeff 1e-1 1e-2"
)
_GATING = "--moe-router-gating deepspeed --moe-aux-loss-coeff 1e-2 --moe-min-capacity 4"
_LIMIT = "--moe-expert-capacity-factor 1.0"
TOP1 = f"{_GATING} {_LIMIT} --moe-router-topk 1 --noisy-gate-policy RSample --mlp-type residual"
TOP2 = f"{_GATING} {_LIMIT} {_CHOICE}"
DRAWN_FIRST = f"{_GATING} --moe-router-topk 1 --noisy-gate-policy RSample"
DRAWN = f"{_GATING} {_CHOICE} --noisy-gate-policy Jitter"
RESIDUAL = f"{_CHOICE} --mlp-type residual --moe-aux-loss-coeff 1e-2"
SIGMOID = (
    f"{_SHARED} --moe-router-score-function sigmoid --moe-router-topk 4 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
)
GPT_OSS = (
    f"{_CHOICE} --moe-aux-loss-coeff 1e-2 --moe-router-bias --quick-geglu --glu-linear-offset 1 "
    "--activation-func-clamp-value 0.5 --softmax-type learnable"
)

LLAMA4 = (
    f"--moe-router-topk 1 {_SHARED} --moe-router-score-function sigmoid --moe-apply-probs-on-input "
    "--moe-aux-loss-coeff 1e-2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --no-rope-freq 2 --attention-chunk-size 5 --qk-l2-norm "
    "--attention-temperature-scale 0.5 --attention-temperature-floor 3"
)
AHEAD = f"{SOFTMAX} --mtp-num-layers 1 --position-embedding-type rope"


@dataclass(frozen=True)
class MixtureCase:
    """One way to train the toy mixture.

    Attributes:
        processes: The number of processes.
        tensor, context, pipeline, expert: Sizes of the grid.
        expert_tensor: The expert tensor size, or `None` for that of `tensor`.
        flags: Flags of the layout, which change no number.
        network: Flags that the single process also gets.
        tolerance: Relative, for the losses; ten times as much for norms.
        iterations: The length of the training. In 16 bits, rounding alone soon reroutes a token.
    """

    processes: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    flags: str = ""
    network: str = SOFTMAX
    tolerance: float = 1e-5
    iterations: int = 20

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes, and the order of the ranks, as `Layout.at` takes them."""
        found = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        found["expert"] = self.expert
        found["expert_tensor"] = self.expert_tensor or self.tensor
        found["pipeline_before_data"] = "--use-tp-pp-dp-mapping" in self.flags
        return found

    @property
    def grid(self) -> str:
        """Return the sizes of the grid in words, without those that are 1."""
        grid = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        sizes = grid_sizes(self.processes, **grid) | {"expert": self.expert}
        words = [f"{axis} {size}" for axis, size in reversed(sizes.items()) if size > 1]
        words += [f"expert_tensor {self.expert_tensor}"] if self.expert_tensor else []
        return " x ".join(words) or "one process"

    @property
    def shown_flags(self) -> str:
        """Return the flags that the plain mixture on one process does not have."""
        return " ".join(f"{self.flags} {self.network.replace(SOFTMAX, '')}".split())

    @property
    def name(self) -> str:
        """Return the grid and the flags in words."""
        return f"{self.grid} {self.shown_flags}"

    @property
    def words(self) -> list[str]:
        """Return the command line. Router losses are per micro-batch, so each has one sequence."""
        return [
            *_BASE,
            *("--tensor-model-parallel-size", str(self.tensor)),
            *("--context-parallel-size", str(self.context)),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--expert-model-parallel-size", str(self.expert)),
            *("--expert-tensor-parallel-size", str(self.expert_tensor or self.tensor)),
            *("--exit-interval", str(self.iterations)),
            *self.flags.split(),
            *self.network.split(),
        ]


_HALVES = "--overlap-moe-expert-parallel-comm"
_SP = "--sequence-parallel"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
_BUBBLE = "--pipeline-schedule zero-bubble"
_FULL = "--recompute-granularity full --recompute-method uniform"
_SELECTIVE = "--recompute-granularity selective"
_PARTS = "layernorm moe_act shared_experts"
_A2A = "--cp-comm-type a2a"
_ZERO3 = "--zero-stage 3"
_PER_TOKEN = f"{SOFTMAX} --calculate-per-token-loss"
_FP16 = f"{SOFTMAX} --fp16 --initial-loss-scale 1024"
_BF16 = f"{SOFTMAX} --bf16"
_OLMOE = (
    f"{SOFTMAX} --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention "
    "--num-query-groups 2 --qk-layernorm --qk-layernorm-scope projection"
)
_PYRAMID = f"{SOFTMAX} --num-experts 4 8 2"
_BIASED = (
    f"{_CHOICE} --num-experts 2 8 4 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
)
_FP8 = f"{_BF16} --fp8-format hybrid"
_MUON = f"{SOFTMAX} --swiglu {MUON}"
_MUON_SPLIT = f"{SOFTMAX} --swiglu {MUON_DISTRIBUTED}"
_DROPS = f"{SOFTMAX} --moe-expert-capacity-factor 1.0"

MIXTURES: tuple[MixtureCase, ...] = (
    # Data parallelism, with experts divided over its ranks.
    MixtureCase(2),
    MixtureCase(2, expert=2),
    MixtureCase(4, expert=2),
    MixtureCase(4, expert=4),
    MixtureCase(2, flags="--zero-stage 1"),
    MixtureCase(4, flags=f"--zero-stage 2 {_OVERLAP}"),
    MixtureCase(2, expert=2, flags="--zero-stage 1"),
    MixtureCase(4, expert=2, flags=f"--zero-stage 1 {_OVERLAP}"),
    MixtureCase(4, expert=4, flags=f"--zero-stage 1 {_OVERLAP}"),
    MixtureCase(2, expert=2, flags="--zero-stage 2"),
    MixtureCase(4, expert=2, flags=f"--zero-stage 2 {_OVERLAP}"),
    MixtureCase(4, expert=4, flags="--zero-stage 2 --overlap-grad-reduce"),
    MixtureCase(2, expert=2, flags="--zero-stage 1 --optimizer-cpu-offload"),
    # Sharded weights.
    MixtureCase(2, flags=_ZERO3),
    MixtureCase(4, expert=2, flags=_ZERO3),
    MixtureCase(4, expert=4, flags=_ZERO3),
    MixtureCase(2, tensor=2, expert_tensor=1, flags=f"{_SP} {_ZERO3}"),  # only the experts' weights
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} {_ZERO3}"),
    MixtureCase(4, tensor=2, expert=2, expert_tensor=1, flags=f"{_SP} {_ZERO3}"),
    MixtureCase(4, context=2, expert=2, flags=_ZERO3),
    MixtureCase(4, pipeline=2, expert=2, flags=f"{_ZERO3} {_VIRTUAL}"),
    MixtureCase(4, expert=2, flags=f"{_ZERO3} {_FULL}"),
    MixtureCase(4, expert=2, flags=_ZERO3, network=SIGMOID),
    MixtureCase(
        4, expert=2, context=2, flags=f"{_HALVES} --zero-stage 1", network=LLAMA4, iterations=8
    ),
    MixtureCase(
        4,
        pipeline=2,
        tensor=2,
        expert_tensor=1,
        flags=f"{_SP} {_FULL}",
        network=LLAMA4,
        iterations=8,
    ),
    # Tensor parallelism, with experts that are not split.
    MixtureCase(2, expert=2, flags=_HALVES),
    MixtureCase(4, expert=4, flags=f"{_HALVES} --zero-stage 1 {_OVERLAP}"),
    MixtureCase(4, expert=2, flags=f"{_HALVES} {_ZERO3}"),
    MixtureCase(4, pipeline=2, expert=2, flags=f"{_HALVES} {_BUBBLE}"),
    MixtureCase(4, tensor=2, expert=2, expert_tensor=1, flags=f"{_SP} {_HALVES} {_FULL}"),
    MixtureCase(4, tensor=2, expert=2, flags=_SP, network=GPT_OSS),
    MixtureCase(4, tensor=2, expert_tensor=1, flags=f"{_SP} {_ZERO3}", network=GPT_OSS),
    MixtureCase(2, tensor=2),
    MixtureCase(2, tensor=2, flags=_SP),
    MixtureCase(2, tensor=2, expert_tensor=1, flags=_SP),
    MixtureCase(2, tensor=2, expert=2, expert_tensor=1, flags=_SP),
    MixtureCase(4, tensor=4, flags=_SP),
    MixtureCase(4, tensor=4, expert=4, expert_tensor=1, flags=_SP),
    MixtureCase(4, tensor=2, expert=2),
    MixtureCase(4, tensor=2, expert=2, flags=_SP),
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} --tp-comm-overlap"),
    MixtureCase(4, tensor=2, expert=2, expert_tensor=1, flags=_SP),
    MixtureCase(4, tensor=2, expert=4, expert_tensor=1, flags=_SP),
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} --zero-stage 1 {_OVERLAP}"),
    MixtureCase(4, tensor=2, expert=2, expert_tensor=1, flags=f"{_SP} --zero-stage 1 {_OVERLAP}"),
    MixtureCase(4, tensor=2, expert=2, expert_tensor=1, flags=f"{_SP} --zero-stage 2 {_OVERLAP}"),
    MixtureCase(4, tensor=2, expert_tensor=1, flags=f"{_SP} --zero-stage 2"),
    # Pipelines.
    MixtureCase(2, pipeline=2),
    MixtureCase(2, pipeline=2, flags="--pipeline-schedule gpipe"),
    MixtureCase(2, pipeline=2, flags="--decoder-first-pipeline-num-layers 1"),  # one stage is dense
    MixtureCase(4, pipeline=4, flags=_BUBBLE),
    MixtureCase(4, pipeline=2, expert=2),
    MixtureCase(4, pipeline=2, expert=2, flags=_VIRTUAL),
    MixtureCase(4, pipeline=2, expert=2, flags=_BUBBLE),
    MixtureCase(4, pipeline=2, expert=2, flags=f"--zero-stage 1 {_OVERLAP} {_VIRTUAL}"),
    MixtureCase(4, pipeline=2, expert=2, flags=f"--zero-stage 2 {_BUBBLE} --overlap-grad-reduce"),
    MixtureCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_VIRTUAL}"),
    MixtureCase(4, tensor=2, pipeline=2, expert=2, expert_tensor=1, flags=f"{_SP} {_BUBBLE}"),
    MixtureCase(
        4,
        pipeline=2,
        expert=2,
        network=f"{SOFTMAX} --untie-embeddings-and-output-weights --swiglu --disable-bias-linear",
    ),
    # Queries and keys normalized over all heads, which tensor ranks share (OLMoE).
    MixtureCase(2, tensor=2, flags=f"{_SP} {_FULL}", network=_OLMOE),
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} --zero-stage 1 {_OVERLAP}", network=_OLMOE),
    MixtureCase(4, tensor=4, expert=4, expert_tensor=1, flags=_SP, network=_OLMOE),
    # Sequences split over context ranks.
    MixtureCase(2, context=2),
    MixtureCase(2, context=2, expert=2),
    MixtureCase(2, context=2, expert=2, flags=_A2A),
    MixtureCase(4, context=4, expert=2),
    MixtureCase(4, context=2, expert=4, flags=f"--zero-stage 1 {_OVERLAP}"),
    MixtureCase(4, context=2, expert=2, flags="--zero-stage 2"),
    MixtureCase(4, context=2, pipeline=2, expert=2, flags=_VIRTUAL),
    MixtureCase(4, tensor=2, context=2, expert=2, flags=_SP),
    MixtureCase(4, tensor=2, context=2, expert=4, expert_tensor=1, flags=f"{_SP} {_A2A}"),
    # Recomputation.
    MixtureCase(1, flags=_FULL),
    MixtureCase(2, expert=2, flags=_FULL),
    MixtureCase(2, expert=2, flags=_SELECTIVE),
    MixtureCase(4, expert=2, flags=f"{_ZERO3} {_SELECTIVE} --recompute-modules moe mlp"),
    MixtureCase(4, expert=2, flags=f"{_ZERO3} {_SELECTIVE} --recompute-modules {_PARTS}"),
    MixtureCase(
        4, pipeline=2, expert=2, flags=f"{_BUBBLE} {_SELECTIVE} --recompute-modules {_PARTS}"
    ),
    MixtureCase(
        4,
        tensor=2,
        expert=2,
        flags=f"{_SP} {_SELECTIVE} --recompute-modules {_PARTS}",
    ),
    MixtureCase(2, tensor=2, flags=f"{_FULL} --distribute-saved-activations"),
    MixtureCase(4, tensor=2, expert=4, expert_tensor=1, flags=f"{_SP} {_FULL}"),
    MixtureCase(4, pipeline=2, expert=2, flags=f"{_BUBBLE} {_FULL}"),
    # Losses, clipping, number formats, dropped tokens.
    MixtureCase(4, expert=2, network=_PER_TOKEN),
    MixtureCase(4, context=2, expert=2, network=_PER_TOKEN),
    MixtureCase(2, expert=2, network=f"{SOFTMAX} --clip-grad 0"),
    MixtureCase(2, expert=2, network=f"{SOFTMAX} --clip-grad 0.1"),
    MixtureCase(4, expert=4, network=_DROPS),
    MixtureCase(4, pipeline=2, expert=2, network=f"{_DROPS} --moe-token-drop-policy position"),
    MixtureCase(2, tensor=2, network=_DROPS),
    MixtureCase(2, expert=2, network=_FP16, tolerance=2e-4, iterations=6),
    MixtureCase(
        4, pipeline=2, expert=2, flags="--zero-stage 1", network=_FP16, tolerance=2e-4, iterations=6
    ),
    MixtureCase(2, expert=2, network=_BF16, tolerance=5e-3, iterations=4),
    MixtureCase(2, expert=2, network=_FP8, tolerance=5e-3, iterations=4),
    MixtureCase(4, pipeline=2, expert=2, network=_FP8, tolerance=5e-3, iterations=4),
    MixtureCase(4, expert=2, flags=_ZERO3, network=_BF16, tolerance=5e-3, iterations=4),
    MixtureCase(4, expert=2, flags=_ZERO3, network=_FP16, tolerance=2e-4, iterations=6),
    MixtureCase(
        4,
        tensor=2,
        expert=2,
        expert_tensor=1,
        flags=f"{_SP} --zero-stage 1 {_OVERLAP}",
        network=_BF16,
        tolerance=5e-3,
        iterations=4,
    ),
    # Layers with different numbers of experts, some of them possibly dense.
    MixtureCase(4, pipeline=2, expert=2, network=_PYRAMID),
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} --zero-stage 1 {_OVERLAP}", network=_BIASED),
    MixtureCase(2, expert=2, network=f"{SOFTMAX} --num-experts 4 1 8"),
    # A dense MLP next to the experts, as in DeepSpeed.
    MixtureCase(4, tensor=2, expert=2, flags=_SP, network=RESIDUAL),
    MixtureCase(2, context=2, network=RESIDUAL),
    # DeepSpeed's gating: all layouts draw the same noise and drop the same tokens.
    MixtureCase(2, expert=2, network=TOP1),
    MixtureCase(4, expert=4, network=TOP1),
    MixtureCase(4, tensor=2, expert=2, network=TOP1),
    MixtureCase(4, pipeline=2, expert=2, network=TOP1),
    MixtureCase(4, pipeline=2, expert=2, flags=f"{_VIRTUAL} {_FULL}", network=TOP2),
    MixtureCase(4, expert=4, flags=_FULL, network=TOP2),
    MixtureCase(4, tensor=2, expert=2, network=TOP2),
    MixtureCase(4, tensor=2, expert=2, flags=_SP, network=DRAWN),
    MixtureCase(4, tensor=2, expert=4, expert_tensor=1, flags=_SP, network=DRAWN_FIRST),
    MixtureCase(2, context=2, network=DRAWN),
    MixtureCase(4, tensor=2, context=2, expert=2, flags=_SP, network=DRAWN_FIRST),
    MixtureCase(4, pipeline=2, expert=2, network=f"{TOP2} --moe-router-topk 3"),
    # Global-batch loss: with data ranks, more micro-batches count at a time.
    MixtureCase(1, flags=_FULL, network=GLOBAL),
    MixtureCase(4, tensor=2, context=2, expert=2, flags=_SP, network=GLOBAL),
    MixtureCase(4, tensor=2, pipeline=2, flags=f"{_SP} {_FULL} {_VIRTUAL}", network=GLOBAL),
    # Balanced choices instead of losses, over the tokens of a process.
    MixtureCase(4, pipeline=2, expert=2, network=BALANCED),
    # Biases instead of losses.
    MixtureCase(4, expert=4, network=SIGMOID),
    MixtureCase(4, expert=2, flags=f"--zero-stage 1 {_OVERLAP}", network=SIGMOID),
    MixtureCase(4, tensor=2, expert=2, flags=_SP, network=SIGMOID),
    MixtureCase(4, tensor=2, expert=4, expert_tensor=1, flags=_SP, network=SIGMOID),
    MixtureCase(4, context=2, pipeline=2, expert=2, network=SIGMOID),
    MixtureCase(4, pipeline=2, expert=2, flags=f"{_VIRTUAL} {_FULL}", network=SIGMOID),
    # Muon: each expert's matrix on a process that holds it, or some of its rows.
    MixtureCase(2, expert=2, flags="--zero-stage 1", network=_MUON),
    MixtureCase(4, expert=2, flags="--zero-stage 2", network=_MUON),
    MixtureCase(4, expert=2, flags=_ZERO3, network=_MUON),
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} --zero-stage 1", network=_MUON_SPLIT),
    MixtureCase(4, tensor=2, expert=4, expert_tensor=1, flags=_SP, network=_MUON_SPLIT),
    # Multi-token prediction whose layer is also a mixture.
    MixtureCase(2, expert=2, network=AHEAD),
    MixtureCase(4, pipeline=2, expert=2, flags=_VIRTUAL, network=AHEAD),
    MixtureCase(4, tensor=2, expert=2, flags=f"{_SP} {_ZERO3}", network=AHEAD),
)


# The cases in docs/layouts.md. In 16 bits, rounding alone soon reroutes a token.
IN_FP32 = tuple(case for case in MIXTURES if case.tolerance == 1e-5)


class MixtureCurves(NamedTuple):
    """What one process recorded.

    Attributes:
        losses: Losses by name, one value per iteration.
        norms: Gradient norms.
        biases: The routers' final biases, by the layer's number in the model.
    """

    losses: dict[str, list[float]]
    norms: list[float]
    biases: dict[str, Tensor]


def train_mixture(layout: Layout, words: list[str]) -> MixtureCurves:
    """Train the toy mixture to the end."""
    recorder, run = train_toy(layout, words)
    names = (*run.recipe.loss_names(run.config), *run.config.model.auxiliary_losses)
    losses = {name: recorder.values(name) for name in names}
    routers = (name for name, _ in run.named_parameters() if name.endswith("router.weight"))
    states = zip(routers, run.layers.routers.states, strict=True)
    biases = {name: state.bias.cpu() for name, state in states if state.bias is not None}
    return MixtureCurves(losses, recorder.values("grad-norm"), biases)


@cache
def alone(network: str, iterations: int = 20) -> MixtureCurves:
    """Return the curves of the same training on one process."""
    case = MixtureCase(1, network=network, iterations=iterations)
    return train_mixture(Layout.single(), case.words)


def differences(case: MixtureCase) -> Mapping[str, float]:
    """Return the largest relative differences from one process, by loss; "norm" is that of norms.

    Biases move in steps of one size, so they must be equal: "biases" is their largest difference.
    """
    expected = alone(case.network, case.iterations)
    found = dict.fromkeys((*expected.losses, "norm", "biases"), 0.0)
    seen = set()
    for got in run_sharing_memory(case.processes, train_mixture, case.words, **case.sizes):
        curves = {name: (got.losses[name], curve) for name, curve in expected.losses.items()}
        for name, (ours, theirs) in {**curves, "norm": (got.norms, expected.norms)}.items():
            found[name] = max(found[name], largest_difference(ours, theirs))
        for name, bias in got.biases.items():
            far = (bias - expected.biases[name]).abs().max().item()
            found["biases"] = max(found["biases"], far)
        seen |= got.biases.keys()
    assert seen == expected.biases.keys()
    return found
