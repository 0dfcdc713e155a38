"""The rows of the start-up panel, word by word."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.data.datasets import Datasets
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec
from megatron.models.plans import model_plan
from megatron.training import panel
from tests.config.command import parse

_AWARE = "--use-precision-aware-optimizer"
_FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
_DELAYED = f"{_FP8} delayed --fp8-amax-history-len"


@pytest.mark.parametrize(
    ("words", "name", "told"),
    [
        ("", "precision", "fp32 (neither --bf16 nor --fp16 given)"),
        ("--bf16", "precision", "bf16 (--bf16; gradients and master weights in fp32)"),
        (
            f"--bf16 {_AWARE} --main-grads-dtype bf16",
            "precision",
            "bf16 (--bf16; gradients in bf16, master weights in fp32)",
        ),
        (f"--fp16 {_AWARE} --main-params-dtype fp16", "precision",
         "fp16 (--fp16; master weights in fp16)"),
        (f"{_FP8} tensorwise", "linear layers", "fp8 hybrid, one scale per matrix"),
        (
            f"{_FP8} rowwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            "linear layers",
            "fp8 hybrid, one scale per row; the first 1 and last 2 layers in 16 bits",
        ),
        (
            f"{_DELAYED} 2 --fp8-amax-compute-algo max",
            "linear layers",
            "fp8 hybrid, one scale per matrix, from the largest amax of 2 iterations",
        ),
        (
            f"{_DELAYED} 1 --fp8-amax-compute-algo max",
            "linear layers",
            "fp8 hybrid, one scale per matrix, from the last iteration's amax",
        ),
        (
            f"{_DELAYED} 2 --fp8-amax-compute-algo most_recent",
            "linear layers",
            "fp8 hybrid, one scale per matrix, from the last iteration's amax",
        ),
    ],
)  # fmt: skip
def test_how_numbers_are_stored(words: str, name: str, told: str) -> None:
    device: Any = SimpleNamespace(
        description="a GPU", peak_flops=989.4e12, torch_device=torch.device("cpu")
    )
    rows = panel.device_rows(parse(words).config, device, "a kernel")
    layers = ["linear layers"] if "fp8" in words else []
    assert [each for each, _ in rows] == [
        "device", "precision", *layers, "attention", "other kernels", "MFU"
    ]  # fmt: skip
    assert dict(rows)[name] == told
    assert (rows[0][1], dict(rows)["attention"]) == ("a GPU", "a kernel")
    assert rows[-1][1] == "tokens/s x model FLOPs per token / 989 TFLOP/s (dense 16-bit peak)"


def test_a_device_without_a_known_peak_and_a_model_with_states() -> None:
    device: Any = SimpleNamespace(
        description="a GPU", peak_flops=None, torch_device=torch.device("cpu")
    )
    words = "--hybrid-layer-pattern M*M* --mamba-num-groups 1"
    rows = dict(panel.device_rows(parse(words).config, device, ""))
    assert rows["MFU"] == "n/a: this device's peak FLOP/s is unknown"
    assert rows["recurrent layers"].startswith("PyTorch operations (")


@pytest.mark.parametrize(
    ("words", "world", "architecture", "told"),
    [
        (
            "--tensor-model-parallel-size 2 --global-batch-size 16",
            4,
            "gpt",
            {
                "layout": "4 processes: TP 2, CP 1, DP 2, PP 1",
                "batch": "16 samples = micro-batch size 4 x DP 2 x micro-batches 2",
                "tokens per iteration": "2,048",
                "parameters": "216,448 (vocabulary padded to 128)",
            },
        ),
        (
            "--num-experts 4 --moe-router-topk 2",
            2,
            "gpt",
            {"parameters": "614,528, of which a token uses 349,824 (vocabulary padded to 128)"},
        ),
        ("", 1, "t5 --decoder-seq-length 64", {"tokens per iteration": "768"}),
        (
            "--lora-rank 4",
            1,
            "gpt",
            {
                "adapters": "18,432 parameters (LoRA of rank 4); all others are frozen",
                "model FLOPs per token": "0.001016 GFLOP (half of causal attention counted)",
            },
        ),
        (
            "--lora-rank 4 --use-dora --frozen-weights-dtype nf4 --bf16",
            1,
            "gpt",
            {
                "adapters": "20,736 parameters (DoRA of rank 4); all others are frozen, those of "
                "linear layers in nf4"
            },
        ),
        (
            "--curriculum-schedule fixed_linear --curriculum-min-length 8 --curriculum-steps 5",
            1,
            "gpt",
            {
                "tokens per iteration": "512 of whole samples",
                "curriculum": "32 to 128 tokens in 5 iterations, linearly, in multiples of 8; the "
                "rest of a sample is not read",
            },
        ),
        (
            "--data-path a --full-validation",
            1,
            "gpt",
            {
                "validation": "every sample of the validation data once; every 1000 iterations and "
                "at the end"
            },
        ),
        (
            "--train-data-path a --valid-data-path b c --full-validation "
            "--multiple-validation-sets --validation-set-names wiki code --eval-interval 5",
            1,
            "gpt",
            {
                "validation": "every sample once, of each set separately: wiki (b), code (c); "
                "every 5 iterations and at the end"
            },
        ),
        (
            f"--bf16 {_AWARE} --main-grads-dtype bf16",
            1,
            "gpt",
            {"optimizer states": "main_grads in bf16: 0.4 MiB per process less than in fp32"},
        ),
        (
            f"--bf16 {_AWARE} --exp-avg-dtype fp8 --main-grads-dtype bf16",
            1,
            "gpt",
            {
                "optimizer states": "exp_avg in fp8, main_grads in bf16: 1.0 MiB per process less "
                "than in fp32; PyTorch's operations update them, because the fused Adam kernel "
                "needs fp32"
            },
        ),
    ],
)
def test_sizes_follow_from_the_flags(
    words: str, world: int, architecture: str, told: dict[str, str]
) -> None:
    architecture, _, more = architecture.partition(" ")
    without = ["--mock-data"] if "data-path" in words else []
    config = parse(words, more, without=without, world_size=world, architecture=architecture).config
    rows = dict(panel.size_rows(config, world, model_plan(config.model, 128, LANGUAGE_MODEL_HEAD)))
    assert {name: rows[name] for name in told} == told
    for name in ("adapters", "curriculum", "optimizer states", "validation"):
        assert (name in rows) == (name in told)
    assert ("if all experts get the same number of tokens" in rows["memory per process"]) == (
        "--num-experts" in words
    )


def _run(words: str, **facts: Any) -> Any:
    """Return what the panel reads of a run, with 1,200 training samples and 2 test samples."""
    without = ["--mock-data"] if "data-path" in words else []
    without += ["--train-iters"] if "branch" in words else []
    return SimpleNamespace(
        config=parse(words, without=without, architecture=facts.pop("kind", "gpt")).config,
        datasets=Datasets(range(1200), None, range(2)),
        recipe=SimpleNamespace(head=HeadSpec(outputs=1, sequences=facts.pop("sequences", 1))),
        **facts,
    )


_SFT = "--sft --train-data-path x.jsonl"
_WEIGHTED = f"{_SFT} --calculate-per-token-loss"


@pytest.mark.parametrize(
    ("words", "facts", "told"),
    [
        ("", {}, "generated tokens (--mock-data); samples of 128"),
        ("", {"sequences": 2}, "generated tokens (--mock-data); samples of 2 x 128"),
        ("--decoder-seq-length 64", {"kind": "t5"}, "generated tokens (--mock-data); samples of "
         "128 + 64"),
        ("--data-path x", {}, "indexed files; samples of 128"),
        ("--train-data-path x", {}, "indexed files; samples of 128"),
        (_SFT, {}, "conversations; samples of 128"),
        (f"{_WEIGHTED} --preference-loss dpo", {}, "pairs of answers; samples of 128"),
        (f"{_WEIGHTED} --preference-loss kto", {}, "answers; samples of 128"),
    ],
)  # fmt: skip
def test_what_the_data_is(words: str, facts: dict[str, Any], told: str) -> None:
    sizes = "training 1,200, validation 0, test 2"
    assert panel._describe_data(_run(words, **facts)) == f"{told} tokens: {sizes}"


def test_data_of_a_task_and_of_texts() -> None:
    run = _run("", sequences=1)
    run.config = replace(run.config, data=replace(run.config.data, mock_data=False))
    told = "samples of 128 tokens: training 1,200, test 2"  # only the splits that there are
    assert panel._describe_data(run) == f"the task's files; {told}"

    class Texts:
        """A dataset that is tokenized while training."""

        def __len__(self) -> int:
            return 3

        def text_members(self, samples: int) -> list[tuple[Texts, int]]:
            assert samples == 0
            return [(self, samples)]

    run = _run("--data-path x")
    run.datasets = Datasets(range(1200), Texts(), None)
    assert panel._describe_data(run) == (
        "text, tokenized while training; samples of 128 tokens: training 1,200, validation 3, "
        "test 0"
    )


_EQUAL = "all tokens of an update have the same weight (--calculate-per-token-loss)"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data-path x", []),
        (
            _SFT,
            [
                "the assistant's turns count; the mean over micro-batches (to weight tokens "
                "equally: --calculate-per-token-loss)"
            ],
        ),
        (f"{_WEIGHTED} --train-on-inputs", [f"all turns count; {_EQUAL}"]),
        (
            f"{_WEIGHTED} --preference-loss dpo",
            ["dpo; all pairs in an update have the same weight", "pairs, 90% full"],
        ),
        (
            f"{_WEIGHTED} --preference-loss kto",
            [
                "kto; all answers of the same kind in an update have the same weight",
                "pairs, 90% full",
            ],
        ),
    ],
)
def test_how_finetuning_weights_tokens(
    words: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(words)
    monkeypatch.setattr(panel, "describe_pairs", {run.datasets[0]: "pairs, 90% full"}.get)
    monkeypatch.setattr(panel, "describe_packing", lambda _: "")
    assert [text for _, text in panel.finetuning_rows(run)] == told
    monkeypatch.setattr(panel, "describe_packing", {run.datasets[0]: "80% full"}.get)
    if words in (_SFT, f"{_WEIGHTED} --train-on-inputs"):
        assert panel.finetuning_rows(run)[-1] == ("packing", "80% full")


@pytest.mark.parametrize(
    ("words", "iteration", "save_at", "told"),
    [
        ("", 0, (), "starting from random weights; not saving (--save is not given)"),
        (
            "--save a --save-interval 7 --save-interval-in-mins 5 --async-save",
            0,
            {3},
            "starting from random weights; saving to a every 7 iterations or 5 minutes or epoch "
            "in the background, and at the end",
        ),
        (
            "--load b --save a --save-interval-in-mins 2.5",
            4,
            (),
            "continuing b at iteration 4; saving to a every 2.5 minutes, and at the end",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-wsd-branch-from c --load b "
            "--save b --save-interval 3",
            8,
            (),
            "continuing b, a branch of c, at iteration 8; saving to b every 3 iterations, and at "
            "the end",
        ),
    ],
)
def test_where_weights_come_from_and_go(
    words: str, iteration: int, save_at: Any, told: str
) -> None:
    progress = SimpleNamespace(iteration=iteration)
    run = _run(words, progress=progress, save_at=save_at, pretrained=None)
    assert panel._describe_checkpoints(run) == told
