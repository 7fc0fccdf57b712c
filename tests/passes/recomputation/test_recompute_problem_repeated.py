"""A program without inner blocks recomputes and offloads as the whole program does, at equal cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from passes.driver.expand_plan import expand_plan, match_nodes
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, find_options
from passes.recomputation.recompute_problem import RecomputeProblem, Restored, build_recompute_problem
from passes.recomputation.with_restored import host_bytes, with_restored
from tests.passes.blocks import peak_of, problem_of
from tests.passes.deep import adamw, alike, in_turn, short_step, step
from tests.passes.recomputation.test_recompute_problem import drawn_choice

ONE, TWO = Mesh({"a": 4}), Mesh({"a": 2, "b": 2})


def _joint(planning: PlanningProblem) -> RecomputeProblem:
    return build_recompute_problem(planning, find_options(planning, least_share=0.0, offload=True))


def _choice_of_whole(whole: RecomputeProblem, short: RecomputeProblem, choice: Sequence[int]) -> tuple[int, ...]:
    """Return the choice of the whole program for a choice of the short program."""
    matches = match_nodes(short.space.program, whole.space.program)
    found = []
    for variable, members in enumerate(whole.planning.members):
        (match,) = {short.planning.classes[matches.get(name, name)] for name in members}
        assert whole.options.of(variable) == short.options.of(match)
        found.append(choice[match])
    return tuple(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "depth", "mesh", "micro_batches"),
    [(alike, 7, TWO, 3), (in_turn, 7, ONE, None)],
)
def test_the_short_program_recomputes_and_offloads_what_the_whole_one_does(
    make: Callable[[int], nn.Module], depth: int, mesh: Mesh, micro_batches: int | None
) -> None:
    """A choice has equal costs, restored values and memory in the short and the whole program.

    The short program's plan expands to the whole program's plan.
    """
    model = make(depth)
    update = None if micro_batches is None else adamw(model)
    programs = step(model, update), short_step(model, update, margin=2)
    whole, short = (_joint(problem_of(program, mesh, micro_batches=micro_batches or 1)) for program in programs)
    assert len(short.space.sites) < len(whole.space.sites)
    for policies in (RECOMPUTED, OFFLOADED):
        counts = (each.options.candidates(policies, each.planning.counts()) for each in (short, whole))
        assert len(set(counts)) == 1
    for seed in range(2):
        choice = drawn_choice(short, seed)
        same = _choice_of_whole(whole, short, choice)
        assert short.assignment.cost_of(choice) == pytest.approx(whole.assignment.cost_of(same), rel=1e-9)
        used = short.usage(choice)
        assert used.max() == whole.usage(same).max()
        assert used.max() == short.memory_row(int(used.argmax())).bytes_of(choice, short.assignment.edges)
        restored, strategies = short.restored(choice), short.without_policies(choice)
        running, other = with_restored(short.planning, restored), with_restored(whole.planning, whole.restored(same))
        of_other = whole.without_policies(same)
        assert peak_of(running, strategies) == pytest.approx(peak_of(other, of_other), rel=0.01)
        assert host_bytes(running, strategies) == host_bytes(other, of_other)
    plan = _plan(running, strategies, restored)
    expanded = expand_plan(plan, short.space.program, whole.space.program)
    of_whole = _plan(other, of_other, whole.restored(same))
    assert expanded.program_digest == of_whole.program_digest
    assert (expanded.recompute.nodes, expanded.offload.nodes) == (of_whole.recompute.nodes, of_whole.offload.nodes)
    assert expanded.nodes == of_whole.nodes


def _plan(running: PlanningProblem, choice: Sequence[int], restored: Restored) -> Plan:
    plan = lowered_plan(running, choice, 0.0, None, running.prices.cluster, PlanOptions()).plan
    recompute = dataclasses.replace(plan.recompute, nodes=restored.recomputed)
    return dataclasses.replace(
        plan, recompute=recompute, offload=dataclasses.replace(plan.offload, nodes=restored.offloaded)
    )
