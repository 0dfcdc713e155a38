"""Random networks: the flags of a published family's, or of the toy's, with a few changed."""

from __future__ import annotations

import random
from typing import NamedTuple

_ROPE = "--position-embedding-type rope"
_LLAMA = f"{_ROPE} --normalization RMSNorm --swiglu --disable-bias-linear"
_WINDOW = "--window-size 4,0"
_GEMMA = (
    f"{_ROPE} --normalization RMSNorm --geglu --disable-bias-linear --apply-layernorm-1p "
    "--scale-embeddings"
)
_OLMO = (
    f"{_LLAMA} --norm-placement after --qk-layernorm --qk-layernorm-scope projection --lr 0.002 "
    "--untie-embeddings-and-output-weights"
)
_COHERE = (
    f"{_ROPE} --swiglu --disable-bias-linear --disable-layernorm-bias --parallel-residual "
    "--shared-parallel-norm --logit-scale 0.4"
)
_YARN = "--rope-type yarn --rotary-scaling-factor 2 --yarn-original-max-position-embeddings 8"
_MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 10"
_SHARED = "--moe-shared-expert-intermediate-size 14"
_GROUPS = "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 1.7"
_LATENT = (
    f"{_LLAMA} --multi-latent-attention --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 6 "
    "--v-head-dim 6 --qk-layernorm --untie-embeddings-and-output-weights"
)
_MAMBA = "--mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-num-heads 4"
_HYBRID = (
    f"{_MAMBA} --position-embedding-type none --normalization RMSNorm --disable-bias-linear "
    "--squared-relu --untie-embeddings-and-output-weights"
)
_BIASED = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1"
)
_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-conv-kernel-dim 3 "
    "--linear-key-head-dim 6 --linear-value-head-dim 8 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4"
)
# By `model_type`. Hugging Face's classes compute these networks, whatever their sizes are.
FAMILIES = {
    "llama": _LLAMA,
    "mistral": f"{_LLAMA} {_WINDOW}",
    "qwen2": f"{_LLAMA} --add-qkv-bias",
    "qwen2 with windows": f"{_LLAMA} --add-qkv-bias {_WINDOW} --window-attn-skip-freq [0,1]",
    "qwen3": f"{_LLAMA} --qk-layernorm",
    "mixtral": f"{_LLAMA} --num-experts 4",
    "olmoe": f"{_LLAMA} --num-experts 4 --qk-layernorm --qk-layernorm-scope projection",
    "qwen2_moe": f"{_LLAMA} --add-qkv-bias {_MIXTURE} {_SHARED} --moe-shared-expert-gate "
    "--moe-router-pre-softmax",
    "qwen3_moe": f"{_LLAMA} --qk-layernorm {_MIXTURE} --moe-layer-freq [0,1]",
    "qwen3_next": f"{_LLAMA} --qk-layernorm --apply-layernorm-1p --attention-output-gate {_DELTA} "
    f"--linear-attention-freq 2 {_MIXTURE} {_SHARED} --moe-shared-expert-gate",
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA} --norm-placement both --attn-logit-softcapping 3 --softmax-scale 0.3 "
    f"--final-logit-softcapping 4 {_WINDOW} --window-attn-skip-freq 2",
    "gemma3_text": f"{_GEMMA} --norm-placement both --qk-layernorm --softmax-scale 0.3 {_WINDOW} "
    "--window-attn-skip-freq 2 --window-rotary-base 50",
    "olmo2": _OLMO,
    "olmo3": f"{_OLMO} {_WINDOW} --window-attn-skip-freq 2",
    "phi3": f"{_LLAMA} --rotary-percent 0.5 --untie-embeddings-and-output-weights",
    "gpt_neox": f"{_ROPE} --parallel-residual --rotary-percent 0.5 "
    "--untie-embeddings-and-output-weights",
    "stablelm": f"{_ROPE} --swiglu --disable-bias-linear --add-qkv-bias --rotary-percent 0.5 "
    "--untie-embeddings-and-output-weights",
    "gptj": f"{_ROPE} --parallel-residual --shared-parallel-norm --disable-bias-attention "
    "--lm-head-bias --untie-embeddings-and-output-weights",
    "cohere": _COHERE,
    "cohere2": f"{_COHERE} {_WINDOW} --window-attn-skip-freq 2 --no-rope-freq 2",
    "bloom": "--position-embedding-type alibi --embed-layernorm",
    "falcon": f"{_ROPE} --parallel-residual --disable-bias-linear --onnx-safe True",
    "falcon of one group": f"{_ROPE} --parallel-residual --shared-parallel-norm --onnx-safe True "
    "--disable-bias-linear --group-query-attention --num-query-groups 1",
    "falcon with alibi": "--position-embedding-type alibi --scale-alibi --onnx-safe True",
    "gpt_oss": f"{_ROPE} --normalization RMSNorm --quick-geglu --glu-linear-offset 1 "
    f"--activation-func-clamp-value 0.7 {_WINDOW} --window-attn-skip-freq 2 --num-experts 4 "
    f"--softmax-type learnable --moe-router-bias {_YARN} --untie-embeddings-and-output-weights",
    "llama4_text": f"{_LLAMA} --no-rope-freq 2 --attention-chunk-size 5 --qk-l2-norm "
    "--attention-temperature-scale 0.7 --attention-temperature-floor 5 --num-experts 4 "
    "--moe-ffn-hidden-size 14 --moe-router-topk 1 --moe-router-score-function sigmoid "
    f"--moe-apply-probs-on-input {_SHARED} --untie-embeddings-and-output-weights",
    "deepseek_v2": f"{_LATENT} {_MIXTURE} --moe-shared-expert-intermediate-size 20 "
    "--moe-router-pre-softmax --moe-router-topk-scaling-factor 1.7",
    "deepseek_v3": f"{_LATENT} --q-lora-rank 14 {_MIXTURE} {_BIASED} {_GROUPS} "
    "--moe-shared-expert-intermediate-size 20 --moe-layer-freq [0,1]",
    "mamba2": f"{_HYBRID} --hybrid-layer-pattern MM",
    "nemotron_h": f"{_HYBRID} --hybrid-layer-pattern M*-M --num-layers 4",
    "nemotron_h, experts": f"{_HYBRID} --hybrid-layer-pattern ME*M --num-layers 4 {_MIXTURE} "
    f"{_BIASED} {_SHARED}",
    "falcon_h1": f"{_LLAMA} --parallel-mamba {_MAMBA} --embedding-multiplier 1.5 "
    "--key-multiplier 0.6 --attention-input-multiplier 1.2 --attention-output-multiplier 0.7 "
    "--mamba-input-multiplier 0.9 --mamba-multipliers 0.8 1.1 0.9 1.3 0.7 "
    "--mamba-output-multiplier 0.8 --mlp-multipliers 0.9 1.2 --logit-scale 0.8 "
    "--untie-embeddings-and-output-weights",
    "gpt2": "",
    "gpt2, exact": "--onnx-safe True",
}
_BERTS = [
    "",
    "--apply-residual-connection-post-layernorm",
    "--apply-residual-connection-post-layernorm --onnx-safe True --bert-no-binary-head",
    "--bert-no-binary-head",
    f"{_ROPE} --normalization RMSNorm",
]
_GOOGLE = (
    "--position-embedding-type relative --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 9 --normalization RMSNorm --disable-bias-linear "
    "--disable-output-bias --softmax-scale 1.0"
)
_T5S = [
    "",
    f"{_GOOGLE} --relu --scale-decoder-outputs",
    f"{_GOOGLE} --geglu --untie-embeddings-and-output-weights",
    f"{_ROPE} --decoder-num-layers 1",
]
_SIZES = [
    *(
        "",
        "",
        "",
        "--untie-embeddings-and-output-weights",
        "--kv-channels 20",
        "--kv-channels 12",
        "--ffn-hidden-size 22",
    ),
    *("--hidden-size 40", "--num-layers 4", "--norm-epsilon 0.01", "--rotary-base 500"),
    "--make-vocab-size-divisible-by 56",
]
_SIZES_OF_GPT = [
    *("", "--group-query-attention --num-query-groups 2"),
    *("--group-query-attention --num-query-groups 1", "--rotary-percent 0.5"),
]
_CHANGES = [
    *("--normalization RMSNorm", "--apply-layernorm-1p", "--disable-layernorm-bias"),
    *("--apply-residual-connection-post-layernorm", "--swiglu", "--geglu", "--squared-relu"),
    *("--onnx-safe True", "--openai-gelu", "--quick-geglu", "--relu", "--no-bias-gelu-fusion"),
    *("--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm", _ROPE),
    "--qk-layernorm --qk-layernorm-scope projection",
    "--qk-layernorm --qk-layernorm-scope each-head",
]
_CHANGES_OF_GPT = [
    *_CHANGES,
    *("--norm-placement both", "--norm-placement after --lr 0.002", "--parallel-residual"),
    *("--parallel-residual --shared-parallel-norm", "--scale-embeddings", "--embed-layernorm"),
    *("--lm-head-bias", "--lm-head-bias --untie-embeddings-and-output-weights"),
    *("--logit-scale 0.6", "--final-logit-softcapping 3", "--attn-logit-softcapping 2"),
    *("--softmax-scale 0.3", "--disable-bias-attention", "--attention-output-gate"),
    *(_WINDOW, f"{_WINDOW} --window-attn-skip-freq 2", f"{_WINDOW} --window-rotary-base 100"),
    *("--softmax-type learnable", "--softmax-type off-by-one", "--qk-l2-norm"),
    *("--no-rope-freq 2", "--attention-chunk-size 5", "--position-embedding-type alibi"),
    *("--position-embedding-type none", "--position-embedding-type learned_absolute"),
    "--no-rope-freq 2 --attention-temperature-scale 0.7 --attention-temperature-floor 5",
    *("--glu-linear-offset 1", "--activation-func-clamp-value 0.5"),
    *(_YARN, f"{_YARN} --yarn-beta-fast 4 --yarn-beta-slow 0.5", f"{_YARN} --mscale 0.7"),
    *("--use-rope-scaling --rope-scaling-factor 4", "--rotary-seq-len-interpolation-factor 2.5"),
    "--rope-type dynamic --rotary-scaling-factor 3",
    "--rope-type proportional --rotary-percent 0.5",
    "--rope-type longrope --longrope-original-max-position-embeddings 9 "
    "--longrope-short-factor 1 1.1 1.3 1.5 --longrope-long-factor 1.5 2 3 5 "
    "--longrope-attention-factor 1.2",
    *("--mtp-num-layers 1", "--mtp-num-layers 2 --untie-embeddings-and-output-weights"),
    "--use-mup --mup-base-hidden-size 16",
    *(f"{_DELTA} --linear-attention-freq 2", "--hybrid-layer-pattern *-*-"),
    *("--num-experts 4", _MIXTURE, "--num-experts 4 --moe-layer-freq 2"),
    *(f"{_MIXTURE} {_SHARED}", f"{_MIXTURE} {_SHARED} --moe-shared-expert-gate"),
    *("--num-experts 4 --mlp-type residual --moe-router-topk 1", f"{_MIXTURE} {_BIASED}"),
    *(f"{_MIXTURE} --moe-router-bias", f"{_MIXTURE} --moe-router-score-function sqrtsoftplus"),
    *("--num-experts 2 4 --moe-ffn-hidden-size 10", f"{_MIXTURE} --moe-expert-capacity-factor 1"),
    *("--moe-router-pre-softmax", "--moe-router-topk 1", "--moe-router-topk 3"),
    *("--moe-router-topk-scaling-factor 2.5", "--moe-router-group-score-topk 1"),
    *("--moe-router-num-groups 2 --moe-router-group-topk 1", "--moe-router-score-function sigmoid"),
    "--num-experts 4 --moe-router-gating deepspeed",
]
_CHANGES_OF_T5 = [*_CHANGES, "--disable-output-bias", "--scale-decoder-outputs", _GOOGLE]


class Network(NamedTuple):
    """A random network.

    Attributes:
        kind: "gpt", "bert" or "t5".
        family: The key of `FAMILIES` if the network is that one, otherwise "".
        flags: Its flags. They may contradict one another, which `parse_config` refuses.
    """

    kind: str
    family: str
    flags: str


def draw_network(rng: random.Random, kind: str) -> Network:
    """Draw a network: a family's in other sizes, or one with up to three changes."""
    changes: list[str] = []
    family = ""
    if kind == "gpt":
        family = rng.choice(list(FAMILIES))
        sizes = [rng.choice(_SIZES), rng.choice(_SIZES_OF_GPT)]
        base, pool = FAMILIES[family], _CHANGES_OF_GPT
    else:
        sizes, base = [rng.choice(_SIZES)], rng.choice(_BERTS if kind == "bert" else _T5S)
        pool = _CHANGES_OF_T5 if kind == "t5" else _CHANGES
    changes = rng.sample(pool, rng.choice([0, 0, 1, 1, 2, 3]))
    # Changes of weights by training are small compared to these initial weights.
    flags = f"--init-method-std 0.2 {base} {' '.join([*sizes, *changes])}"
    return Network(kind, "" if changes or any(sizes) else family, " ".join(flags.split()))


def all_networks() -> list[Network]:
    """Return every family, and the plain networks with each of the changes."""
    families = [Network("gpt", name, flags) for name, flags in FAMILIES.items()]
    others = {
        "bert": (_BERTS, _CHANGES),
        "t5": (_T5S, _CHANGES_OF_T5),
        "gpt": ([], _CHANGES_OF_GPT),
    }
    changed = [
        Network(kind, "", flags)
        for kind, (plain, changes) in others.items()
        for flags in (*plain, *changes)
    ]
    return families + changed
