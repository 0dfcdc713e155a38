"""Values that follow from others: a pure function of the configuration and the world size.

`resolve` fills in only what is unset (or implied by a mode) and never fails: what cannot be derived
stays unset, and `checks` says why.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.config.data import DataOptions, TokenizerConfig
from megatron.config.model import ModelOptions
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunOptions, with_values
from megatron.config.training import TrainingOptions

# What `resolve` derives from other flags. Not the global batch: once a run has one, it keeps it.
_DERIVED = (
    "model.decoder_num_layers",
    "model.kv_channels",
    "model.ffn_hidden_size",
    "model.max_position_embeddings",
    "optimizer.start_weight_decay",
    "optimizer.end_weight_decay",
    "training.recompute_granularity",
    "parallel.zero_stage",
)


def resolve(config: RunOptions, world_size: int) -> RunOptions:
    """Return the run with derived values filled in. Resolving twice changes nothing."""
    data, precision, parallel = config.data, config.precision, config.parallel
    if parallel.zero_stage is None:
        stage = 1 if parallel.use_distributed_optimizer else 0
        parallel = replace(parallel, zero_stage=stage)
    return replace(
        config,
        model=_model(config.model, longest_sequence(data)),
        parallel=parallel,
        training=_training(config.training, data_parallel_size(config, world_size)),
        precision=replace(
            precision,
            accumulate_allreduce_grads_in_fp32=precision.accumulate_allreduce_grads_in_fp32
            or precision.bf16,
        ),
        optimizer=_optimizer(config.optimizer),
        tokenizer=_tokenizer(config.tokenizer, config.model.architecture),
        data=replace(data, dataloader_type=data.dataloader_type or "single"),
    )


def data_parallel_size(config: RunOptions, world_size: int) -> int:
    """Return the number of copies of the model, at least 1 so that derived values make sense."""
    parallel = config.parallel
    model = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    return max(world_size // model, 1) if model > 0 else 1


def forget_derived(config: RunOptions, world_size: int) -> RunOptions:
    """Unset what `resolve` would derive again, so that a changed flag changes what follows from it.

    A saved `config.yaml` holds resolved values. Run again with another --hidden-size, its derived
    --kv-channels must follow; one that the user chose differs from the derived value and stays.
    """
    resolved = resolve(config, world_size)
    for path in _DERIVED:
        without = with_values(config, {path: None})
        if resolve(without, world_size) == resolved:
            config = without
    return config


def longest_sequence(data: DataOptions) -> int | None:
    """Return the longest sequence of a sample in tokens, or `None` if that is not given."""
    lengths = [length for length in (data.seq_length, data.decoder_seq_length) if length]
    return max(lengths, default=None)


def _model(model: ModelOptions, seq_length: int | None) -> ModelOptions:
    hidden, heads = model.hidden_size, model.num_attention_heads
    kv_channels, ffn_hidden = model.kv_channels, model.ffn_hidden_size
    if kv_channels is None and hidden and heads:
        kv_channels = hidden // heads
    if ffn_hidden is None and hidden:
        # Three matrices instead of two: 8/3 keeps the parameter count, 64 suits the hardware.
        ffn_hidden = int(hidden * 4 * 2 / 3 / 64) * 64 if model.is_gated else 4 * hidden
    decoder_layers = model.decoder_num_layers
    if model.architecture == "t5" and decoder_layers is None:
        decoder_layers = model.num_layers
    return replace(
        model,
        decoder_num_layers=decoder_layers,
        kv_channels=kv_channels,
        ffn_hidden_size=ffn_hidden,
        max_position_embeddings=model.max_position_embeddings or seq_length,
    )


def _training(training: TrainingOptions, data_parallel: int) -> TrainingOptions:
    global_batch, granularity = training.global_batch_size, training.recompute_granularity
    if global_batch is None and training.micro_batch_size:
        global_batch = training.micro_batch_size * data_parallel
    if granularity is None and training.recompute_activations:
        granularity = "selective"
    train_iters = training.train_iters
    if training.skip_train and train_iters is None and training.train_samples is None:
        train_iters = 0
    return replace(
        training,
        global_batch_size=global_batch,
        recompute_granularity=granularity,
        train_iters=train_iters,
    )


def _tokenizer(tokenizer: TokenizerConfig, architecture: str) -> TokenizerConfig:
    """Fill in the kind: each Megatron entry script has its own, and its examples name none."""
    if tokenizer.tokenizer_type is not None or tokenizer.vocab_file is None:
        return tokenizer
    kind = "GPT2BPETokenizer" if architecture == "gpt" else "BertWordPieceLowerCase"
    return replace(tokenizer, tokenizer_type=kind)


def _optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    if optimizer.weight_decay_incr_style != "constant":
        return optimizer
    start, end, constant = (
        optimizer.start_weight_decay,
        optimizer.end_weight_decay,
        optimizer.weight_decay,
    )
    return replace(
        optimizer,
        start_weight_decay=constant if start is None else start,
        end_weight_decay=constant if end is None else end,
    )
