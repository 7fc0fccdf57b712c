"""Gradients reduced over one axis and then over another are bucketed and overlapped on both axes."""

from __future__ import annotations

from functools import cache

import pytest
from torch import fx

from autoshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.start_ahead import StartAhead
from passes.lowering.wait_in_turn import WaitInTurn
from passes.lowering.wait_late import WaitLate
from passes.verification.verify_phases import verify_phases
from tests.passes.blocks import blocks_program, h100s
from tests.passes.lowering.overlapped import calls, differ, fully_sharded, plain

SMALL = BucketCollectives(end_bytes=64, least_bytes=128, most_bytes=128)


@cache
def twice_reduced() -> PhasedProgram:
    """Return a program of blocks with the batch split over two axes, so each gradient is reduced twice."""
    mesh, constraints = Mesh({"x": 2, "y": 2}), {"*.weight": P(), "*.bias": P(), "input:0": P(("x", "y"))}
    program = blocks_program(batch=2**14, length=1, hidden=1024, count=6)
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(constraints=constraints, with_baselines=False))
    return lower_program(program, plan, h100s(mesh), LoweringOptions(with_overlap=False))


def apart(phased: PhasedProgram) -> PhasedProgram:
    return StartAhead(by=None)(WaitLate()(phased))


def made_of(phased: PhasedProgram, most_held: int | None = None) -> PhasedProgram:
    return WaitInTurn(most_held)(BucketCollectives()(apart(phased)))


def by_group(graph_module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Map each communicator to its collectives, in order."""
    nodes = [node for node in graph_module.graph.nodes if is_collective(node)]
    return {name: [node for node in nodes if node.args[-1] == name] for name in {str(node.args[-1]) for node in nodes}}


def test_all_reductions_of_a_gradient_come_into_buckets() -> None:
    """If gradients are reduced over two axes, each axis sends less than two thirds as many collectives in buckets."""
    phased = twice_reduced()
    before, after = by_group(phased.backward), by_group(made_of(phased).backward)
    assert set(before) == set(after) == {"x/gradients", "y/gradients"}
    assert all(len(after[group]) < 2 * len(starts) / 3 for group, starts in before.items())


def test_what_follows_runs_beside_computation() -> None:
    """In each kind of collective, all but the last three start before the last matrix product of the backward."""
    nodes = list(made_of(twice_reduced()).backward.graph.nodes)
    last = max(place for place, node in enumerate(nodes) if "mm" in str(node.target))
    for target in (REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER):
        places = [place for place, node in enumerate(nodes) if node.target is target]
        assert sum(place < last for place in places) >= len(places) - 3, target
        assert len(places) > 6


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "layout"), [("gpt", "data"), ("mixture", "two axes"), ("llama", "ZeRO-1")])
@pytest.mark.parametrize("bucket", [SMALL, BucketCollectives()])
@pytest.mark.parametrize("most_held", [None, 1])
def test_bits_stay(family: str, layout: str, bucket: BucketCollectives, most_held: int | None) -> None:
    """With buckets of any size and any limit of reductions in flight, all bits of two micro-batches stay."""
    made = WaitInTurn(most_held)(StartAhead()(bucket(apart(plain(family, layout)))))
    verify_phases(made)
    assert differ(family, layout, made) == []


def test_an_update_sends_over_each_axis_once_or_twice() -> None:
    """Under ZeRO-1, buckets reduce the reduce-scatters and the all-gathers of the update to at most a third each."""
    phased = plain("llama", "ZeRO-1")
    made = made_of(phased)
    assert phased.update is not None
    assert made.update is not None
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        before, after = ([call for call in calls(item) if name in call] for item in (phased.update, made.update))
        assert len(after) <= len(before) / 3


@pytest.mark.parametrize("most_held", [1, 2])
def test_no_more_reductions_hold_what_they_scatter(most_held: int) -> None:
    """`most_held` reduce-scatters are in flight at most, since the oldest is waited for before another starts."""
    made = WaitInTurn(most_held)(WaitLate()(fully_sharded()))
    under_way, most = 0, 0
    for node in made.backward.graph.nodes:
        under_way += node.target is REDUCE_SCATTER
        under_way -= is_wait(node) and node.all_input_nodes[0].target is REDUCE_SCATTER
        most = max(most, under_way)
    assert most == most_held
