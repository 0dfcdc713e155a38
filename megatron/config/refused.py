"""Megatron's flags that have no field here: refused by name, or honoured with nothing to do.

Each is known with its type, so that the rest of the command line is read correctly. A value equal
to Megatron's default asks for nothing and passes.
"""

from __future__ import annotations

from megatron.config.honoured import HONOURED
from megatron.config.known_flag import KnownFlag
from megatron.config.refused_network import REFUSED_NETWORK
from megatron.config.refused_running import REFUSED_RUNNING
from megatron.config.refused_training import REFUSED_TRAINING

__all__ = ["HONOURED", "REFUSED", "KnownFlag"]

REFUSED: tuple[KnownFlag, ...] = (*REFUSED_NETWORK, *REFUSED_TRAINING, *REFUSED_RUNNING)
