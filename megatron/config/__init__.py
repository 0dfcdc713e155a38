"""What was asked for: frozen dataclasses, and the flags, help and YAML made from them."""

from megatron.config.run import RunConfig

__all__ = ["RunConfig"]
