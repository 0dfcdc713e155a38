"""What an engine is built with: the size of its cache, recordings, drafts, and its panel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.generation import Speculation
from megatron.config.stages import whole_model
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference import build
from megatron.inference.build import EngineOptions, check_speculation, describe_speculation
from megatron.inference.cache import CacheMemory
from megatron.inference.executor import batch_sizes_to_record
from megatron.models.plan import ModelPlan
from megatron.models.recurrent_plan import StateSpec
from megatron.parallel.layout import Axis, Layout
from tests.checkpoint.huggingface.models import CASES
from tests.inference.toy import OPTIONS, toy_engine, write_model
from tests.models.recorded_plans import plan_of

# Keys and values of 4 heads of size 8 in 2 layers, in fp32.
_TOKEN_BYTES = 2 * 2 * 4 * 8 * 4


def _draft(method: str, count: int = 1) -> Speculation:
    return Speculation(method=method, num_speculative_tokens=count)


def _cache(plan: ModelPlan, dtype: torch.dtype = torch.float32, **options: Any) -> CacheMemory:
    extra = options.pop("extra_bytes", 0)
    loaded = SimpleNamespace(
        model=SimpleNamespace(plan=plan, part=whole_model(len(plan.layers))),
        layout=Layout.single(),
        config=SimpleNamespace(precision=SimpleNamespace(weight_dtype=dtype)),
        earlier_parts=(),
    )
    arguments: Any = (loaded, EngineOptions(**options), None, Device.cpu())
    return build.make_cache(*arguments, extra_bytes=extra)


def test_the_largest_cache_that_is_asked_for_or_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("gpt")
    assert _cache(plan, cache_tokens=100).blocks == 6
    memory = _cache(plan, cache_tokens=100, block_size=25)
    assert (memory.blocks, memory.block_size, memory.state_slots) == (4, 25, 256 + 64)
    assert {index: (*layer.shape,) for index, layer in memory.layers.items()} == {
        1: (2, 125, 4, 8),
        2: (2, 125, 4, 8),
    }
    assert memory.size_bytes == 125 * _TOKEN_BYTES
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 16 * 5 * _TOKEN_BYTES + 1)
    assert _cache(plan).blocks == 5
    assert _cache(plan, extra_bytes=4 * _TOKEN_BYTES).blocks == 4
    assert _cache(plan, torch.bfloat16).blocks == 10
    assert _cache(plan, max_sequences=1, block_size=20).blocks == 4  # of the 96 tokens' 4.8
    assert _cache(plan, max_sequences=2, block_size=80).blocks == 1
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 2**30)
    assert _cache(plan, max_sequences=1).blocks == 6  # 96 tokens
    assert _cache(plan, max_sequences=3).blocks == 18


def test_a_cache_without_room_for_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has room for 15 tokens, less than one block of 16"):
        _cache(plan_of("gpt"), cache_tokens=15)
    assert _cache(plan_of("gpt"), cache_tokens=16).blocks == 1
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 15 * _TOKEN_BYTES)
    with pytest.raises(ConfigError, match="has room for 15 tokens"):
        _cache(plan_of("gpt"))


def test_states_of_sequences_and_snapshots_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(
        "gpt --mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-num-heads 4 "
        "--position-embedding-type none --hybrid-layer-pattern M*"
    )
    memory = _cache(plan, cache_tokens=32, max_sequences=5)
    assert (memory.blocks, memory.state_slots) == (2, 5 + 2)
    each = sum(state[0].nbytes for states in memory.states.values() for state in states)
    token = sum(layer[:, 0].nbytes for layer in memory.layers.values())
    assert memory.size_bytes == 8 * each + 3 * 16 * token
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 7 * each + 16 * token)
    assert _cache(plan, max_sequences=5).blocks == 1
    monkeypatch.setattr(build, "_CPU_CACHE_BYTES", 7 * each)
    with pytest.raises(ConfigError, match="the states of 5 sequences need more than the .* GB of"):
        _cache(plan, max_sequences=5)
    specs = {3: (StateSpec("a", (2, 3), torch.float32), StateSpec("b", (5,)))}
    assert build._state_bytes(specs, torch.bfloat16) == 24 + 10


def test_depths_that_draft_have_their_own_keys_and_values() -> None:
    plan = plan_of("gpt --mtp-num-layers 2 --untie-embeddings-and-output-weights")
    for speculation, layers in (
        (None, [1, 2]),
        (_draft("ngram", 2), [1, 2]),
        (_draft("mtp", 1), [1, 2, 3]),
        (_draft("mtp", 2), [1, 2, 3, 4]),
    ):
        memory = _cache(plan, cache_tokens=16, speculation=speculation)
        assert list(memory.layers) == layers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"graphs": False}, "turned off"),
        ({"is_gpu": False}, "not available on cpu"),
        ({"can_capture": False}, "the attention kernels cannot be recorded"),
        ({"ranks": 2}, "the model is split over 2 processes"),
        ({"ranks": 3, "can_capture": False}, "the attention kernels cannot be recorded"),
    ],
)
def test_why_steps_are_not_recorded(changes: dict[str, Any], reason: str) -> None:
    given = {"graphs": True, "is_gpu": True, "can_capture": True, "ranks": 1} | changes
    arguments: Any = (
        EngineOptions(graphs=given["graphs"]),
        SimpleNamespace(is_gpu=given["is_gpu"], type="gpu" if given["is_gpu"] else "cpu"),
        SimpleNamespace(can_capture=given["can_capture"]),
        Axis(size=given["ranks"]),
    )
    assert build._why_no_graphs(*arguments) == reason


@pytest.mark.parametrize(
    ("model", "speculation", "problem"),
    [
        ({}, None, None),
        ({"architecture": "retro"}, None, None),
        ({}, _draft("ngram", 9), None),
        ({"architecture": "retro"}, _draft("ngram"), "a Retro model looks up neighbors"),
        ({"has_states": True}, _draft("ngram"), "the states of recurrent layers cannot be rolled"),
        ({}, _draft("mtp", 3), "num_speculative_tokens 3 with the method mtp: the model predicts"),
        ({"mtp_num_layers": 2}, _draft("mtp", 2), None),
        ({"mtp_num_layers": 2}, _draft("mtp", 3), "with --mtp-num-layers 2: give at most 2"),
    ],
)
def test_models_that_cannot_check_drafts(
    model: dict[str, Any], speculation: Speculation | None, problem: str | None
) -> None:
    plain = {"architecture": "gpt", "has_states": False, "mtp_num_layers": None}
    found: Any = SimpleNamespace(**(plain | model))
    if problem is None:
        check_speculation(found, speculation)
    else:
        with pytest.raises(ConfigError, match=problem):
            check_speculation(found, speculation)


def test_the_panel_tells_of_drafts_and_of_the_cache() -> None:
    assert describe_speculation(_draft("mtp")) == (
        "up to 1 token by the model's multi-token prediction layers"
    )
    assert describe_speculation(_draft("ngram", 2)) == (
        "up to 2 tokens that followed an earlier occurrence of the last 4 to 2"
    )
    memory: Any = SimpleNamespace(size_bytes=2_345_000_000, states={}, blocks=1200)
    assert build._describe_cache(memory, 16, Axis()) == (
        "19,200 tokens, 1,200 blocks of 16: 2.35 GB"
    )
    memory.states = {1: ()}
    assert build._describe_cache(memory, 8, Axis(size=2)) == (
        "9,600 tokens, 1,200 blocks of 8 and states: 2.35 GB on rank 0"
    )


def test_options_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions(max_sequences=0, max_step_tokens=-1, cache_tokens=0, block_size=0)
    assert caught.value.problems == [
        "max_sequences 0: give 1 or more",
        "max_step_tokens -1: give 1 or more",
        "cache_tokens 0: give 1 or more",
        "block_size 0: give 1 or more",
    ]
    EngineOptions(max_sequences=1, max_step_tokens=1, cache_tokens=1, block_size=1)


def test_latent_vectors_have_their_own_attention() -> None:
    latent = "--position-embedding-type rope --multi-latent-attention --normalization RMSNorm"
    sizes = "--kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 6 --v-head-dim 6"
    found = build._latent_sizes(plan_of(f"gpt {latent} {sizes} --disable-bias-linear"))
    assert found == build.LatentSizes(16, 10)
    assert build._latent_sizes(plan_of("gpt")) is None


def test_batch_sizes_to_record() -> None:
    for largest, sizes in (
        (1, [1]),
        (8, [1, 2, 4, 8]),
        (100, [1, 2, 4, 8, 16, 32, 48, 64, 96, 100]),
        (256, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]),
        (300, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 300]),
    ):
        assert batch_sizes_to_record(largest) == sizes


def test_attention_knows_whether_chunks_are_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remainders, choose = write_model("llama 4", tmp_path), [], build.choose_paged_attention

    def spy(*given: Any, chunk_remainder: int, **named: Any) -> Any:
        remainders.append(chunk_remainder)
        return choose(*given, chunk_remainder=chunk_remainder, **named)

    monkeypatch.setattr(build, "choose_paged_attention", spy)
    chunk = CASES["llama 4"].config["attention_chunk_size"]
    for size in (1, chunk - 1, chunk, chunk + 1):
        toy_engine(folder, replace(OPTIONS, block_size=size))
    assert remainders == [0, 1, 0, chunk]
