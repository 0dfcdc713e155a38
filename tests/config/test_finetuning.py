"""Finetuning flags: what cannot be combined, and the defaults of finetune.py."""

from __future__ import annotations

import pytest

from megatron.config import parse_config
from megatron.config.adapters import lora_flags
from megatron.config.finetuning import finetuning_args
from megatron.errors import ConfigError
from tests.config.command import problems
from tests.config.test_fp8 import DELTA_WIDTHS, EXPERT_WIDTHS, LATENT_WIDTHS

_BASE = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1
    --lr 0.1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json
    --data-path chats.jsonl
""".split()


def _problems(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config([*_BASE, *words], world_size=1)
    return str(caught.value)


def test_an_epoch_is_a_length() -> None:
    parsed = parse_config([*_BASE, "--sft", "--num-train-epochs", "3"], world_size=1)
    assert parsed.config.finetuning.train_epochs == 3
    assert parsed.config.training.train_iters is None
    assert "or --train-epochs" in _problems("--sft")
    text = _problems("--sft", "--train-epochs", "3", "--train-iters", "5")
    assert "--train-epochs 3 cannot be combined with --train-iters" in text
    text = _problems("--sft", "--train-epochs", "3", "--lr-warmup-samples", "5")
    assert "use --lr-warmup-iters" in text


@pytest.mark.parametrize(
    "flag",
    [
        "--reset-position-ids",
        "--reset-attention-mask",
        "--eod-mask-loss",
        "--fim-data",
        "--dataloader-type cyclic",
    ],
)
def test_conversations_refuse_what_means_nothing_for_them(flag: str) -> None:
    text = _problems("--sft", "--train-iters", "5", *flag.split())
    assert f"--sft cannot be combined with {flag}" in text


@pytest.mark.parametrize(
    "flag",
    ["--train-on-inputs", "--truncation drop", "--no-packing"],
)
def test_flags_of_conversations_require_them(flag: str) -> None:
    assert f"{flag} requires --sft" in _problems("--train-iters", "5", *flag.split())


def test_a_chat_template_is_kept_for_the_server() -> None:
    parsed = parse_config([*_BASE, "--train-iters", "5", "--chat-template", "x"], world_size=1)
    assert parsed.config.tokenizer.chat_template == "x"


@pytest.mark.parametrize("flag", ["--zero-stage 3", "--fp8-format hybrid"])
def test_answers_in_training_need_a_whole_model(flag: str) -> None:
    words = [*_BASE, "--train-iters", "5", "--sample-prompts", "x", *flag.split()]
    with pytest.raises(ConfigError, match=f"--sample-prompts x cannot be combined with {flag}"):
        parse_config(words, world_size=2)


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--sample-tokens 0", "must be at least 1"),
        ("--sample-tokens 1048577", "must be at most 1048576"),
        ("--sample-interval 0", "must be at least 1"),
        ("--sft --train-epochs 0", "must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(flag: str, rule: str) -> None:
    text = _problems("--train-iters", "5", "--sample-prompts", "x", *flag.split())
    assert f"{flag.removeprefix('--sft ')}: {rule}" in text


@pytest.mark.parametrize(
    "flag",
    ["--bf16", "--tensor-model-parallel-size 2", "--lora-rank 4", "--no-masked-softmax-fusion"],
)
def test_what_changes_the_order_of_sums_is_refused_with_batch_invariance(flag: str) -> None:
    words = [*_BASE, "--train-iters", "5", "--batch-invariant-mode", *flag.split()]
    with pytest.raises(ConfigError, match=f"--batch-invariant-mode cannot be combined with {flag}"):
        parse_config(words, world_size=2)


def test_an_adapter_s_settings_are_spelled_as_the_flags_that_give_them() -> None:
    targets = ("q_proj", "layers.1.mlp")
    for is_rslora, is_dora in ((True, False), (False, True)):
        text = lora_flags(rank=4, alpha=2.5, targets=targets, is_rslora=is_rslora, is_dora=is_dora)
        model = parse_config(
            [*_BASE, "--train-iters", "5", *text.split()], world_size=1
        ).config.model
        assert (model.lora_rank, model.lora_alpha) == (4, 2.5)
        assert model.lora_target_modules == targets
        assert (model.use_rslora, model.use_dora) == (is_rslora, is_dora)


def test_flags_of_megatron_core_are_reported() -> None:
    text = _problems("--sft", "--train-iters", "5", "--sft-tokenizer-prompt-format", "default")
    assert "--chat-template" in text


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", "--sft --calculate-per-token-loss"),
        ("--no-sft", ""),
        ("--sft --no-calculate-per-token-loss", ""),
        ("--load a", "--sft --calculate-per-token-loss --finetune"),
        ("--load a --save b", "--sft --calculate-per-token-loss --finetune"),
        ("--load a --save ./a", "--sft --calculate-per-token-loss"),
        ("--load a --save a --pretrained-checkpoint b", "--sft --calculate-per-token-loss"),
        ("--load a --no-finetune", "--sft --calculate-per-token-loss"),
        ("--load a --no-sft", "--finetune"),
    ],
)
def test_defaults_of_finetune(given: str, added: str) -> None:
    words = given.split()
    assert finetuning_args(words) == [*words, *added.split()]


@pytest.mark.parametrize(
    ("words", "world", "widths"),
    [
        (
            "--kv-channels 5 --ffn-hidden-size 40",
            1,
            ["--ffn-hidden-size 40", "--num-attention-heads x --kv-channels 20"],
        ),
        (
            LATENT_WIDTHS,
            1,
            [
                "--hidden-size 80",
                "--q-lora-rank 9",
                "--kv-lora-rank 7",
                "--num-attention-heads x --v-head-dim 15",
            ],
        ),
        (DELTA_WIDTHS, 1, ["--linear-num-value-heads x --linear-value-head-dim 35"]),
        (
            EXPERT_WIDTHS,
            2,
            [
                "--ffn-hidden-size 48",
                "--moe-ffn-hidden-size 24",
                "--moe-shared-expert-intermediate-size 40",
                "--num-attention-heads x --kv-channels 64",
            ],
        ),
        (
            "--hybrid-layer-pattern M*-M --mamba-head-dim 8 --mamba-num-groups 1 "
            "--mamba-num-heads 3",
            1,
            ["--mamba-num-heads x --mamba-head-dim 24"],
        ),
    ],
)
def test_each_width_that_packed_weights_do_not_fill_is_named(
    words: str, world: int, widths: list[str]
) -> None:
    lora = "--lora-rank 2 --load x --finetune --frozen-weights-dtype nf4"
    found = problems(lora, words, world_size=world)
    share = " on each of 2 processes" if world == 2 else ""
    assert [line.partition(f" is not a multiple of 64{share}, the")[0] for line in found] == [
        f"--frozen-weights-dtype nf4: {width}" for width in widths
    ]
