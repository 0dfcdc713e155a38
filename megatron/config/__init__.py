"""What was asked for: frozen dataclasses, and the flags, help and YAML made from them."""

from megatron.config.parser import ParsedRun, parse_config
from megatron.config.run import RunConfig

__all__ = ["ParsedRun", "RunConfig", "parse_config"]
