"""Each mistake has its own error, which says what was asked and what was found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard import (
    Cluster,
    InvalidSpecError,
    Mesh,
    MeshError,
    NoShardingRuleError,
    NotAvailableError,
    P,
    Plan,
    PlanMismatchError,
    TraceError,
)

MESH = Mesh({"data": 2, "model": 2})
X = torch.ones(4, 6)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autoshard.compile(small(), MESH, example_inputs=(X,)).plan


def test_an_axis_used_twice() -> None:
    with pytest.raises(InvalidSpecError, match=r"uses mesh axis 'data' twice"):
        P("data", "data")


def test_an_unknown_axis_in_a_constraint() -> None:
    with pytest.raises(
        InvalidSpecError, match=r"names mesh axis 'tensor', which Mesh\(data=2, model=2\) does not have"
    ):
        autoshard.compile(small(), MESH, example_inputs=(X,), constraints={"0.weight": P("tensor")})


def test_a_constraint_on_nothing() -> None:
    with pytest.raises(InvalidSpecError, match=r"constraints\['nothing.*'\] matches no parameter"):
        autoshard.compile(small(), MESH, example_inputs=(X,), constraints={"nothing.*": P("data")})


def test_a_constraint_that_is_no_spec() -> None:
    with pytest.raises(InvalidSpecError, match=r"constraints\['0.weight'\]=\('data',\) is a tuple"):
        autoshard.compile(small(), MESH, constraints={"0.weight": ("data",)})


def test_a_mesh_larger_than_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"Mesh\(data=2, model=2\) has 4 ranks, but this run has 2 processes"):
        autoshard.compile(small(), MESH)


def test_something_that_is_no_mesh() -> None:
    with pytest.raises(MeshError, match=r"mesh=4 is a int"):
        autoshard.compile(small(), 4)


def test_a_cluster_without_example_inputs() -> None:
    with pytest.raises(MeshError, match=r"pass example_inputs="):
        autoshard.compile(small(), Cluster("cpu_laptop", 1, 4))


def test_a_fixed_plan_runs_its_model(plan: Plan, tmp_path: Path) -> None:
    """A plan that was saved and loaded gives what the model gives, in training and in evaluation."""
    plan.save(tmp_path / "plan.json")
    sharded = autoshard.compile(small(), MESH, plan=tmp_path / "plan.json")
    torch.testing.assert_close(sharded(X), small()(X))
    with torch.no_grad():
        torch.testing.assert_close(sharded(torch.ones(8, 6)), small()(torch.ones(8, 6)))


def test_inputs_of_another_shape_than_a_fixed_plan(plan: Plan) -> None:
    sharded = autoshard.compile(small(), MESH, plan=plan)
    with pytest.raises(PlanMismatchError, match=r"inputs \{'input:0': 'f32\[4, 6\]'\}, the call has .*\[8, 6\]"):
        sharded(torch.ones(8, 6))


def test_a_plan_of_another_model(plan: Plan) -> None:
    other = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 2))
    with pytest.raises(
        PlanMismatchError, match=r"parameter '0.weight' has shape=\(8, 6\) in the plan and shape=\(16, 6\)"
    ):
        autoshard.compile(other, MESH, plan=plan)(X)


def test_a_plan_of_a_model_with_the_same_parameters(plan: Plan) -> None:
    other = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2), nn.ReLU())
    with pytest.raises(PlanMismatchError, match=r"another model or other inputs"):
        autoshard.compile(other, MESH, plan=plan)(X)


def test_a_plan_for_another_mesh_is_where_the_search_starts(plan: Plan) -> None:
    """It is planned again, and the old plan is priced beside; a plan of another model is refused there too."""
    model, mesh = small(), Mesh({"data": 4})
    sharded = autoshard.compile(model, mesh, plan=plan, example_inputs=(X,))
    assert isinstance(sharded, autoshard.ShardedModule)
    found = sharded.plan
    assert found is not None
    assert found.mesh == mesh
    before = found.baselines["the plan before"]
    assert before is not None
    assert found.predicted.step_time_s <= before
    torch.testing.assert_close(sharded(X), model(X))
    other = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 2))
    with pytest.raises(PlanMismatchError, match=r"parameter '0.weight' has shape=\(8, 6\) in the plan"):
        autoshard.compile(other, mesh, plan=plan)(X)


@torch.library.custom_op("autoshard_tests::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@mystery.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Mysterious(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mystery(x) + 1


def test_an_operator_without_a_rule() -> None:
    with pytest.raises(NoShardingRuleError, match=r"(?s)mystery.*test_errors\.py:\d+"):
        autoshard.compile(Mysterious(), MESH, example_inputs=(X,), strict=True)


def test_without_strict_such_an_operator_runs_whole() -> None:
    """Its plan says so, with the user's line."""
    sharded = autoshard.compile(Mysterious(), MESH, example_inputs=(X,))
    torch.testing.assert_close(sharded(X), Mysterious()(X))
    operators = sharded.plan.replicated_operators
    assert any("mystery" in name and "test_errors.py" in line for name, line in operators)


def test_a_model_on_meta_can_be_planned() -> None:
    with torch.device("meta"):
        model = small()
    plan = autoshard.plan(model, MESH, example_inputs=(X,), optimizer="adamw", loss_fn=lambda y: y.sum())
    assert plan.parameters["0.weight"].shape == (8, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int8"}, r"precision='int8' is unknown; use 'bf16', 'f16', 'f32'"),
        ({"backend": "inductor"}, r"needs a process per rank"),
        ({"backend": "nonsense"}, r"backend='nonsense' is unknown"),
        ({"micro_batches": 2}, r"micro_batches=2 belongs to a training step"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0 belongs to a training step"),
    ],
)
def test_what_is_not_available(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(NotAvailableError, match=message):
        autoshard.compile(small(), MESH, **arguments)


def test_an_optimizer_of_another_model() -> None:
    optimizer = torch.optim.SGD(small().parameters(), lr=0.1)
    with pytest.raises(TraceError, match=r"optimizer=SGD holds 4 parameters in group 0 that are not the model's"):
        autoshard.compile(small(), MESH, optimizer=optimizer)


def test_a_step_without_a_loss() -> None:
    model = small()
    step = autoshard.compile(model, MESH, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TraceError, match=r"returns no floating scalar; it returns tensors of shapes=\[\(4, 2\)\]"):
        step(X)


def test_example_inputs_that_are_a_tensor() -> None:
    with pytest.raises(TraceError, match=r"example_inputs is a Tensor; pass a tuple"):
        autoshard.compile(small(), MESH, example_inputs=X)
