"""Plans and costs of all families' networks, and of small ones with each flag, as recorded.

Other tests compare costs with real modules; these notice any change. If it is intended, record
them again (see `recorded_plans`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.models.recorded_plans import FILE, costs_of, digest_of, plan_of

_RECORDED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", _RECORDED)
def test_a_plan_and_its_costs_are_as_recorded(name: str) -> None:
    plan = plan_of(name)
    assert {"plan": digest_of(plan), **costs_of(plan)} == _RECORDED[name]
