"""Split programs with infinities compute the infinities and NaNs of one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Mesh, P
from autoshard.ir.plan_parts import NodePlan
from autoshard.testing import plans
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program
from tests.samples import examples

ROWS, WIDTH = 8, 256
MESH = Mesh({"a": 2})


class Clamped(nn.Module):
    """A model that clamps an infinite quotient."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return (x.sum(0) / c).sum().clamp(max=1.0)


class Vanishing(nn.Module):
    """A model whose exponential of an infinite product is zero."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return torch.exp((x.sum(0) * c).sum())


class Weighed(nn.Module):
    """A matrix product with weights plus `c`, clamped, so that infinite weights give finite results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.weight + c[:, None]
        return (x.sum(0, keepdim=True) @ weight).clamp(min=-5.0, max=5.0).sum()


def of_opposite_signs(first: float, second: float) -> Tensor:
    """Return rows of two values, in whose sum a rank's half may have another sign than the whole."""
    return torch.cat([torch.full((ROWS // 2, WIDTH), first), torch.full((ROWS // 2, WIDTH), second)])


def filled(value: float, special: float) -> Tensor:
    """Return a tensor filled with `value`, except for `special` at index 3."""
    c = torch.full((WIDTH,), value)
    c[3] = special
    return c


CASES: list[tuple[type[nn.Module], Tensor, Tensor]] = [
    (Clamped, of_opposite_signs(2.0, -1.0), filled(1.0, 0.0)),
    (Vanishing, of_opposite_signs(-2.0, 1.0), filled(1e-6, math.inf)),
    (Weighed, of_opposite_signs(2.0, -1.0), filled(1e-3, math.inf)),
]
by_name = pytest.mark.parametrize(("build", "x", "c"), CASES, ids=[case[0].__name__ for case in CASES])


@by_name
@pytest.mark.parametrize("constraints", [{"input:0": P("a", None)}, {"input:0": P("a", None), "input:1": P(None)}])
def test_an_infinity_that_vanishes_leaves_the_same_number(
    build: Callable[[], nn.Module], x: Tensor, c: Tensor, constraints: dict[str, P]
) -> None:
    """Under the chosen plan, a model that turns an infinity into a finite number returns one device's number."""
    sharded = autoshard.compile(build(), MESH, constraints=constraints, example_inputs=(x, c))
    with torch.no_grad():
        torch.testing.assert_close(sharded(x, c), build()(x, c))


@pytest.mark.sample(1)
@by_name
@examples(5, 10)
@given(data=st.data())
def test_so_does_any_legal_plan(build: Callable[[], nn.Module], x: Tensor, c: Tensor, data: st.DataObject) -> None:
    """Under any legal plan, the models equal one device, with zeros and infinities among the inputs."""
    values = data.draw(st.lists(st.sampled_from([0.0, 1.0, -2.0, math.inf, -math.inf]), min_size=4, max_size=4))
    c = c.clone()
    c[:4] = torch.tensor(values)
    plan = data.draw(plans(trace(build(), (x, c)), MESH))
    sharded = autoshard.compile(build(), MESH, plan=plan)
    with torch.no_grad():
        torch.testing.assert_close(sharded(x, c), build()(x, c), equal_nan=True)


def test_a_plan_from_before_is_refused_by_name() -> None:
    """A plan that divides partial sums by a possible zero is refused, and the error names the division."""
    build, x, c = CASES[0]
    plan = autoshard.plan(build(), MESH, example_inputs=(x, c), constraints={"input:0": P("a", None)})
    pending, (name,) = P(partial={"a": "sum"}), (name for name in plan.nodes if name.startswith("div"))
    old = dataclasses.replace(plan, nodes={**plan.nodes, name: NodePlan((pending, P()), (pending,))})
    with pytest.raises(autoshard.PlanMismatchError, match=name):
        lower_program(trace(build(), (x, c)), old)
