"""What a solution says of itself."""

from __future__ import annotations

import pytest

from passes.solver.assignment import Solution


@pytest.mark.parametrize(
    ("lower_bound", "is_optimal"),
    [(1.0, True), (1.5, True), (1 - 1e-9, True), (1 - 1e-7, False), (0.99, False), (0.0, False)],
)
def test_a_solution_is_optimal_where_its_bound_leaves_nothing_cheaper(lower_bound: float, is_optimal: bool) -> None:
    """But for one part in a hundred million, at any scale: a solver's tolerance."""
    for scale in (1e-6, 1.0, 1e3):
        assert Solution((0,), scale, lower_bound * scale).is_optimal == is_optimal
