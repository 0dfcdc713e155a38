"""Plans, costs and results of all families' networks, and of others with each flag, as recorded.

Other tests compare them with real modules and other programs; these notice any change. If it is
intended, record them again (see `recorded_plans`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.models.recorded_plans import FILE, costs_of, digest_of, network_of, plan_of
from tests.models.recorded_results import results_of

_RECORDED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", _RECORDED)
def test_a_plan_and_its_costs_are_as_recorded(name: str) -> None:
    plan = plan_of(name)
    expected = {key: value for key, value in _RECORDED[name].items() if key != "results"}
    assert {"plan": digest_of(plan), **costs_of(plan)} == expected


@pytest.mark.parametrize("name", _RECORDED)
def test_results_are_as_recorded(name: str) -> None:
    assert results_of(network_of(name)) == pytest.approx(
        _RECORDED[name]["results"], rel=1e-4, abs=1e-3
    )
