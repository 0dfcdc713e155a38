"""`megatron pretrain` runs a recipe as a script, and torchrun starts several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatron.cli import pretrain
from megatron.cli.pretrain import training_command
from megatron.config import parse_config
from megatron.config.model import ModelOptions
from megatron.environment import module_command
from megatron.errors import ConfigError
from megatron.recipes import catalog
from tests.repository import ROOT

TINY = str(catalog.FOLDER / "gpt-tiny.yaml")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_recipe_becomes_its_script_and_flags_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "_gpus", lambda: 0)
    command = training_command(["gpt-tiny", "--lr", "0.1", "--blend", "1", "2", "--bf16"])
    flags = ["--config", TINY, "--lr", "0.1", "--blend", "1", "2", "--bf16"]
    assert command == (["python"], ROOT / "pretrain_gpt.py", flags)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("--retro-workdir runs/retro --num-layers 6", "retro"),
        ("--decoder-seq-length 8 --num-layers 6", "t5"),
        ("--bert-no-binary-head", "bert"),
        ("--num-layers 6 --mask-prob 0.1", "gpt"),  # a flag of BERT and T5
        ("--retro-workdir runs/retro --decoder-seq-length 8", "gpt"),  # GPT refuses both flags
    ],
)
def test_flags_without_a_recipe_name_the_script(words: str, kind: str) -> None:
    command = training_command([*words.split(), "--gpus", "0"])
    assert command == (["python"], ROOT / f"pretrain_{kind}.py", words.split())


def test_gpus_starts_torchrun_with_as_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "_gpus", lambda: 0)
    program, _, flags = training_command(["gpt-tiny", "--gpus", "4", "--lr=0.1"])
    launcher = "python -m megatron.processes.torchrun --standalone --nproc-per-node 4"
    assert program == launcher.split()
    assert flags == ["--config", TINY, "--lr", "0.1"]
    assert training_command(["gpt-tiny", "--gpus", "0"])[0] == ["python"]


def test_every_gpu_of_the_machine_is_used_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "_gpus", lambda: 8)
    assert training_command(["gpt-tiny"])[0][-1] == "8"
    with pytest.raises(ConfigError, match=r"--gpus 9: this machine has 8 GPUs"):
        training_command(["gpt-tiny", "--gpus", "9"])


def test_the_gpus_of_the_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "detect_architectures", lambda: [(9, 0)])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert training_command(["gpt-tiny"])[0][-1] == "3"
    with pytest.raises(ConfigError, match=r"--gpus 4: this machine has 3 GPUs"):
        training_command(["gpt-tiny", "--gpus", "4"])


@pytest.mark.parametrize(("words", "visible"), [("--gpus 0", ""), ("--gpus 1", "5,7"), ("", "5,7")])
def test_a_run_without_gpus_does_not_see_them(
    words: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(pretrain, "_gpus", lambda: 2)
    training_command(["gpt-tiny", *words.split()])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_a_machine_without_gpus_starts_as_many_processes_as_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pretrain, "detect_architectures", list)
    assert training_command(["gpt-tiny", "--gpus", "3"])[0][-1] == "3"
    assert training_command(["gpt-tiny"])[0] == ["python"]


def test_processes_of_a_launcher_start_none_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(pretrain, "_gpus", lambda: 8)
    assert training_command(["gpt-tiny"])[0] == ["python"]
    with pytest.raises(ConfigError, match="a launcher has already started this process"):
        training_command(["gpt-tiny", "--gpus", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-125"], "no recipe is named 'gpt-125': did you mean gpt-125m?"),
        *(
            (["gpt-tiny", "--gpus", *count.split()], f"--gpus {count}: give the number of GPUs")
            for count in ("two", "-1", "1.5", "1 2")
        ),
        (["gpt-tiny", "gpt-125m"], "gpt-tiny gpt-125m: give one recipe"),
        (["gpt-tiny", "--config", "x.yaml"], "gpt-tiny and --config: both name a YAML file"),
        (["no.yaml"], "--config no.yaml: cannot be read: No such file or directory"),
        ([], "no recipe: name one (`megatron recipes` lists them)"),
        (["--gpus", "2", "--finetune"], "no recipe: name one"),
        ([str(catalog.FOLDER)], "this folder has no config.json: name a recipe or a YAML file"),
    ],
)
def test_mistakes_say_the_remedy(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        training_command(words)
    assert message in str(caught.value)


_LAYOUTS = """
layouts:
  2: {parallel: {tensor_model_parallel_size: 2}}
  8: {parallel: {tensor_model_parallel_size: 4}, training: {micro_batch_size: 2}}
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}
training: {micro_batch_size: 1, global_batch_size: 48, train_iters: 2}
schedule: {lr: 0.1}
tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 100}
data: {mock_data: true, seq_length: 16}
"""


@pytest.mark.parametrize(
    ("processes", "tensor", "micro_batch"), [(2, 2, 1), (6, 2, 1), (8, 4, 2), (24, 4, 2), (3, 1, 1)]
)
def test_the_number_of_processes_chooses_the_layout(
    processes: int, tensor: int, micro_batch: int, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(_LAYOUTS)
    parsed = parse_config(["--config", str(path)], world_size=processes)
    assert parsed.config.parallel.tensor_model_parallel_size == tensor
    assert parsed.config.training.micro_batch_size == micro_batch
    noted = any("has layouts for 2, 8 processes" in notice for notice in parsed.notices)
    assert noted == (processes == 3)
    dry = ["--config", str(path), "--dry-run", "--dry-run-world-size", str(processes)]
    assert parse_config(dry, world_size=1).config.parallel.tensor_model_parallel_size == tensor
    flag = parse_config(
        ["--config", str(path), "--tensor-model-parallel-size", "1"], world_size=processes
    )
    assert flag.config.parallel.tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ("[2]", "layouts: expected numbers of processes with sections, got [2]"),
        ("{two: {}}", "layouts: expected a number of processes, got 'two'"),
        ("{8: {parallel: {tensor: 2}}}", "layouts.8: unknown key parallel.tensor"),
    ],
)
def test_mistakes_in_any_layout_are_found(layouts: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"layouts: {layouts}\n")
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(path)], world_size=1)
    assert message in str(caught.value)


def test_a_huggingface_folder_becomes_flags_of_the_same_network(tmp_path: Path) -> None:
    from megatron.checkpoint.huggingface.families import family_named
    from megatron.checkpoint.huggingface.settings import Settings
    from megatron.config.model import NETWORK_FIELDS

    values = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    }
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    for word in (str(folder), str(folder / "config.json")):
        _, script, flags = training_command([word])
        assert script.name == "pretrain_gpt.py"
        assert str(folder / "tokenizer.json") in flags
    rest = "--mock-data --tokenizer-type NullTokenizer --vocab-size 999 --lr 1 --train-iters 1"
    rest += " --seq-length 32 --micro-batch-size 1"
    parsed = parse_config([*flags, *rest.split()], world_size=1)
    asked = family_named("qwen3", "").read(Settings(values, "")).model
    for name in NETWORK_FIELDS:
        assert getattr(parsed.config.model, name) == getattr(asked, name), name


def test_finetune_begins_from_weights_and_a_task_is_the_task_s_command(monkeypatch) -> None:
    from megatron.tasks import main

    started: list[object] = []
    monkeypatch.setattr(
        pretrain, "_exec", lambda words, finetunes: started.append((words, finetunes))
    )
    monkeypatch.setattr(main, "main", lambda *given: started.append(given) or 0)
    assert pretrain.finetune(["gpt-tiny", "--load", "x"]) == 0
    assert pretrain.finetune(["MNLI", "--load", "x"]) == 0
    assert started == [
        (["gpt-tiny", "--load", "x"], True),
        (["--task", "MNLI", "--load", "x"], "megatron finetune"),
    ]


@pytest.mark.parametrize("command", [pretrain.pretrain, pretrain.finetune])
def test_help_shows_common_flags_unless_all_are_asked_for(
    command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["--help"]) == 0
    common = capsys.readouterr().out
    assert command(["--help-all"]) == 0
    everything = capsys.readouterr().out
    for shown in (common, everything):
        assert "--lr " in shown
        assert "--gpus N starts N processes" in shown
    assert ("--adam-eps" in common, "--adam-eps" in everything) == (False, True)


def test_help_names_the_tasks_that_train_a_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.finetune(["--help"]) == 0
    tasks = capsys.readouterr().out.rpartition("name a task instead of a recipe: ")[2]
    named = tasks.strip().removesuffix(".").split(", ")
    assert {"MNLI", "RACE", "RET-FINETUNE-NQ"} <= set(named)
    assert "LAMBADA" not in named, "it is only evaluated"


def test_a_script_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "_gpus", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^pretrain_gpt\.py is not installed"):
        training_command(["gpt-tiny"])


def test_finetuning_has_a_script_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "_gpus", lambda: 0)
    _, script, flags = training_command(["gpt-tiny", "--load", "x"], finetunes=True)
    assert (script, flags) == (ROOT / "finetune.py", ["--config", TINY, "--load", "x"])
    _, script, flags = training_command(["bert-base", "--load", "x"], finetunes=True)
    assert (script, flags[-1]) == (ROOT / "pretrain_bert.py", "--finetune")


@pytest.mark.parametrize(("word", "near"), [("MNLY", "MNLI"), ("mnli", "MNLI"), ("Cola", "CoLA")])
def test_a_misspelled_task_gets_the_nearest_one(
    word: str, near: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.finetune([word, "--load", "x"]) == 9
    assert f"there is no such task: did you mean {near}?" in capfd.readouterr().err


def test_a_misspelled_recipe_is_not_a_task(capfd: pytest.CaptureFixture[str]) -> None:
    assert pretrain.finetune(["gpt-tiny2"]) == 9
    assert "no recipe is named 'gpt-tiny2': did you mean gpt-tiny?" in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["--gpus", "--model"])
def test_small_refuses_flags_that_it_would_ignore(
    flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.pretrain(["gpt-tiny", "--small", flag, "2"]) == 9
    assert f"error: {flag} 2: --small chooses this itself" in capfd.readouterr().err
    assert pretrain.pretrain(["gpt-tiny", "--small", "2"]) == 9
    assert "error: --small 2: --small takes no value: drop 2" in capfd.readouterr().err


def test_small_says_which_flags_it_accepts(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["gpt-tiny", "--small", "--data-path", "a.jsonl", "--iters", "3", "--train-iters", "5"]
    assert pretrain.pretrain(words) == 9
    assert (
        "error: --small does not accept --data-path, --train-iters, only --input, --iters, --out, "
        "--overwrite: drop what"
    ) in capfd.readouterr().err


def _pretrain(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron", "pretrain", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_mistake_is_reported_before_several_processes_start() -> None:
    done = _pretrain("gpt-tiny", "--gpus", "2", "--lr", "fast")
    assert done.returncode == 9
    assert done.stderr.startswith("error: --lr fast:")
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_a_network_in_a_checkpoint_is_left_to_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("checkpoint: {use_checkpoint_args: true, load: /not/here}\n")
    assert training_command([str(path), "--gpus", "2"])[2] == ["--config", str(path)]
    with pytest.raises(ConfigError, match="--num-layers is required"):
        training_command([str(path), "--gpus", "2", "--no-use-checkpoint-args"])


def test_the_exit_code_of_several_processes_is_that_of_the_run(tmp_path: Path) -> None:
    load = ("--load", str(tmp_path / "none"), "--exit-on-missing-checkpoint")
    done = _pretrain("gpt-tiny", "--gpus", "2", *load)
    assert done.returncode == 4, done.stderr
    assert "none" in done.stderr
    assert "megatron.processes.torchrun --standalone --nproc-per-node 2" in done.stdout


@pytest.mark.parametrize("architecture", ["gpt", "bert", "t5"])
def test_a_recipe_with_small_keeps_the_form_of_its_layers(architecture: str) -> None:
    from megatron.tools.demo_kinds import KINDS, small_kind

    model = {"normalization": "RMSNorm", "swiglu": True, "num_layers": 80, "num_query_groups": 8}
    kind = small_kind(architecture, model)
    blocks = "--normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2"
    assert kind.blocks == blocks
    assert kind.network == KINDS[architecture].network
    assert small_kind("gpt", {"num_experts": 64}).network == KINDS["moe"].network
    with pytest.raises(ConfigError, match="--small: there is no demo for .* \\(ict\\)"):
        small_kind("ict", {})


@pytest.mark.parametrize("name", catalog.names())
def test_every_recipe_with_small_is_a_valid_run(name: str) -> None:
    from megatron.tools.demo_kinds import small_kind

    recipe = catalog.find(name)
    model = {path.removeprefix("model."): value for path, value in recipe.values.items()}
    rest = "--micro-batch-size 4 --train-iters 2 --mock-data --tokenizer-type NullTokenizer"
    words = [*small_kind(recipe.architecture, model).training_flags, *rest.split()]
    config = parse_config(
        [*words, "--vocab-size", "2048"], world_size=2, architecture=recipe.architecture
    ).config
    assert config.model.hidden_size == 128
    for field in ("normalization", "swiglu", "position_embedding_type", "qk_layernorm"):
        assert getattr(config.model, field) == model.get(field, getattr(ModelOptions(), field))
    assert bool(config.model.num_experts) == ("num_experts" in model)


def test_small_starts_the_demo_with_the_recipe_s_kind(tmp_path: Path, monkeypatch) -> None:
    from megatron.tools import demo

    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(demo, "demo", lambda *given: started.append(given))
    words = ["qwen3-0.6b", "--small", "--out", str(tmp_path / "out"), "--iters", "3"]
    assert pretrain.pretrain(words) == 0
    ((kind, out, source, iterations),) = started
    assert "--qk-layernorm" in kind.blocks
    assert (out, source, iterations) == (tmp_path / "out", None, 3)


def test_a_file_with_a_task_s_name_is_a_recipe() -> None:
    """Only a task's exact name, or a name that resembles none of the recipes, is a task."""
    found = {
        word: pretrain._is_task(word)
        for word in ("MNLI", "lambada.yaml", "-LAMBADA", "gpt-tiny", "xyzzy")
    }
    assert found == {**dict.fromkeys(found, False), "MNLI": True}


@pytest.mark.parametrize(
    ("gpus", "launched", "shown", "started"),
    [
        ("0", False, "CUDA_VISIBLE_DEVICES= python pretrain_gpt.py", [sys.executable]),
        (
            "2",
            False,
            "python -m megatron.processes.torchrun --standalone --nproc-per-node 2 pretrain_gpt.py",
            [
                *module_command("megatron.processes.torchrun"),
                *("--standalone", "--nproc-per-node", "2"),
            ],
        ),
        (None, True, None, [sys.executable]),
    ],
)
def test_the_command_is_shown_and_replaces_this_process(
    gpus: str | None,
    launched: bool,
    shown: str | None,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Processes of a launcher show nothing, because there are many."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if launched:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pretrain.os, "execv", lambda *given: calls.append(given))
    words = ["gpt-tiny", *(["--gpus", gpus] if gpus else [])]
    assert pretrain.pretrain(words) == 0
    said = capsys.readouterr().out
    assert said == ("" if shown is None else f"$ {shown} --config {TINY}\n\n")
    ((program, command),) = calls
    assert program == command[0] == sys.executable
    assert command == [*started, str(ROOT / "pretrain_gpt.py"), "--config", TINY]


def test_a_script_elsewhere_is_shown_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrain.os, "execv", lambda *_: None)
    assert pretrain.pretrain(["gpt-tiny", "--gpus", "0"]) == 0
    assert capsys.readouterr().out.startswith(
        f"$ CUDA_VISIBLE_DEVICES= python {ROOT / 'pretrain_gpt.py'} --config "
    )
