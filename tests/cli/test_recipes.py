"""`megatron recipes` lists recipes, and shows one of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.cli import pretrain
from megatron.cli.recipes import build_parser, run
from megatron.recipes import catalog

LLAMA2_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the lines that `megatron recipes ...` prints."""
    run(build_parser().read(words))
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a Hugging Face folder without weights."""
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA2_7B))
    return folder


def test_one_recipe_is_shown_with_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys)
    head, row, *details = shown(capsys, "bert-base")
    assert head.split() == table[0].split()
    assert row.split() in [line.split() for line in table]
    assert "architecture: bert" in details
    assert "--num-layers 12" in details
    assert all(line.startswith("--") for line in details[details.index("architecture: bert") + 2 :])


def test_the_table_has_the_sizes_of_each_family_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [line.split()[0] for line in shown(capsys)[1:] if line][:-1]
    assert sorted(names) == sorted(catalog.names())
    families = [name.partition("-")[0] for name in names]
    assert families == sorted(families)
    for family in set(families):
        sizes = [catalog.find(name).size for name in names if name.partition("-")[0] == family]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("file", [False, True])
def test_a_huggingface_config_is_shown_like_a_recipe(
    folder: Path, file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    word = str(folder / "config.json") if file else str(folder)
    _, row, *details = shown(capsys, word)
    assert row.split()[:3] == ["my-llama", "6.74B", "32"]
    assert "--ffn-hidden-size 11008" in details
    assert "architecture: gpt" in details
    ours, theirs = catalog.find("llama2-7b"), catalog.find(word)
    assert theirs.facts["parameters"] == ours.facts["parameters"]
    shared = [path for path in theirs.values if path.startswith("model.") and path in ours.values]
    assert len(shared) > 8
    assert [path for path in shared if theirs.values[path] != ours.values[path]] == []


def test_a_huggingface_folder_can_be_trained_small(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.tools import demo

    started = []
    monkeypatch.setattr(demo, "run", lambda options, kind: started.append((options, kind)))
    assert pretrain.pretrain([str(folder), "--small"]) == 0
    ((options, kind),) = started
    assert options.out == Path("runs/my-llama-small")
    assert "--normalization RMSNorm" in kind.blocks
    assert "--swiglu" in kind.blocks


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (999_999, "999999"),
        (10**6, "1M"),
        (124_439_808, "124M"),
        (6_738_415_616, "6.74B"),
        (10**9, "1B"),
        (15 * 10**12, "15T"),
        (10**12, "1T"),
    ],
)
def test_counts_have_three_digits_and_a_unit(count: int | None, text: str) -> None:
    assert catalog.format_count(count) == text


@pytest.mark.parametrize(
    ("words", "architecture"),
    [
        ("--retro-workdir x", "retro"),
        ("--decoder-seq-length 8", "t5"),
        ("--retro-workdir x --decoder-seq-length 8", "gpt"),
        ("--lr 1", "gpt"),
        ("--lora-rank 4", "gpt"),  # a flag of other recipes too
    ],
)
def test_flags_of_one_network_choose_it(words: str, architecture: str) -> None:
    assert catalog.as_script(words.split()) == (architecture, words.split())


def test_a_recipe_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text("layouts: {8: {}, 2: {}}\nmodel: {num_layers: 3}\n")
    recipe = catalog.find(str(path))
    assert (recipe.name, recipe.layouts, recipe.size) == ("mine", (2, 8), 0)
    assert (recipe.architecture, recipe.values["model.num_layers"]) == ("gpt", 3)
    assert catalog.is_recipe(str(path))
    assert not catalog.is_recipe(str(tmp_path))
    assert catalog.as_script([str(path), "--gpus", "2", "--lr", "1"]) == (
        "gpt",
        ["--config", str(path), "--lr", "1"],
    )
