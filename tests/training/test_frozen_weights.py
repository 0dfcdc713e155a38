"""Adapters with frozen weights in 8 or 4 bits (QLoRA): layouts, checkpoints, and mistakes."""

from __future__ import annotations

import functools
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.loading import open_root
from megatron.checkpoint.reader import NativeReader
from megatron.config.adapters import is_adapter_parameter
from megatron.config.parser import parse_config
from megatron.device import Device
from megatron.inference.load import load_gpt
from megatron.kernels.quantize import dequantize, quantize
from megatron.models.arithmetic import count_part_matrices
from megatron.models.costs import WeightSplit
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.parallel.quantized import PackedWeight
from megatron.planner.memory import estimate_memory, largest_process
from megatron.training.run import Run
from tests.config.command import problems
from tests.distributed import run_sharing_memory, runner_of
from tests.finetuning.toy_pairs import train_pairs
from tests.training import test_sft, trl
from tests.training.toy import build_toy, fingerprint, train_toy

NETWORK = """
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --hidden-dropout 0 --attention-dropout 0
    --global-batch-size 8 --eval-iters 0 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --train-iters 4
"""
LORA = NETWORK + "--lora-rank 4 --lora-alpha 8 --lr 3e-2 "
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 128 "


def _train(layout: Layout, flags: str) -> tuple[list[float], ...]:
    recorder, _ = train_toy(layout, flags.split())
    return tuple(recorder.values(name) for name in ("lm loss", "grad-norm", "params-norm"))


@cache
def _whole(more: str) -> tuple[list[float], ...]:
    """Return the losses and norms of one process."""
    return _train(Layout.single(), LORA + more)


_TP = "--tensor-model-parallel-size 2"
_PP = "--pipeline-model-parallel-size 2"
_NF4 = "--frozen-weights-dtype nf4 --log-params-norm "


@pytest.mark.parametrize(
    ("more", "flags"),
    [
        ("", "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
        ("--use-dora", "--zero-stage 2"),
        ("--use-dora", "--zero-stage 3"),
        ("", _TP),
        ("--use-dora", f"{_TP} --sequence-parallel"),
        ("", f"{_TP} --sequence-parallel --tp-comm-overlap"),
        ("", "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform"),
        ("", f"{_PP} --pipeline-schedule zero-bubble"),
        (MIXTURE, f"{_TP} --sequence-parallel"),
        (MIXTURE, "--expert-model-parallel-size 2"),
        (MIXTURE, "--zero-stage 3 --recompute-granularity full --recompute-method uniform"),
        (MIXTURE, "--zero-stage 3 --expert-model-parallel-size 2"),  # no copies of experts
    ],
)
def test_layouts_equal_one_process(more: str, flags: str) -> None:
    expected = _whole(_NF4 + more)
    sizes = {a: 2 for a in ("tensor", "context", "pipeline") if f"--{a}" in flags}
    sizes |= {"expert": 2} if "--expert-model" in flags else {}
    words = f"{LORA} {_NF4} {more} {flags}"
    for ours in runner_of(flags)(2, _train, words, **sizes):
        for found, value, tolerance in zip(ours, expected, (1e-5, 1e-4, 1e-6), strict=True):
            assert found == pytest.approx(value, rel=tolerance)


def _train_shards(layout: Layout, flags: str) -> tuple[list[float], str, int, int]:
    """Return losses, a fingerprint, the bytes of packed shards, and those that a layer gathers."""
    gathered, gather = [], PackedWeight.fsdp_pre_all_gather

    def counted(self: PackedWeight, *args: Any) -> Any:
        gathered.append(sum(part.nbytes for part in gather(self, *args)[0]))
        return gather(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        # `fully_shard` counts the parameters of the method's signature.
        patch.setattr(PackedWeight, "fsdp_pre_all_gather", functools.wraps(gather)(counted))
        recorder, run = train_toy(layout, flags.split())
    shards = (run.gradients.part(p) for p in run.parameters() if not p.requires_grad)
    held = sum(shard.packed_bytes for shard in shards if isinstance(shard, PackedWeight))
    return recorder.values("lm loss"), fingerprint(run), held, sum(gathered[:4])


@pytest.mark.parametrize(("form", "bits"), [("fp8", 8.25), ("nf4", 4.25)])
def test_shards_are_packed_and_gathered_as_such(form: str, bits: float, tmp_path: Path) -> None:
    """Their checkpoint has the weights of one process, and resuming from it is exact."""
    flags = f"{LORA} --bf16 --frozen-weights-dtype {form} "
    recorder, run = train_toy(Layout.single(), flags.split())
    weights = _packed(run)
    elements = sum(w.numel() for w in weights.values())
    flags += f"--zero-stage 3 --save {tmp_path} --save-interval 2"
    found = run_sharing_memory(2, _train_shards, flags)
    for losses, _, held, gathered in found:
        assert losses == pytest.approx(recorder.values("lm loss"), rel=1e-4)
        assert held * 8 == bits * elements / 2
        assert gathered * 8 == bits * elements / 4  # one of two layers, of which it has half
    reader = open_root(tmp_path)
    assert reader is not None
    assert all(reader.read(f"model.{n}").equal(w.values().cpu()) for n, w in weights.items())
    flags += f" --load {tmp_path} --ckpt-step 2"
    resumed = run_sharing_memory(2, _train_shards, flags)
    assert [one[1] for one in resumed] == [one[1] for one in found]


def test_rows_that_do_not_divide_over_the_shards() -> None:
    told = "the 256 rows of layers.0.attention.qkv.weight do not divide evenly over the 3 processes"
    flags = f"{LORA} {_NF4} --zero-stage 3 --global-batch-size 6"
    with pytest.raises(RuntimeError, match=told):
        run_sharing_memory(3, _train, flags)


def test_another_format_gives_other_numbers() -> None:
    """Otherwise the layouts above might agree because of unpacked weights."""
    plain, fp8, nf4 = (_whole(f"{form}--log-params-norm ") for form in ("", _FP8, _NF4))
    assert 1e-5 < abs(fp8[0][0] - plain[0][0]) < abs(nf4[0][0] - plain[0][0]) < 0.05
    assert all(found[2][-1] == pytest.approx(plain[2][-1], rel=1e-3) for found in (fp8, nf4))


_FP8 = "--frozen-weights-dtype fp8 "


@pytest.mark.parametrize(
    "more",
    [
        _FP8 + "--bf16 --async-save",
        _NF4 + "--bf16 --use-dora",
        _NF4 + "--lora-dropout 0.2 " + MIXTURE,
    ],
)
def test_resuming_is_exact(tmp_path: Path, more: str) -> None:
    if "--num-experts" in more:
        more += "--lora-target-modules linear_qkv linear_proj"
    flags = [*LORA.split(), *more.split(), "--save", str(tmp_path), "--save-interval", "2"]
    straight = fingerprint(train_toy(Layout.single(), flags)[1])
    flags += ["--load", str(tmp_path), "--ckpt-step", "2"]
    assert fingerprint(train_toy(Layout.single(), flags)[1]) == straight


def _packed(run: Run) -> dict[str, PackedWeight]:
    return {n: p for n, p in run.named_parameters() if isinstance(p, PackedWeight)}


def test_weights_are_packed_as_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one weight at a time is in a wider format, and adapters do not change that."""
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    _, plain = train_toy(Layout.single(), [*NETWORK.split(), *save])
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    order: list[str] = []
    store, read = PackedWeight._store, NativeReader._read
    monkeypatch.setattr(PackedWeight, "_store", lambda *a: order.append("packed") or store(*a))
    monkeypatch.setattr(NativeReader, "_read", lambda *a: order.append(a[1]) or read(*a))
    flags = f"{LORA} {_NF4} --load {tmp_path} --finetune --no-initialization"
    run = build_toy(Layout.single(), flags.split())
    held = _packed(run)
    kinds = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    assert set(held) == {f"layers.{i}.{kind}.weight" for i in (0, 1) for kind in kinds}
    for name in held:
        read_at = max(i for i, step in enumerate(order) if step == f"model.{name}")
        assert order[read_at + 1] == "packed", order
    for name, parameter in run.named_parameters():
        if name in held:
            expected = dequantize(*quantize(weights[name], "nf4"), "nf4")
            assert held[name].values().equal(expected)
            assert not parameter.requires_grad
        elif not is_adapter_parameter(name):
            assert parameter.equal(weights[name])


def test_memory_is_that_of_the_estimate() -> None:
    for form, bits in (("nf4", 4.25), ("fp8", 8.25)):
        flags = [*LORA.split(), *MIXTURE.split(), "--bf16", "--frozen-weights-dtype", form]
        run = build_toy(Layout.single(), flags)
        held = _packed(run).values()
        found = sum(w.codes.nbytes + w.scales.nbytes for w in held)
        assert found * 8 == bits * sum(w.numel() for w in held)
        (part,) = (model.part for model in run.parts)
        assert sum(w.numel() for w in held) == count_part_matrices(run.plan, part, WeightSplit())
        others = (p for n, p in run.named_parameters() if not isinstance(p, PackedWeight))
        rest = sum(p.nbytes for p in others)
        adapters = sum(p.nbytes for n, p in run.named_parameters() if is_adapter_parameter(n))
        largest = 2 * max(w.numel() for w in held)  # read by products, one at a time
        estimate = estimate_memory(run.config, run.plan, run.layout, 1)
        assert estimate.parameters == found + rest - adapters + largest


LLAMA_70B = """
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --swiglu
    --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-4
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128000
    --tensor-model-parallel-size 2 --sequence-parallel --lora-rank 16
"""


def test_a_model_of_70_billion_parameters_fits_two_gpus() -> None:
    found = []
    for words in ("", "--frozen-weights-dtype nf4"):
        flags = [*LLAMA_70B.split(), *words.split()]
        config = parse_config(flags, world_size=2).config
        found.append(largest_process(config, model_plan(config.model, 128256), 2))
    plain, packed = found
    assert packed.total < 139 * 2**30 < plain.total
    assert packed.parameters < 0.33 * plain.parameters


def test_shards_of_a_model_of_70_billion_parameters() -> None:
    """Eight processes hold codes instead of fp32, and gather codes instead of bf16."""
    one_rank = LLAMA_70B.replace("--tensor-model-parallel-size 2 --sequence-parallel", "")
    found = []
    for words in ("", "--frozen-weights-dtype nf4"):
        flags = [*one_rank.split(), "--zero-stage", "3", *words.split()]
        config = parse_config(flags, world_size=8).config
        plan = model_plan(config.model, 128256)
        found.append(largest_process(config, plan, 8).parameters)
    matrices, layer, largest = 68.45e9, 0.856e9, 8192 * 2 * 28672
    saved = matrices / 8 * (4 - 4.25 / 8) + 3 * layer * (2 - 4.25 / 8) - 2 * largest
    assert found[0] - found[1] == pytest.approx(saved, rel=1e-3)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations, and a Llama whose rows can be divided into blocks on two processes."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "HIDDEN", 128)
        patch.setattr(trl, "INNER", 256)
        trl.write_model(folder)
    trl.write_conversations(folder / f"{trl.FEW}.jsonl", trl.FEW)
    return folder


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data"])
def test_finetuning_on_conversations_learns(axis: str, conversations: Path) -> None:
    words = ["--train-epochs", "4", "--global-batch-size", "4", "--lora-rank", "4", "--lr", "1e-2"]
    words += ["--frozen-weights-dtype", "nf4"]
    alone = _conversations_alone(conversations, tuple(words))
    assert min(alone) < alone[0] - 0.3
    sizes = {} if axis == "data" else {axis: 2}
    words += [word for name in sizes for word in (f"--{name}-model-parallel-size", "2")]
    found = run_sharing_memory(2, test_sft._losses, conversations, trl.FEW, words, **sizes)
    assert found[-1] == pytest.approx(alone, rel=1e-5)


@cache
def _conversations_alone(folder: Path, words: tuple[str, ...]) -> list[float]:
    (alone,) = run_sharing_memory(1, test_sft._losses, folder, trl.FEW, list(words))
    return alone


_WIDE = "--hidden-size 64 --ffn-hidden-size 128 --lora-rank 4 --lr 1e-2 " + _FP8


@pytest.mark.parametrize("axis", ["pipeline", "data"])
def test_the_reference_is_the_model_without_adapters(axis: str) -> None:
    expected = train_pairs(Layout.single(), _WIDE.split())
    assert expected["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert expected["loss"][-1] < 0.69
    sizes = {} if axis == "data" else {axis: 2}
    words = [*_WIDE.split(), *(f"--{name}-model-parallel-size=2" for name in sizes)]
    for found in run_sharing_memory(2, train_pairs, words, **sizes):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-4)


def test_a_checkpoint_holds_the_values_and_serves_them(tmp_path: Path) -> None:
    """The adapters are merged into the weights with which they were trained."""
    flags = f"{LORA} {_NF4} --save {tmp_path} --save-interval 4"
    _, run = train_toy(Layout.single(), flags.split())
    reader = open_root(tmp_path)
    assert reader is not None
    for name, weight in _packed(run).items():
        assert reader.read(f"model.{name}").equal(weight.values())
    model = load_gpt(str(tmp_path), Device.cpu(), row_by_row=False).model
    linear = run.parts[0].layers["1"].mlp.down
    served = model.layers["1"].mlp.down
    assert type(served.weight) is torch.nn.Parameter
    expected = linear.adapter.merged(linear.weight.values())
    torch.testing.assert_close(served.weight.detach(), expected)
    x = torch.randn(3, 1, 256)
    torch.testing.assert_close(served(x), linear(x), atol=1e-5, rtol=1e-5)


def test_it_may_be_left_out_when_a_run_resumes(tmp_path: Path) -> None:
    """The checkpoint has the same weights in the wider format."""
    flags = f"{LORA} {_NF4} --save {tmp_path} --save-interval 2"
    recorder, _ = train_toy(Layout.single(), flags.split())
    again = f"{LORA} --log-params-norm --load {tmp_path} --ckpt-step 2"
    resumed, _ = train_toy(Layout.single(), again.split())
    assert resumed.values("lm loss") == pytest.approx(recorder.values("lm loss")[2:], rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "--frozen-weights-dtype nf4 requires --lora-rank"),
        ("--lora-rank 4 --DDP-impl torch", "--frozen-weights-dtype nf4: --DDP-impl torch"),
        (
            "--lora-rank 4 --bf16 --fp8-format e4m3",
            "--lora-rank 4: FP8 training does not support frozen",
        ),
        (
            "--lora-rank 4 --hidden-size 160",
            "--frozen-weights-dtype nf4: --hidden-size 160 is not a multiple of 64, the "
            "number of weights that share a scale: use 128 or 192,",
        ),
        (
            f"--lora-rank 4 --ffn-hidden-size 192 {_TP}",
            "--frozen-weights-dtype nf4: --ffn-hidden-size 192 is not a multiple of 64 on each of "
            "2 processes, the number of weights that share a scale: use 128 or 256,",
        ),
    ],
)
def test_what_it_cannot_be_combined_with(flags: str, told: str) -> None:
    sizes = "--hidden-size 128 --num-attention-heads 4 --frozen-weights-dtype nf4"
    lines = problems(sizes, flags, world_size=2)
    assert any(line.startswith(told) for line in lines), lines
