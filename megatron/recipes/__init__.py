"""Recipes: a YAML file for each named model, which `--config` reads like any other.

    catalog          finds recipes by name, in files and in Hugging Face folders
    derive           the flags of the network that a config.json of Hugging Face describes

The files beside this one are the recipes.
"""
