"""Rules for windows, rotary embeddings, latent attention and gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.attention import delta_net_layers, layer_windows, rotary_layers
from megatron.config.fields import MAX_LAYERS
from megatron.config.model import ModelOptions, contradictions_of_yarn
from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions

_NOT_WITH_LATENT: Exclusions = {
    "model.group_query_attention": ((False,), "every head has its own keys and values"),
    "model.add_qkv_bias": ((False,), "its projections have no biases"),
    "model.softmax_scale": ((None,), "the size of its heads and YaRN set the scale"),
    "model.qk_layernorm_scope": (("head",), "a whole latent vector is normalized, for all heads"),
    "model.rotary_percent": ((1.0,), "--qk-pos-emb-head-dim is the number of channels that rotate"),
    "model.attention_chunk_size": ((None,), "it does not support chunks"),
    "model.attention_temperature_scale": ((None,), "its queries have no temperature"),
    "model.qk_l2_norm": ((False,), "--qk-layernorm normalizes its latent vectors"),
    "optimizer.apply_wd_to_qk_layernorm": (
        (False,),
        "its norms are those of latent vectors, not of queries and keys",
    ),
    "checkpoint.ckpt_format": (
        ("native", "torch_dist"),
        "latent attention cannot be written in this format",
    ),
}
_NOT_WITH_OUTPUT_GATE: Exclusions = {
    "model.multi_latent_attention": ((False,), "latent attention has no gates"),
}
_NOT_WITH_CHUNKS: Exclusions = {
    "model.window_size": ((None,), "a layer has either chunks or a window"),
}
_NOT_WITH_L2_NORM: Exclusions = {
    "model.qk_layernorm": ((False,), "both normalize queries and keys"),
}
_NOT_WITH_DELTA: Exclusions = {
    "model.hybrid_layer_pattern": ((None,), "the pattern names the kind of each layer"),
    "model.batch_invariant_mode": (
        (False,),
        "training computes chunks of tokens, and generation computes single tokens",
    ),
    "checkpoint.ckpt_format": (
        ("native", "torch_dist"),
        "gated delta nets cannot be written in this format",
    ),
}


def attention(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in attention windows, rotary embeddings or attention scores.

    This includes the flags that select the layers with a window, rotary embeddings or a delta net.
    """
    model = config.model
    for read in (layer_windows, rotary_layers, delta_net_layers):
        try:
            read(model, min(model.num_layers or 1, MAX_LAYERS))
        except ValueError as error:
            if model.num_layers or "layers" not in str(error):
                yield str(error)
    yield from _rope_type(model)
    for flag, is_on, exclusions in (
        ("--attention-output-gate", model.attention_output_gate, _NOT_WITH_OUTPUT_GATE),
        ("--attention-chunk-size", model.attention_chunk_size is not None, _NOT_WITH_CHUNKS),
        ("--qk-l2-norm", model.qk_l2_norm, _NOT_WITH_L2_NORM),
    ):
        if is_on:
            yield from excluded(config, flag, exclusions)
    parallel, bound = config.parallel, model.attn_logit_softcapping
    positions = model.position_embedding_type
    is_ring = parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p"
    if is_ring and bound is not None:
        yield (
            f"--attn-logit-softcapping {bound} with --cp-comm-type p2p: a ring cannot cap the "
            "scores: use --cp-comm-type a2a, in which each rank holds whole sequences"
        )
    if positions == "alibi" and model.use_flash_attn:
        yield (
            "--position-embedding-type alibi with --use-flash-attn: no flash kernel adds biases to "
            "the scores: drop one of them"
        )
    if bound is not None and model.use_flash_attn:
        yield (
            f"--attn-logit-softcapping {bound:g} with --use-flash-attn: no flash kernel caps "
            "the scores: drop one of them"
        )


def latent_attention(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with latent attention."""
    model = config.model
    if not model.multi_latent_attention:
        return
    flag = "--multi-latent-attention"
    yield from excluded(config, flag, _NOT_WITH_LATENT)
    if model.qk_pos_emb_head_dim % 2:
        yield (
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}: channels rotate in pairs: use an "
            "even number"
        )


def delta_net(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with gated delta nets."""
    model, parallel = config.model, config.parallel
    if model.experimental_attention_variant is None:
        return
    flag = f"--experimental-attention-variant {model.experimental_attention_variant}"
    yield from excluded(config, flag, _NOT_WITH_DELTA)
    if model.linear_attention_freq is None:
        yield (
            f"{flag} requires --linear-attention-freq: give 4 for three such layers and then one "
            "with attention, or a pattern"
        )
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys > 0 and values % keys:
        yield (
            f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads "
            f"{keys}: each key serves the same number of value heads: use a multiple of {keys}"
        )
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if min(tensor, context) > 0 and keys % (tensor * context):
        ranks = f"--tensor-model-parallel-size {tensor}"
        ranks += f" x --context-parallel-size {context}" * (context > 1)
        yield (
            f"--linear-num-key-heads {keys} is not divisible by {ranks}, over which the heads of "
            f"gated delta nets are split: use a multiple of {tensor * context}, or fewer processes"
        )


def _rope_type(model: ModelOptions) -> Iterator[str]:
    """Yield an error for each mistake in the settings of --rope-type."""
    kind = model.rope_type
    if model.position_embedding_type == "yarn":
        yield from contradictions_of_yarn(model)
    if kind != "rope" and not model.has_rotary_embeddings:
        yield (
            f"--rope-type {kind} requires --position-embedding-type rope: add it, or drop the flag"
        )
    if kind in ("longrope", "dynamic") and model.architecture != "gpt":
        yield (
            f"--rope-type {kind} is only for GPT, and this model is a "
            f"{model.architecture.upper()}: drop it"
        )
    stretch = model.rotary_seq_len_interpolation_factor or 1
    if kind in ("yarn", "longrope", "dynamic") and (model.use_rope_scaling or stretch > 1):
        other = f"--rotary-seq-len-interpolation-factor {stretch:g}"
        other = "--use-rope-scaling" if model.use_rope_scaling else other
        yield f"--rope-type {kind} with {other}: both lower the frequencies: use one of them"
    if kind == "yarn":
        yield from _yarn(model)
    if kind == "longrope":
        yield from _long_rope(model)
    if kind == "dynamic" and _rotary_channels(model) == 2:
        yield (
            "--rope-type dynamic: its base is undefined if only 2 channels rotate: rotate more of "
            "them"
        )
    if kind == "proportional" and model.multi_latent_attention:
        yield (
            "--rope-type proportional with --multi-latent-attention: --qk-pos-emb-head-dim is the "
            "number of channels that rotate: drop --rope-type"
        )


def _long_rope(model: ModelOptions) -> Iterator[str]:
    flag = "--rope-type longrope"
    if model.longrope_original_max_position_embeddings is None:
        yield (
            f"{flag} requires --longrope-original-max-position-embeddings: give the context that "
            "the model was trained with"
        )
    size = _rotary_channels(model)
    for name in ("short", "long"):
        count = len(getattr(model, f"longrope_{name}_factor"))
        if size and count != size // 2:
            yield (
                f"--longrope-{name}-factor has {count} numbers: {flag} needs one for every two of "
                f"the {size} channels that rotate: give {size // 2}"
            )


def _yarn(model: ModelOptions) -> Iterator[str]:
    if model.yarn_original_max_position_embeddings is None:
        yield (
            "--rope-type yarn requires --yarn-original-max-position-embeddings: give the context "
            "that the model was trained with"
        )
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"--yarn-beta-fast {model.yarn_beta_fast:g} is not above --yarn-beta-slow "
            f"{model.yarn_beta_slow:g}: swap them"
        )


def _rotary_channels(model: ModelOptions) -> int:
    """Return how many channels of a head rotate; 0 if the size of a head is not known."""
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    return int((model.kv_channels or 0) * model.rotary_percent)
