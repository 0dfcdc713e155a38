"""Derived values: a pure function of the configuration and the world size.

`resolve` fills in only what is unset (or implied by a mode) and never fails: what cannot be derived
stays unset, and `checks` reports why.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megatron.config.data import DataOptions
from megatron.config.hybrid import MIXTURE, layer_symbols, pipeline_layout
from megatron.config.model import ModelOptions, contradictions_of_yarn
from megatron.config.patterns import layer_pattern
from megatron.config.run import Findings, RunOptions, flatten, with_values
from megatron.config.training import read_batch_schedule

# Fields that are derived again if a flag changes the values that they depend on (`forget_derived`).
# The global batch size is not among them, because a run keeps its batch size.
_FOLLOWING = (
    "model.num_layers",
    "model.decoder_num_layers",
    "model.mamba_num_heads",
    "model.kv_channels",
    "model.rope_type",
    "model.yarn_original_max_position_embeddings",
    "model.ffn_hidden_size",
    "model.max_position_embeddings",
    "optimizer.start_weight_decay",
    "optimizer.end_weight_decay",
    "training.recompute_granularity",
    "parallel.zero_stage",
)


def resolve(config: RunOptions, world_size: int) -> RunOptions:
    """Return the run with derived values filled in. Resolving again changes nothing."""
    config = with_values(config, _values_from_positions(config.model))
    values, derived = flatten(config), _derived(config, world_size)
    filled = {path: value for path, value in derived.items() if values[path] is None}
    if config.precision.bf16 and config.optimizer.main_grads_dtype == "fp32":
        filled["precision.accumulate_allreduce_grads_in_fp32"] = True
    if config.schedule.lr_wsd_branch_from is not None and config.checkpoint.load is None:
        filled["checkpoint.load"] = config.checkpoint.save
    if config.preferences.trains_reward_model:
        filled["model.reward_head"] = True
    filled |= _values_from_pattern(config)
    return with_values(config, filled)


def without_unused_sizes(config: RunOptions, findings: Findings) -> RunOptions:
    """Unset sizes that Megatron's scripts give but this network does not have.

    Values derived from them would be wrong. A notice is added for each.
    """
    model, parallel, unused = config.model, config.parallel, dict[str, None]()
    if model.multi_latent_attention and model.kv_channels not in (None, model.latent_head_size):
        unused["model.kv_channels"] = None
        findings.notices.append(
            f"--kv-channels {model.kv_channels} has no effect with --multi-latent-attention: "
            "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are the sizes of its heads"
        )
    if parallel.expert_tensor_parallel_size is not None and not model.num_experts:
        unused["parallel.expert_tensor_parallel_size"] = None
        findings.notices.append(
            f"--expert-tensor-parallel-size {parallel.expert_tensor_parallel_size} has no effect "
            "without --num-experts"
        )
    return with_values(config, unused)


def _values_from_positions(model: ModelOptions) -> dict[str, Any]:
    """Return the values that a position embedding type stands for, if it is an alias.

    `yarn` is kept if other settings contradict it, so that `rules_attention.attention` reports
    them.
    """
    positions = model.position_embedding_type
    if positions == "none" and model.multi_latent_attention:
        return {"model.position_embedding_type": "rope"}  # which is the same network
    if positions != "yarn":
        return {}
    original = model.yarn_original_max_position_embeddings or 4096
    return {
        "model.position_embedding_type": "yarn" if any(contradictions_of_yarn(model)) else "rope",
        "model.rope_type": model.rope_type or "yarn",
        "model.yarn_original_max_position_embeddings": original,
    }


def _values_from_pattern(config: RunOptions) -> dict[str, Any]:
    """Return the values of flags that follow from the symbols of a hybrid pattern.

    The vertical bars of a pattern are moved to the flag for the pipeline's layout, so that the
    network's settings are the same in every layout. With a single stage, the bars are dropped. If
    that flag is given too, they stay, so that `rules_hybrid.hybrid` reports them.
    """
    model, parallel = config.model, config.parallel
    symbols = layer_symbols(model.hybrid_layer_pattern)
    if not symbols:
        return {}
    values: dict[str, Any] = {}
    if model.num_experts and model.moe_layer_freq == "1":
        values["model.moe_layer_freq"] = layer_pattern(symbol == MIXTURE for symbol in symbols)
    layout = pipeline_layout(model.hybrid_layer_pattern)
    if parallel.pipeline_model_parallel_size == 1 or layout is None:
        values["model.hybrid_layer_pattern"] = symbols
    elif parallel.pipeline_model_parallel_layout is None:
        values["model.hybrid_layer_pattern"] = symbols
        values["parallel.pipeline_model_parallel_layout"] = layout
    return values


def _derived(config: RunOptions, world_size: int) -> dict[str, Any]:
    """Return the value of each field that follows from others, by "section.field".

    A value is `None` if the values that it depends on are unset.
    """
    model, training, optimizer = config.model, config.training, config.optimizer
    hidden, heads = model.hidden_size, model.num_attention_heads
    ffn_size = 4 * (hidden or 0)
    if model.swiglu or model.geglu:  # but not with --quick-geglu, as in Megatron Core
        # With three matrices instead of two, 8/3 keeps the parameter count; 64 suits the hardware.
        ffn_size = int(ffn_size * 2 / 3 / 64) * 64
    micro_batch = training.micro_batch_size
    batch = micro_batch * data_parallel_size(config, world_size) if micro_batch else None
    if training.step_batch_size_schedule is not None:
        with suppress(ValueError):  # the checks report it
            schedule = read_batch_schedule(training.step_batch_size_schedule)
            batch = max(size for _, size in schedule)
    has_no_length = training.skip_train and training.train_samples is None
    has_no_length = has_no_length and training.train_tokens is None
    ramp = optimizer.weight_decay if optimizer.weight_decay_incr_style == "constant" else None
    # Each of Megatron's scripts has its own default tokenizer, which the examples do not name.
    tokenizer = None
    if config.tokenizer.vocab_file is not None:
        is_gpt = model.architecture in ("gpt", "retro")
        tokenizer = "GPT2BPETokenizer" if is_gpt else "BertWordPieceLowerCase"
    head_size = hidden // heads if hidden and heads else None
    if model.multi_latent_attention:
        head_size = model.latent_head_size
    # Megatron Core's latent attention has YaRN unless --rope-type says otherwise. Its default
    # factor of 1 changes nothing.
    is_scaled = model.multi_latent_attention and (
        (model.rotary_scaling_factor, model.mscale, model.mscale_all_dim) != (1.0, 1.0, 0.0)
    )
    rope_type = model.rope_type or ("yarn" if is_scaled else "rope")
    is_latent_yarn = model.multi_latent_attention and rope_type == "yarn"
    state_heads = 2 * (hidden or 0) // (model.mamba_head_dim or 1)
    return {
        "model.num_layers": len(layer_symbols(model.hybrid_layer_pattern)) or None,
        "model.mamba_num_heads": (state_heads or None) if model.has_mamba else None,
        "model.decoder_num_layers": model.num_layers if model.architecture == "t5" else None,
        "model.kv_channels": head_size,
        "model.rope_type": rope_type,
        "model.yarn_original_max_position_embeddings": 4096 if is_latent_yarn else None,
        "model.ffn_hidden_size": ffn_size if hidden else None,
        "model.max_position_embeddings": longest_sequence(config.data),
        "training.global_batch_size": batch,
        "training.recompute_granularity": "selective" if training.recompute_activations else None,
        "training.train_iters": 0 if has_no_length else None,
        "optimizer.start_weight_decay": ramp,
        "optimizer.end_weight_decay": ramp,
        "parallel.zero_stage": 1 if config.parallel.use_distributed_optimizer else 0,
        "tokenizer.tokenizer_type": tokenizer,
        "data.dataloader_type": "single",
    }


def data_parallel_size(config: RunOptions, world_size: int) -> int:
    """Return the data-parallel size, or 1 if there are too few processes for one replica."""
    parallel = config.parallel
    model = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    return max(world_size // model, 1) if model > 0 else 1


def forget_derived(config: RunOptions, world_size: int) -> RunOptions:
    """Unset the values that `resolve` derives, so that it derives them again from changed flags.

    A saved `config.yaml` contains resolved values. If it is run with a different --hidden-size,
    the derived --kv-channels must change too. A value that differs from the derived one was chosen
    by the user and is kept.
    """
    resolved = resolve(config, world_size)
    for path in _FOLLOWING:
        without = with_values(config, {path: None})
        if resolve(without, world_size) == resolved:
            config = without
    return config


def longest_sequence(data: DataOptions) -> int | None:
    """Return the length of a sample's longest sequence in tokens, or `None` if it is not given."""
    lengths = [length for length in (data.seq_length, data.decoder_seq_length) if length]
    return max(lengths, default=None)
