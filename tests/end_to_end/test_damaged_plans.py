"""A damaged, edited or outdated plan file is refused with an error that names the fault, or runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import AutoshardError, Mesh, Plan, PlanMismatchError

MESH = Mesh({"data": 2, "model": 2})
X = torch.ones(4, 6)
NODE = "p_0_weight"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def total(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return autoshard.compile(small(), MESH, example_inputs=(X,)).plan.to_json()


def edited(data: dict[str, Any], path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Write a plan file after applying `edit` to a copy of the plan; return its path."""
    found = json.loads(json.dumps(data))
    edit(found)
    path.write_text(json.dumps(found))
    return path


def place(found: dict[str, Any], spec: str) -> None:
    """Give parameter "0.weight" and its gradient another spec, at the three places of the plan."""
    found["parameters"]["0.weight"]["spec"] = found["outputs"]["gradient 0.weight"] = spec
    found["nodes"][NODE] = [[], [spec]]


def test_a_parameter_moved_by_hand(data: dict[str, Any], tmp_path: Path) -> None:
    """A plan with a parameter's spec edited at all three places runs, verifies and equals one device."""
    path = edited(data, tmp_path / "plan.json", lambda found: place(found, "P('model')"))
    sharded = autoshard.compile(small(), MESH, plan=path)
    torch.testing.assert_close(sharded(X), small()(X))
    assert "P('model')" in str(sharded.plan)
    autoshard.verify(sharded)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda found: found["parameters"]["0.weight"].update(spec="P('model')"),
            r"parameter '0.weight' as P\('model'\) under 'parameters', and as P\(.*\) under 'nodes', 'p_0_weight'",
        ),
        (lambda found: found["nodes"].pop(NODE), r"no node 'p_0_weight': something was taken out"),
        (lambda found: found["outputs"].pop("gradient 0.weight"), r"no output 'gradient 0.weight'"),
        (lambda found: place(found, "P('tensor')"), r"Mesh\(data=2, model=2\) has no axis 'tensor'"),
        (lambda found: place(found, "P('data"), r"plan.json: spec=\"P\('data\" cannot be read"),
        (lambda found: found.pop("mesh"), r"plan.json: 'mesh' is missing in the plan: something was taken out"),
        (
            lambda found: found.update(autoshard_plan=99),
            r"plan.json: the plan has schema version 99.*Upgrade",
        ),
        (
            lambda found: found.update(autoshard_plan=6),
            r"schema version 6; this release reads \d+. Upgrade autoshard, or",
        ),
        (lambda found: found.update(inputs=17), r"plan.json: 'inputs' is 17 in the plan; it must be of dict"),
        (lambda found: found.update(lower_bound="1 s"), r"'lower_bound' is '1 s' in .* of int or float or null"),
        (lambda found: found.pop("autoshard_plan"), r"plan.json: the plan has schema version None"),
        (lambda found: found.update(autoshard_plan=True), r"plan.json: the plan has schema version True"),
        (lambda found: found.update(memory_budgt=8), r"plan.json: 'memory_budgt' is no field of plans; there are auto"),
        (lambda found: found.update(precision="x"), r"'precision' is 'x' in the plan; it must be null or of 'bf16',"),
        (
            lambda found: found.update(objective=float("nan")),
            r"not a plan that autoshard wrote: .* 'NaN' is not finite",
        ),
        (lambda found: found.update(objective=float("inf")), r"the number 'Infinity' is not finite"),
        (lambda found: found.update(memory_budget=10**400), r"the number '10+\.\.\.0+' is longer than 64 bits"),
        (lambda found: found.update(mesh={"data": 10**12}), r"has 1000000000000 ranks; the largest mesh has 1048576"),
        (lambda found: found.update(was_interrupted=1), r"'was_interrupted' is 1 in the plan; it must be of bool\."),
        (lambda found: found.update(mesh={"data": True}), r"'mesh', 'data' is True in the plan; it must be of int\."),
        (lambda found: found.update(mesh={"data": 0}), r"Mesh axis 'data' has size=0"),
        (lambda found: found["predicted"].pop("breakdown"), r"'predicted', 'breakdown' is missing in the plan"),
        (lambda found: found["predicted"].update(peak=3), r"'predicted', 'peak' is no field of plans; there are step_"),
        (
            lambda found: found["predicted"].update(step_time_interval_s=[1.0]),
            r"'predicted', 'step_time_interval_s' has 1 entries in the plan; it must have 2",
        ),
        (
            lambda found: found["parameters"]["0.weight"].update(shape=[8, "6"]),
            r"'parameters', '0.weight', 'shape', '1' is '6' in the plan; it must be of int\.",
        ),
        (lambda found: found["operators"].append(3), r"'operators', '\d+' is 3 in the plan; it must be of dict"),
        (lambda found: found["nodes"].update({NODE: 3}), r"'nodes', 'p_0_weight' is 3 in the plan; it must be of list"),
        (lambda found: found["nodes"][NODE].append([]), r"'nodes', 'p_0_weight' has 3 entries .* it must have 2"),
        (
            lambda found: found["nodes"].update({NODE: [[], []]}),
            r"0 specs for operands of node 'p_0_weight' and 0 for results, and it has 0 and 1: the plan was changed",
        ),
        (
            lambda found: found["nodes"]["t"][0].clear(),
            r"0 specs for operands of node 't' and 1 for results, and it has 1 and 1: the plan was changed",
        ),
        (lambda found: found.update(timeline=3), r"'timeline' is 3 in the plan; it must be of dict\."),
        (lambda found: found["timeline"].pop("spans"), r"'timeline', 'spans' is missing in the plan"),
        (
            lambda found: found["timeline"]["spans"].append("x"),
            r"'x' is no span of the timeline's 1 processes. A span reads",
        ),
        (lambda found: found["timeline"].update(processes=[]), r"is no span of the timeline's 0 processes"),
    ],
)
def test_a_damaged_plan(
    data: dict[str, Any], tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = edited(data, tmp_path / "plan.json", edit)
    with pytest.raises(AutoshardError, match=message):
        autoshard.compile(small(), MESH, plan=path)(X)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(bytes(range(256)))
    with pytest.raises(PlanMismatchError, match=r"plan.json' is not a plan that autoshard wrote: it is no text"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hardware"', '"mesh": {"data": 4}, "hardware"', "'mesh' stands twice in one object; take one of them out"),
        ('"model": 2', '"data": 4', "'data' stands twice"),
        ('"mesh": ', '"mesh": ' + "[" * 100_000, "its lists and objects lie in each other too deeply"),
        ("}", "", "it is no JSON"),
    ],
)
def test_a_file_that_can_be_read_in_two_ways(
    data: dict[str, Any], tmp_path: Path, old: str, new: str, message: str
) -> None:
    """A file that is ambiguous or unreadable raises one error, which names the file."""
    text = json.dumps(data).replace(old, new)
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanMismatchError, match=rf"plan.json' is not a plan that autoshard wrote: {message}"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_that_is_a_number() -> None:
    with pytest.raises(PlanMismatchError, match=r"plan=3 is a int; pass a Plan, or the path of a saved one"):
        autoshard.compile(small(), MESH, plan=3)


def test_the_plan_of_a_runtime_profile() -> None:
    """A plan under a profile of another runtime can be read, and its error says how to make a plan that runs."""
    recipe = autoshard.Recipe(data=2, tensor=2)
    priced = autoshard.price(small(), autoshard.Cluster("h100_sxm", 1, 4), recipe, example_inputs=(X,), loss_fn=total)
    for_reading = r"prices a recipe \(data 2, tensor 2; .*\) under runtime='megatron', and is for reading"
    with pytest.raises(PlanMismatchError, match=for_reading):
        autoshard.compile(small(), MESH, plan=priced)
    with pytest.raises(PlanMismatchError, match=for_reading):
        autoshard.prove(small(), priced, example_inputs=(X,))
