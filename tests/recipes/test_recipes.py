"""Every recipe is the model that it names, and fits where it says it does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from megatron.config import RunConfig, parse_config
from megatron.errors import ConfigError
from megatron.models.arithmetic import count_active_parameters, count_parameters
from megatron.models.plan import LANGUAGE_MODEL_HEAD, ModelPlan
from megatron.models.plans import model_plan
from megatron.planner.memory import largest_process
from megatron.recipes import catalog
from tests.repository import ROOT

# As counted in the checkpoints that their authors published, without vocabulary padding; BERT
# includes the pretraining heads, whose output weight is the word embedding.
EXACT = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "t5-base": 222_903_552,
}
# As rounded in the papers.
ROUNDED = {
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-1.3b": 1.3e9,
    "gpt-13b": 13e9,
    "gpt-175b": 175e9,
    "yuan-4.7b": 4.7e9,
    "yuan-13b": 13e9,
}
ACTIVE = {"qwen3-30b-a3b": 3.3e9, "mixtral-8x7b": 12.9e9}  # per token
LIMIT = 0.92 * 80e9  # bytes of an 80 GB GPU, less the CUDA context and fragmentation
OURS = {"gpt-small", "gpt-tiny"}  # models that nobody published


@cache
def _run(name: str, processes: int) -> tuple[RunConfig, ModelPlan]:
    recipe = catalog.find(name)
    vocabulary = int(recipe.facts["vocabulary"])
    words = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {vocabulary - 1} "
    words += f"--vocab-extra-ids 0 --dry-run --dry-run-world-size {processes}"
    config = parse_config(
        ["--config", str(recipe.path), *words.split()],
        world_size=1,
        architecture=recipe.architecture,
    ).config
    return config, model_plan(config.model, vocabulary, LANGUAGE_MODEL_HEAD)


def test_every_recipe_is_held_against_a_published_number() -> None:
    assert EXACT.keys() | ROUNDED.keys() | OURS == set(catalog.names())


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_a_recipe_has_the_parameters_of_the_published_model(name: str) -> None:
    recipe = catalog.find(name)
    _, plan = _run(name, recipe.layouts[0])
    count = count_parameters(plan)
    assert recipe.facts["parameters"] == count
    if name in EXACT:
        assert count == EXACT[name]
    else:
        assert count == pytest.approx(ROUNDED[name], rel=0.02)
    active = ACTIVE.get(name, count)
    assert count_active_parameters(plan) == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "processes"),
    [(name, count) for name in catalog.names() for count in catalog.find(name).layouts],
)
def test_a_recipe_fits_80_gb_in_each_of_its_layouts(name: str, processes: int) -> None:
    config, plan = _run(name, processes)
    estimate = largest_process(config, plan, processes)
    assert 0 < estimate.total < LIMIT, f"{estimate.total / 1e9:.1f} GB"


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_a_recipe_trains_on_as_many_tokens_as_it_says(name: str) -> None:
    recipe = catalog.find(name)
    if "tokens" not in recipe.facts:
        return
    config, _ = _run(name, recipe.layouts[0])
    length = config.data.seq_length + (config.data.decoder_seq_length or 0)
    assert config.training.train_iters is not None
    tokens = length * config.training.global_batch_size * config.training.train_iters
    assert tokens == pytest.approx(recipe.facts["tokens"], rel=0.25 if name == "t5-base" else 1e-3)


@pytest.mark.parametrize("name", catalog.names())
def test_measured_speeds_are_those_of_the_benchmarks(name: str) -> None:
    about = catalog.find(name).facts
    assert ("measured" in about) == ("measured_in" in about)
    if "measured" in about:
        figure = about["measured"].partition(" tokens/s")[0]
        assert figure in (ROOT / about["measured_in"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", catalog.names())
def test_losses_are_those_of_their_page(name: str) -> None:
    about = catalog.find(name).facts
    assert ("loss" in about) == ("loss_in" in about)
    if "loss" in about:
        assert about["loss"].split()[0] in (ROOT / about["loss_in"]).read_text(encoding="utf-8")


def test_the_smallest_recipe_ends_with_its_loss(tmp_path: Path) -> None:
    from megatron.training.pretrain import main
    from pretrain_gpt import GPTRecipe

    recipe, metrics = catalog.find("gpt-tiny"), tmp_path / "metrics.jsonl"
    assert main(GPTRecipe(), ["--config", str(recipe.path), "--metrics-jsonl", str(metrics)]) == 0
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [one["lm loss validation"] for one in records if "lm loss validation" in one]
    assert losses[-1] == pytest.approx(float(recipe.facts["loss"].split()[0]), abs=0.005)


def test_examples_in_yaml_are_recipes() -> None:
    for file in (ROOT / "examples").glob("gpt_*.yaml"):
        assert file.is_symlink()
        assert file.resolve().parent == catalog.FOLDER


def test_a_file_of_one_s_own_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: {title: mine}\nmodel: {num_layers: 3}\n")
    recipe = catalog.find(str(tmp_path / "mine.yaml"))
    assert (recipe.name, recipe.facts, recipe.layouts) == ("mine", {"title": "mine"}, ())
    assert recipe.values == {"model.num_layers": 3}
    assert recipe.size == 0  # the file does not give it


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("text", "recipe: expected `key: value` lines, got 'text'"),
        ("{vocabulary: x}", "recipe.vocabulary: expected a whole number above 0, got 'x'"),
        ("{vocabulary: -3}", "recipe.vocabulary: expected a whole number above 0, got -3"),
        ("{parameters: [1]}", "recipe.parameters: expected a whole number above 0, got [1]"),
    ],
)
def test_mistakes_in_the_facts_of_a_recipe(facts: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"recipe: {facts}\nmodel: {{num_layers: 3}}\n")
    with pytest.raises(ConfigError) as caught:
        catalog.find(str(tmp_path / "mine.yaml"))
    assert str(caught.value) == f"{tmp_path / 'mine.yaml'}: {message}"


@pytest.mark.parametrize(
    ("number", "text"),
    [(125_226_240, "125M"), (6_738_415_616, "6.74B"), (15 * 10**12, "15T"), (12, "12"), (None, "")]
    + [(10**6, "1M"), (10**9, "1B"), (10**12, "1T"), (999_999, "999999")],
)
def test_numbers_of_the_table(number: object, text: str) -> None:
    assert catalog.format_count(number) == text


def test_a_word_is_a_recipe_if_it_is_a_name_a_yaml_file_or_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert not catalog.is_recipe(str(folder))
    (folder / "config.json").write_text("{}")
    words = ["gpt-tiny", "mine.yaml", "mine.yml", str(folder), str(folder / "config.json")]
    assert all(map(catalog.is_recipe, words))
    assert not any(map(catalog.is_recipe, ["gpt-huge", "mine.txt", "gpt-tiny/"]))
