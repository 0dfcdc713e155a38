"""Recipes: a YAML file for each named model, which `--config` reads like any other.

    catalog          finds recipes by name, and says what each is

The files beside this one are the recipes.
"""
