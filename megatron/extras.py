"""Optional packages, which the extras of pyproject.toml install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.errors import ConfigError


@contextmanager
def packages_of(extra: str) -> Iterator[None]:
    """Turn the failed import of an optional package into an error that says how to install it.

    Args:
        extra: The extra of pyproject.toml that includes the package, for example "corpora".

    Raises:
        ConfigError: A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the Python package {error.name} is missing: in the repository's folder, run "
            f"pip install -e '.[{extra}]'"
        ) from error
