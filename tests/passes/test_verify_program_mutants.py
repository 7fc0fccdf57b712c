"""Wrong programs of every family under every kind of plan: what computes another number is refused.

Here are some hundred mutants; thousands are `python -m tests.benchmarks.mutation_campaign`.
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from tests.benchmarks.mutation_campaign import attack, prove
from tests.passes.families import FAMILIES
from tests.passes.layouts import LAYOUTS
from tests.passes.mutants import KINDS, Place, draw_mutant, mutate

FEW = (("gpt", "tensor"), ("recommender", "ZeRO-3"), ("lstm", "ZeRO-1"), ("graph", "two axes"))
"""Programs that are quick to make."""


@pytest.mark.parametrize(("family", "layout"), FEW)
def test_mutants_that_change_numbers_are_refused(family: str, layout: str) -> None:
    """Twenty mutants of each; of those that were refused, some change numbers."""
    part = attack(family, layout, 20, seed=1)
    assert part.holes == []
    assert sum(part.drawn.values()) == 20
    assert sum(part.accepted.values()) < 10
    assert sum(part.changing.values()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), list(product(FAMILIES, LAYOUTS)))
def test_mutants_of_every_program_are_refused(family: str, layout: str) -> None:
    """Sixty of each family under each kind of plan."""
    assert attack(family, layout, 60, seed=2).holes == []


def test_a_right_program_has_numbers_to_be_held_beside() -> None:
    """All results are finite, and ranks that should hold copies do, with NaN in all padding."""
    phased, _, run = prove("lstm", "ZeRO-1")
    for place in Place:
        numbers = run.numbers(place, phased, phased.lowered.traced)
        assert all(value.isfinite().all() for value in numbers)
        assert len(numbers) >= len(phased.lowered.outputs)


def test_every_kind_of_mutation_can_be_made() -> None:
    """On one of two programs at least; and equal seeds give equal mutants."""
    programs = [prove(family, layout)[0] for family, layout in FEW[:2]]

    def is_made(place: Place, kind: str) -> bool:
        return any(mutate(phased, place, kind, Random(seed)) for phased in programs for seed in range(8))

    assert [kind for kind in KINDS if not is_made(*kind)] == []
    assert draw_mutant(programs[1], Random(7)).what == draw_mutant(programs[1], Random(7)).what
