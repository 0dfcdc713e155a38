"""Training on a GPU with --deterministic-mode gives the same bits twice, with any attention."""

import re

import pytest

from megatron.device import Device
from tests.gpu.processes import run_processes
from tests.gpu.repeats import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Device.pick().is_gpu, reason="needs a GPU"),
]


def test_a_run_repeats_itself_bit_for_bit() -> None:
    output = run_processes(1, ["--module", "tests.gpu.repeats", "long"], seconds=300)
    found = re.findall(r"^results of (.*): (\d)$", output, re.MULTILINE)
    assert found == [(f"{kind} {flags}", "1") for kind, flags in CASES]
