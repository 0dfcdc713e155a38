"""Predictions recorded in predictions.json, so that none changes unnoticed.

They cover what no measurement does: ring attention, hybrids with context parallelism, frozen
weights, averages of weights, several machines. To record them again after a change of the model:

    python -m tests.planner.test_recorded
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron.planner.command import build_parser, describe, read_request
from megatron.planner.machine import MACHINES
from megatron.planner.prediction import predict
from megatron.planner.search import PLANNED, Search, layouts
from tests.planner.test_prediction import planned

FILE = Path(__file__).with_name("predictions.json")
_GPT = """
    --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16
    --max-position-embeddings 2048 --micro-batch-size 4 --mock-data --lr 1e-4 --train-iters 1
    --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 50303
    --cuda-graph-impl none
"""
_HYBRID = "--hybrid-layer-pattern M-M*-M-M --mamba-num-groups 4 --position-embedding-type none"
_MIXTURE = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4"
_SMALL = "--hidden-size 512 --num-attention-heads 8 --micro-batch-size 1"  # waits for the host
_LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --position-embedding-type rope"
)
_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-key-head-dim 128 --linear-value-head-dim 256 --linear-num-key-heads 16 "
    "--linear-num-value-heads 32 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear"
)
_PACKED = "--lora-rank 8 --frozen-weights-dtype nf4"
# Name: (machine, processes, flags).
RUNS = {
    "plain": ("A100", 1, ""),
    "dropout": ("A100", 1, "--hidden-dropout 0.1"),
    "fp8": ("H100", 1, "--fp8-format hybrid"),
    "fp8 on B200": ("B200", 1, "--fp8-format hybrid"),
    "tensor": ("H200", 4, "--tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap"),
    "two nodes": ("H100", 16, "--tensor-model-parallel-size 4 --zero-stage 1"),
    "a tensor group of two nodes": ("B200", 16, "--tensor-model-parallel-size 16"),
    "ring": ("H200", 4, "--context-parallel-size 4 --cp-comm-type p2p"),
    "all-to-all": ("H200", 4, "--context-parallel-size 4 --cp-comm-type a2a"),
    "hybrid": ("H200", 1, _HYBRID),
    "hybrid, context": ("H200", 4, f"{_HYBRID} --context-parallel-size 4"),
    "hybrid, context and tensor": ("H200", 4, f"{_HYBRID} --context-parallel-size 2 "
                                              "--tensor-model-parallel-size 2"),
    "experts": ("H200", 4, _MIXTURE),
    "experts, tensor": ("H200", 8, f"{_MIXTURE} --tensor-model-parallel-size 2 "
                                   "--sequence-parallel"),
    "experts, one process": ("H200", 1, "--num-experts 4 --moe-router-topk 2"),
    "experts, all chosen": ("H200", 4, "--num-experts 4 --moe-router-topk 4 "
                                       "--expert-model-parallel-size 4"),
    "small": ("H200", 1, _SMALL),
    "small, experts": ("H200", 2, f"{_SMALL} --num-experts 4 --moe-router-topk 2 "
                                  "--expert-model-parallel-size 2"),
    "small, tensor": ("H200", 2, f"{_SMALL} --tensor-model-parallel-size 2"),
    "few micro-batches": ("H200", 8, "--pipeline-model-parallel-size 4 --micro-batch-size 2 "
                                     "--global-batch-size 8"),
    "pipeline": ("H200", 4, "--pipeline-model-parallel-size 4 --global-batch-size 32"),
    "chunks": ("H200", 4, "--pipeline-model-parallel-size 4 --global-batch-size 32 "
                          "--num-layers-per-virtual-pipeline-stage 1"),
    "zero-bubble": ("H200", 4, "--pipeline-model-parallel-size 4 --global-batch-size 32 "
                               "--pipeline-schedule zero-bubble"),
    "stage 2": ("H200", 4, "--zero-stage 2 --global-batch-size 32"),
    "stage 3": ("H200", 4, "--zero-stage 3 --global-batch-size 32"),
    "recomputed": ("H200", 1, "--recompute-granularity full --recompute-method uniform"),
    "modules recomputed": ("H200", 1, "--recompute-granularity selective "
                                      "--recompute-modules core_attn mlp layernorm"),
    "moving average": ("H200", 1, "--ema-decay 0.999"),
    "mean of snapshots": ("H200", 1, "--lawa-interval 10 --lawa-window 3"),
    "packed": ("H200", 1, _PACKED),
    "packed, stage 3": ("H200", 4, f"{_PACKED} --zero-stage 3 --global-batch-size 32"),
    "untied": ("H200", 2, "--tensor-model-parallel-size 2 "
                                     "--untie-embeddings-and-output-weights"),
    "pipeline, many nodes": ("H100", 32, "--pipeline-model-parallel-size 2 "
                                         "--global-batch-size 128"),
    "pipeline within nodes": ("H100", 32, "--pipeline-model-parallel-size 2 "
                                          "--global-batch-size 128 --use-tp-pp-dp-mapping"),
    "logits from files": ("H200", 1, "--logits-load-dir logits"),
    "offloaded": ("H200", 1, "--optimizer-cpu-offload"),
    "muon": ("H200", 1, "--optimizer muon"),
    "momentum": ("H200", 1, "--optimizer sgd --sgd-momentum 0.9"),
    "attention dropout": ("H200", 1, "--attention-dropout 0.1"),
    "latent attention": ("H200", 1, _LATENT),
    "latent attention, recomputed": ("H200", 1, f"{_LATENT} --recompute-granularity selective "
                                                "--recompute-modules mla_up_proj"),
    "delta rule, context": ("H200", 2, f"{_DELTA} --context-parallel-size 2"),
    "further tokens": ("H200", 1, "--mtp-num-layers 1 --position-embedding-type rope"),
    "experts in FP8": ("H200", 2, "--num-experts 4 --moe-router-topk 2 --fp8-format hybrid "
                                  "--expert-model-parallel-size 2"),
}  # fmt: skip
SEARCHES = {
    "gpt": f"--gpus 8xH100 --global-batch 64 -- {_GPT}",
    "experts": f"--gpus 8xH200 --global-batch 64 -- {_GPT} --num-experts 8 --moe-router-topk 2",
    "distillation": f"--gpus 8xH100 --global-batch 64 --teacher gpt-1.3b -- {_GPT}",
}

_SHORT = """
    --hidden-size 384 --num-attention-heads 12 --seq-length 256 --max-position-embeddings 256
    --bf16 --hidden-dropout 0 --attention-dropout 0
"""
CANDIDATES = {
    "uneven": f"--gpus 6xH100 --global-batch 384 -- {_SHORT} --num-layers 10",
    "experts": f"--gpus 8xH200 --global-batch 24 -- {_SHORT} --num-layers 8 --num-experts 6 "
               "--moe-router-topk 2",
    "long": f"--gpus 16xA100 --global-batch 16 -- {_SHORT} --num-layers 6 --seq-length 16384 "
            "--max-position-embeddings 16384",
    "recorded passes": f"--gpus 4xB200 --global-batch 6 -- {_SHORT} --num-layers 12 "
                       "--cuda-graph-impl local",
}  # fmt: skip


def _prediction(name: str) -> dict[str, Any]:
    machine, gpus, flags = RUNS[name]
    found = predict(*planned([*_GPT.split(), *flags.split()], gpus), MACHINES[machine])
    times = {field: getattr(found, field) for field in ("seconds", "host", "bubble", "gradients")}
    device = {f"device, {kind}": value for kind, value in found.stage._asdict().items()}
    return times | device | {"optimizer": found.optimizer, "memory": asdict(found.memory)}


def _layouts(name: str) -> list[list[Any]]:
    request = read_request(build_parser().read(SEARCHES[name].split()))
    search = Search(
        request.start,
        request.vocabulary,
        request.gpus,
        request.machine,
        request.machine.memory,
        teacher=request.teacher,
    )
    return [
        [describe(plan.config, request.gpus), plan.prediction.seconds] for plan in search.best(3)
    ]


def _candidates(name: str) -> dict[str, dict[str, int]]:
    """Return how many of the layouts that a search considers have each value."""
    request = read_request(build_parser().read(CANDIDATES[name].split()))
    found = list(layouts(request.start, request.gpus, request.machine.node))
    counts = {path: Counter(json.dumps(values.get(path)) for values in found) for path in PLANNED}
    return {path: dict(sorted(counts[path].items())) for path in sorted(PLANNED)}


def _machines() -> dict[str, dict[str, Any]]:
    return {name: asdict(machine) for name, machine in MACHINES.items()}


def test_rates_of_machines_are_the_recorded_ones() -> None:
    assert _machines() == json.loads(FILE.read_text())["machines"]


@pytest.mark.parametrize("name", RUNS)
def test_a_prediction_is_the_recorded_one(name: str) -> None:
    recorded = json.loads(FILE.read_text())["runs"][name]
    found = _prediction(name)
    assert found.pop("memory") == recorded.pop("memory")
    assert found == pytest.approx(recorded, rel=1e-9)


@pytest.mark.parametrize("name", CANDIDATES)
def test_the_layouts_that_a_search_considers_are_the_recorded_ones(name: str) -> None:
    assert _candidates(name) == json.loads(FILE.read_text())["candidates"][name]


@pytest.mark.parametrize("name", SEARCHES)
def test_the_fastest_layouts_are_the_recorded_ones(name: str) -> None:
    recorded = json.loads(FILE.read_text())["searches"][name]
    found = _layouts(name)
    assert [layout for layout, _ in found] == [layout for layout, _ in recorded]
    assert [seconds for _, seconds in found] == pytest.approx([s for _, s in recorded], rel=1e-9)


if __name__ == "__main__":
    content = {
        "machines": _machines(),
        "runs": {name: _prediction(name) for name in RUNS},
        "candidates": {name: _candidates(name) for name in CANDIDATES},
        "searches": {name: _layouts(name) for name in SEARCHES},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")
