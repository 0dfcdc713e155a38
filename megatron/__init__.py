"""Megatron-style pretraining of transformers, from a laptop CPU to thousands of GPUs."""

__version__ = "0.1.0"
