"""The GRPO example learns on a GPU, with fused kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.device import Device
from megatron.parallel.layout import Layout
from tests.distributed import DEVICE_ENV
from tests.finetuning.test_grpo import MODERN, NF4, train_grpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Device.pick().is_gpu, reason="needs a GPU"),
]


@pytest.mark.parametrize("words", ["", MODERN, f"{MODERN} {NF4} --lr 0.05"])
def test_it_learns(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary has padding, whose logits the kernel of the cross entropy does not get."""
    monkeypatch.setenv(DEVICE_ENV, "gpu")
    found = train_grpo(Layout.single(), tmp_path, ["--train-iters", "25", *words.split()])
    assert np.mean(found["reward"][-3:]) > 1.8 * np.mean(found["reward"][:2])
    assert max(found["log-ratio"]) < 1e-3
