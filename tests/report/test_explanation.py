"""The comparison of two plans, as figures and as text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, P
from autoshard.ir.answers import Outcome, Variant, WhyNot
from autoshard.ir.plan import Plan

CLUSTER = Cluster("h100_sxm", nodes=1, devices_per_node=4)


def make_plan(mesh: dict[str, int], **constraints: autoshard.PartitionSpec) -> Plan:
    model = nn.Sequential(nn.Linear(64, 128), nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)))
    inputs = (torch.randn(8, 64),)
    named = {name.replace("_", "."): spec for name, spec in constraints.items()}
    return autoshard.plan(model, CLUSTER.mesh(mesh), example_inputs=inputs, constraints=named)


def test_differences_are_both_plans_figures() -> None:
    """A comparison has both plans' step times, memory, parts of the step, and specs."""
    one, other = make_plan({"data": 4}), make_plan({"data": 2, "model": 2}, **{"0_weight": P("model", None)})
    found = one.compare(other)
    assert found.step_time_s == (one.predicted.step_time_s, other.predicted.step_time_s)
    assert found.peak_memory_bytes == (one.predicted.peak_memory_bytes, other.predicted.peak_memory_bytes)
    assert found.parameters["0.weight"] == (one.parameters["0.weight"].spec, P("model"))
    assert found.breakdown["communication over model"][0] == 0
    for index, plan in enumerate((one, other)):
        assert {name: pair[index] for name, pair in found.breakdown.items() if pair[index]} == {
            name: seconds for name, seconds in plan.predicted.breakdown.items() if seconds
        }


def test_what_is_hidden_stands_beside_what_is_exposed() -> None:
    """Hidden communication is listed for each axis apart from the parts of the step, which still add up."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3)))
        inputs = (torch.zeros(65536, 2048),)
    rows = {"input:0": P("data"), "*.weight": P(), "*.bias": P()}
    one = autoshard.plan(model, CLUSTER.mesh({"data": 4}), example_inputs=inputs, constraints=rows)
    other = autoshard.plan(model, Cluster("cpu_laptop", nodes=1, devices_per_node=1), example_inputs=inputs)
    found = one.compare(other)
    hidden_s = one.predicted.communication["data"].hidden_s
    assert hidden_s > 0
    assert found.hidden == {"hidden: communication over data": (hidden_s, 0.0)}
    assert sum(first for first, _ in found.breakdown.values()) == pytest.approx(one.predicted.step_time_s)
    assert "hidden: communication over data" in str(found)


def test_a_plan_differs_from_itself_in_nothing() -> None:
    """A plan compared with itself prints that nothing differs."""
    plan = make_plan({"data": 4})
    found = plan.compare(plan)
    assert not found.parameters
    assert not found.outputs
    assert "All specs are the same." in str(found)


def test_ways_that_memory_does_not_exclude_are_not_said_to_need_memory() -> None:
    """ "Fits in memory" is said of a variant only if a larger memory would fit it, and "was found" otherwise."""
    chosen = Outcome(fits=True, step_time_s=1.0, peak_memory_bytes=1, breakdown={})
    for smallest, words in ((0, "was found"), (2**30, "fits in memory")):
        ways = (Variant("tensor over data", fits=False, smallest_bytes=smallest),)
        assert f"tensor: no plan with it {words}." in str(WhyNot("tensor", "", chosen, ways, 1, ""))


def test_alike_differences_share_a_row() -> None:
    """Equal differences of repeated blocks share a row with their count, and numbers in which names agree are kept."""
    one = make_plan({"data": 4}, **{"1_*_weight": P("data", None)})
    other = make_plan({"data": 4}, **{"1_*_weight": P(None, "data")})
    row = next(line for line in str(one.compare(other)).splitlines() if "1.*.weight" in line and "update" not in line)
    assert "2" in row
    assert "P('data')" in row
    assert "P(None, 'data')" in row
