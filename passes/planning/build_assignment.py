"""Turn a priced search space into an assignment problem: choose one option for each variable at least cost.

Sites of repeated blocks that share a strategy form a class (`fold_blocks`). Any other site is a class of its own. Each
class has one variable, whose options are the strategies of the class.

* The cost of an option is the seconds of all calls of the class in a step (`runs`).
* A gradient is added to the sum over earlier micro-batches. The variable of the gradient's fan-out has this cost.
* Links from one result of a class to one operand of another class become an edge. Its costs are the seconds of the
  reshards on all of these links in a step. The costs of links within one class are added to the class's variable.
* A memory row has the bytes in use at a point of the program. It is made only when the search needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.enumeration import Strategy
from passes.memory.liveness import Interval, Liveness, OnLink
from passes.memory.memory_rows import row_at
from passes.memory.memory_tables import MemoryTables
from passes.memory.memory_usage import MemoryUsage, UsedBytes, with_standing
from passes.planning.runs import link_runs, site_runs
from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow
from passes.strategies.enumerate_strategies import (
    Link,
    SearchSpace,
    Site,
    ValueInfo,
    leaves_program,
    needs_of,
    specs_of,
)
from passes.strategies.narrow_gradients import without_sums
from passes.strategies.price import Prices
from passes.strategies.repeated import NO_REPEATED_UNITS, RepeatedUnits, tie

_EdgeKey = tuple[int, int, int, int]
_Places = tuple[ValueInfo, int, int, int, int, bool, bool]


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """An assignment problem, and the meaning of its variables and edges.

    A *choice* is a sequence with the index of the chosen option of each variable.

    Args:
        space: the sites and links.
        classes: number of the variable of each site, by the site's name.
        members: names of the sites of each variable.
        edge_between: (tail variable, head variable) → index of their edge in `assignment.edges`.
        assignment: the assignment problem, without memory rows.
        memory: tables of the bytes of values on each rank, for each option.
        repeated: the repeated units of blocks, some of which the program leaves out.
        derived: a cache for other passes, for facts about the problem that do not depend on a choice.
    """

    space: SearchSpace
    prices: Prices
    liveness: Liveness
    classes: Mapping[str, int]
    members: tuple[tuple[str, ...], ...]
    edge_between: Mapping[tuple[int, ...], int]
    assignment: Assignment
    memory: MemoryTables
    repeated: RepeatedUnits = NO_REPEATED_UNITS
    derived: dict[str, Any] = field(default_factory=dict)
    _usage: list[MemoryUsage] = field(default_factory=list, repr=False)

    def strategy(self, name: str, choice: Sequence[int]) -> Strategy:
        """Return the strategy that site `name` has under a choice."""
        return self.space.sites[name].strategies[choice[self.classes[name]]]

    def counts(self) -> Mapping[str, int]:
        """Return for each site's name the number of equal sites of the whole model that the site stands for.

        A site that is absent from the result stands for itself alone.
        """
        return self.repeated.site_counts()

    def site_runs(self) -> Mapping[str, int]:
        """Return each site's number of runs in a step of the whole model, by name."""
        return site_runs(self.space, self.repeated, self.liveness.micro_batches)

    def link_runs(self) -> Sequence[int]:
        """Return the number of runs of the reshard on each link of `space.links` in a step of the whole model."""
        return link_runs(self.space, self.repeated, self.liveness.micro_batches)

    def usage(self, choice: Sequence[int]) -> np.ndarray:
        """Return the bytes in use on each rank under a choice, [program points]."""
        return self._memory_usage()(choice)

    def least_bytes(self, allowed: Mapping[int, np.ndarray]) -> float:
        """Return a lower bound of each rank's peak under the allowed options, in bytes.

        `allowed` has masks by variable. All options of absent variables are allowed.
        """
        return self._memory_usage().least_peak(allowed)

    def _memory_usage(self) -> MemoryUsage:
        if not self._usage:
            self._usage.append(MemoryUsage.of(self.liveness.points, list(with_standing(self._items(), self.liveness))))
        return self._usage[0]

    def _items(self) -> Iterator[tuple[str, UsedBytes]]:
        """Yield the bytes of each value that is in memory, with the name of the site that makes the value.

        The bytes of copies on links, and of workspaces of calls, are yielded with the name "".
        """
        for name, result, interval, number in self.liveness.held_values():
            table = self.memory.of_value(name, result, self._copies(name))
            yield name, UsedBytes(interval, table, (self.classes[name],), number)
        for kept, number in self.liveness.held_on_links():
            table = self.memory.on_link(kept)
            yield "", UsedBytes(kept.interval, table, self._variables(kept, table), number)
        for name, now in self.liveness.calls.items():
            workspace = self.memory.of_call(name)
            if workspace is not None:
                yield "", UsedBytes(Interval(now, now), workspace, (self.classes[name],))

    def _copies(self, name: str) -> float:
        """Return the bytes that each byte of a value of site `name` takes in memory: 1.0, or more for a parameter.

        A parameter's optimizer state counts with the parameter.
        """
        return 1 + self.liveness.state_bytes_per_parameter_byte if name in self.liveness.parameters else 1.0

    def _variables(self, kept: OnLink, table: Floats) -> tuple[int, ...]:
        """Return the variables that decide the bytes of `kept`: of the link's tail and head, or of the head alone.

        The head decides alone if `table` has one dim.
        """
        link = self.space.links[kept.link]
        head = self.classes[link.head]
        return (head,) if table.ndim == 1 else (self.classes[link.tail], head)

    def memory_row(self, point: int) -> MemoryRow:
        """Return the bytes in use on each rank at program point `point`, as a function of the choice."""
        return row_at(self._memory_usage(), point, self.edge_between)


def build_problem(
    space: SearchSpace,
    prices: Prices,
    liveness: Liveness,
    representatives: Mapping[str, str],
    repeated: RepeatedUnits = NO_REPEATED_UNITS,
) -> PlanningProblem:
    """Return the planning problem of a search space.

    Args:
        representatives: for each site, the site whose strategy it shares (`fold_blocks`).
        repeated: the repeated units of blocks. Their sites at one place share a strategy too.
    """
    representatives = tie(representatives, repeated)
    runs = site_runs(space, repeated, liveness.micro_batches)
    numbers: dict[str, int] = {}
    classes = {name: numbers.setdefault(representatives[name], len(numbers)) for name in space.sites}
    members: list[list[str]] = [[] for _ in numbers]
    for name, number in classes.items():
        members[number].append(name)
    sites = space.sites
    costs = [_call_times(group, sites, runs, prices) for group in members]
    counts, more = repeated.site_counts(), liveness.micro_batches - 1
    for fan_out in liveness.adding if more else ():
        costs[classes[fan_out]] = costs[classes[fan_out]] + more * counts.get(fan_out, 1) * prices.adding_times(
            sites[fan_out]
        )
    tables: dict[Any, Floats] = {}
    edges, edge_between = [], {}
    alike = _alike_links(space, classes, link_runs(space, repeated, liveness.micro_batches))
    for key, (link, times) in alike.items():
        places = (_places_of(sites[link.tail], sites[link.head], link), times)
        if places not in tables:
            tables[places] = _link_table(space, prices, link) * times
        tail, _, head, _ = key
        if tail == head:
            costs[tail] = costs[tail] + np.diagonal(tables[places])
        else:
            edge_between[tail, head] = len(edges)
            edges.append(Edge(tail, head, tables[places]))
    assignment = Assignment(tuple(costs), tuple(edges))
    groups = tuple(map(tuple, members))
    return PlanningProblem(
        space, prices, liveness, classes, groups, edge_between, assignment, MemoryTables(space), repeated
    )


def _call_times(group: Sequence[str], sites: Mapping[str, Site], runs: Mapping[str, int], prices: Prices) -> Floats:
    """Return the seconds of all calls of a variable's sites in a step, [options]."""
    times = []
    for names in _by_call(group, sites):
        site = sites[names[0]]
        times.append(prices.call_times(site, site.strategies) * sum(runs[name] for name in names))
    return np.sum(times, axis=0)


def _by_call(group: Sequence[str], sites: Mapping[str, Site]) -> Iterable[list[str]]:
    """Return the sites of a variable in lists of equal calls.

    Sites of one variable are equal calls, except copies to and from the host, whose sizes may differ.
    """
    found: dict[Any, list[str]] = {}
    for name in group:
        site = sites[name]
        moves = site.node is not None and site.node.target in TRANSFERS
        found.setdefault(site.call if moves else None, []).append(name)
    return found.values()


def _alike_links(
    space: SearchSpace, classes: Mapping[str, int], runs: Sequence[int]
) -> dict[_EdgeKey, tuple[Link, int]]:
    """Return one link for each edge, and the number of runs of all links of this edge in a step.

    A key has the variable of the tail, the index of the result, the variable of the head, and the index of the operand.
    """
    found: dict[_EdgeKey, tuple[Link, int]] = {}
    for index, link in enumerate(space.links):
        key = (classes[link.tail], link.result, classes[link.head], link.operand)
        first, times = found.get(key, (link, 0))
        found[key] = first, times + runs[index]
    return found


def _places_of(tail: Site, head: Site, link: Link) -> _Places:
    """Return a key of a link. Links with equal keys have equal costs, so they share one table."""
    value = tail.results[link.result]
    strategies = id(tail.strategies), link.result, id(head.strategies), link.operand
    return value, *strategies, leaves_program(head, link), link.keeps_sums


def _link_table(space: SearchSpace, prices: Prices, link: Link) -> Floats:
    """Return the seconds of the reshard on a link, [tail's options, head's options].

    A pair of options that the link forbids has an infinite time.
    """
    tail, head = space.sites[link.tail], space.sites[link.head]
    sources, targets = specs_of(tail, link.result), needs_of(head, link)
    times = prices.reshard_table(tail.results[link.result], sources, targets)
    return without_sums(times, sources, targets) if link.keeps_sums else times
