"""Rows of an assignment."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, row_against
from tests.passes.solver.test_solve_milp import assignments


@given(assignments(), st.data())
def test_a_row_against_a_choice_is_broken_by_no_other(problem: Assignment, data: st.DataObject) -> None:
    """A row that excludes a choice excludes no other choice, at any limit."""
    choices = list(product(*(range(len(cost)) for cost in problem.costs)))
    refused, other = data.draw(st.sampled_from(choices)), data.draw(st.sampled_from(choices))
    limit = data.draw(st.sampled_from([1.0, 1e3 + 1, 8e10]))
    row = row_against(refused, problem.costs, limit)
    assert (row.bytes_of(other, problem.edges) <= limit) == (other != refused)
