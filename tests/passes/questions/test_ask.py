"""`plan.explain` compares the specs that a value may have, each by a new plan with the spec as a constraint."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, P
from autoshard.errors import InvalidSpecError, NotAvailableError
from autoshard.ir.plan import Plan
from passes.driver import plan_again
from passes.driver.plan_of_choice import kernels_of

CLUSTER, MESH = Cluster("h100_sxm", nodes=1, devices_per_node=4), Mesh({"data": 2, "model": 2})


class Model(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(blocks)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x.square().mean()


def make_plan(**arguments: object) -> Plan:
    tokens = torch.randint(0, 50, (4, 8))
    return autoshard.plan(Model(), CLUSTER.mesh(MESH), example_inputs=(tokens,), **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "optimizer"),
    [
        ("blocks.1.0.weight", None, None),
        pytest.param("table.weight", 0.6, None, marks=pytest.mark.slow),  # plans of recomputation, for minutes
        ("exp_avg:table.weight", None, "adamw"),
    ],
)
def test_figures_are_those_of_planning_again(name: str, share: float | None, optimizer: str | None) -> None:
    """Each alternative has the step time of a plan with its spec as a constraint, or the least memory that it needs."""
    budget = None if share is None else int(share * make_plan().predicted.peak_memory_bytes)
    asked = {"optimizer": optimizer, "memory_budget": budget}
    plan = make_plan(**asked)
    found = plan.explain(name)
    assert len(found.others) >= 3
    assert found.chosen.spec not in [item.spec for item in found.others]
    for item in found.others:
        if not item.fits:
            assert item.smallest_bytes is not None
            assert budget is not None
            assert item.smallest_bytes > budget
            continue
        again = make_plan(**asked, constraints={name: item.spec})
        assert item.step_time_s == pytest.approx(again.predicted.step_time_s, rel=1e-2)


def test_repeated_blocks_are_explained_together() -> None:
    """The explanation of a parameter names the same parameter of the other blocks, which share its spec."""
    found = make_plan().explain("blocks.0.1.weight")
    assert found.alike == ("blocks.1.1.weight",)
    assert found.shape == (64, 256)


def test_constraints_of_the_plan_hold() -> None:
    """With a constraint on a parameter, other specs of the parameter are marked as excluded."""
    found = make_plan(constraints={"table.weight": P("model", None)}).explain("table.weight")
    assert found.chosen.spec == P("model")
    assert not any(item.fits for item in found.others)
    assert "excluded" in str(found)


def test_nodes_have_explanations() -> None:
    """`explain` of a node's name gives the node's spec in the plan."""
    plan = make_plan()
    node = next(name for name, item in plan.nodes.items() if name.startswith("relu"))
    assert plan.explain(node).chosen.spec == plan.nodes[node].outputs[0]


def test_the_text_has_a_row_for_each_spec() -> None:
    """Text and JSON of an explanation have an entry for each spec, and mark the chosen spec."""
    found = make_plan().explain("table.weight")
    lines = str(found).splitlines()
    assert "table.weight: 50x64" in lines[0]
    assert sum("chosen" in line for line in lines) == 1
    assert all(any(repr(item.spec) in line for line in lines) for item in found.others)
    data = found.to_json()
    assert data["chosen"]["spec"] == repr(found.chosen.spec)
    assert len(data["others"]) == len(found.others)


def test_mistakes() -> None:
    """`explain` refuses an unknown name, and a plan without its model."""
    plan = make_plan()
    with pytest.raises(
        InvalidSpecError, match=r"explain\('tables.weight'\).*there are table.weight, blocks.0.0.weight"
    ):
        plan.explain("tables.weight")
    with pytest.raises(NotAvailableError, match=r"Call autoshard.plan with the model"):
        Plan.from_json(plan.to_json()).explain("table.weight")


def test_kernels_of_a_plan_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a plan are found once for all explanations, and anew for another plan."""
    asked: list[Plan] = []
    monkeypatch.setattr(
        plan_again, "kernels_of", lambda plan, *others: (asked.append(plan), kernels_of(plan, *others))[1]
    )
    tokens = torch.randint(0, 50, (4, 8))
    first = autoshard.plan(Model(16, 1), CLUSTER.mesh({"data": 4}), example_inputs=(tokens,))
    other = dataclasses.replace(first, nodes=dict(first.nodes))
    answers = [plan.explain("table.weight") for plan in (first, first, other)]
    assert [plan is first for plan in asked] == [True, False]
    assert answers[0] == answers[1]
    assert answers[0].kernels == answers[2].kernels
