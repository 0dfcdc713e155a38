"""Rules for hybrid models and their Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.experts import mixture_layers
from megatron.config.fields import divisors
from megatron.config.hybrid import MAMBA, MIXTURE, layer_symbols, pattern_parts, pipeline_layout
from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions
from megatron.config.stages import LAYOUT_FLAG

_FLAG = "--hybrid-layer-pattern"
_NOT_WITH_HYBRID: Exclusions = {
    "model.mtp_num_layers": ((None,), "the layers of hybrid models predict one token"),
    "model.parallel_residual": ((False,), "a layer has either a mixer or an MLP"),
    "checkpoint.ckpt_format": (
        ("native", "torch_dist"),
        "hybrid models cannot be written in this format",
    ),
}
_NOT_WITH_MAMBA: Exclusions = {
    "model.batch_invariant_mode": ((False,), "Mamba-2's sums depend on the length of a sequence"),
    "model.use_mup": ((False,), "muP has no rules for Mamba-2's decays and time steps"),
    "precision.fp8_format": ((None,), "Mamba-2's projections are not computed in 8 bits"),
}
_NOT_WITH_PARALLEL: Exclusions = {
    "model.lora_rank": ((None,), "its layers do not support adapters"),
    "model.hybrid_layer_pattern": ((None,), "the pattern names the kind of each layer"),
    "model.add_bias_linear": ((False,), "its linear layers have no biases"),
    "model.add_qkv_bias": ((False,), "its linear layers have no biases"),
    "model.num_experts": ((None,), "its layers have no mixtures of experts"),
    "model.parallel_residual": ((False,), "its MLP follows its mixers"),
    "model.mtp_num_layers": ((None,), "layers with states predict one token"),
    "model.qk_layernorm": ((False,), "--key-multiplier is part of the scale of the scores"),
    "model.qk_l2_norm": ((False,), "--key-multiplier is part of the scale of the scores"),
    "model.attention_output_gate": ((False,), "attention has no gates there"),
    "model.multi_latent_attention": ((False,), "latent attention cannot run parallel to Mamba-2"),
    "model.experimental_attention_variant": ((None,), "every layer has attention"),
    "checkpoint.ckpt_format": (("native",), "such layers cannot be written in this format"),
}


def parallel_mamba(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with --parallel-mamba."""
    model = config.model
    if not model.parallel_mamba:
        return
    flag = "--parallel-mamba"
    yield from excluded(config, flag, _NOT_WITH_PARALLEL)
    yield from excluded(config, flag, _NOT_WITH_MAMBA)
    yield from _mamba(config)
    for name, count in (("mamba_multipliers", 5), ("mlp_multipliers", 2)):
        given = len(getattr(model, name))
        if given != count:
            yield f"--{name.replace('_', '-')} has {given} value{'s' * (given > 1)}: give {count}"


def hybrid(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the pattern, and each setting that does not fit it."""
    model, parallel = config.model, config.parallel
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return
    flag = f"{_FLAG} {pattern}"
    try:
        pattern_parts(pattern)
    except ValueError as error:
        yield f"{flag}: {error}"
        return
    symbols = layer_symbols(pattern)
    if model.num_layers != len(symbols):
        yield (
            f"{flag} names {len(symbols)} layers, and --num-layers is {model.num_layers}: drop "
            "--num-layers, or make the two agree"
        )
        return
    if pipeline_layout(pattern) and parallel.pipeline_model_parallel_size > 1:
        yield (
            f"{flag} has bars between pipeline stages, and {LAYOUT_FLAG} "
            f"{parallel.pipeline_model_parallel_layout} distributes the layers too: drop one of "
            "them"
        )
    yield from _experts(config, flag, symbols)
    yield from excluded(config, flag, _NOT_WITH_HYBRID)
    if MAMBA in symbols:
        yield from excluded(config, flag, _NOT_WITH_MAMBA)
        yield from _mamba(config)


def _experts(config: RunOptions, flag: str, symbols: str) -> Iterator[str]:
    """Yield an error if the pattern and the flags of mixtures name different layers."""
    model = config.model
    if not model.num_experts:
        if MIXTURE in symbols:
            yield f"{flag} has mixtures of experts (E): give --num-experts"
        return
    try:
        chosen = mixture_layers(model, len(symbols))
    except ValueError:  # another rule reports it
        return
    if MIXTURE not in symbols:
        yield f"{flag} has no mixtures of experts (E): drop --num-experts"
    elif chosen != tuple(symbol == MIXTURE for symbol in symbols):
        yield (
            f"{flag} with --moe-layer-freq {model.moe_layer_freq}: the two name different "
            "mixtures of experts: drop --moe-layer-freq"
        )


def _mamba(config: RunOptions) -> Iterator[str]:
    """Yield an error if the number of Mamba-2 heads or groups is not divisible as required."""
    model, parallel = config.model, config.parallel
    heads, groups = model.mamba_num_heads, model.mamba_num_groups
    if heads is None or min(heads, groups) < 1:
        return
    if heads % groups:
        yield (
            f"--mamba-num-heads {heads} is not divisible by --mamba-num-groups {groups}: use "
            f"{divisors(heads)} groups"
        )
    tensor = max(1, parallel.tensor_model_parallel_size)
    context = max(1, parallel.context_parallel_size)
    if groups % (tensor * context):
        ranks = f"--tensor-model-parallel-size {tensor}"
        ranks += f" x --context-parallel-size {context}" * (context > 1)
        yield (
            f"--mamba-num-groups {groups} is not divisible by {ranks}, and a process computes "
            f"whole groups: use a multiple of {tensor * context} groups"
        )
