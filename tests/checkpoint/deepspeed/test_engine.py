"""Checkpoints saved by DeepSpeed's own engine, if it is installed, load to the engine's values."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from megatron.checkpoint.deepspeed.names import destination_of
from megatron.checkpoint.legacy.names import Arrangement
from megatron.checkpoint.loading import open_checkpoint
from tests.ports import free_port
from tests.repository import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install deepspeed",
)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "bf16", "mixture"])
def test_it_is_read_as_the_engine_had_it(tmp_path, kind):
    _run(kind, tmp_path)
    reader = open_checkpoint(tmp_path)
    assert reader.meta["optimizer"] == {"step": 3, "loss_scale": {}}
    seen = set()
    for path in sorted(tmp_path.glob("held_*.pt")):
        held = torch.load(path, weights_only=True)
        for key, expected in held.items():
            name, _, state = key.partition(":")
            seen |= {_compare(reader, name, state, expected)}
    assert seen == {name for name in reader.names() if not name.endswith(".master")}


def _run(kind, folder):
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.checkpoint.deepspeed.engine", kind, str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    texts = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), texts[0][-3000:] + texts[1][-3000:]


def _compare(reader, name, state, expected):
    """Compare a parameter or a state, and return our name for it."""
    place = destination_of(name)
    ours = f"optimizer.{place.name}.{state}" if state else f"model.{place.name}"
    master = f"optimizer.{place.name}.master"
    source = master if not state and master in reader.tensors else ours
    found = reader.read(source)
    found = found if place.expert is None else found[place.expert]
    arranged = Arrangement(0, heads=2, gated=False).arrange(f".{place.dense}", expected)
    assert torch.equal(found, arranged), ours
    if source == master:
        assert torch.equal(reader.read(ours), arranged.to(torch.bfloat16)), ours
    return ours
