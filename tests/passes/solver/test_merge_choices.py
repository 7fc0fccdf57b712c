"""The best seen choice is no dearer than a merged choice of seen options, and fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.solver.assignment import Assignment
from passes.solver.dual_search import DualSearch
from passes.solver.dual_state import DualState
from passes.solver.merge_choices import merge
from passes.solver.search_control import SearchControl, SearchProgress
from tests.passes.solver.closing import check_closer, knapsacks
from tests.passes.solver.exhaustive import solve_exhaustive
from tests.passes.solver.test_dual_search import usage_of
from tests.passes.solver.test_solve_milp import assignments

_WITHOUT = DualSearch(tolerance=0.0, max_rounds=6)
_MERGING = dataclasses.replace(_WITHOUT, merges_above=0.0)


@given(st.one_of(assignments(), knapsacks(most=8)))
def test_merging_keeps_to_what_is_so(problem: Assignment) -> None:
    """Merging keeps the bound, and finds only fitting choices that are no dearer."""
    check_closer(problem, _WITHOUT, _MERGING)


@given(knapsacks(most=8), st.data())
def test_nothing_made_of_choices_seen_is_cheaper(problem: Assignment, data: st.DataObject) -> None:
    """The merged choice fits and is the cheapest, though no seen choice needs to fit; no progress is shown."""
    shown: list[SearchProgress] = []
    state = DualState(problem, usage_of(problem), problem.rows.__getitem__, SearchControl(shown.append))
    choices = st.tuples(*(st.integers(0, len(cost) - 1) for cost in problem.costs))
    seen = data.draw(st.lists(choices, min_size=1, max_size=4))
    for choice in seen:
        state.offer(choice)
    merge(state, 0.0)
    best = solve_exhaustive(_only(problem, seen))
    if best is not None:
        assert state.best is not None
        assert problem.fits(state.best)
        assert state.best_cost <= best.cost * (1 + 1e-9)
    assert not shown


def _only(problem: Assignment, seen: Sequence[Sequence[int]]) -> Assignment:
    """The problem with the options that some choices have."""
    options = ([choice[variable] for choice in seen] for variable in range(len(problem.costs)))
    costs = (
        np.where(np.isin(np.arange(len(cost)), those), cost, np.inf)
        for cost, those in zip(problem.costs, options, strict=True)
    )
    return dataclasses.replace(problem, costs=tuple(costs))
