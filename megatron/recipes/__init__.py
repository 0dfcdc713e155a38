"""Recipes: one YAML file per named model, which `--config` reads like any other YAML file.

    catalog          finding recipes by name, in files and in Hugging Face folders
    derive           the flags of the network that a Hugging Face config.json describes

The YAML files in this folder are the recipes.
"""
