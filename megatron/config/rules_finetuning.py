"""Rules for finetuning: conversations, answers, preferences, adapters (LoRA) and distillation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.adapters import FROZEN_BLOCK
from megatron.config.fields import near_multiples
from megatron.config.model import ModelOptions
from megatron.config.rules_model import mlp_sizes
from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions, field_at, flatten

# Flags that have no meaning for conversations, with the only value that they may have.
_NOT_WITH_SFT = {
    "data.mock_data": (False, "conversations are read from files"),
    "data.fim_data": (False, "conversations are kept as they are"),
    "data.reset_position_ids": (False, "positions are counted from 0 in each conversation anyway"),
    "data.reset_attention_mask": (False, "conversations are kept apart anyway"),
    "data.eod_mask_loss": (False, "the chat template says which tokens count"),
    "data.dataloader_type": ("single", "the rows are shuffled in every epoch anyway"),
    "curriculum.curriculum_schedule": (None, "it would cut off the ends of rows"),
}


# Flags that rule out generating text during training, except with these values.
_NOT_WITH_SAMPLES: Exclusions = {
    "parallel.sequence_parallel": (
        (False,),
        "a generation step has too few tokens to split",
    ),
    "parallel.zero_stage": ((None, 0, 1, 2), "no process holds whole weights"),
    "precision.fp8_format": ((None,), "a generation step has too few rows for FP8"),
    "training.cuda_graph_impl": (("auto", "none"), "recorded passes have fixed shapes"),
}


_NOT_WITH_TEACHER: Exclusions = {
    "curriculum.curriculum_schedule": ((None,), "logits are stored for whole samples"),
}
# Each data-parallel process computes its own files.
_NOT_WITH_SAVING: Exclusions = {
    "parallel.expert_model_parallel_size": ((1,), "processes compute different files"),
}


# Flags that change matrix products or sums that --batch-invariant-mode relies on.
_NOT_BATCH_INVARIANT: Exclusions = {
    "precision.bf16": ((False,), "it computes in fp32"),
    "precision.fp16": ((False,), "it computes in fp32"),
    "precision.fp8_format": ((None,), "it computes in fp32"),
    "parallel.tensor_model_parallel_size": ((1,), "sums over processes have a different order"),
    "parallel.context_parallel_size": ((1,), "sums over processes have a different order"),
    "model.num_experts": ((None,), "the sizes of experts' products differ in every batch"),
    "model.lora_rank": ((None,), "adapters add their own products"),
    "model.use_flash_attn": ((False,), "it uses its own attention kernel"),
    "model.masked_softmax_fusion": ((True,), "it uses its own attention kernel"),
    "training.cuda_graph_impl": (("auto", "none"), "it runs on CPUs"),
}


def batch_invariance(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each flag that cannot be combined with --batch-invariant-mode."""
    if config.model.batch_invariant_mode:
        yield from excluded(config, "--batch-invariant-mode", _NOT_BATCH_INVARIANT)


# Additional flags that rule out training on a model's own answers, except with these values.
_NOT_WITH_ROLLOUTS: Exclusions = {
    "reliability.torchft_lighthouse": ((None,), "every job would generate its own answers"),
    **_NOT_WITH_SAMPLES,
    "parallel.pipeline_model_parallel_size": ((1,), "answers are not scored on pipeline stages"),
    "parallel.context_parallel_size": ((1,), "generation does not split an answer over processes"),
    "parallel.expert_model_parallel_size": ((1,), "each copy of the model generates on its own"),
    "training.calculate_per_token_loss": ((False,), "every answer's tokens have their own weight"),
    "data.mock_data": ((False,), "prompts are read from a file"),
    "evaluation.full_validation": ((False,), "answers are not evaluated"),
    "curriculum.curriculum_schedule": ((None,), "it would cut off answers"),
}


# Flags that rule out training a reward model, except with these values.
_NOT_WITH_REWARDS: Exclusions = {
    "finetuning.sample_prompts": ((None,), "a reward model does not generate text"),
    "checkpoint.ckpt_format": (("native",), "Megatron's formats have no name for its head"),
}


def samples(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each flag that cannot be combined with --sample-prompts."""
    path = config.finetuning.sample_prompts
    if path is not None:
        yield from excluded(config, f"--sample-prompts {path}", _NOT_WITH_SAMPLES)


def rollouts(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each flag that prevents a model from training on its own answers."""
    yield from excluded(config, "training on a model's own answers", _NOT_WITH_ROLLOUTS)
    model = config.model
    values = {
        "hidden": model.hidden_dropout,
        "attention": model.attention_dropout,
        "lora": model.lora_dropout,
    }
    for name, value in values.items():
        if value:
            yield (
                f"--{name}-dropout {value:g}: generation uses no dropout, and the loss compares "
                f"training with generation: give --{name}-dropout 0"
            )


def conversations(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each flag that cannot be combined with --sft."""
    if not config.finetuning.sft:
        return
    values = flatten(config)
    for path, (only, reason) in _NOT_WITH_SFT.items():
        if values[path] not in (only, None):
            flag = field_at(path).spell(values[path])
            yield f"--sft cannot be combined with {flag}: {reason}: drop one of them"
    training = config.training
    if config.finetuning.train_epochs is not None and (
        training.has_count or training.train_tokens is not None
    ):
        yield (
            f"--train-epochs {config.finetuning.train_epochs} cannot be combined with "
            "--train-iters, --train-samples or --train-tokens: give one length"
        )


def preferences(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with --preference-loss."""
    loss, precision = config.preferences.preference_loss, config.precision
    if config.model.reward_head and not config.preferences.trains_reward_model:
        yield (
            "the checkpoint contains a reward model, which does not generate text: train it "
            "with --preference-loss bradley-terry, or give --load a language model"
        )
    if loss is None:
        return
    flag = f"--preference-loss {loss}"
    if config.preferences.trains_reward_model:
        yield from excluded(config, flag, _NOT_WITH_REWARDS)
    if not config.training.calculate_per_token_loss:
        yield (
            f"{flag} requires --calculate-per-token-loss, which gives each pair or answer of a "
            "batch the same weight: add it"
        )
    if precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "linear":
        yield (
            f"{flag} cannot be combined with --cross-entropy-fusion-impl linear, which has no "
            "gradient for single tokens: use --cross-entropy-fusion-impl native"
        )
    if config.training.cuda_graph_impl == "local":
        yield (
            f"{flag} cannot be combined with --cuda-graph-impl {config.training.cuda_graph_impl}: "
            "losses of pairs are not recorded: drop the flag"
        )
    if config.finetuning.truncation == "split":
        yield (
            f"{flag} cannot be combined with --truncation split, because answers are compared as "
            "a whole: use keep-start"
        )
    if config.evaluation.full_validation:
        yield (
            f"{flag} cannot be combined with --full-validation, which reads documents or "
            "conversations: use --eval-iters, and drop the flag"
        )
    if config.distillation.is_on or config.distillation.logits_save_dir:
        yield (
            f"{flag} cannot be combined with distillation: drop --teacher-load, --logits-load-dir "
            "and --logits-save-dir"
        )


def preference_dropout(config: RunOptions) -> Iterator[str]:
    """Yield a notice if the policy has dropout, which the reference model does not have."""
    loss, model = config.preferences.preference_loss, config.model
    given = {
        "--hidden-dropout": model.hidden_dropout,
        "--attention-dropout": model.attention_dropout,
    }
    for name, value in given.items() if config.preferences.needs_reference else ():
        if value:
            yield (
                f"{name} {value:g} with --preference-loss {loss}: the reference model has no "
                f"dropout, so rewards are noisy: TRL uses {name} 0"
            )


def adapters(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with adapters."""
    model, parallel, rank = config.model, config.parallel, config.model.lora_rank
    if rank is None:
        return
    flag = f"--lora-rank {rank}"
    if config.precision.fp8_format is not None:
        yield (
            f"{flag}: FP8 training does not support frozen weights: use --bf16 without --fp8-format"
        )
    groups, tensor = model.num_query_groups, parallel.tensor_model_parallel_size
    if model.group_query_attention and groups and groups < tensor:
        yield (
            f"{flag}: --tensor-model-parallel-size {tensor} splits the {groups} query groups: use "
            f"at most {groups}"
        )
    if config.checkpoint.ckpt_format != "native":
        yield (
            f"{flag}: --ckpt-format {config.checkpoint.ckpt_format} has no adapters: use native, "
            "and merge them when you convert the checkpoint"
        )
    if model.frozen_weights_dtype is not None:
        yield from _packed_weights(config)


def _packed_weights(config: RunOptions) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with packed frozen weights."""
    flag = f"--frozen-weights-dtype {config.model.frozen_weights_dtype}"
    if config.parallel.ddp_impl == "torch":
        yield (
            f"{flag}: --DDP-impl torch sends all weights to all processes: use --DDP-impl local, "
            "or drop the flag"
        )
    model, split = config.model, max(1, config.parallel.tensor_model_parallel_size)
    widths = [*mlp_sizes(config), *_mixer_inputs(model, split)]
    for name, size, parts in widths:  # the width of a linear layer's input, and its shards
        if size % (FROZEN_BLOCK * parts):
            share = f" on each of {parts} processes" if parts > 1 else ""
            yield (
                f"{flag}: {name} {size} is not a multiple of {FROZEN_BLOCK}{share}, the number of "
                f"weights that share a scale: use {near_multiples(size, FROZEN_BLOCK * parts)}, "
                "fewer tensor-parallel processes, or drop the flag"
            )


def _mixer_inputs(model: ModelOptions, split: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name, width and number of shards of each input of the mixers' linear layers.

    The hidden size is left out, because `mlp_sizes` yields it.
    """
    heads = model.num_attention_heads or 0
    if model.multi_latent_attention:
        yield "--q-lora-rank", model.q_lora_rank or 0, 1
        yield "--kv-lora-rank", model.kv_lora_rank, 1
        yield "--num-attention-heads x --v-head-dim", heads * model.v_head_dim, split
    else:
        yield "--num-attention-heads x --kv-channels", heads * (model.kv_channels or 0), split
    if model.experimental_attention_variant is not None:
        values = model.linear_num_value_heads * model.linear_value_head_dim
        yield "--linear-num-value-heads x --linear-value-head-dim", values, split
    if model.mamba_num_heads is not None:
        inner = model.mamba_num_heads * model.mamba_head_dim
        yield "--mamba-num-heads x --mamba-head-dim", inner, split


def distillation(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each mistake in the distillation flags, and each incompatible setting."""
    options = config.distillation
    sources = {
        "--teacher-load": options.teacher_load,
        "--logits-load-dir": options.logits_load_dir,
        "--logits-save-dir": options.logits_save_dir,
    }
    given = [f"{flag} {value}" for flag, value in sources.items() if value is not None]
    if not given:
        return
    yield from excluded(config, given[0], _NOT_WITH_TEACHER)
    if options.logits_load_dir is not None and len(given) > 1:
        others = " and ".join(
            source for source in given if not source.startswith("--logits-load-dir")
        )
        yield (
            f"--logits-load-dir {options.logits_load_dir} cannot be combined with {others}: a run "
            "learns from files, learns from a model, or writes files: drop one of them"
        )
    precision = config.precision
    if precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "linear":
        yield (
            f"{given[0]} cannot be combined with --cross-entropy-fusion-impl linear, which never "
            "holds all logits: drop one of them"
        )
    if options.logits_save_dir is None:
        return
    yield from excluded(config, f"--logits-save-dir {options.logits_save_dir}", _NOT_WITH_SAVING)
    if options.logits_save_top_k is None:
        yield (
            f"--logits-save-dir {options.logits_save_dir} requires --logits-save-top-k: add it "
            "(100 is usual; a number as large as the vocabulary keeps everything)"
        )
    if options.teacher_load is None and config.checkpoint.load is None:
        yield (
            f"--logits-save-dir {options.logits_save_dir} requires a teacher: name its checkpoint "
            "with --teacher-load"
        )
