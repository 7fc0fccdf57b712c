"""The coverage of a plan: how its operators are computed, with their times and source lines."""

from __future__ import annotations

import json

import pytest
import torch

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.rules import registry
from cost_models.hardware import Cluster
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.planning.cover import cover_stages
from tests.passes.blocks import perceptron_program


def _plan() -> Plan:
    mesh = Mesh({"x": 2})
    return plan_program(perceptron_program(), mesh, Cluster("h100_sxm", nodes=1, devices_per_node=2), PlanOptions())


def test_every_call_is_counted_once() -> None:
    """Each operator is in one group of the coverage.

    The times of all sum to the compute time, but for joined biases.
    """
    plan = _plan()
    rows = [row for group in plan.coverage.values() for row in group]
    assert sorted(map(repr, rows)) == sorted(map(repr, plan.operators))
    assert plan.coverage["without rule"] == ()
    times = [row.time_s + row.reshard_time_s for row in plan.operators]
    assert times == sorted(times, reverse=True)
    compute = sum(seconds for name, seconds in plan.predicted.breakdown.items() if name.endswith(" compute"))
    biases = [row for row in plan.operators if row.operator == "aten.add.Tensor"]  # products take them along
    rest = sum(row.time_s for row in plan.operators if row not in biases)
    assert rest * (1 - 1e-9) <= compute <= (rest + sum(row.time_s for row in biases)) * (1 + 1e-9)


def test_stages_are_covered_together() -> None:
    """The coverage of two stages adds up the calls of each operator and source line.

    Its times are means over both ranks.
    """
    rows = _plan().operators
    found = cover_stages((rows, rows[1:]), 2)
    assert {row.operator for row in found} == {row.operator for row in rows}
    assert len(found) == len(rows)
    assert sum(row.calls for row in found) == 2 * sum(row.calls for row in rows) - rows[0].calls
    assert sum(row.time_s for row in found) == pytest.approx(sum(row.time_s for row in rows) - rows[0].time_s / 2)
    times = [row.time_s + row.reshard_time_s for row in found]
    assert times == sorted(times, reverse=True)


def test_operators_without_a_rule_have_a_line_and_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator without a rule is listed as not split, with its source line and a positive time."""
    monkeypatch.delitem(registry._rules, torch.ops.aten.relu.default)
    (row,) = _plan().coverage["without rule"]
    assert row.operator == "aten.relu.default"
    assert "blocks.py:" in row.source
    assert row.time_s > 0
    assert not row.is_split


def test_coverage_is_saved() -> None:
    """A loaded plan has the coverage of the saved plan. A file without operators loads without coverage."""
    plan = _plan()
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data).coverage == plan.coverage
    del data["operators"]
    assert Plan.from_json(data).operators == ()
