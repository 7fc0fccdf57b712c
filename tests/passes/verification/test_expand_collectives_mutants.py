"""Mutants of buckets, messages in flight and unlike ranks are refused if they change numbers or hang.

The tests draw some dozens of mutants; `python -m tests.benchmarks.overlap_campaign` draws thousands.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.runtime.simulator import simulate
from tests.benchmarks.mutation_campaign import attack
from tests.benchmarks.overlap_campaign import OF_OVERLAP, PLANS, plain, prove_in_buckets
from tests.passes.in_flight import InFlight
from tests.passes.in_place import in_place
from tests.passes.mutants import Place, mutate
from tests.passes.overlap_mutants import overlap_kinds

FEW = (
    ("recommender", "ZeRO-1 on one axis"), ("lstm", "ZeRO-3"), ("recommender", "tensor"), ("lstm", "data"),
    ("recommender", "two axes"),
)  # fmt: skip
"""Families and plans whose programs are quick to make."""

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "plan"), FEW)
def test_mutants_that_change_numbers_are_refused(family: str, plan: str) -> None:
    """No accepted mutant of a quick program changes numbers, and at least half of the refused mutants that run do."""
    part = attack(family, plan, 10, seed=1, sampled=3, campaign=OF_OVERLAP)
    assert part.holes == []
    assert sum(part.changing.values()) >= sum(part.run.values()) / 2 > 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", OF_OVERLAP.families)
def test_mutants_of_every_program_are_refused(family: str, plan: str) -> None:
    """No accepted mutant changes numbers, among forty mutants of each family and plan."""
    assert attack(family, plan, 40, seed=2, campaign=OF_OVERLAP).holes == []


def test_every_kind_of_mutation_can_be_made() -> None:
    """Every kind of mutation finds a place in one of the quick programs."""
    programs = [(plain(*names), prove_in_buckets(*names)[0]) for names in FEW]
    missing = [
        kind
        for kind in overlap_kinds(programs[0][0])
        if not any(
            mutate(phased, *kind, Random(seed), overlap_kinds(without))
            for without, phased in programs
            for seed in range(8)
        )
    ]
    assert missing == []


@pytest.mark.parametrize(("family", "plan"), [FEW[0], FEW[1]])
def test_a_right_program_computes_what_it_does_without_overlap(family: str, plan: str) -> None:
    """With late messages, a program with overlap, also with its update in place, has the numbers of no overlap."""
    phased, traced, run = prove_in_buckets(family, plan)
    without = run.numbers(Place.PHASES, plain(family, plan), traced)
    for place, made in ((Place.PHASES, phased), (Place.IN_PLACE, in_place(phased))):
        found = run.numbers(place, made, traced)
        for one, other in zip(found, without, strict=False):
            torch.testing.assert_close(one, other, equal_nan=True)


def _gathered(*, is_waited: bool, is_written: bool) -> fx.Graph:
    """Return a graph with an all-gather, whose input may be written early and whose result may be read early."""
    graph: Any = fx.Graph()
    sent = graph.placeholder("sent")
    started = graph.call_function(c10d.all_gather_into_tensor.default, (sent, 2, "x"))
    if is_written:
        graph.call_function(aten.mul_.Scalar, (sent, 2))
    waited = graph.call_function(c10d.wait_tensor.default, (started,))
    graph.output((graph.call_function(aten.add.Tensor, (waited if is_waited else started, 1)), waited))
    return graph


@pytest.mark.parametrize(("is_waited", "is_written"), [(True, False), (False, False), (True, True)])
def test_what_is_in_flight_is_guarded(is_waited: bool, is_written: bool) -> None:
    """Under `InFlight`, a read before a gather's wait is NaN, and so is the wait if the gather's input was written."""
    given = [torch.ones(2), torch.zeros(2)]
    graph = _gathered(is_waited=is_waited, is_written=is_written)
    read, waited = simulate(graph, Mesh({"x": 2}), [given], on_values=InFlight())
    assert [value.isnan().all() for value in read] == [not is_waited or is_written] * 2
    assert [value.isnan().all() for value in waited] == [is_written] * 2
