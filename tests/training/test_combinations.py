"""Random combinations of features train, save and resume to the bit, or are refused by name.

Other tests try each feature alone or in combinations known to matter. To try more of them:

    python -m tests.training.test_combinations --count 200 --seed 1
"""

import math
import random
import sys
from dataclasses import dataclass

import pytest

from megatron.config.parser import parse_config
from megatron.errors import UserError
from tests.combinations import try_combinations
from tests.distributed import run_distributed, toy_device
from tests.training.toy import FLAGS_BY_KIND, TOY, network_of, train_toy

_ROPE = "--position-embedding-type rope"
_RMS = f"{_ROPE} --normalization RMSNorm"
# One is chosen of each line of alternatives. "" stands for what the toy has anyway.
_NETWORKS = [
    "",
    f"{_RMS} --swiglu --disable-bias-linear --untie-embeddings-and-output-weights",
    f"{_ROPE} --group-query-attention --num-query-groups 2 --qk-layernorm",
    "--position-embedding-type alibi",
    f"{_ROPE} --window-size 5,0",
    f"{_RMS} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8",
    f"{_RMS} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4",
    "--hybrid-layer-pattern M*-M --num-layers 4 --mamba-state-dim 8 --mamba-head-dim 8 "
    "--mamba-num-groups 2 --position-embedding-type none --normalization RMSNorm",
    f"{_ROPE} --attention-output-gate",
    f"{_ROPE} --softmax-type learnable",
    "--attn-logit-softcapping 30 --final-logit-softcapping 20 --norm-placement both",
    "--parallel-residual",
    "--scale-embeddings --geglu",
    "--use-mup --mup-base-hidden-size 16",
    f"{_ROPE} --mtp-num-layers 1",
    "--position-embedding-type relative",
]
_MIXTURE = "--num-experts 4 --moe-router-topk 2"
_MIXTURES = [
    "",
    "",
    _MIXTURE,
    "--num-experts 4 --moe-shared-expert-intermediate-size 16",
    f"{_MIXTURE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1",
    f"{_MIXTURE} --moe-expert-capacity-factor 1 --moe-aux-loss-coeff 0.01",
    "--num-experts 4 --moe-layer-freq 2 --moe-z-loss-coeff 0.001 --moe-per-layer-logging",
]
_PRECISIONS = [
    "",
    "--bf16",
    "--fp16",
    "--bf16 --embedding-weights-in-fp32",
    "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
]
_AWARE = "--use-precision-aware-optimizer --exp-avg-dtype"
_OPTIMIZERS = [
    "",
    "--optimizer sgd",
    "--optimizer muon",
    f"{_AWARE} bf16 --exp-avg-sq-dtype fp8",
    f"{_AWARE} fp8 --exp-avg-sq-dtype fp8 --main-params-dtype fp16",
    "--ema-decay 0.5 --eval-interval 1 --eval-iters 1",
    "--lawa-interval 1 --lawa-window 2",
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    "--decoupled-lr 1e-3",
    "--lr-decay-style WSD --lr-wsd-decay-iters 2",
]
_MEMORY = [
    "",
    "--recompute-granularity full --recompute-method uniform",
    "--recompute-activations",
    "--recompute-granularity selective --recompute-modules core_attn mlp",
    "--fine-grained-activation-offloading --offload-modules core_attn attn_norm",
]
_TRAINING = [
    "",
    "",
    "--lora-rank 2",
    "--lora-rank 2 --use-dora",
    "--freeze embedding",
    "--calculate-per-token-loss",
    "--on-spike skip --spike-loss-threshold 1.001",
    "--rerun-mode validate_results",
    "--rerun-mode report_stats",
    "--deterministic-mode",
    "--check-weight-hash-across-dp-replicas-interval 1",
    "--reset-position-ids --reset-attention-mask --eod-mask-loss",
    "--hidden-dropout 0.1 --attention-dropout 0.1",
]
_NON_PERSISTENT = "--non-persistent-save-interval 1 --non-persistent-ckpt-type local"
_SAVES = [
    "",
    "--async-save",
    f"--async-save {_NON_PERSISTENT} --non-persistent-local-ckpt-dir FOLDER/local",
    "--ckpt-format torch_dist",
    "--async-save --ckpt-format torch_dist",
    "--ckpt-format legacy",
]
_LOGS = [
    "",
    "--log-params-norm --log-num-zeros-in-grad",
    "--timing-log-level 2",
    "--log-optimizer-states-to-tensorboard",
]
_PIPELINE = "--pipeline-model-parallel-size 2"
_TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
_LAYOUTS = [
    (1, ""),
    (2, ""),
    (2, "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    (2, "--zero-stage 2"),
    (2, "--zero-stage 3"),
    (2, _TENSOR),
    (2, f"{_TENSOR} --tp-comm-overlap"),
    (2, _PIPELINE),
    (2, f"{_PIPELINE} --pipeline-schedule zero-bubble"),
    (2, f"{_PIPELINE} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    (2, "--context-parallel-size 2"),
    (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    (2, "--expert-model-parallel-size 2 --zero-stage 1"),
    (4, f"{_TENSOR} {_PIPELINE}"),
    (4, "--context-parallel-size 2 --zero-stage 3"),
]
_SIZES = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
}


@dataclass(frozen=True)
class Combination:
    """A command line and the number of processes that run it."""

    kind: str
    processes: int
    flags: list[str]

    def __str__(self):
        return f"{self.kind}, {self.processes} processes: {' '.join(self.flags)}"


def combination(seed):
    """Draw combinations until the rules of the configuration accept one."""
    rng = random.Random(seed)
    choices = (_NETWORKS, _MIXTURES, _PRECISIONS, _OPTIMIZERS, _MEMORY, _TRAINING, _SAVES, _LOGS)
    while True:
        kind = rng.choice(["gpt", "gpt", "gpt", "gpt", "bert", "t5"])
        processes, layout = rng.choice(_LAYOUTS)
        features = [rng.choice(alternatives) for alternatives in choices]
        found = Combination(kind, processes, " ".join([*features, layout]).split())
        if _is_accepted(found):
            return found


def _is_accepted(found):
    flags = [*TOY, *FLAGS_BY_KIND[found.kind], "--train-iters", "6", *found.flags]
    try:
        parse_config(
            flags, world_size=found.processes, architecture=found.kind, read_checkpoint=network_of
        )
    except UserError:
        return False
    return True


def _train(layout, kind, flags):
    """Return the losses, or the message of a refusal."""
    try:
        return train_toy(layout, flags, kind)[0].values("lm loss")
    except UserError as error:
        return str(error)


def problem_of(found, folder):
    """Train, resume in the middle, and describe what is wrong; "" if nothing is."""
    flags = [flag.replace("FOLDER", str(folder)) for flag in found.flags]
    sizes = {_SIZES[f]: int(flags[i + 1]) for i, f in enumerate(flags) if f in _SIZES}
    defaults = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --save-interval 2".split()
    flags = [*defaults, *flags, "--save", str(folder / "save"), "--tensorboard-dir", str(folder)]
    try:
        # The last rank has the losses of a pipeline.
        whole = run_distributed(found.processes, _train, found.kind, flags, **sizes)[-1]
        if isinstance(whole, str):
            return ""  # refused when it was built
        flags += ["--load", str(folder / "save"), "--ckpt-step", "4"]
        resumed = run_distributed(found.processes, _train, found.kind, flags, **sizes)[-1]
    except RuntimeError as error:  # an error that is no message for users
        return str(error)
    if isinstance(resumed, str):
        return f"a checkpoint of its own is refused: {resumed}"
    # Megatron's formats contain neither the history of fp8 scaling nor packed states: only finite.
    is_exact = "--ckpt-format" not in found.flags
    if len(resumed) != 2 or not all(map(math.isfinite, whole)):
        return f"losses {whole}, resumed {resumed}"
    if is_exact and resumed != whole[-2:]:
        return f"losses {whole}, resumed {resumed}"
    return ""


@pytest.mark.skipif(toy_device().is_gpu, reason="some layouts need more GPUs than a machine has")
@pytest.mark.parametrize("seed", range(6))
def test_features_work_together_or_are_refused_by_name(seed, tmp_path):
    found = combination(seed)
    problem = problem_of(found, tmp_path)
    assert not problem, f"{found}\n{problem}"


def _problems_of(found, folder):
    return filter(None, [problem_of(found, folder)])


if __name__ == "__main__":
    sys.exit(try_combinations(__doc__.splitlines()[0], combination, _problems_of))
