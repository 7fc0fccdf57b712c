"""The exact count of memory of the problem with recomputation and offload: each choice in the program that runs then.

What is in memory there depends on strategies, and on keepings by way of who reads what: the facts of `Keepings`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import fx

from passes.memory.memory_tables import MemoryTables
from passes.planning.build_assignment import PlanningProblem
from passes.planning.exact_rows import ExactRows
from passes.planning.search_exactly import CountedPlan
from passes.planning.wiring import Facts, both
from passes.recomputation.recompute import moved_by, original_of
from passes.recomputation.recompute_options import AGAIN, OFFLOADED, RECOMPUTED, Keeping
from passes.recomputation.recompute_problem import Again, RecomputeProblem
from passes.recomputation.with_again import space_with
from passes.solver.assignment import Assignment
from passes.strategies.enumerate_strategies import Link, leaves_program, needs_of, resolve, specs_of


@dataclass(frozen=True, slots=True)
class ExactRecompute:
    """See the module's docstring. Programs are made once for each set of what is recomputed and offloaded."""

    problem: RecomputeProblem
    running: dict[Again, PlanningProblem] = field(default_factory=dict, repr=False)

    @property
    def tables(self) -> RecomputeProblem:
        """See `ExactlyCounted`."""
        return self.problem

    @property
    def assignment(self) -> Assignment:
        """The problem, without memory rows."""
        return self.problem.assignment

    def counted(self, choice: Sequence[int]) -> CountedPlan:
        """The count under a choice."""
        again = self.problem.again(choice)
        if again not in self.running:
            self.running[again] = self._with(again)
        running = self.running[again]
        keepings = Keepings(self.problem, running, tuple(choice), again)
        return CountedPlan(running, ExactRows(running, self.problem.without_keepings(choice), keepings))

    def _with(self, again: Again) -> PlanningProblem:
        """The program that recomputes and offloads so; what costs it has is not asked."""
        planning = self.problem.planning
        space, originals = space_with(planning.space, again)
        return dataclasses.replace(
            planning,
            space=space,
            liveness=planning.liveness.of(space),
            classes={name: planning.classes[original] for name, original in originals.items()},
            memory=MemoryTables(space, planning.memory.transients),
            derived={},
            _usage=[],
        )


@dataclass
class Keepings:
    """Which keepings, and strategies as far as these decide, give the program that runs under a choice.

    Args:
        problem: its options are strategies with keepings.
        running: the problem of that program.
        choice: of options.
        again: what it recomputes and offloads.
    """

    problem: RecomputeProblem
    running: PlanningProblem
    choice: tuple[int, ...]
    again: Again
    known: dict[tuple[str, int | None], Facts] = field(default_factory=dict)

    def options(self, variable: int) -> int:
        """See `Wiring`."""
        return len(self.problem.keepings(variable))

    def exists(self, name: str) -> Facts:
        """See `Wiring`."""
        return self._exists(name)

    def _exists(self, name: str, after: int | None = None) -> Facts:
        """That a site is there; if it recomputes, at its place, or at any behind the place `after`."""
        original = self.family(name)
        return {} if original == name else self._is_again(original, after)

    def family(self, name: str) -> str:
        """See `Wiring`."""
        node = self.running.space.sites[name].node
        if node is None:
            return name
        moved = moved_by(node)
        if moved is not None:
            return resolve(self._nodes[moved])[0].name
        return original_of(node) or name

    def reads(self, link: int) -> Facts:
        """See `Wiring`."""
        return self._reads(link)

    def will_read(self, link: int, point: int) -> Facts:
        """See `Wiring`."""
        return self._reads(link, self._place(point))

    def _reads(self, link: int, after: int | None = None) -> Facts:
        found = self.running.space.links[link]
        exists = self._exists(found.head, after)
        if self.family(found.tail) != found.tail:
            return both(exists, self.exists(found.tail))
        return both(exists, self._is_not_made_again(found.tail)) if self._is_behind(found) else exists

    def needs(self, link: int, point: int) -> Facts:
        """See `Wiring`: whether it was held or is there again by then."""
        found = self.running.space.links[link]
        original, place = self.family(found.tail), self._place(point)
        is_late = self._is_behind(found) and self.family(found.head) == found.head
        if not is_late or place is None or place <= self._end_of_forward or self._is_exempt(original):
            return self.will_read(link, point)
        variable = self.problem.planning.classes[original]
        anchors = self.problem.options.anchors.get(original, {})
        there = (k not in AGAIN or self._order[anchors[k]] <= place for k in self.problem.keepings(variable))
        return self._kept(original, list(there))

    def _is_behind(self, link: Link) -> bool:
        """Whether what reads a link does so behind the forward, or again."""
        head = self.running.space.sites[link.head]
        return head.phase != "forward" and not leaves_program(head, link)

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return self.problem.space.program.nodes_by_name()

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.problem.space.sites)}

    @cached_property
    def _end_of_forward(self) -> int:
        sites = self.problem.space.sites
        return max(self._order[name] for name, site in sites.items() if site.phase == "forward" and not site.is_input)

    @cached_property
    def _places(self) -> dict[int, str]:
        """The site that is at work at each point."""
        liveness, links = self.running.liveness, self.running.space.links
        found = {point: name for name, point in liveness.calls.items()}
        for index, point in liveness.reshards.items():
            link = links[index]
            leaves = leaves_program(self.running.space.sites[link.head], link)
            found[point] = link.tail if leaves else link.head
        return found

    def _place(self, point: int) -> int | None:
        """Where a point lies in the order of the program; None for what is not one of its sites."""
        return self._order.get(self._places.get(point, ""))

    # What there is again.

    @cached_property
    def _made(self) -> dict[str, Keeping]:
        return self.problem.made_again(self.choice)

    @cached_property
    def _recomputed(self) -> frozenset[str]:
        return frozenset(item.name for item in self.again.recomputed)

    @cached_property
    def _viewed(self) -> dict[str, Link]:
        return {link.head: link for link in self.problem.space.links if link.operand == 0}

    @cached_property
    def _readers(self) -> dict[str, list[Link]]:
        found: dict[str, list[Link]] = defaultdict(list)
        for link in self.problem.space.links:
            found[link.tail].append(link)
        return found

    def _keeping(self, name: str) -> Keeping:
        return self.problem.keeping(name, self.choice)

    def _kept(self, name: str, flags: Collection[bool]) -> Facts:
        """That the keeping of a site is one of those that are flagged."""
        variable = self.problem.planning.classes[name]
        return {variable: np.repeat(np.array(flags), len(self.problem.planning.assignment.costs[variable]))}

    def _kept_as(self, name: str, *others: Keeping) -> Facts:
        """That a site is kept as it is, or in some other way."""
        wanted = {self._keeping(name), *others}
        variable = self.problem.planning.classes[name]
        return self._kept(name, [keeping in wanted for keeping in self.problem.keepings(variable)])

    def _is_again(self, name: str, after: int | None = None) -> Facts:
        """That a value is there again: its keeping says so, it is no view to hold, and something reads it."""
        if (name, after) not in self.known:
            facts = [self._is_made_again(name, after)]
            readers = self._readers[name]
            if not any(self._is_late(link) for link in readers):
                reader = next(link.head for link in readers if link.head in self._recomputed)
                facts.append(self._is_again(reader, after))
            self.known[name, after] = both(*facts)
        return self.known[name, after]

    def _is_late(self, link: Link) -> bool:
        head = self.problem.space.sites[link.head]
        return head.phase != "forward" and not leaves_program(head, link)

    def _is_made_again(self, name: str, after: int | None = None) -> Facts:
        """That a value is freed and there again, if anything reads it."""
        kept = self._kept_as(name, *self._same_behind(name, after))
        if self._keeping(name) not in RECOMPUTED or not self.problem.space.sites[name].is_alias:
            return kept
        above = self._viewed[name]
        return both(kept, self._is_made_again(above.tail) if above.tail in self._made else self._as_moved(above))

    def _same_behind(self, name: str, after: int | None) -> list[Keeping]:
        """The keepings under which a value is there again in the same way, at any place behind `after`."""
        if after is None:
            return []
        alike = RECOMPUTED if self._keeping(name) in RECOMPUTED else OFFLOADED
        anchors = self.problem.options.anchors[name]
        return [keeping for keeping in alike if keeping in anchors and self._order[anchors[keeping]] > after]

    def _is_not_made_again(self, name: str) -> Facts:
        """That a value is held: its keeping says so, or it is a view of what is held."""
        if name not in self.problem.options.anchors:
            return {}
        held = [keeping for keeping in Keeping if keeping not in AGAIN]
        if not self._is_exempt(name):
            return self._kept_as(name, *held)
        above = self._viewed[name]
        kept = self._kept_as(name, *held, *RECOMPUTED)
        return both(kept, self._is_not_made_again(above.tail), self._as_moved(above))

    def _is_exempt(self, name: str) -> bool:
        """Whether a view is held with what it views, whatever its keeping says."""
        return name in self.problem.options.anchors and self._keeping(name) in AGAIN and name not in self._made

    def _as_moved(self, link: Link) -> Facts:
        """That a link joins the specs that it does."""
        planning = self.problem.planning
        tail, head = planning.space.sites[link.tail], planning.space.sites[link.head]
        base = self.problem.without_keepings(self.choice)
        found: list[Facts] = []
        for name, specs in ((link.tail, specs_of(tail, link.result)), (link.head, needs_of(head, link))):
            variable = planning.classes[name]
            same = np.array([spec == specs[base[variable]] for spec in specs])
            found.append({variable: np.tile(same, self.options(variable))})
        return both(*found)
