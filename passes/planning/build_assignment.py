"""Turn a priced search space into an assignment problem over classes of alike nodes.

Each class has one variable, and its options are the strategies of the class. A node's seconds count as often as its
members run in a step (`runs`). The fan-out of a gradient costs the accumulation of the gradient over micro-batches in
its spec. Links between the same places of two classes become one edge, whose costs count as often as the links run.
Links within one class become costs of its variable. A memory row is made for a program point when it is needed.
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
    """An assignment, and the meaning of its variables and edges.

    Args:
        space: the sites and links.
        classes: site name to variable.
        members: variable to the names of its sites.
        edge_between: two variables to the index of an edge of `assignment` from the first to the second.
        assignment: the problem, without memory rows.
        memory: tables of bytes.
        repeated: the repeated units, of which the program leaves some out.
        derived: facts about the problem, for any choice, that other passes compute and keep here.
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
        """Return the strategy of site `name` under a choice."""
        return self.space.sites[name].strategies[choice[self.classes[name]]]

    def counts(self) -> Mapping[str, int]:
        """Site to the number of sites that it stands for; absent sites stand for themselves alone."""
        return self.repeated.site_counts()

    def site_runs(self) -> Mapping[str, int]:
        """Site to its number of runs in a step."""
        return site_runs(self.space, self.repeated, self.liveness.micro_batches)

    def link_runs(self) -> Sequence[int]:
        """Number of runs in a step of the reshard on each link."""
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
        """A lower bound of the peak of every choice of `allowed` options, bytes; see `MemoryUsage.least_peak`."""
        return self._memory_usage().least_peak(allowed)

    def _memory_usage(self) -> MemoryUsage:
        if not self._usage:
            self._usage.append(MemoryUsage.of(self.liveness.points, list(with_standing(self._items(), self.liveness))))
        return self._usage[0]

    def _items(self) -> Iterator[tuple[str, UsedBytes]]:
        """Return pairs of site and item in memory: values, copies on links and workspaces; "" for items that are no
        values.
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
        """Factor of a value's bytes; a parameter carries its optimizer state."""
        return 1 + self.liveness.state_bytes_per_parameter_byte if name in self.liveness.parameters else 1.0

    def _variables(self, kept: OnLink, table: Floats) -> tuple[int, ...]:
        """Return the variables that decide the bytes of a link: both ends, or its head alone."""
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
    """Return the assignment problem of a search space in which alike sites are tied."""
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
    """Seconds of all calls of a variable, [options]."""
    times = []
    for names in _by_call(group, sites):
        site = sites[names[0]]
        times.append(prices.call_times(site, site.strategies) * sum(runs[name] for name in names))
    return np.sum(times, axis=0)


def _by_call(group: Sequence[str], sites: Mapping[str, Site]) -> Iterable[list[str]]:
    """Group the sites of a variable by call: first its own calls, then each form of copy to and from the host.

    Results of one call may differ in size, and so may their copies.
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
    """Return one link for each pair of places that links join, and the number of runs of all these links."""
    found: dict[_EdgeKey, tuple[Link, int]] = {}
    for index, link in enumerate(space.links):
        key = (classes[link.tail], link.result, classes[link.head], link.operand)
        first, times = found.get(key, (link, 0))
        found[key] = first, times + runs[index]
    return found


def _places_of(tail: Site, head: Site, link: Link) -> _Places:
    """Return everything that the costs and copies of a link depend on; links with equal keys share their tables."""
    value = tail.results[link.result]
    strategies = id(tail.strategies), link.result, id(head.strategies), link.operand
    return value, *strategies, leaves_program(head, link), link.keeps_sums


def _link_table(space: SearchSpace, prices: Prices, link: Link) -> Floats:
    """Seconds of a link between two places, [tail's options, head's options]."""
    tail, head = space.sites[link.tail], space.sites[link.head]
    sources, targets = specs_of(tail, link.result), needs_of(head, link)
    times = prices.reshard_table(tail.results[link.result], sources, targets)
    return without_sums(times, sources, targets) if link.keeps_sums else times
