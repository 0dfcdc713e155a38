"""The exchange for --tp-comm-overlap: its size, and when there can be none."""

from dataclasses import replace

import pytest
import torch

from megatron.config.parser import parse_config
from megatron.device import Device
from megatron.models.plan import LANGUAGE_MODEL_HEAD
from megatron.models.plans import model_plan
from megatron.parallel.exchange import GroupExchange
from megatron.parallel.layout import Layout
from megatron.planner.memory import exchange_bytes, largest_expert_message, largest_message
from megatron.training.build import new_exchange
from tests.distributed import run_distributed
from tests.training.toy import FLAGS_BY_KIND, TOY, build_toy, losses_of

SPLIT = "--train-iters 1 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"


def config_of(*words, kind="gpt"):
    words = [*TOY, *FLAGS_BY_KIND[kind], *SPLIT.split(), *words]
    return parse_config(words, world_size=2, architecture=kind).config


def test_the_largest_message_is_a_part_of_the_longer_half():
    layout = Layout.at(0, 2, tensor=2)
    config = config_of("--bf16")
    assert largest_message(config, layout, 1) == 2 * (16 // 2) * 1 * 32
    four = replace(LANGUAGE_MODEL_HEAD, sequences=4)
    plan = replace(model_plan(config.model, 128), head_spec=four)
    assert exchange_bytes(config, plan, layout) == 3 * 2 * largest_message(config, layout, 4)
    assert exchange_bytes(config, plan, Layout.single()) == 0
    evaluated = config_of("--bf16", "--eval-micro-batch-size", "2")
    assert largest_message(evaluated, layout, 1) == 2 * largest_message(config, layout, 1)
    both = config_of(kind="t5")
    longer = max(both.data.seq_length, both.data.decoder_seq_length)
    assert largest_message(both, layout, 1) == 4 * (longer // 2) * 32


def test_experts_exchange_whole_micro_batches_where_all_tokens_go_to_all_ranks():
    layout = Layout.at(0, 2, expert=2)
    words = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"

    def message(*more):
        given = [*TOY, *FLAGS_BY_KIND["gpt"], "--train-iters", "1", "--bf16", *words.split(), *more]
        config = parse_config(given, world_size=2, architecture="gpt").config
        return largest_expert_message(config, model_plan(config.model, 128), layout)

    assert message() == 2 * 16 * 32
    assert message("--eval-micro-batch-size", "2") == 2 * message()
    assert message("--moe-router-topk", "1") == 0  # half of the tokens
    assert message("--overlap-moe-expert-parallel-comm") == 0


def test_a_run_asks_for_room_for_all_texts_of_a_sample(monkeypatch):
    """A message that does not fit would silently use collectives."""
    asked = []

    def ask(axis, device, message_bytes, **_):
        asked.append(message_bytes)
        return GroupExchange(axis)

    monkeypatch.setattr("megatron.parallel.symmetric_memory.SymmetricExchange", ask)
    layout, config = Layout.at(0, 2, tensor=2), config_of("--bf16")
    layout = replace(layout, tensor=replace(layout.tensor, group=object()))
    new_exchange(config, layout, Device(torch.device("cuda", 0)), 4)
    assert asked == [2 * (16 // 2) * 4 * 32]


def test_one_process_has_none():
    run = build_toy(Layout.single(), ["--tp-comm-overlap", "--train-iters", "1"])
    assert new_exchange(run.config, run.layout, run.device, 1) is None


def test_parts_of_a_projection_are_exchanged_too():
    """Without a norm, latent attention's second projections read parts of the first one's rows."""
    latent = """--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4
        --v-head-dim 8 --position-embedding-type rope --normalization RMSNorm --eval-iters 0
        --hidden-dropout 0 --attention-dropout 0"""
    *plain, overlap = SPLIT.removeprefix("--train-iters 1 ").split()
    flags = [*latent.split(), *plain]
    overlapped, whole = (
        run_distributed(2, losses_of, more, tensor=2)[-1] for more in ([*flags, overlap], flags)
    )
    assert overlapped == pytest.approx(whole, rel=1e-6)
