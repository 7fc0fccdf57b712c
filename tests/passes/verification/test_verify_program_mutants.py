"""Mutants of every family under every kind of plan are refused if they change numbers.

The tests draw some hundred mutants; `python -m tests.benchmarks.mutation_campaign` draws thousands.
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from torch import Tensor

from tests.benchmarks.mutation_campaign import attack, prove
from tests.passes.families import FAMILIES
from tests.passes.layouts import LAYOUTS
from tests.passes.mutants import KINDS, Place, draw_mutant, mutate
from tests.passes.rewrite_mutations import OFFLOAD_MUTATIONS, REWRITE_MUTATIONS

FEW = (
    ("gpt", "tensor"), ("recommender", "ZeRO-3"), ("lstm", "ZeRO-1"), ("graph", "two axes"), ("lstm", "recomputed"),
    ("llama", "kernels"),
)  # fmt: skip
"""Families and layouts whose programs are quick to make."""


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "layout"), FEW)
def test_mutants_that_change_numbers_are_refused(family: str, layout: str) -> None:
    """No accepted mutant among twenty of a program changes numbers, and some refused mutants do."""
    part = attack(family, layout, 20, seed=1, sampled=4)
    assert part.holes == []
    assert sum(part.drawn.values()) == 20
    assert sum(part.accepted.values()) < 10
    assert sum(part.changing.values()) >= 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [item.__name__ for item in REWRITE_MUTATIONS if item not in OFFLOAD_MUTATIONS])
def test_mistakes_in_what_rewrites_put_in_are_refused(kind: str) -> None:
    """Mistakes in clones, casts and kernels that change numbers are refused in a bfloat16 program."""
    phased, traced, run = prove("llama", "all together")
    drawn = [
        mutant
        for place in (Place.PREPARATION, Place.PROGRAM, Place.PHASES)
        for seed in range(2)
        if (place, kind) in KINDS and (mutant := mutate(phased, place, kind, Random(seed)))
    ]
    accepted = [mutant for mutant in drawn if not mutant.is_refused(traced)]
    assert len(drawn) > len(accepted)
    assert [mutant.what for mutant in accepted if run.is_changed_by(mutant)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), list(product(FAMILIES, LAYOUTS)))
def test_mutants_of_every_program_are_refused(family: str, layout: str) -> None:
    """No accepted mutant changes numbers, among sixty mutants of each family and layout."""
    assert attack(family, layout, 60, seed=2).holes == []


def test_a_right_program_has_numbers_to_be_held_beside() -> None:
    """At every place of a mutant, the right program has finite numbers for all results, although padding is NaN."""
    phased, _, run = prove("lstm", "ZeRO-1")
    for place in set(Place) - {Place.ONE_RANK}:
        numbers = run.numbers(place, phased, phased.lowered.traced)
        assert all(isinstance(value, Tensor) and value.isfinite().all() for value in numbers)
        assert len(numbers) >= len(phased.lowered.outputs)


@pytest.mark.slow
def test_every_kind_of_mutation_can_be_made() -> None:
    """Every kind of mutation finds a place in some program, and equal seeds give equal mutants."""
    others = ("llama", "all together"), ("recommender", "offloaded")
    programs = [prove(family, layout)[0] for family, layout in (*FEW[:2], *others)]

    def is_made(place: Place, kind: str) -> bool:
        return any(mutate(phased, place, kind, Random(seed)) for phased in programs for seed in range(8))

    assert [kind for kind in KINDS if not is_made(*kind)] == []
    assert draw_mutant(programs[1], Random(7)).what == draw_mutant(programs[1], Random(7)).what
