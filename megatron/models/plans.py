"""Plans of the networks that flags describe, with one function for each architecture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron.config.attention import delta_net_layers, layer_windows, rotary_layers
from megatron.config.experts import layer_experts
from megatron.config.hybrid import ATTENTION, MAMBA, layer_symbols
from megatron.config.model import ModelConfig
from megatron.config.retro import retro_layers
from megatron.kernels.rope import DynamicNtk, LongRope, Scaling, Yarn
from megatron.models.mixture_plan import GatingPlan, MixturePlan, RouterPlan
from megatron.models.plan import (
    LANGUAGE_MODEL_HEAD,
    RETRIEVAL_HEAD,
    AttentionPlan,
    ClassifierPlan,
    EmbeddingPlan,
    HeadPlan,
    HeadSpec,
    InitPlan,
    LatentAttentionPlan,
    LayerPlan,
    MaskedTokenPlan,
    MixerPlan,
    MLPPlan,
    ModelPlan,
    MultiTokenPlan,
    NormPlan,
    OutputPlan,
    PositionBiasPlan,
    RetrievalAttentionPlan,
    RetrievalPlan,
    RetrieverPlan,
    RotaryPlan,
    TemperaturePlan,
)
from megatron.models.recurrent_plan import GatedDeltaNetPlan, MambaPlan, ParallelMambaPlan

_JITTER = 0.01  # DeepSpeed's value for the policy Jitter
_SEGMENTS = 2  # segments per BERT sample, and therefore token types and classes of the binary head


def layer_plan(
    model: ModelConfig,
    *,
    causal: bool,
    crosses: bool = False,
    experts: int = 0,
    window: int | None = None,
    rotates: bool = True,
    is_delta: bool = False,
) -> LayerPlan:
    """Return the plan of one layer.

    Args:
        model: Resolved network flags.
        causal: Whether, without a mask, tokens attend only to themselves and earlier tokens.
        crosses: Whether the layer belongs to a decoder that also attends to an encoder's output.
        experts: The number of experts in the mixture that replaces the MLP; 0 for a dense MLP.
        window: The number of earlier tokens that a token attends to; `None` for all.
        rotates: Whether the layer has rotary embeddings, in a model that uses them.
        is_delta: Whether the layer has a gated delta net instead of attention.
    """
    attention = attention_plan(model, causal=causal, window=window, rotates=rotates)
    mixer: MixerPlan = attention
    if is_delta:
        mixer = delta_net_plan(model)
    elif model.multi_latent_attention:
        mixer = latent_plan(model, attention)
    elif model.parallel_mamba:
        mixer = parallel_mamba_plan(model, attention)
    mlp = mlp_plan(model)
    return LayerPlan(
        mixer=mixer,
        mlp=mixture_plan(model, mlp, experts) if experts else mlp,
        norm=norm_plan(model),
        norm_placement=model.norm_placement,
        parallel=model.parallel_residual,
        shares_norm=model.parallel_residual and model.shared_parallel_norm,
        cross_attention=cross_attention_plan(attention) if crosses else None,
        residual_after_norm=model.apply_residual_connection_post_layernorm,
        dropout=model.hidden_dropout,
    )


def attention_plan(
    model: ModelConfig, *, causal: bool, window: int | None = None, rotates: bool = True
) -> AttentionPlan:
    """Return the plan of self-attention. The arguments are those of `layer_plan`."""
    rotary = None
    if model.has_rotary_embeddings and rotates:
        rotary = rotary_plan(model, in_window=window is not None)
    return AttentionPlan(
        hidden=model.hidden_size,
        init=hidden_init_plan(model),
        bias=model.add_bias_linear and model.add_bias_attention,
        defers_bias=model.hidden_dropout > 0,
        causal=causal,
        heads=model.num_attention_heads,
        kv_heads=model.kv_heads,
        head_size=model.kv_channels,
        dropout=model.attention_dropout,
        scale=model.attention_scale,
        output_gate=model.attention_output_gate,
        qkv_bias=model.add_qkv_bias,
        qk_norm=query_norm_plan(model, rotates=rotates),
        norm_scope=model.qk_layernorm_scope,
        rotary=rotary,
        window=window,
        chunk=model.attention_chunk_size if rotates else None,
        temperature=None if rotates else temperature_plan(model),
        softcap=model.attn_logit_softcapping,
        softmax=model.softmax_type,
        alibi=alibi_factor(model),
    )


def cross_attention_plan(attention: AttentionPlan) -> AttentionPlan:
    """Return the plan of a decoder's attention to an encoder's output.

    It has as many key-value heads as query heads, nothing that depends on positions, and no gate,
    QKV bias, query-key normalization or sinks.

    Args:
        attention: The plan of the decoder's self-attention.
    """
    return replace(
        attention,
        kind="cross_attention",
        causal=False,
        kv_heads=attention.heads,
        output_gate=False,
        qkv_bias=False,
        qk_norm=None,
        rotary=None,
        window=None,
        chunk=None,
        temperature=None,
        softmax="vanilla",
        alibi=None,
    )


def mlp_plan(model: ModelConfig) -> MLPPlan:
    """Return the plan of a dense MLP."""
    gate_factor, factor = model.mlp_multipliers
    return MLPPlan(
        hidden=model.hidden_size,
        init=hidden_init_plan(model),
        bias=model.add_bias_linear,
        defers_bias=model.hidden_dropout > 0,
        inner=model.ffn_hidden_size,
        activation=model.activation,
        gated=model.is_gated,
        clamp=model.activation_func_clamp_value,
        offset=model.glu_linear_offset,
        gate_factor=gate_factor,
        factor=factor,
    )


def hybrid_layer(model: ModelConfig, layer: LayerPlan, symbol: str) -> LayerPlan:
    """Return the part of a layer that a symbol of --hybrid-layer-pattern selects.

    Args:
        model: Resolved network flags.
        layer: The plan of a layer with attention and an MLP or a mixture.
        symbol: `ATTENTION`, `MAMBA`, or any other symbol for the MLP or the mixture.
    """
    if symbol == ATTENTION:
        return replace(layer, mlp=None)
    if symbol == MAMBA:
        return replace(layer, mlp=None, mixer=mamba_plan(model))
    return replace(layer, mixer=None)


def mamba_plan(model: ModelConfig) -> MambaPlan:
    """Return the plan of a Mamba-2 mixer."""
    assert model.mamba_num_heads is not None, "resolve fills it in"
    factors = tuple(model.mamba_input_multiplier * factor for factor in model.mamba_multipliers)
    return MambaPlan(
        hidden=model.hidden_size,
        init=hidden_init_plan(model),
        heads=model.mamba_num_heads,
        head_size=model.mamba_head_dim,
        groups=model.mamba_num_groups,
        state=model.mamba_state_dim,
        epsilon=model.norm_epsilon,
        normalizes=model.mamba_norm,
        factors=factors if set(factors) != {1.0} else (),
    )


def parallel_mamba_plan(model: ModelConfig, attention: AttentionPlan) -> ParallelMambaPlan:
    """Return the plan of attention with a parallel Mamba-2 mixer.

    Factors applied to queries and keys become part of the scale of the scores, and a factor applied
    to values becomes a factor applied to the output.

    Args:
        model: Resolved network flags.
        attention: The plan of attention without these factors.
    """
    scale = attention.scale or attention.head_size**-0.5
    scale *= model.attention_input_multiplier**2 * model.key_multiplier
    return ParallelMambaPlan(
        **{**vars(attention), "kind": "parallel_mamba", "scale": scale},
        mamba=mamba_plan(model),
        attention_factor=model.attention_input_multiplier * model.attention_output_multiplier,
        mamba_factor=model.mamba_output_multiplier,
    )


def alibi_factor(model: ModelConfig) -> float | None:
    """Return the factor applied to ALiBi's slopes, or `None` for a model without ALiBi."""
    if model.position_embedding_type != "alibi":
        return None
    return (model.softmax_scale or model.kv_channels**-0.5) if model.scale_alibi else 1.0


def rotary_plan(model: ModelConfig, *, in_window: bool) -> RotaryPlan:
    """Return the plan of a layer's rotary embeddings.

    Args:
        model: Resolved network flags.
        in_window: Whether the layer's attention is limited to a window.
    """
    is_proportional = model.rope_type == "proportional"
    plan = RotaryPlan(
        positions=model.max_position_embeddings,
        channels=model.qk_pos_emb_head_dim
        if model.multi_latent_attention
        else int(model.kv_channels * (1 if is_proportional else model.rotary_percent)),
        base=model.rotary_base,
        interpolation=model.rotary_seq_len_interpolation_factor,
        planes=int(model.kv_channels * model.rotary_percent / 2) if is_proportional else None,
        scaling=Scaling(model.rope_scaling_factor, model.rope_high_freq_factor)
        if model.use_rope_scaling
        else None,
        yarn=yarn(model) if model.rope_type == "yarn" else None,
        long_rope=long_rope(model) if model.rope_type == "longrope" else None,
        dynamic=dynamic_ntk(model) if model.rope_type == "dynamic" else None,
    )
    if in_window and model.window_rotary_base is not None:
        return RotaryPlan(plan.positions, plan.channels, model.window_rotary_base)
    return plan


def latent_plan(model: ModelConfig, attention: AttentionPlan) -> LatentAttentionPlan:
    """Return the plan of latent attention.

    Args:
        model: Resolved network flags.
        attention: The plan of the attention that latent attention replaces.
    """
    size = model.qk_head_dim + model.qk_pos_emb_head_dim
    strength = 1.0
    if model.rope_type == "yarn":
        strength += 0.1 * math.log(model.rotary_scaling_factor) * model.mscale_all_dim
    shared = {**vars(attention), "kind": "latent_attention", "head_size": model.latent_head_size}
    return LatentAttentionPlan(
        **{**shared, "kv_heads": attention.heads},
        query_scale=strength**2 * math.sqrt(model.latent_head_size / size),
        query_rank=model.q_lora_rank,
        rank=model.kv_lora_rank,
        nope_size=model.qk_head_dim,
        rope_size=model.qk_pos_emb_head_dim,
        value_size=model.v_head_dim,
    )


def delta_net_plan(model: ModelConfig) -> GatedDeltaNetPlan:
    """Return the plan of a gated delta net."""
    return GatedDeltaNetPlan(
        hidden=model.hidden_size,
        init=init_plan(model),
        convolution=model.linear_conv_kernel_dim,
        key_heads=model.linear_num_key_heads,
        value_heads=model.linear_num_value_heads,
        key_size=model.linear_key_head_dim,
        value_size=model.linear_value_head_dim,
        epsilon=model.norm_epsilon,
    )


def yarn(model: ModelConfig) -> Yarn:
    """Return YaRN's changes to the rotary frequencies."""
    factor, original = model.rotary_scaling_factor, model.yarn_original_max_position_embeddings
    assert original is not None, "a rule requires it"
    strength = 0.1 * math.log(factor)
    return Yarn(
        factor=factor,
        original=original,
        fast=model.yarn_beta_fast,
        slow=model.yarn_beta_slow,
        rounds=model.yarn_correction_range_round_to_int,
        concentration=(strength * model.mscale + 1) / (strength * model.mscale_all_dim + 1),
    )


def long_rope(model: ModelConfig) -> LongRope:
    """Return LongRoPE's changes to the rotary frequencies."""
    original = model.longrope_original_max_position_embeddings
    assert original is not None, "a rule requires it"
    return LongRope(
        original,
        model.longrope_short_factor,
        model.longrope_long_factor,
        model.longrope_attention_factor,
    )


def dynamic_ntk(model: ModelConfig) -> DynamicNtk:
    """Return dynamic NTK's changes to the rotary base."""
    return DynamicNtk(model.rotary_scaling_factor, model.max_position_embeddings)


def mixture_plan(model: ModelConfig, dense: MLPPlan, experts: int) -> MixturePlan:
    """Return the plan of a mixture of experts.

    Args:
        model: Resolved network flags.
        dense: The plan of the MLP in dense layers.
        experts: The number of experts.
    """
    expert = replace(
        dense, inner=model.moe_ffn_hidden_size or model.ffn_hidden_size, defers_bias=False
    )
    is_sinkhorn = "sinkhorn" in model.moe_router_load_balancing_type
    is_residual = model.mlp_type == "residual"
    gating = gating_plan(model) if model.moe_router_gating == "deepspeed" else None
    jitter = _JITTER if model.noisy_gate_policy == "Jitter" else 0.0
    shared_size = expert.inner if is_residual else model.moe_shared_expert_intermediate_size
    bias_rate = None
    if model.moe_router_enable_expert_bias:
        # Biases belong to the base model, which does not change when adapters are trained.
        bias_rate = model.moe_router_bias_update_rate if model.lora_rank is None else 0.0
    return MixturePlan(
        hidden=dense.hidden,
        init=dense.init,
        bias=dense.bias,
        router=RouterPlan(
            hidden=dense.hidden,
            init=dense.init,
            experts=experts,
            chosen=model.moe_router_topk,
            bias=model.moe_router_bias,
            score="sigmoid"
            if is_sinkhorn and model.moe_router_topk == 1
            else model.moe_router_score_function,
            scores_all=model.moe_router_pre_softmax or gating is not None or is_sinkhorn,
            groups=model.moe_router_num_groups or 1,
            groups_chosen=model.moe_router_group_topk or 1,
            group_score=model.moe_router_group_score_topk,
            scale=model.moe_router_topk_scaling_factor or 1.0,
            bias_rate=bias_rate,
            balancing=model.balancing,
            sinkhorn=is_sinkhorn,
            z_loss=model.moe_z_loss_coeff,
            jitter=model.moe_input_jitter_eps or jitter,
            capacity=model.moe_expert_capacity_factor if model.moe_token_dropping else None,
            eval_capacity=model.moe_eval_capacity_factor if model.moe_token_dropping else None,
            min_capacity=model.moe_min_capacity,
            drops_last=model.moe_token_drop_policy == "position",
            gating=gating,
        ),
        expert=expert,
        shared=replace(expert, inner=shared_size) if shared_size else None,
        gates_shared=model.moe_shared_expert_gate,
        weighs_shared=is_residual,
        weighs_input=model.moe_apply_probs_on_input,
    )


def gating_plan(model: ModelConfig) -> GatingPlan:
    """Return the plan of DeepSpeed's gating."""
    draws_second = model.moe_router_topk == 2 and model.moe_top2_2nd_expert_sampling
    return GatingPlan(
        samples=draws_second or model.noisy_gate_policy == "RSample",
        selects_randomly=model.moe_use_rts,
    )


def init_plan(model: ModelConfig) -> InitPlan:
    """Return the distribution of initial weights."""
    outputs = 1 if model.hybrid_layer_pattern else 2
    xavier = model.init_method_xavier_uniform
    return InitPlan(model.init_method_std, model.num_layers, xavier, outputs)


def hidden_init_plan(model: ModelConfig) -> InitPlan:
    """Return the distribution of matrices whose inputs and outputs both grow with the width.

    With muP, the sum over the inputs has the same magnitude at every width, before and after an
    update.
    """
    plan, ratio = init_plan(model), model.width_ratio
    return replace(plan, std=plan.std / math.sqrt(ratio), rate=1 / ratio)


def norm_plan(model: ModelConfig) -> NormPlan:
    """Return the plan that all normalizations share."""
    has_bias = model.normalization == "LayerNorm" and model.layernorm_bias
    return NormPlan(model.normalization, model.norm_epsilon, model.apply_layernorm_1p, has_bias)


def query_norm_plan(model: ModelConfig, *, rotates: bool) -> NormPlan | None:
    """Return the plan of the normalization of queries and keys, or `None` if there is none.

    Args:
        model: Resolved network flags.
        rotates: Whether the layer has rotary embeddings, in a model that uses them.
    """
    if model.qk_l2_norm:
        return NormPlan("RMSNorm", model.norm_epsilon, weight=False) if rotates else None
    return norm_plan(model) if model.qk_layernorm else None


def temperature_plan(model: ModelConfig) -> TemperaturePlan | None:
    """Return the plan of the factor applied to queries, or `None` if there is none."""
    if model.attention_temperature_scale is None:
        return None
    return TemperaturePlan(model.attention_temperature_scale, model.attention_temperature_floor)


def embedding_plan(
    model: ModelConfig, vocabulary: int, *, token_types: int = 0, calls: int = 1
) -> EmbeddingPlan:
    """Return the plan of the embedding.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        token_types: Number of token types; 0 for a model without them.
        calls: Number of lookups per pass: an encoder and a decoder make one each.
    """
    learned = model.position_embedding_type == "learned_absolute"
    scale = math.sqrt(model.hidden_size) if model.scale_embeddings else 1.0
    scale *= model.mup_embedding_mult * model.embedding_multiplier
    return EmbeddingPlan(
        vocabulary=vocabulary,
        hidden=model.hidden_size,
        init=init_plan(model),
        positions=model.max_position_embeddings if learned else 0,
        token_types=token_types,
        calls=calls,
        dropout=model.hidden_dropout,
        scale=None if scale == 1 else scale,
        norm=norm_plan(model) if model.embed_layernorm else None,
    )


def output_plan(model: ModelConfig, vocabulary: int, *, bias: bool = False) -> OutputPlan:
    """Return the plan of the language-model head.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        bias: Whether each entry has a bias.
    """
    hidden = model.hidden_size
    return OutputPlan(
        hidden=hidden,
        init=init_plan(model),
        vocabulary=vocabulary,
        tied=not model.untie_embeddings_and_output_weights,
        bias=bias,
        scale=hidden**-0.5 if model.scale_decoder_outputs else model.logit_factor,
        softcap=model.final_logit_softcapping,
    )


def gpt_plan(model: ModelConfig, vocabulary: int, head: HeadSpec) -> ModelPlan:
    """Return the plan of GPT, whose layers may differ in mixer, MLP, window and rotation.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        head: Purpose of the model's heads, which must be language modeling.
    """
    assert head.is_language_model, "only BERT models have task heads"
    output: HeadPlan = output_plan(model, vocabulary, bias=model.lm_head_bias)
    if model.reward_head:
        output = ClassifierPlan(
            kind="score",
            hidden=model.hidden_size,
            init=init_plan(model),
            outputs=1,
            bias=False,
            in_fp32=True,
        )
    kinds = (layer_experts, layer_windows, rotary_layers, delta_net_layers)
    symbols = layer_symbols(model.hybrid_layer_pattern) or [""] * model.num_layers
    choices = list(zip(*(kind(model, model.num_layers) for kind in kinds), symbols, strict=True))
    depths = model.mtp_num_layers or 0
    # As in Megatron Core, a depth is like the last layer, except that windows and rotations start
    # again with those of the first layer: depth 1 has those of layer 1.
    experts, _, _, is_delta, symbol = choices[-1]
    numbered = (choices[min(depth, model.num_layers - 1)] for depth in range(depths))
    ahead_choices = [
        (experts, window, rotates, is_delta, symbol) for _, window, rotates, *_ in numbered
    ]
    plans = {}  # equal layers share one plan, so that the planner times it once
    for choice in (*choices, *ahead_choices):
        experts, window, rotates, is_delta, symbol = choice
        layer = layer_plan(
            model,
            causal=True,
            experts=experts,
            window=window,
            rotates=rotates,
            is_delta=is_delta,
        )
        plans[choice] = hybrid_layer(model, layer, symbol) if symbol else layer
    layers = tuple(plans[choice] for choice in choices)
    ahead = MultiTokenPlan(
        hidden=model.hidden_size,
        init=hidden_init_plan(model),
        layers=tuple(plans[choice] for choice in ahead_choices),
        norm=norm_plan(model),
        output=output_plan(model, vocabulary, bias=model.lm_head_bias),
        layer_offset=len(layers),
    )
    return ModelPlan(
        embedding=replace(embedding_plan(model, vocabulary), ahead=depths),
        layers=layers,
        final_norm=norm_plan(model),
        heads=(output, ahead) if depths else (output,),
        positions=model.longest_context,
    )


def bert_plan(model: ModelConfig, vocabulary: int, head: HeadSpec) -> ModelPlan:
    """Return the plan of BERT: bidirectional layers, and heads for pretraining or a task.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        head: Purpose of the model's heads.
    """
    options: dict[str, Any] = {"hidden": model.hidden_size, "init": init_plan(model)}
    heads: list[HeadPlan] = []
    if model.bert_binary_head:
        heads.append(ClassifierPlan(kind="pooler", outputs=model.hidden_size, **options))
    if head.outputs is not None:
        assert heads, "without a binary head there is no pooler"
        heads.append(
            ClassifierPlan(kind="task_head", outputs=head.outputs, in_fp32=True, **options)
        )
    else:
        # As in Megatron-LM 23.08, the head's weight is never an offset.
        norm = replace(norm_plan(model), offset=False)
        heads.append(MaskedTokenPlan(norm=norm, tanh=model.openai_gelu, **options))
        heads.append(output_plan(model, vocabulary, bias=True))
        if model.bert_binary_head:
            heads.append(ClassifierPlan(kind="binary_head", outputs=_SEGMENTS, **options))
    return ModelPlan(
        embedding=embedding_plan(
            model, vocabulary, token_types=_SEGMENTS if model.bert_binary_head else 0
        ),
        layers=(layer_plan(model, causal=False),) * model.num_layers,
        final_norm=norm_plan(model),
        heads=tuple(heads),
        head_spec=head,
        positions=model.max_position_embeddings,
    )


def t5_plan(model: ModelConfig, vocabulary: int, head: HeadSpec) -> ModelPlan:
    """Return the plan of T5, with the encoder's layers before the decoder's.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        head: Purpose of the model's heads, which must be language modeling.
    """
    assert head.is_language_model, "only BERT models have task heads"
    encoder, decoder = model.num_layers, model.decoder_layers
    positions = model.max_position_embeddings
    bias = None
    if model.position_embedding_type == "relative":
        bias = PositionBiasPlan(
            heads=model.num_attention_heads,
            buckets=model.relative_attention_num_buckets,
            max_distance=model.relative_attention_max_distance,
            positions=positions,
            init=init_plan(model),
        )
    return ModelPlan(
        embedding=embedding_plan(model, vocabulary, calls=2),
        layers=(layer_plan(model, causal=False),) * encoder
        + (layer_plan(model, causal=True, crosses=True),) * decoder,
        final_norm=norm_plan(model),
        heads=(output_plan(model, vocabulary, bias=model.add_output_bias),),
        positions=positions,
        encoder_layers=encoder,
        position_bias=bias,
    )


def retro_plan(model: ModelConfig, vocabulary: int, head: HeadSpec) -> ModelPlan:
    """Return the plan of Retro: a GPT model, some of whose layers also attend to neighbors.

    The first of these layers contains the encoder of the neighbors.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        head: Purpose of the model's heads, which must be language modeling.
    """
    gpt = gpt_plan(model, vocabulary, head)
    retrieval = RetrievalPlan(
        chunk=model.chunk_length,
        neighbors=model.retro_num_neighbors,
        retrieved=model.retro_num_retrieved_chunks * model.chunk_length,
    )
    encoding = replace(
        model,
        position_embedding_type="learned_absolute",  # only the decoder has rotary embeddings
        hidden_dropout=model.retro_encoder_hidden_dropout,
        attention_dropout=model.retro_encoder_attention_dropout,
    )

    def neighbor_attention(model: ModelConfig, kind: str) -> RetrievalAttentionPlan:
        attention = cross_attention_plan(attention_plan(model, causal=False))
        return RetrievalAttentionPlan(**{**vars(attention), "kind": kind, "retrieval": retrieval})

    plain = layer_plan(encoding, causal=False)
    reads_chunk = replace(
        plain, cross_attention=neighbor_attention(encoding, "neighbor_cross_attention")
    )
    retriever = RetrieverPlan(
        layers=(reads_chunk, *[plain] * (model.retro_encoder_layers - 1)),
        retrieval=retrieval,
        layer_offset=model.num_layers,
    )
    layers = list(gpt.layers)
    for index in retro_layers(model.num_layers):
        reads_neighbors = neighbor_attention(model, "chunked_cross_attention")
        layers[index] = replace(layers[index], cross_attention=reads_neighbors)
    first = retro_layers(model.num_layers).start
    layers[first] = replace(layers[first], retriever=retriever)
    embedding = replace(gpt.embedding, calls=2)
    return replace(gpt, embedding=embedding, layers=tuple(layers))


def ict_plan(model: ModelConfig, vocabulary: int, head: HeadSpec) -> ModelPlan:
    """Return the plan of a bi-encoder: BERT towers that turn a text into a vector.

    Args:
        model: Resolved network flags.
        vocabulary: Number of vocabulary entries, padding included.
        head: `RETRIEVAL_HEAD`, or the default `LANGUAGE_MODEL_HEAD`, which means the same here.
    """
    assert head in (LANGUAGE_MODEL_HEAD, RETRIEVAL_HEAD), "only BERT models have task heads"
    projection = ClassifierPlan(
        kind="projection",
        outputs=model.biencoder_projection_dim,
        hidden=model.hidden_size,
        init=init_plan(model),
    )
    return ModelPlan(
        embedding=embedding_plan(model, vocabulary, token_types=_SEGMENTS),
        layers=(layer_plan(model, causal=False),) * model.num_layers,
        final_norm=norm_plan(model),
        heads=(projection,) if projection.outputs else (),
        head_spec=RETRIEVAL_HEAD,
        positions=model.max_position_embeddings,
        towers=1 if model.biencoder_shared_query_context_model else 2,
    )


PLANS = {"gpt": gpt_plan, "bert": bert_plan, "t5": t5_plan, "retro": retro_plan, "ict": ict_plan}


def model_plan(
    model: ModelConfig, padded_vocab_size: int, head: HeadSpec = LANGUAGE_MODEL_HEAD
) -> ModelPlan:
    """Return the plan of the network that the flags describe.

    Args:
        model: Resolved network flags.
        padded_vocab_size: Number of vocabulary entries, padding included.
        head: Purpose of the model's heads.
    """
    return PLANS[model.architecture](model, padded_vocab_size, head)
