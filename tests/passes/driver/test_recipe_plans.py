"""Plans within recipes that leave something open: what is tried, and what is taken of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autoshard import DoesNotFitError, Mesh, Recipe
from autoshard.ir.request import Request
from passes.driver.planner import Planner
from passes.driver.recipe_plans import plan_recipe
from passes.solver.search_control import Ceiling


@dataclass(frozen=True)
class PlannerOf:
    """Stands for a planner, with plans that are made already.

    Args:
        plans: by number of micro-batches: the step's seconds, what is computed again, and what is offloaded.
        asked: the numbers of micro-batches that were planned, and the sequences of each.
    """

    plans: Mapping[int, tuple[float, set[str], set[str]]]
    asked: list[tuple[int, int]] = field(default_factory=list)
    recipe: Recipe | None = None
    micro_batches: int = 1
    time_budget_s: float = 1.0

    def begun(self) -> tuple[PlannerOf, Ceiling]:
        return self, Ceiling()

    def plan_call(self, request: Request, meshes: Sequence[Mesh], *, in_time: bool) -> tuple[None, Any]:
        seconds, again, away = self.plans[self.micro_batches]
        self.asked.append((self.micro_batches, len(request.args[0])))
        parts = (SimpleNamespace(step_time_s=seconds), SimpleNamespace(nodes=again), SimpleNamespace(nodes=away))
        return None, SimpleNamespace(**dict(zip(("predicted", "recompute", "offload"), parts, strict=True)))


CASES = {
    "the first keeps all": ({1: (1.0, set(), set())}, 1),
    "the first computes again": ({1: (3.0, {"a"}, set()), 2: (2.0, set(), set())}, 2),
    "the first offloads": ({1: (3.0, set(), {"a"}), 2: (2.0, set(), set())}, 2),
    "computing again is faster": ({1: (1.0, {"a"}, set()), 2: (2.0, set(), set())}, 1),
    "none keeps all": ({parts: (1.0 / parts, {"a"}, {"b"}) for parts in (1, 2, 4, 8)}, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_become_more_until_all_is_kept(case: str) -> None:
    """And no more; of those that were tried the fastest is taken."""
    plans, chosen = CASES[case]
    planner, recipe = PlannerOf(plans), Recipe(data=1)
    request = Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
    found = plan_recipe(cast(Planner, planner), request, [Mesh({"data": 1})], recipe, 8)
    assert planner.asked == [(parts, 8 // parts) for parts in plans]
    assert found.planner.micro_batches == chosen


@pytest.mark.parametrize(("recompute", "is_named"), [("none", True), ("full", False), (None, False)])
def test_what_does_not_fit_may_with_recomputation(recompute: Any, is_named: bool) -> None:
    """Where the recipe recomputes nothing, the error says how to let it."""

    class NothingFits(PlannerOf):
        def plan_call(self, request: Request, meshes: Sequence[Mesh], *, in_time: bool) -> tuple[None, Any]:
            raise DoesNotFitError("no plan was found that fits.", smallest_bytes=7)

    planner, request = NothingFits({}), Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
    recipe = Recipe(data=1, micro_batch=8, recompute=recompute)
    with pytest.raises(DoesNotFitError, match=r"no plan was found that fits\.") as raised:
        plan_recipe(cast(Planner, planner), request, [Mesh({"data": 1})], recipe, 8)
    assert ("recompute=None" in str(raised.value)) is is_named
    assert raised.value.smallest_bytes == 7
