"""`megatron recipes`: a table of the named models, or the flags of one recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.config.arguments import ToolParser
from megatron.config.run import field_at
from megatron.recipes import catalog

_HEAD = ("recipe", "parameters", "layers", "tokens", "GPUs", "model")


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("recipes", "List the named models, or show one recipe.")
    parser.add_argument("recipe", nargs="?",
        help="The recipe to show: a name, a YAML file, or a Hugging Face folder or "
        "config.json.")  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the table of recipes, or one recipe.

    Raises:
        UserError: There is no such recipe, or its file is invalid.
    """
    if options.recipe is not None:
        recipe = catalog.find(options.recipe)
        print(_table([_HEAD, _row(recipe)]))
        print(f"\n{_details(recipe)}")
        return
    recipes = map(catalog.find, catalog.names())
    by_family = sorted(recipes, key=lambda recipe: (recipe.name.partition("-")[0], recipe.size))
    rows = [_row(recipe) for recipe in by_family]
    print(_table([_HEAD, *rows]))
    print("\n`megatron recipes NAME` shows a model's flags; `megatron pretrain NAME` trains it.")


def _row(recipe: catalog.NamedRun) -> tuple[str, ...]:
    about = recipe.facts
    return (
        recipe.name,
        catalog.format_count(about.get("parameters")),
        str(recipe.values.get("model.num_layers", "")),
        catalog.format_count(about.get("tokens")),
        " ".join(f"{count:,}" for count in recipe.layouts),
        str(about.get("title", "")),
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _details(recipe: catalog.NamedRun) -> str:
    facts = {**recipe.facts, "architecture": recipe.architecture}
    about = [f"{name}: {value}" for name, value in facts.items()]
    fields = [(field_at(path), value) for path, value in recipe.values.items()]
    flags = [field.spell(value) for field, value in fields if field.names]
    return "\n".join([f"{recipe.name} ({recipe.path})", *about, "", *flags])
