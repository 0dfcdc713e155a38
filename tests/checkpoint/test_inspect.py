"""tools/checkpoint/inspect.py on sound and damaged folders."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.states import save_state

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "checkpoint" / "inspect.py"


@pytest.fixture
def inspect(capsys):
    """Call the tool in this process: exit code and both outputs together."""
    spec = importlib.util.spec_from_file_location("checkpoint_inspect", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(*arguments):
        code = module.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return code, output.out + output.err

    return call


def test_sound_and_damaged_ones_are_told_apart(tmp_path, inspect):
    save_state(tmp_path, 1)
    shard = save_state(tmp_path, 2) / "rank_00000.safetensors"
    code, text = inspect("--details", tmp_path)
    assert code == 0
    assert "the tracker names iter_0000002" in text
    assert text.count("  verified") == 2
    assert "model.norm.weight  float16 [8]" in text
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "iter_0000003").mkdir()
    code, text = inspect(tmp_path)
    assert code == 4
    assert (
        "iter_0000003 has no manifest.json, nor mp_rank folders of Megatron-LM: incomplete" in text
    )
    assert "iter_0000002  native  cannot be used: rank_00000.safetensors: damaged" in text
    code, text = inspect("--no-verify", tmp_path)
    assert code == 0
    assert "not verified" in text


def test_a_folder_without_checkpoints_is_an_error(tmp_path, inspect):
    code, text = inspect(tmp_path)
    assert code == 4
    assert "there is no checkpoint" in text


def test_megatrons_folders_are_read(golden, inspect):
    code, text = inspect(golden / "gpt_tp2pp2_fp32" / "ckpt")
    assert code == 0
    assert "iter_0000020  legacy  156 tensors  verified" in text


def test_it_runs_as_a_script_although_its_name_is_that_of_a_library(tmp_path):
    save_state(tmp_path, 1)
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "iter_0000001  native" in answer.stdout
