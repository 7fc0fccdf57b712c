"""An oracle for searches with recomputation and offload: plans, the cheapest first, each counted as it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np

from passes.planning.build_assignment import PlanningProblem
from passes.planning.exact_memory import exact_peak
from passes.planning.search import restrict
from passes.recomputation.recompute_options import AGAIN, RECOMPUTED, Keeping
from passes.recomputation.recompute_problem import Again, RecomputeProblem
from passes.recomputation.with_again import with_again
from passes.solver.assignment import Assignment, Floats
from passes.strategies.enumerate_strategies import Link, needs_of, specs_of
from tests.passes.recomputation.cheap_choices import cheapest_first

PlanOf = tuple[tuple[int, ...], Again]
"""Strategies, and what is recomputed and offloaded."""


@dataclass
class EveryPlan:
    """The plans of a problem.

    Args:
        problem: what is chosen from.
        allowed: variable to a mask of its options without keepings; absent variables are free.
        running: the programs of plans that were counted.
    """

    problem: RecomputeProblem
    allowed: Mapping[int, np.ndarray] = field(default_factory=dict)
    running: dict[Again, PlanningProblem] = field(default_factory=dict)

    def first(self, most: int, cost: float = np.inf) -> tuple[list[PlanOf], bool]:
        """The plans of the cheapest choices, so many at most, that cost less than some bound; whether these are all."""
        problem = self.choices()
        cheap = takewhile(lambda choice: problem.cost_of(choice) < cost, cheapest_first(problem))
        choices = list(islice(cheap, most + 1))
        return list(dict.fromkeys(map(self.plan_of, choices[:most]))), len(choices) <= most

    def choices(self) -> Assignment:
        """The problem, as far as it is allowed, without most of what repeats a plan."""
        return restrict(without_repeats(self.problem), self.problem.widen(self.allowed))

    def plan_of(self, choice: tuple[int, ...]) -> PlanOf:
        """What a choice stands for."""
        return self.problem.without_keepings(choice), self.problem.again(choice)

    def counted(self, strategies: tuple[int, ...], again: Again) -> tuple[float, float]:
        """Seconds and bytes of a plan, in the program that runs then."""
        if again not in self.running:
            self.running[again] = with_again(self.problem.planning, again)
        running = self.running[again]
        return running.assignment.cost_of(strategies), exact_peak(running, strategies)


def without_repeats(problem: RecomputeProblem) -> Assignment:
    """The problem without most of the choices that stand for the same plan as another one, which costs no more.

    What is KEPT is held whether that is used or not, and is part of no plan; so AS_READ goes where there is KEPT. So
    does a view that is to be recomputed of what is held and as it lies: it is held with that.
    """
    costs = list(problem.assignment.costs)
    for variable in range(len(costs)):
        keepings = problem.keepings(variable)
        if Keeping.KEPT in keepings:
            flags = np.array([keeping is Keeping.AS_READ for keeping in keepings])
            costs[variable] = np.where(_spread(problem, variable, flags), np.inf, costs[variable])
    edges = list(problem.assignment.edges)
    for link in problem.space.links:
        if _is_of_view(problem, link):
            ends = problem.planning.classes[link.tail], problem.planning.classes[link.head]
            number = problem.planning.edge_between[ends]
            table = np.where(_views_of_held(problem, link), np.inf, edges[number].cost)
            edges[number] = dataclasses.replace(edges[number], cost=table)
    return dataclasses.replace(problem.assignment, costs=tuple(costs), edges=tuple(edges))


def _spread(problem: RecomputeProblem, variable: int, flags: np.ndarray) -> np.ndarray:
    """Flags of keepings as flags of options."""
    return np.repeat(flags, len(problem.planning.assignment.costs[variable]))


def _is_of_view(problem: RecomputeProblem, link: Link) -> bool:
    """Whether a link is of a view that may be recomputed, and alone between its variables' sites."""
    ends = (problem.planning.classes[name] for name in (link.tail, link.head))
    is_alone = all(len(problem.planning.members[variable]) == 1 for variable in ends)
    is_view = link.operand == 0 and problem.space.sites[link.head].is_alias
    return is_view and is_alone and link.head in problem.options.anchors


def _views_of_held(problem: RecomputeProblem, link: Link) -> np.ndarray:
    """Under which pairs of options a view is to be recomputed of what is held, and not resharded on the way."""
    tail, head = problem.planning.classes[link.tail], problem.planning.classes[link.head]
    held = np.array([keeping not in AGAIN for keeping in problem.keepings(tail)])
    again = np.array([keeping in RECOMPUTED for keeping in problem.keepings(head)])
    before = specs_of(problem.space.sites[link.tail], link.result)
    after = needs_of(problem.space.sites[link.head], link)
    same: Floats = np.array([[one == other for other in after] for one in before])
    return np.kron(np.outer(held, again), same).astype(bool)
