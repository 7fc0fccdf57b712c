"""Checks of values in a model change no result when they hold, and raise the error of one device when they fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Mesh
from autoshard.testing import check_plan
from autoshard.tracing import trace
from tests.passes.greedy_plans import most_split_plan

MESH = Mesh({"data": 2, "model": 2})


def _covariance(h: Tensor) -> Tensor:
    """Return a matrix of shape [2, 8, 8] that is positive definite unless `h` has NaN."""
    return h.mT @ h / 8 + torch.eye(8)


def _asserted(h: Tensor, is_right: Tensor) -> Tensor:
    torch._assert_async(is_right.all(), "h must be small")
    return h.square()


CHECKED: dict[str, Callable[[Tensor], Tensor]] = {
    "assertion": lambda h: _asserted(h, h.abs() < 1e3),
    "cholesky": lambda h: torch.linalg.cholesky(_covariance(h)),
    "inverse": lambda h: torch.linalg.inv(h[:, :8]),
    "solve": lambda h: torch.linalg.solve(h[:, :8], h[:, :8] + 1),
    "normal distribution": lambda h: torch.distributions.MultivariateNormal(
        torch.zeros(8), covariance_matrix=_covariance(h), validate_args=False
    ).log_prob(h[:, 0]),
    "eigenvalues, whose backward solves": lambda h: torch.linalg.eigvals(_covariance(h)).abs(),
}


class Checked(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last, self.name = nn.Linear(8, 8), nn.Linear(8, 8), name

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        found = CHECKED[self.name](h)
        return self.last(h).square().mean() + found.square().mean(), h


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHECKED)
def test_a_check_that_passes_changes_nothing(name: str) -> None:
    """A check that holds changes no result, under the chosen plan and under a plan with many splits."""
    torch.manual_seed(0)
    model, inputs = Checked(name), (torch.randn(2, 16, 8),)
    for plan in (None, most_split_plan(trace(model, inputs), MESH)):
        check_plan(model, MESH, inputs, plan=plan, precise=torch.float64).raise_if_different()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["assertion", "inverse", "solve"])
@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_a_check_that_fails_is_the_error_of_one_device(name: str, axis: str) -> None:
    """A failed check raises the error of one device and leaves all state unchanged, and the next step runs."""
    torch.manual_seed(0)
    model, good = Checked(name), torch.randn(4, 16, 8)
    bad = good * 1e6 if name == "assertion" else good * 0
    if name != "assertion":
        nn.init.zeros_(model.first.bias)
    with pytest.raises(RuntimeError) as expected:
        model(bad)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = autoshard.compile(
        model, Mesh({axis: 2}), optimizer=optimizer, loss_fn=lambda outputs: outputs[0], micro_batches=2
    )
    step(good)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(type(expected.value)) as found:
        step(bad)
    assert str(found.value).split("(Batch")[0] == str(expected.value).split("(Batch")[0]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert step(good).isfinite()
