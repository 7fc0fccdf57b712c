"""Search the cheapest choice of strategies that fits in memory.

The search by Lagrangian duality (`passes.solver.dual_search`) also proves a lower bound of the optimal cost.

A stopped search (`SearchControl`) returns the cheapest choice so far, with the bound that is proven by then. If no
choice fits yet, it looks for a choice that needs little memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.text import format_bytes, memory_limit_in_words
from passes.memory.liveness import Liveness
from passes.solver.assignment import Assignment, MemoryRow, Solution
from passes.solver.dual_search import DualSearch
from passes.solver.messages import Messages
from passes.solver.search_control import SearchControl
from passes.solver.smallest_peak import choice_of_smallest_peak
from passes.strategies.enumerate_strategies import SearchSpace, Site


class Searchable(Protocol):
    """A problem that `Search` can search: `PlanningProblem` or `RecomputeProblem`."""

    @property
    def space(self) -> SearchSpace:
        """The program's sites, each with its options, and the links between sites."""
        ...

    @property
    def liveness(self) -> Liveness:
        """The lifetimes of the program's values in memory."""
        ...

    @property
    def assignment(self) -> Assignment:
        """The costs of options and of pairs of options in seconds, without memory rows."""
        ...

    def usage(self, choice: Sequence[int], /) -> np.ndarray:
        """Return the bytes in use on each rank under a choice, [program points]."""
        ...

    def memory_row(self, point: int) -> MemoryRow:
        """Return the bytes in use on each rank at one program point, as a function of the choice."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """The search for the cheapest choice under a memory limit.

    Args:
        memory_limit_bytes: limit of each rank's peak memory, in bytes; None: no limit.
        tolerance: relative gap between cost and proven bound at which the search ends.
        max_rounds: greatest number of rounds of message passing (`DualSearch`).
        is_thorough: continue the search after a choice fits (`DualSearch.raises_multipliers`).
        says_smallest: name a sufficient memory limit in the error, even if it is proven that no choice fits.
        is_given: whether the user gave the limit, as `memory_budget`. Otherwise it is the memory of the device.
        control: receives the progress, and may stop the search.
    """

    memory_limit_bytes: float | None = None
    tolerance: float = 1e-3
    max_rounds: int = 100
    is_thorough: bool = True
    says_smallest: bool = True
    is_given: bool = True
    control: SearchControl = dataclasses.field(default_factory=SearchControl)

    def __call__(
        self,
        planning: Searchable,
        allowed: Mapping[int, np.ndarray] | None = None,
        start: Sequence[Solution] = (),
    ) -> Solution:
        """Return the cheapest choice found that fits in memory, with its cost and a lower bound of all costs.

        Args:
            allowed: variable → a boolean mask of its allowed options. All options of other variables are allowed.
            start: solutions that fit and are allowed. The result is no worse.

        Raises:
            DoesNotFitError: no choice that fits was found. The message names a sufficient memory limit if one is known.
        """
        limit = np.inf if self.memory_limit_bytes is None else float(self.memory_limit_bytes)
        problem = dataclasses.replace(restrict(planning.assignment, allowed or {}), limit=limit)
        choices = [solution.choice for solution in start]

        @cache
        def find_small_peak() -> Sequence[int]:
            # A few rounds, even if the search is stopped, because the search has to return a choice.
            hopeless = np.inf if self.says_smallest else problem.limit
            return choice_of_smallest_peak(problem, planning.usage, planning.memory_row, problem.limit, hopeless)

        by_duals = DualSearch(
            self.tolerance, self.max_rounds, raises_multipliers=self.is_thorough, control=self.control
        )
        solution = by_duals(problem, planning.usage, planning.memory_row, choices, find_small_peak)
        if solution is None:
            least = find_small_peak()
            raise self.does_not_fit(planning, float(planning.usage(least).max()) if least else None)
        return solution

    def does_not_fit(self, planning: Searchable, least: float | None = None) -> DoesNotFitError:
        """Return the error to raise if the search found no choice within its memory limit.

        `least` is a sufficient limit of each rank's memory, in bytes; None if no sufficient limit is known.
        """
        if least is None:
            would_do = "A sufficient budget is not known."
        else:
            would_do = f"{least:.0f} bytes ({format_bytes(least)}) are enough; fewer may be."
        return DoesNotFitError(
            f"No plan was found that fits for {planning.space.mesh} in "
            f"{memory_limit_in_words(self.memory_limit_bytes, is_given=self.is_given)}. "
            f"{would_do} {_largest(planning)} Use more devices, a smaller batch, or fewer constraints.",
            smallest_bytes=0 if least is None else int(np.ceil(least)),
        )


_PASSES = 16
"""Rounds of message passing in `first_bound`."""


def first_bound(planning: Searchable, allowed: Mapping[int, np.ndarray]) -> float:
    """Return a lower bound, in seconds, of the cost of every choice of allowed options, proven by message passing.

    The memory limit does not count.
    """
    return Messages(restrict(planning.assignment, allowed)).iterate(_PASSES)[0]


def restrict(problem: Assignment, allowed: Mapping[int, np.ndarray]) -> Assignment:
    """Return the problem with infinite costs for the options that `allowed` excludes.

    `allowed` has boolean masks by variable. Absent variables keep their costs.
    """
    costs = list(problem.costs)
    for variable, mask in allowed.items():
        costs[variable] = np.where(mask, costs[variable], np.inf)
    return dataclasses.replace(problem, costs=tuple(costs))


def _largest(planning: Searchable) -> str:
    sites = planning.space.sites
    sizes = {key: math.prod(sites[key[0]].results[key[1]].shape) for key in planning.liveness.values}
    sizes = {key: count * sites[key[0]].results[key[1]].itemsize for key, count in sizes.items()}
    largest = sorted(sizes, key=lambda key: -sizes[key])[:3]
    slots = {slot.node: slot.name for slot in planning.space.program.inputs}
    names = ", ".join(f"{_title(sites[key[0]], slots)} ({format_bytes(sizes[key])})" for key in largest)
    return f"The largest tensors, before they are split: {names}."


def _title(site: Site, slots: Mapping[str, str]) -> str:
    """Return the words for a site's value in messages.

    They are the name of a parameter or input. For a call's result, they are the operator and the source line.
    """
    if site.node is None or site.name in slots:
        return slots.get(site.name, site.name)
    source = site.node.meta.get("source")
    return f"a result of {site.node.target}" + (f" at {source}" if source else "")
