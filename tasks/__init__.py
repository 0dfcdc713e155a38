"""Downstream tasks: evaluation of language models, and finetuning. `main.py` is the command."""
