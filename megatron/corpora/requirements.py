"""The optional packages that `megatron.corpora` needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.errors import ConfigError


@contextmanager
def corpora_extra() -> Iterator[None]:
    """Turn the failed import of an optional package into an error that says how to install it.

    Raises:
        ConfigError: A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the Python package {error.name} is missing: pip install 'megatron[corpora]' (in a "
            "checkout: pip install -e '.[corpora]')"
        ) from error
