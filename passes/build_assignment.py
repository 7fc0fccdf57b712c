"""Turn a priced search space into an assignment problem over classes of alike nodes.

One variable per class; its options are the strategies of the class. A node's time counts once per member. Links between
the same places of two classes become one edge, whose costs count once per link; links within one class become costs of
its variable. Memory rows are made for single program points, on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from passes.assignment import Assignment, Edge, Floats, MemoryRow
from passes.enumerate_strategies import Link, SearchSpace, Site, ValueInfo
from passes.liveness import Interval, Liveness, leaves_program
from passes.memory_usage import Item, MemoryUsage
from passes.price import Prices, local_bytes_of

_EdgeKey = tuple[int, int, int, int]
_Places = tuple[ValueInfo, int, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """An assignment together with what its variables and edges stand for.

    Args:
        space: the sites and links.
        classes: site name to variable.
        members: variable to the names of its sites.
        edge_of: (variable, result, variable, operand) to the index of an edge of `assignment`.
        assignment: the problem, without memory rows.
        derived: what other passes find out about the problem, whatever the choice, and keep with it.
    """

    space: SearchSpace
    prices: Prices
    liveness: Liveness
    classes: Mapping[str, int]
    members: tuple[tuple[str, ...], ...]
    edge_of: Mapping[_EdgeKey, int]
    assignment: Assignment
    derived: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _bytes: dict[tuple[int, int], Floats] = field(default_factory=dict, repr=False)
    _copy_bytes: dict[tuple[_Places, bool], Floats] = field(default_factory=dict, repr=False)
    _usage: list[MemoryUsage] = field(default_factory=list, repr=False)

    def strategy(self, name: str, choice: Sequence[int]) -> Strategy:
        """The strategy of site `name` under a choice."""
        return self.space.sites[name].strategies[choice[self.classes[name]]]

    def usage(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes in use on each rank at every program point."""
        if not self._usage:
            self._usage.append(MemoryUsage.of(self.liveness.points, self._items()))
        return self._usage[0](choice)

    def _items(self) -> list[Item]:
        """What lies in memory: values, and the copies that reshards on links make."""
        items = [
            Item(interval, self._value_bytes(name, result), self.classes[name])
            for (name, result), interval in self.liveness.values.items()
        ]
        for index, moved, interval in self.on_links():
            tail, _, head, _ = self.link_key(self.space.links[index])
            items.append(Item(interval, self._link_bytes(index, moved=moved), tail, head))
        return items

    def on_links(self) -> Iterator[tuple[int, bool, Interval]]:
        """What links keep in memory: index, whether it is the copy that a reshard makes or the value, and lifetime."""
        for index, interval in self.liveness.copies.items():
            yield index, True, interval
        for index, interval in self.liveness.kept.items():
            yield index, False, interval

    def link_bytes(self, index: int, choice: Sequence[int], *, moved: bool) -> float:
        """Bytes of what link `index` keeps in memory: if `moved`, only where it is resharded, else where it is not."""
        tail, _, head, _ = self.link_key(self.space.links[index])
        return float(self._link_bytes(index, moved=moved)[choice[tail], choice[head]])

    def memory_row(self, point: int) -> MemoryRow:
        """Bytes in use at one program point, as a function of the choice."""
        variables: dict[int, Floats] = {}
        for (name, result), interval in self.liveness.values.items():
            if interval.birth <= point <= interval.death:
                _accumulate(variables, self.classes[name], self._value_bytes(name, result))
        edges: dict[int, Floats] = {}
        for index, moved, interval in self.on_links():
            if interval.birth <= point <= interval.death:
                tail, _, head, _ = key = self.link_key(self.space.links[index])
                table = self._link_bytes(index, moved=moved)
                if tail == head:
                    _accumulate(variables, tail, np.diagonal(table))
                else:
                    _accumulate(edges, self.edge_of[key], table)
        return MemoryRow(0.0, variables, edges)

    def link_key(self, link: Link) -> _EdgeKey:
        """The variables and places that a link joins."""
        return self.classes[link.tail], link.result, self.classes[link.head], link.operand

    def _value_bytes(self, name: str, result: int) -> Floats:
        key = (self.classes[name], result)
        if key not in self._bytes:
            site = self.space.sites[name]
            sizes = local_bytes_of(site.results[result], specs_of(site, result), self.space.mesh)
            if name in self.liveness.parameters:
                sizes = sizes * (1 + self.liveness.state_bytes_per_parameter_byte)
            self._bytes[key] = sizes
        return self._bytes[key]

    def _link_bytes(self, index: int, *, moved: bool) -> Floats:
        """Bytes of a link's value at its head under each pair of options: where it is resharded (`moved`) or is not."""
        link = self.space.links[index]
        tail, head = self.space.sites[link.tail], self.space.sites[link.head]
        key = (_places_of(tail, head, link), moved)
        if key not in self._copy_bytes:
            sources, targets = specs_of(tail, link.result), needs_of(head, link)
            sizes = local_bytes_of(tail.results[link.result], targets, self.space.mesh)
            numbers: dict[PartitionSpec, int] = {}
            before = np.array([numbers.setdefault(spec, len(numbers)) for spec in sources])
            after = np.array([numbers.setdefault(spec, len(numbers)) for spec in targets])
            differs = before[:, None] != after[None, :]
            self._copy_bytes[key] = np.where(differs == moved, sizes[None, :], 0.0)
        return self._copy_bytes[key]


def build_problem(
    space: SearchSpace, prices: Prices, liveness: Liveness, representatives: Mapping[str, str]
) -> PlanningProblem:
    """The assignment problem of a search space whose alike sites are tied."""
    numbers: dict[str, int] = {}
    classes = {name: numbers.setdefault(representatives[name], len(numbers)) for name in space.sites}
    members: list[list[str]] = [[] for _ in numbers]
    for name, number in classes.items():
        members[number].append(name)
    sites = space.sites
    costs = [_call_costs([sites[name] for name in group], prices) for group in members]
    tables: dict[tuple[_Places, int], Floats] = {}
    edges, edge_of = [], {}
    for key, (link, count) in _alike_links(space, classes).items():
        places = (_places_of(sites[link.tail], sites[link.head], link), count)
        if places not in tables:
            tables[places] = _link_table(space, prices, link) * count
        tail, _, head, _ = key
        if tail == head:
            costs[tail] = costs[tail] + np.diagonal(tables[places])
        else:
            edge_of[key] = len(edges)
            edges.append(Edge(tail, head, tables[places]))
    assignment = Assignment(tuple(costs), tuple(edges))
    return PlanningProblem(space, prices, liveness, classes, tuple(map(tuple, members)), edge_of, assignment)


def _alike_links(space: SearchSpace, classes: Mapping[str, int]) -> dict[_EdgeKey, tuple[Link, int]]:
    """One link for each pair of places that links join, and how many there are."""
    found: dict[_EdgeKey, tuple[Link, int]] = {}
    for link in space.links:
        key = (classes[link.tail], link.result, classes[link.head], link.operand)
        found[key] = (link, found[key][1] + 1 if key in found else 1)
    return found


def specs_of(site: Site, result: int) -> tuple[PartitionSpec, ...]:
    """The spec of one result under each strategy."""
    return tuple(strategy.outputs[result] for strategy in site.strategies)


def needs_of(head: Site, link: Link) -> tuple[PartitionSpec, ...]:
    """The spec that a link's value must have at its head, under each strategy of the head."""
    if link.operand < 0:
        return specs_of(head, 0)
    return tuple(strategy.inputs[link.operand] for strategy in head.strategies)


def _places_of(tail: Site, head: Site, link: Link) -> _Places:
    """What the costs and copies of a link depend on: links for which this is equal share their tables."""
    value = tail.results[link.result]
    return value, id(tail.strategies), link.result, id(head.strategies), link.operand, leaves_program(head, link)


def _call_costs(alike: Sequence[Site], prices: Prices) -> Floats:
    return prices.call_times(alike[0], alike[0].strategies) * len(alike)


def _link_table(space: SearchSpace, prices: Prices, link: Link) -> Floats:
    tail, head = space.sites[link.tail], space.sites[link.head]
    return prices.reshard_table(tail.results[link.result], specs_of(tail, link.result), needs_of(head, link))


def _accumulate(into: dict[int, Floats], key: int, sizes: Floats) -> None:
    into[key] = into[key] + sizes if key in into else sizes
