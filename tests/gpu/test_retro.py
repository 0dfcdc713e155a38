"""Retro gives the same results on a GPU as on a CPU."""

import pytest

from megatron.device import Device
from megatron.parallel.layout import Layout
from tests.training.test_retro import QUIET, toy_workdir, words
from tests.training.toy import CPU, train_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
_WIDE = "--hidden-size 64"
_MODERN = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ("", 1e-4),
        (_MODERN, 1e-4),
        (f"{_MODERN} --bf16", 3e-3),
        ("--bf16 --recompute-activations", 3e-3),
        (f"{_MODERN} --bf16 --fp8-format hybrid --hidden-size 128", 2e-2),
    ],
)
def test_a_run_gives_the_losses_of_a_cpu(tmp_path, flags, tolerance):
    folder = toy_workdir(tmp_path)
    # The CPU has no 8-bit products, so it computes the same network without them.
    plain = flags.replace("--bf16", "").replace("--fp8-format hybrid", "")
    ours, _ = train_toy(Layout.single(), words(folder, QUIET, _WIDE, flags), "retro", DEVICE)
    theirs, _ = train_toy(Layout.single(), words(folder, QUIET, _WIDE, plain), "retro", CPU)
    assert ours.values("lm loss") == pytest.approx(theirs.values("lm loss"), rel=tolerance)
