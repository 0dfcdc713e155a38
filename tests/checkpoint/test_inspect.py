"""tools/checkpoint/inspect.py on sound and damaged folders."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import inspection
from megatron.checkpoint.entries import Entry
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.checkpoint.states import make_state, save, save_state

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "checkpoint" / "inspect.py"


@pytest.fixture
def inspect(capsys):
    """Call the tool in this process; return the exit code and both outputs together."""
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
        "iter_0000003 has neither manifest.json nor Megatron-LM's mp_rank folders nor Megatron "
        "Core's .metadata nor DeepSpeed's files: never loaded" in text
    )
    assert "iter_0000002  native  cannot be used: rank_00000.safetensors: damaged" in text
    code, text = inspect("--no-verify", tmp_path)
    assert code == 0
    assert "not verified" in text


def test_a_tracker_that_names_nothing_usable_is_no_sound_folder(tmp_path, inspect):
    save_state(tmp_path, 1)
    (tmp_path / "iter_0000009.tmp-1a2b").mkdir()
    code, text = inspect(tmp_path)
    assert code == 0
    assert "iter_0000009.tmp-1a2b: a save that has not finished, never loaded" in text
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    code, text = inspect(tmp_path)
    assert code == 4
    assert "the tracker names iter_0000007, which does not exist" in text
    assert text.count("  verified") == 1
    (tmp_path / "iter_0000007").mkdir()
    code, text = inspect(tmp_path)
    assert code == 4
    assert "the tracker names iter_0000007, which is incomplete" in text


def test_a_job_that_saves_meanwhile_leaves_the_folder_sound(tmp_path, inspect, monkeypatch):
    save_state(tmp_path, 1)
    summarize_all = inspection._summarize_all

    def saving(*args, **options):
        save_state(tmp_path, 2)
        return summarize_all(*args, **options)

    monkeypatch.setattr(inspection, "_summarize_all", saving)
    code, text = inspect(tmp_path)
    assert code == 0, text
    assert "the tracker names iter_0000001\n" in text


def test_a_folder_without_checkpoints_is_an_error(tmp_path, inspect):
    code, text = inspect(tmp_path)
    assert code == 4
    assert "there is no checkpoint" in text


def test_megatrons_folders_are_read(golden, inspect):
    code, text = inspect(golden / "gpt_tp2pp2_fp32" / "ckpt")
    assert code == 0
    assert "iter_0000020  legacy  156 tensors  verified" in text


def test_one_checkpoint_and_hugging_face_s_folders(tmp_path, inspect):
    code, text = inspect(save_state(tmp_path, 1))
    assert code == 0
    assert "iter_0000001  native  8 tensors" in text
    folder = write_folder(tmp_path / "hf", CASES["llama"].config, tensors_of(CASES["llama"]))
    code, text = inspect("--details", folder)
    assert code == 0
    assert "LlamaForCausalLM  15 tensors  fits config.json, content not verified" in text
    assert "model.final_norm.weight  float32 [32]" in text


def test_the_configuration_is_a_line_a_section(tmp_path, inspect):
    config = {"training": {"seed": 1}, "model": {"num_layers": 2, "hidden_size": 8}}
    save(tmp_path, 1, make_state(1), {"iteration": 1, "config": config}, Layout.single())
    lines = inspect("--details", tmp_path)[1].splitlines()
    assert '  config.training: {"seed": 1}' in lines
    assert '  config.model: {"hidden_size": 8, "num_layers": 2}' in lines


def test_differences_are_named_and_measured(tmp_path, inspect, monkeypatch):
    monkeypatch.setattr(inspection, "_ELEMENTS", 7)  # so that tensors are compared in parts
    one, state = save_state(tmp_path / "a", 1), make_state(1)
    code, text = inspect("diff", tmp_path / "a", one)
    assert (code, text.splitlines()[-1]) == (0, "8 tensors are the same, 0 differences")
    weight = state["model.layers.0.mlp.up.weight"].tensor
    weight[3, 2] += 0.5
    weight[30, 7] -= 2
    norm = state["model.norm.weight"]
    state["model.norm.weight"] = type(norm).whole(norm.tensor.float())
    state["mask"] = type(norm).whole(torch.zeros(2, 5, dtype=torch.bool))
    state["new"] = state.pop("empty")
    other = save_state(tmp_path / "b", 2, state)
    code, text = inspect("diff", one, other)
    assert code == 1
    for line in (
        "model.layers.0.mlp.up.weight: 2 of 256 values changed, by at most 2",
        "model.norm.weight: float16 [8] -> float32 [8]",
        "mask: bool [3, 5] -> bool [2, 5]",
        f"empty: only in {one}",
        f"new: only in {other}",
        "iteration: 1 -> 2",
    ):
        assert line in text.splitlines()
    code, text = inspect("diff", one, other, "--only", "optimizer.")
    assert (code, text.splitlines()[-1]) == (0, "2 tensors are the same, 0 differences")
    code, text = inspect("diff", one, other, "--only", "mdoel.")
    assert code == 4
    assert "--only mdoel.: no tensor's name begins with this: names begin with " in text
    assert "model., " in text
    file = other / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert inspect("diff", one, other)[0] == 4


def test_checkpoints_of_several_formats_are_compared(golden, tmp_path, inspect):
    whole, split = (golden / name / "ckpt" for name in ("gpt_fp32", "gpt_tp2pp2_fp32"))
    code, text = inspect("diff", whole, whole / "iter_0000020")
    assert (code, text.splitlines()[-1]) == (0, "156 tensors are the same, 0 differences")
    code, text = inspect("diff", whole, split)
    assert code == 1
    assert "model.layers.0.mlp.up.weight: 16,384 of 16,384 values changed, by at most 0." in text


def test_vocabularies_of_other_padding_are_compared_in_the_rows_that_both_have(tmp_path, inspect):
    name, table = "model.embedding.word.weight", torch.randn(6, 4)
    one = save_state(tmp_path / "a", 1, {name: Entry.whole(table)})
    other = save_state(tmp_path / "b", 1, {name: Entry.whole(table[:5].clone())})
    code, text = inspect("diff", one, other)
    assert code == 1
    line = f"{name}: float32 [6, 4] -> float32 [5, 4], the rows that both have are the same"
    assert line in text.splitlines()


def test_it_runs_as_a_script_although_its_name_is_that_of_a_library(tmp_path):
    save_state(tmp_path, 1)
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "iter_0000001  native" in answer.stdout
