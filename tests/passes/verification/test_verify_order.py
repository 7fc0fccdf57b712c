"""A step takes each of its micro-batches once, in order, and updates when it has all gradients; others are refused."""

from __future__ import annotations

from random import Random

import pytest

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.step_order import Action, StepOrder, Task, one_after_another
from passes.verification.verify_order import verify_order
from tests.benchmarks.mutation_campaign import prove
from tests.passes.mutants import mutate_order
from tests.passes.order_mutations import ORDER_MUTATIONS

FORWARD, BACKWARD, UPDATE = Action


def tasks(*items: tuple[Action, int | None]) -> tuple[Task, ...]:
    return tuple(Task(*item) for item in items)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_runs_is_accepted(count: int) -> None:
    """And so is a pipeline's order, in which forwards come ahead of backwards."""
    verify_order(one_after_another(count), count)
    forwards, backwards = ([Task(action, number) for number in range(count)] for action in (FORWARD, BACKWARD))
    verify_order(StepOrder((*forwards, *backwards, Task(UPDATE)), count), count)


@pytest.mark.parametrize(
    ("found", "divisor", "says"),
    [
        (((FORWARD, 1), (BACKWARD, 1), (FORWARD, 0), (BACKWARD, 0)), 2, r"runs the forward of micro-batches \[1, 0\]"),
        (((FORWARD, 0), (FORWARD, 1), (BACKWARD, 0)), 2, r"runs the backward of micro-batches \[0\]"),
        (((BACKWARD, 0), (FORWARD, 0), (FORWARD, 1), (BACKWARD, 1)), 2, "backward of micro-batch 0 before its forward"),
        (((FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1)), 1, "2 micro-batches are divided by 1"),
        (((FORWARD, 0), (BACKWARD, 0), (UPDATE, None), (FORWARD, 1), (BACKWARD, 1)), 2, r"updates at \[2, 5\] of 6"),
    ],
)
def test_messages(found: tuple[tuple[Action, int | None], ...], divisor: int, says: str) -> None:
    """They say what the step does instead."""
    with pytest.raises(VerificationError, match=says):
        verify_order(StepOrder((*tasks(*found), Task(UPDATE)), divisor), 2)


def test_orders_that_change_numbers_are_refused() -> None:
    """Every kind of mistake is refused, on a program with dropout and a whole step."""
    _, traced, run = prove("lstm", "ZeRO-1")
    found = [mutant for seed in range(24) if (mutant := mutate_order(run.phased, Random(seed))) is not None]
    assert {mutant.kind for mutant in found} == set(ORDER_MUTATIONS)
    accepted = [mutant for mutant in found if not mutant.is_refused(traced)]
    assert [mutant.what for mutant in accepted if run.is_changed_by(mutant)] == []
    assert len(accepted) == sum(mutant.order == one_after_another(2) for mutant in found)
    assert any(run.is_changed_by(mutant) for mutant in found if mutant.kind == "divide_otherwise")
