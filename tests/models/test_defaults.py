"""Default values of this room's parameters and fields."""

from tests import defaults


def test_defaults_are_as_recorded() -> None:
    defaults.check("models")
