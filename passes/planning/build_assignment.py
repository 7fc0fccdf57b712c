"""Turns a priced search space into an assignment problem over classes of equal nodes.

Each class is one variable; its options are the strategies of the class. A node's time counts once for each run of its
members in a step (`runs`). The fan-out of a gradient costs the accumulation of the gradient over micro-batches in its
spec. Links between the same places of two classes become one edge, whose costs count in the same way. Links within one
class become costs of its variable. Memory rows are made for single program points, on demand.
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
    """An assignment, and the sites and links behind its variables and edges.

    Args:
        space: the sites and links.
        classes: site name to variable.
        members: variable to the names of its sites.
        edge_between: two variables to the index of an edge of `assignment` from the first to the second.
        assignment: the problem, without memory rows.
        memory: tables of bytes.
        repeated: the units that the program leaves out.
        derived: results of other passes about the problem, the same for every choice.
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
        """The strategy of site `name` under a choice."""
        return self.space.sites[name].strategies[choice[self.classes[name]]]

    def counts(self) -> Mapping[str, int]:
        """Site to the count of the model's sites that it stands for; absent sites stand for themselves."""
        return self.repeated.site_counts()

    def site_runs(self) -> Mapping[str, int]:
        """Site to its count of runs in a step."""
        return site_runs(self.space, self.repeated, self.liveness.micro_batches)

    def link_runs(self) -> Sequence[int]:
        """How often the reshard on each link runs in a step."""
        return link_runs(self.space, self.repeated, self.liveness.micro_batches)

    def adding_s(self, choice: Sequence[int]) -> float:
        """Seconds of adding the gradients of one micro-batch to the sums of earlier ones."""
        counts = self.counts()
        return sum(
            counts.get(fan_out, 1)
            * float(self.prices.adding_times(self.space.sites[fan_out])[choice[self.classes[fan_out]]])
            for fan_out in self.liveness.adding
        )

    def usage(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes in use on each rank at every program point."""
        return self._memory_usage()(choice)

    def least_bytes(self, allowed: Mapping[int, np.ndarray]) -> float:
        """Bytes below which the peak of no choice of the `allowed` options is; see `MemoryUsage.least_peak`."""
        return self._memory_usage().least_peak(allowed)

    def _memory_usage(self) -> MemoryUsage:
        if not self._usage:
            self._usage.append(MemoryUsage.of(self.liveness.points, list(with_standing(self._items(), self.liveness))))
        return self._usage[0]

    def _items(self) -> Iterator[tuple[str, UsedBytes]]:
        """Items in memory, each behind its site or "": values, copies on links, and workspaces of calls."""
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
        """The bytes of a value with its optimizer state, as a multiple of its own."""
        return 1 + self.liveness.state_bytes_per_parameter_byte if name in self.liveness.parameters else 1.0

    def _variables(self, kept: OnLink, table: Floats) -> tuple[int, ...]:
        """The variables that decide the bytes that a link keeps: both ends, or the head alone."""
        link = self.space.links[kept.link]
        head = self.classes[link.head]
        return (head,) if table.ndim == 1 else (self.classes[link.tail], head)

    def memory_row(self, point: int) -> MemoryRow:
        """Bytes in use at one program point, as a function of the choice."""
        return row_at(self._memory_usage(), point, self.edge_between)


def build_problem(
    space: SearchSpace,
    prices: Prices,
    liveness: Liveness,
    representatives: Mapping[str, str],
    repeated: RepeatedUnits = NO_REPEATED_UNITS,
) -> PlanningProblem:
    """The assignment problem of a search space, with one variable for equal sites."""
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
    """Seconds of all calls of a variable by its option."""
    times = []
    for names in _by_call(group, sites):
        site = sites[names[0]]
        times.append(prices.call_times(site, site.strategies) * sum(runs[name] for name in names))
    return np.sum(times, axis=0)


def _by_call(group: Sequence[str], sites: Mapping[str, Site]) -> Iterable[list[str]]:
    """The sites of a variable by their call: its own calls, and copies to and from the host.

    The results of one call differ in size, and so do their copies.
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
    """One link for each pair of places that links join, and the sum of their runs."""
    found: dict[_EdgeKey, tuple[Link, int]] = {}
    for index, link in enumerate(space.links):
        key = (classes[link.tail], link.result, classes[link.head], link.operand)
        first, times = found.get(key, (link, 0))
        found[key] = first, times + runs[index]
    return found


def _places_of(tail: Site, head: Site, link: Link) -> _Places:
    """The inputs of a link's costs and copies: links with an equal key share their tables."""
    value = tail.results[link.result]
    strategies = id(tail.strategies), link.result, id(head.strategies), link.operand
    return value, *strategies, leaves_program(head, link), link.keeps_sums


def _link_table(space: SearchSpace, prices: Prices, link: Link) -> Floats:
    """Seconds of a link between two places."""
    tail, head = space.sites[link.tail], space.sites[link.head]
    sources, targets = specs_of(tail, link.result), needs_of(head, link)
    times = prices.reshard_table(tail.results[link.result], sources, targets)
    return without_sums(times, sources, targets) if link.keeps_sums else times
