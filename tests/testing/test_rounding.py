"""Differences are excused as rounding only up to the size that rounding explains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoshard import Mesh, NotAvailableError, P
from autoshard.testing import check, check_calls, check_plan, report
from autoshard.testing.rounding import nudge
from autoshard.tracing import trace
from tests.passes.greedy_plans import most_split_plan


@given(dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]), number=st.integers(0, 9))
def test_every_element_moves_by_one_rounding(dtype: torch.dtype, number: int) -> None:
    """`nudge` moves each element by at most one rounding, leaves integers, and gives the same values for the same
    number."""
    values = {"x": torch.linspace(1.1, 1.9, 7, dtype=torch.float64).to(dtype), "tokens": torch.arange(3)}
    moved = nudge(values, number)
    away = (moved["x"].double() - values["x"].double()).abs()
    assert bool((away <= torch.finfo(dtype).eps).all())
    assert torch.equal(moved["tokens"], values["tokens"])
    assert torch.equal(moved["x"], nudge(values, number)["x"])


def test_the_spacing_of_a_narrower_type_moves_further() -> None:
    """With bfloat16's eps, elements of float32 move by half of bfloat16's spacing."""
    moved = nudge(torch.ones(5), 0, eps=torch.finfo(torch.bfloat16).eps)
    assert moved.sub(1).abs().tolist() == [2.0**-8] * 5


class Product(nn.Module):
    """A matrix product."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.ops.aten.mm.default(x, y),)


def test_partial_sums_that_cancel_differ_by_rounding_alone() -> None:
    """Partial sums in bfloat16 that nearly cancel differ beyond the tolerance, and are excused as rounding."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 64).bfloat16(), torch.randn(64, 8).bfloat16()
    x, y = torch.cat([x, -x * 0.9], 1), torch.cat([y, y])
    calls = (((P(None, "data"), P("data")), (P(partial={"data": "sum"}),)),)
    report = check_calls(Product(), Mesh({"data": 4}), (x, y), (P(), P()), calls)
    assert report.is_equal
    assert not all(item.difference <= report.tolerance * item.scale for item in report.comparisons)


class Cancelling(nn.Module):
    """A sum that nearly vanishes beside its addends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize("fault", [0.0, 1e-6])
def test_the_same_specs_in_a_more_precise_type_decide(monkeypatch: pytest.MonkeyPatch, fault: float) -> None:
    """A difference in float32 beyond the samples' spread is excused if float64 agrees, and is a fault otherwise."""
    torch.manual_seed(0)
    half = torch.randn(32, dtype=torch.float32) * 1e3
    inputs = (torch.cat([half, -half * torch.linspace(0.5, 0.99, 32) / torch.linspace(1.01, 1.5, 32)]),)
    monkeypatch.setattr(report, "ROUNDING_FACTOR", 0.0)  # as if the samples had been small by chance
    monkeypatch.setattr(report, "ABSOLUTE_FLOOR", 0.0)
    trained = check.train_compiled

    def with_fault(*args: Any) -> dict[str, torch.Tensor]:
        return {name: value * (1 + fault) for name, value in trained(*args).items()}

    monkeypatch.setattr(check, "train_compiled", with_fault)
    mesh, model = Mesh({"data": 4}), Cancelling()
    plan = most_split_plan(trace(model, inputs), mesh)
    found = check_plan(model, mesh, inputs, plan=plan, tolerance=1e-12, precise=torch.float64)
    assert found.precisely
    assert found.is_equal == (fault == 0)


class Single(nn.Linear):
    """A layer that does not run in float64, like grouped products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("Expected x to be Float32, got Double.")
        return super().forward(x).square().mean()


def test_a_type_in_which_a_model_does_not_run_is_refused_by_name() -> None:
    """`precise=` in a type in which the model does not run is refused with PyTorch's message."""
    with pytest.raises(NotAvailableError, match=r"precise=torch.float64, but .* Single in it: .* Leave precise= out."):
        check_plan(Single(8, 4), Mesh({"data": 2}), (torch.randn(4, 8),), precise=torch.float64)
