"""The exchange that --tp-comm-overlap asks for: its size, and where there can be none."""

import pytest
import torch

from megatron.config.parser import parse_config
from megatron.device import Device
from megatron.environment import Launch
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.training.tensor_overlap import exchange_bytes, largest_message, new_exchange
from tests.training.toy import OF_KIND, TOY, build_toy

SPLIT = "--train-iters 1 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"


def config_of(*words, kind="gpt"):
    words = [*TOY, *OF_KIND[kind], *SPLIT.split(), *words]
    return parse_config(words, world_size=2, architecture=kind).config


def test_the_largest_message_is_a_part_of_the_longer_half():
    layout = Layout.at(0, 2, tensor=2)
    config = config_of("--bf16")
    assert largest_message(config, layout) == 2 * (16 // 2) * 1 * 32
    assert exchange_bytes(config, layout) == 3 * 2 * largest_message(config, layout)
    assert exchange_bytes(config, Layout.single()) == 0
    both = config_of(kind="t5")
    longer = max(both.data.seq_length, both.data.decoder_seq_length)
    assert largest_message(both, layout) == 4 * (longer // 2) * 32


def test_gpus_of_several_machines_are_refused():
    launch = Launch(world_size=6, local_world_size=3)
    device = Device(torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="does not divide the 3 process"):
        new_exchange(config_of(), launch, Layout.at(0, 6, tensor=2), device)


def test_one_process_has_none():
    run = build_toy(Layout.single(), ["--tp-comm-overlap", "--train-iters", "1"])
    assert run.exchange is None
