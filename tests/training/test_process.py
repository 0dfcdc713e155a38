"""What processes must have in common before they train together."""

from types import SimpleNamespace

import pytest
import torch

from megatron.config import rules_device
from megatron.device import Device
from megatron.environment import Launch
from megatron.errors import ConfigError
from megatron.kernels.library import LibraryChoice
from megatron.parallel.layout import Layout
from megatron.training.process import expect_same_kernels, processes
from tests.config.command import parse
from tests.distributed import run_distributed

FUSED = LibraryChoice(object(), "as if")  # type: ignore[arg-type]
PLAIN = LibraryChoice(None, "no nvcc")


def _answers(layout: Layout) -> list[str]:
    answers = []
    for plain in (set(), {0, 1, 2}, {1}, {0, 2}):
        try:
            expect_same_kernels(PLAIN if layout.world.rank in plain else FUSED, layout.world)
            answers.append("")
        except ConfigError as error:
            answers.append(str(error))
    return answers


def test_fused_kernels_are_for_all_processes_or_none() -> None:
    ranks = run_distributed(3, _answers)
    assert ranks[0] == ranks[1] == ranks[2]
    everywhere, nowhere, one, two = ranks[0]
    assert everywhere == nowhere == ""
    assert one.startswith("rank 1 of 3 cannot use the fused kernels")
    assert two.startswith("ranks 0, 2 of 3")


def test_what_a_device_has_nothing_for_is_refused_before_the_processes_meet(monkeypatch) -> None:
    monkeypatch.setattr("megatron.training.process.Device.pick", lambda _: Device.cpu())
    monkeypatch.setattr("megatron.training.process.process_group", None)
    config = parse("--bf16 --use-flash-attn --cuda-graph-impl local").config
    with pytest.raises(ConfigError) as caught, processes(config, Launch()):
        pass
    assert caught.value.problems == [
        "--use-flash-attn needs a GPU, and this run is on cpu: drop it",
        "--cuda-graph-impl local needs a GPU, and this run is on cpu: drop it",
    ]


def test_numbers_in_8_bits_need_a_gpu_that_has_them() -> None:
    def problems(capability):
        gpu = SimpleNamespace(is_gpu=True, capability=capability, name="A100")
        return list(rules_device.device(parse("--bf16 --fp8-format hybrid").config, gpu, 1))

    assert problems((9, 0)) == problems((8, 9)) == []
    assert problems((8, 0))[0].startswith("--fp8-format hybrid: A100 does not multiply in 8 bits")


def test_memory_of_several_machines_is_not_mapped(monkeypatch) -> None:
    gpu = Device(torch.device("cuda", 0))
    monkeypatch.setattr("megatron.training.process.Device.pick", lambda _: gpu)
    # It writes the launch into this process's environment, where later tests would find it.
    monkeypatch.setattr("megatron.training.process.environment.prepare", lambda *_, **__: None)
    words = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    config = parse(words, world_size=6).config
    launch = Launch(world_size=6, local_world_size=3)
    with (
        pytest.raises(ConfigError, match=r"does not divide the 3 process"),
        processes(config, launch),
    ):
        pass
    assert not list(rules_device.device(config, gpu, 4))


def test_a_process_alone_asks_nobody() -> None:
    expect_same_kernels(PLAIN, Layout.single().world)
    with pytest.raises(AssertionError):
        expect_same_kernels(PLAIN, Layout.at(0, 2).world)
