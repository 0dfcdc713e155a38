"""Flags of Megatron-LM back to 2019."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.config.experts import mixture_layers
from megatron.config.other_flags import other_flags
from megatron.config.run import flatten
from tests.config.command import parse, problems
from tests.config.test_deepspeed import FLAGS as OF_DEEPSPEED

OLD_FLAGS, GONE_FLAGS = other_flags().translated, other_flags().removed

# Old words, and the fields that they set today.
_TRANSLATED: dict[str, dict[str, Any]] = {
    "--batch-size 2": {"training.micro_batch_size": 2},
    "--warmup 0.01": {"schedule.lr_warmup_fraction": 0.01},
    "--checkpoint-activations": {
        "training.recompute_granularity": "full",
        "training.recompute_method": "uniform",
        "training.recompute_num_layers": 1,
    },
    "--activations-checkpoint-method block": {
        "training.recompute_granularity": "full",
        "training.recompute_method": "block",
        "training.recompute_num_layers": 1,
    },
    "--override-lr-scheduler": {"schedule.override_opt_param_scheduler": True},
    "--use-checkpoint-lr-scheduler": {"schedule.use_checkpoint_opt_param_scheduler": True},
    "--apply-query-key-layer-scaling": {"precision.apply_query_key_layer_scaling": True},
    "--fp32-allreduce": {"precision.accumulate_allreduce_grads_in_fp32": True},
    "--min-scale 2": {"precision.min_loss_scale": 2.0},
    "--scaled-upper-triang-masked-softmax-fusion": {"model.masked_softmax_fusion": True},
    "--no-scaled-masked-softmax-fusion": {"model.masked_softmax_fusion": False},
    "--use-contiguous-buffers-in-ddp": {"parallel.use_contiguous_buffers_in_local_ddp": True},
    "--use-rotary-position-embeddings": {"model.position_embedding_type": "rope"},
    "--no-position-embedding": {"model.position_embedding_type": "none"},
    "--model-parallel-size 1": {"parallel.tensor_model_parallel_size": 1},
    "--intra-layer-model-parallel-size 1": {"parallel.tensor_model_parallel_size": 1},
    "--inter-layer-model-parallel-size 1": {"parallel.pipeline_model_parallel_size": 1},
    "--use-pipelining": {"parallel.pipeline_model_parallel_size": 1},
    "--virtual-pipeline-model-parallel-size 1": {
        "parallel.num_virtual_stages_per_pipeline_rank": 1
    },
    "--async-tensor-parallel-allreduce": {"parallel.async_tensor_model_parallel_allreduce": True},
    "--disable-async-tensor-model-parallel-allreduce": {
        "parallel.async_tensor_model_parallel_allreduce": False
    },
    "--dataloader_type cyclic": {"data.dataloader_type": "cyclic"},
    "--erf-gelu": {"model.onnx_safe": True},
    "--multi-query-attention": {
        "model.group_query_attention": True,
        "model.num_query_groups": 1,
    },
    "--moe-frequency 2 --num-experts 4": {"model.moe_layer_freq": "2"},
    "--lr-warmup-percent 0.01": {"schedule.lr_warmup_fraction": 0.01},
    "--log-zeros": {"logging.log_num_zeros_in_grad": True},
    "--scaled-masked-softmax-fusion": {"model.masked_softmax_fusion": True},
    "--use-gpu-initialization": {"parallel.use_cpu_initialization": False},
    "--empty-unused-memory-each-iter 1": {"training.empty_unused_memory_level": 1},
    "--start-wd 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear": {
        "optimizer.start_weight_decay": 0.1
    },
    "--end-wd 0.2 --start-weight-decay 0.1 --weight-decay-incr-style linear": {
        "optimizer.end_weight_decay": 0.2
    },
    "--wd-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2": {
        "optimizer.weight_decay_incr_style": "linear"
    },
    "--checkpoint-attention": {"training.recompute_granularity": "selective"},
    "--checkpoint-granularity full --recompute-method block": {
        "training.recompute_granularity": "full"
    },
    "--checkpoint-method block --recompute-granularity full": {
        "training.recompute_method": "block"
    },
    "--fp8-e4m3": {"precision.fp8_format": "e4m3"},
    "--fp8-hybrid": {"precision.fp8_format": "hybrid"},
    "--enable-cuda-graph": {"training.cuda_graph_impl": "local"},
    "--topk 2": {"model.moe_router_topk": 2},
    "--moe-loss-coeff 0.2": {"model.moe_aux_loss_coeff": (0.2,)},
    "--moe-train-capacity-factor 1.5": {"model.moe_expert_capacity_factor": 1.5},
    "--moe-expert-parallel-size 1": {"parallel.expert_model_parallel_size": 1},
    "--expert-interval 4": {"model.moe_layer_freq": "last-of-4"},
}
# Flags of Megatron Core that have another name here, and the fields that they set.
_PATTERN = "--mamba-num-groups 2 --hybrid-layer-pattern M*M*"
_OF_CORE: dict[str, dict[str, Any]] = {
    "--attention-backend flash --bf16": {"model.use_flash_attn": True},
    "--attention-backend unfused": {"model.masked_softmax_fusion": False},
    "--attention-backend local": {"model.masked_softmax_fusion": False},
    "--attention-backend fused": {
        "model.masked_softmax_fusion": True,
        "model.use_flash_attn": False,
    },
    "--grad-reduce-in-bf16 --bf16 --use-distributed-optimizer": {
        "optimizer.use_precision_aware_optimizer": True,
        "optimizer.main_grads_dtype": "bf16",
    },
    "--use-torch-fsdp2": {"parallel.zero_stage": 3},
    "--torch-fsdp2-no-reshard-after-forward --use-torch-fsdp2": {"parallel.zero_stage": 2},
    "--data-parallel-sharding-strategy optim": {"parallel.zero_stage": 1},
    "--data-parallel-sharding-strategy optim_grads": {"parallel.zero_stage": 2},
    "--data-parallel-sharding-strategy optim_grads_params": {"parallel.zero_stage": 3},
    "--no-weight-decay-cond-type qwen3_next --qk-layernorm": {
        "optimizer.apply_wd_to_qk_layernorm": True
    },
    "--linear-attention-type gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8": {
        "model.experimental_attention_variant": "gated_delta_net"
    },
    "--use-megatron-fsdp": {"parallel.zero_stage": 0},
    "--use-custom-fsdp": {"parallel.zero_stage": 0},
    f"--is-hybrid-model {_PATTERN}": {"model.hybrid_layer_pattern": "M*M*"},
    f"--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec {_PATTERN}": {
        "model.hybrid_layer_pattern": "M*M*"
    },
}
_OF_MIXTURES = {words for words in _TRANSLATED if re.match("--topk|--moe-[^f]|--expert", words)}
# Old words whose translation is refused under today's name.
_REFUSED = {
    "--distribute-checkpointed-activations": "--distribute-saved-activations requires ",
    "--report-topk-accuracies 1 5": "--retriever-report-topk-accuracies 1 5 is only for ICT",
    "--img-dim 64": "--img-h 64: ",
    "--distribute-recomputed-activations": "--distribute-saved-activations requires ",
    "--projection-dim 8": "--biencoder-projection-dim 8 is only for ICT",
    "--shared-query-context-model": "--biencoder-shared-query-context-model is only for ICT",
    "--ict-one-sent": "--use-one-sent-docs is only for ICT",
}
# Flags of one program only; the others refuse them and name that program.
_ELSEWHERE = {
    "--cloze-eval": "tasks/main.py --task LAMBADA: ",
    "--webtext-eval": "tasks/main.py --task PERPLEXITY: ",
    "--eval-hf": "tasks/main.py --load HUGGING_FACE_FOLDER: ",
    "--load-openai": "tasks/main.py --load HUGGING_FACE_FOLDER: ",
}


@pytest.mark.parametrize("words", _TRANSLATED)
def test_translated_with_one_notice(words: str) -> None:
    without = ["--micro-batch-size"] if words.startswith("--batch-size") else []
    more = ["--bf16"] if words.startswith("--fp8") else ["--fp16", "--load folder"]
    if words in _OF_MIXTURES:
        more = ["--num-experts 4"]
    run = parse(words, *more, without=without)
    values = flatten(run.config)
    assert {path: values[path] for path in _TRANSLATED[words]} == _TRANSLATED[words]
    # The second notice is about DeepSpeed's defaults, or the biases of Core's routers.
    assert len(run.notices) == 1 + (words in _OF_MIXTURES or "--num-experts" in words)
    kind = "a flag of Megatron-DeepSpeed, " if words in _OF_MIXTURES else "an old flag ("
    assert run.notices[0].startswith(f"{words.partition(' --')[0]} is {kind}")


@pytest.mark.parametrize("words", _OF_CORE)
def test_flags_of_core_are_read_as_ours(words: str) -> None:
    run = parse(words, world_size=2, without=["--num-layers"] if _PATTERN in words else [])
    values = flatten(run.config)
    assert {path: values[path] for path in _OF_CORE[words]} == _OF_CORE[words]
    name = words.split(maxsplit=1)[0]
    assert [line for line in run.notices if line.startswith(name)]
    assert all(" is a flag of Megatron Core, " in line for line in run.notices)


def test_what_core_does_by_default_needs_no_notice() -> None:
    words = "--attention-backend auto --data-parallel-sharding-strategy no_shard"
    run = parse(words, "--seed 7")
    assert run.notices == ()
    assert run.config.training.seed == 7


def test_values_of_core_that_mean_nothing_here_are_refused() -> None:
    pattern = "--hybrid-layer-pattern"
    spec = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    assert problems(
        "--attention-backend flsh", "--spec local", "--is-hybrid-model", f"--spec {spec}"
    ) == [
        "--attention-backend flsh: expected one of auto, flash, fused, unfused, local",
        f"--spec local: expected one of {spec}, "
        "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
        f"--is-hybrid-model requires {pattern}: add it, or drop the flag",
        f"--spec {spec} requires {pattern}: add it, or drop the flag",
    ]


def test_a_mistake_in_a_translation_names_the_flag_that_was_given() -> None:
    assert problems("--grad-reduce-in-bf16") == [
        "--main-grads-dtype bf16 requires --bf16: add it, or drop the flag "
        "(--grad-reduce-in-bf16 is read as --main-grads-dtype)"
    ]


@pytest.mark.parametrize("stage", ["embedding", "embed"])
def test_a_stage_of_the_embedding_alone(stage: str) -> None:
    run = parse(f"--standalone-{stage}-stage --pipeline-model-parallel-size 2", world_size=2)
    assert run.config.parallel.decoder_first_pipeline_num_layers == 0
    (notice,) = run.notices
    assert notice.endswith("read as --decoder-first-pipeline-num-layers 0")


@pytest.mark.parametrize("words", _REFUSED)
def test_translated_then_refused_by_name(words: str) -> None:
    lines = problems(words, world_size=2)
    assert [line for line in lines if line.startswith(_REFUSED[words])]


@pytest.mark.parametrize("words", _ELSEWHERE)
def test_flags_of_another_program_are_refused_with_its_name(words: str) -> None:
    (line,) = problems(words)
    assert line.startswith(f"{words} is an old flag (2019) for {_ELSEWHERE[words]}")


@pytest.mark.parametrize("flag", GONE_FLAGS, ids=lambda flag: flag.name)
def test_what_nothing_stands_for_is_refused_with_the_remedy(flag: Any) -> None:
    lines = problems(flag.name, flag.value or "3")
    shown = f"{flag.name} {flag.value}" if flag.value else flag.name
    assert lines == [f"{shown} was removed (last seen in {flag.era}): {flag.remedy}"]


@pytest.mark.parametrize(
    "flag", ["--lazy-loader", "--save-optim", "--loose-json", "--fp32-embedding"]
)
def test_gone_switches_take_no_value(flag: str) -> None:
    assert problems(flag)[0].startswith(f"{flag} was removed")


def test_every_old_flag_is_tried_here() -> None:
    lines = (*_TRANSLATED, *_OF_CORE, *_REFUSED, *_ELSEWHERE, *OF_DEEPSPEED)
    tried = {words.split()[0] for words in lines}
    with_a_companion = {
        "--checkpoint-num-layers",
        "--activations-checkpoint-num-layers",
        "--standalone-embedding-stage",
        "--standalone-embed-stage",
        "--model-parallel-memory-opt",
        "--val-data-path",
        "--vocab",
    }
    accepted = {flag.name for flag in other_flags().accepted}
    assert {flag.name for flag in OLD_FLAGS} == (tried | with_a_companion) - accepted


@pytest.mark.parametrize(
    "words",
    [
        "--checkpoint-activations --checkpoint-num-layers 2",
        "--checkpoint-num-layers 2 --checkpoint-activations",
        "--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2",
    ],
)
def test_a_given_layer_count_is_kept(words: str) -> None:
    run = parse(words)
    assert run.config.training.recompute_num_layers == 2
    assert run.config.training.recompute_method == "uniform"
    assert len(run.notices) == 2


@pytest.mark.parametrize(
    "words",
    [
        "--no-position-embedding --use-rotary-position-embeddings",
        "--position-embedding-type rope --no-position-embedding",
    ],
)
def test_rope_needs_no_position_embedding(words: str) -> None:
    assert parse(words).config.model.position_embedding_type == "rope"


def test_a_2019_script_is_reported_line_by_line() -> None:
    lines = problems(
        "--train-data wikipedia --lazy-loader --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model-type bert-large-uncased --cache-dir cache --epochs 1 "
        "--max-preds-per-seq 80 --lr-decay-style exponential"
    )
    assert len([line for line in lines if " was removed " in line]) == 7


def test_model_parallel_size_is_the_tensor_parallel_size() -> None:
    run = parse("--model-parallel-size", "2", world_size=2)
    assert run.config.parallel.tensor_model_parallel_size == 2
    assert [line for line in run.notices if "--model-parallel-size" in line]


def test_files_of_2019_and_2020() -> None:
    run = parse(
        "--vocab words.txt --tokenizer-type BertWordPieceLowerCase",
        "--val-data-path two --train-data-path one",
        without=["--mock-data", "--tokenizer-type", "--vocab-size"],
    )
    assert run.config.tokenizer.vocab_file == "words.txt"
    assert run.config.data.valid_data_path == ("two",)
    assert len(run.notices) == 2


def test_the_first_name_of_sequence_parallelism() -> None:
    run = parse("--model-parallel-memory-opt --tensor-model-parallel-size 2", world_size=2)
    assert run.config.parallel.sequence_parallel
    assert [line for line in run.notices if "--model-parallel-memory-opt" in line]


def test_a_mixture_of_megatron_deepspeed() -> None:
    """Its tutorial's flags are all used, or have no effect and get a notice each."""
    words = (
        "--num-experts 4 4 --topk 2 --mlp-type standard --moe-loss-coeff 0.01 "
        "--moe-expert-parallel-size 2 --create-moe-param-group --disable-moe-token-dropping "
        "--moe-train-capacity-factor 1.0"
    )
    run = parse(words, world_size=2)
    model = run.config.model
    assert (model.num_experts, model.moe_router_topk) == ((4, 4), 2)
    assert model.moe_aux_loss_coeff == (0.01,)
    assert (model.moe_expert_capacity_factor, model.moe_token_dropping) == (1.0, False)
    assert run.config.parallel.expert_model_parallel_size == 2
    assert len(run.notices) == 6
    assert any(line.startswith("--create-moe-param-group: ") for line in run.notices)
    assert (
        "defaults of Megatron-DeepSpeed: --moe-router-gating deepspeed "
        "--moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --moe-layer-freq last-of-2"
    ) in run.notices


def test_a_single_expert_of_megatron_deepspeed_is_a_dense_network() -> None:
    words = (
        "--num-experts 1 --moe-expert-parallel-size 4 --moe-loss-coeff 0.01 "
        "--moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4"
    )
    run = parse("--deepspeed", words)
    assert run.config == parse().config
    assert len(run.notices) == 5  # four flags of Megatron-DeepSpeed, and the resulting settings
    assert "--num-experts 1 is a dense network in Megatron-DeepSpeed" in run.notices[-1]
    core = parse("--num-experts 1 --moe-router-topk 1").config
    assert core.model.num_experts == (1,)  # a mixture in Megatron Core


def test_a_line_of_megatron_deepspeed_has_its_defaults() -> None:
    words = "--num-experts 4 --moe-expert-parallel-size 1 --num-layers 6"
    model = parse(words, without=["--num-layers"]).config.model
    assert model.moe_router_gating == "deepspeed"
    assert (model.moe_router_topk, model.moe_aux_loss_coeff) == (1, (0.1,))
    assert (model.moe_expert_capacity_factor, model.moe_eval_capacity_factor) == (1.0, 1.0)
    assert (model.moe_min_capacity, model.moe_top2_2nd_expert_sampling) == (4, True)
    assert mixture_layers(model, 6) == (False, True) * 3
    given = parse(
        words,
        "--expert-interval 3 --topk 2 --moe-min-capacity 1 --moe-eval-capacity-factor 2",
        "--moe-train-capacity-factor 3 --moe-loss-coeff 0.5 --disable-moe-top2-2nd-expert-sampling",
        without=["--num-layers"],
    ).config.model
    assert (given.moe_router_topk, given.moe_aux_loss_coeff) == (2, (0.5,))
    assert (given.moe_expert_capacity_factor, given.moe_eval_capacity_factor) == (3.0, 2.0)
    assert (given.moe_min_capacity, given.moe_top2_2nd_expert_sampling) == (1, False)
    assert mixture_layers(given, 6) == (False, False, True) * 2
    core = parse("--num-experts 4").config.model
    assert core.moe_router_gating == "core"
    dense = parse("--topk 1").config.model  # does not mention experts
    assert dense.moe_router_gating == "core"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--use-tutel", "--use-tutel: Tutel is not used"),
    ],
)
def test_what_megatron_deepspeed_has_and_our_mixtures_lack(words: str, answer: str) -> None:
    (line,) = problems("--num-experts 4" if words[2:5] != "num" else "", words)
    assert line.startswith(answer)
    assert "drop the flag" in line or ": give one" in line
