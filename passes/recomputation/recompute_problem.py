r"""The planning problem with recomputation: a variable's option is a strategy together with a keeping of its values.

Beside what the problem without recomputation has (`recompute_options` says what keepings are):

* time: a call that is recomputed runs twice, and so do the reshards of its operands (`_Building.costs`, `edges`);
* what is recomputed needs its operands: each is held from the forward, or recomputed before it, or enters the program.
  Pairs of keepings for which this is not so cost infinity (`_fits_together`);
* what is offloaded costs the time of its copies there and back, which nothing hides, and needs nothing to come back;
* memory (`items`): that of the program in which each value is followed, behind the forward, by another one that all the
  rest of the step reads (`_split`), and by all that might be recomputed. Of the first kind nothing depends on keepings;
  a second one is there from the end of the first if the value is held, from the recomputation if it is recomputed, and
  from the fetch if it is offloaded; what a recomputation needs beside that is there if it happens. A view that is held
  or recomputed takes nothing as long as what it views is there too, and is not resharded on the way.

So there still is one option per variable, costs join two of them, and memory is linear in items. A last use counts
every recomputation that might read the value, chosen or not. So the memory is never less than that of the program which
is lowered, and more only where a value is held for nothing but a recomputation, or views overlap.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from autoshard.ir.offload import OffloadedNode
from autoshard.ir.recompute import RecomputedNode
from passes.memory.liveness import Held, Interval, Liveness, OnLink
from passes.memory.memory_rows import row_at
from passes.memory.memory_tables import MemoryTables, differs
from passes.memory.memory_usage import Item, MemoryUsage, Table
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.recompute_options import AGAIN, OFFLOADED, RECOMPUTED, Keeping, RecomputeOptions
from passes.recomputation.recompute_split import SplitSpace, split_space
from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow
from passes.solver.search_control import SearchStopped
from passes.strategies.enumerate_strategies import Link, SearchSpace, Site, leaves_program, needs_of, specs_of
from passes.strategies.price import local_bytes_of


@dataclass(frozen=True, slots=True)
class RecomputeProblem:
    """See the module's docstring.

    Args:
        planning: the problem without recomputation; options of a variable are its options, once for each keeping.
        options: what may be kept how.
        assignment: the problem, without memory rows.
        usage: bytes in use at each point under a choice.
    """

    planning: PlanningProblem
    options: RecomputeOptions
    assignment: Assignment
    usage: MemoryUsage = field(repr=False)

    @property
    def space(self) -> SearchSpace:
        """The search space without recomputation."""
        return self.planning.space

    @property
    def liveness(self) -> Liveness:
        """The lifetimes without recomputation."""
        return self.planning.liveness

    def memory_row(self, point: int) -> MemoryRow:
        """Bytes in use at one program point, as a function of the choice."""
        return row_at(self.usage, point, self.planning.edge_between)

    def widen(self, allowed: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Masks of options of the problem without recomputation as masks of these: whatever the keeping."""
        return {variable: np.tile(mask, len(self.keepings(variable))) for variable, mask in allowed.items()}

    def without_keepings(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of strategies: one of the problem without recomputation."""
        sizes = (len(cost) for cost in self.planning.assignment.costs)
        return tuple(option % size for option, size in zip(choice, sizes, strict=True))

    def again(self, choice: Sequence[int]) -> Again:
        """What a choice recomputes and offloads, in program order: where that makes memory, and something reads it."""
        made = self.made_again(choice)
        readers: dict[str, list[Link]] = defaultdict(list)
        for link in self.space.links:
            readers[link.tail].append(link)
        recomputed: dict[str, RecomputedNode] = {}
        offloaded: list[OffloadedNode] = []
        for name in reversed(made):
            if any(link.head in recomputed or _is_late(self.space.sites[link.head], link) for link in readers[name]):
                node, keeping = self.space.sites[name].node, made[name]
                assert node is not None, "calls have nodes"
                place = (name, self.options.anchors[name][keeping], node.meta.get("module", ""))
                if keeping in RECOMPUTED:
                    recomputed[name] = RecomputedNode(*place)
                else:
                    offloaded.append(OffloadedNode(*place))
        return Again(tuple(reversed(recomputed.values())), tuple(reversed(offloaded)))

    def made_again(self, choice: Sequence[int]) -> dict[str, Keeping]:
        """What is there again; without views to recompute of what is held as it lies, which are held with it."""
        viewed = {link.head: link for link in self.space.links if link.operand == 0}
        found: dict[str, Keeping] = {}
        for name in self.options.anchors:
            keeping = self.keeping(name, choice)
            is_held = (
                keeping in RECOMPUTED
                and self.space.sites[name].is_alias
                and viewed[name].tail not in found
                and not self._is_moved(viewed[name], choice)
            )
            if keeping in AGAIN and not is_held:
                found[name] = keeping
        return found

    def _is_moved(self, link: Link, choice: Sequence[int]) -> bool:
        """Whether a value is resharded on its way."""
        base = self.without_keepings(choice)
        source = self.planning.strategy(link.tail, base).outputs[link.result]
        return source != self.planning.strategy(link.head, base).inputs[link.operand]

    def keeping(self, name: str, choice: Sequence[int]) -> Keeping:
        """What becomes of a site's value under a choice."""
        variable = self.planning.classes[name]
        return self.keepings(variable)[choice[variable] // len(self.planning.assignment.costs[variable])]

    def keepings(self, variable: int) -> tuple[Keeping, ...]:
        """What may become of the values of a variable."""
        return self.options.keepings.get(variable, _AS_READ)


_AS_READ = (Keeping.AS_READ,)


@dataclass(frozen=True, slots=True)
class Again:
    """What a program has again in the backward instead of keeping it, in program order."""

    recomputed: tuple[RecomputedNode, ...] = ()
    offloaded: tuple[OffloadedNode, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.recomputed or self.offloaded)


NOTHING_AGAIN = Again()
"""All that the backward reads is kept."""


def _is_late(head: Site, link: Link) -> bool:
    """Whether a link is read after the forward."""
    return head.phase != "forward" and not leaves_program(head, link)


def build_recompute_problem(
    planning: PlanningProblem, options: RecomputeOptions, *, with_memory: bool = True, deadline: float = math.inf
) -> RecomputeProblem:
    """The problem with recomputation over the strategies of `planning`.

    Args:
        planning, options: what it is of.
        with_memory: what lies in memory is listed; a problem that is not searched (a choice is drawn) does without.
        deadline: of `time.monotonic`.

    Raises:
        SearchStopped: the deadline passed before it was built.
    """
    building = _Building(planning, options)
    assignment = Assignment(tuple(_until(deadline, building.costs())), tuple(_until(deadline, building.edges())))
    usage = MemoryUsage.of(building.liveness.points, list(_until(deadline, building.items())) if with_memory else [])
    return RecomputeProblem(planning, options, assignment, usage)


_Part = TypeVar("_Part")


def _until(deadline: float, parts: Iterator[_Part]) -> Iterator[_Part]:
    """The parts, while there is time."""
    for part in parts:
        if time.monotonic() >= deadline:
            raise SearchStopped("time was up before the problem with recomputation was built")
        yield part


@dataclass
class _Building:
    planning: PlanningProblem
    options: RecomputeOptions
    tables: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    spread: dict[tuple[object, ...], Table] = field(default_factory=dict)

    def keepings(self, variable: int) -> tuple[Keeping, ...]:
        return self.options.keepings.get(variable, _AS_READ)

    def keepings_of(self, name: str) -> tuple[Keeping, ...]:
        return self.keepings(self.planning.classes[name])

    # Costs.

    def costs(self) -> Iterator[Floats]:
        for variable, cost in enumerate(self.planning.assignment.costs):
            runs = [cost * _runs(keeping) for keeping in self.keepings(variable)]
            if any(keeping in OFFLOADED for keeping in self.keepings(variable)):
                copies = self._copy_times(variable)
                runs = [
                    run + copies if keeping in OFFLOADED else run
                    for run, keeping in zip(runs, self.keepings(variable), strict=True)
                ]
            fits = np.diagonal(self.allowed.get((variable, variable), np.ones((len(runs), len(runs)), dtype=bool)))
            yield np.concatenate([np.where(fit, run, np.inf) for run, fit in zip(runs, fits, strict=True)])

    def _copy_times(self, variable: int) -> Floats:
        """Seconds of the copies to the host and back of all values of a variable, [options]."""
        total = np.zeros(len(self.planning.assignment.costs[variable]))
        for name in self.planning.members[variable]:
            site = self.planning.space.sites[name]
            for result in self.read_again[name]:
                sizes = local_bytes_of(site.results[result], specs_of(site, result), self.planning.space.mesh)
                total += self.planning.prices.host_times(sizes)
        return total

    @cached_property
    def read_again(self) -> dict[str, set[int]]:
        """The results of each site that the backward reads, or what it may recompute."""
        found: dict[str, set[int]] = defaultdict(set)
        for link in self.planning.space.links:
            head = self.planning.space.sites[link.head]
            is_recomputed = any(keeping in RECOMPUTED for keeping in self.keepings_of(link.head))
            if _is_late(head, link) or is_recomputed:
                found[link.tail].add(link.result)
        return found

    def edges(self) -> Iterator[Edge]:
        for edge in self.planning.assignment.edges:
            yield Edge(edge.tail, edge.head, self._edge_table(edge, self.allowed[edge.tail, edge.head]))

    def _edge_table(self, edge: Edge, allowed: np.ndarray) -> Floats:
        """Costs of an edge for each pair of keepings; edges that share a table share it here."""
        heads = self.keepings(edge.head)
        key = (id(edge.cost), heads, allowed.tobytes(), allowed.shape)
        if key not in self.tables:
            blocks = [
                [np.where(fits, edge.cost * _runs(head), np.inf) for head, fits in zip(heads, row, strict=True)]
                for row in allowed
            ]
            self.tables[key] = np.block(blocks)
        return self.tables[key]

    @cached_property
    def allowed(self) -> dict[tuple[int, int], np.ndarray]:
        """For variables that links join, which keepings of both go together, [tail, head]."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for link in self.planning.space.links:
            tails, heads = self.keepings_of(link.tail), self.keepings_of(link.head)
            pairs = np.array([[self._fits_together(link, tail, head) for head in heads] for tail in tails])
            key = (self.planning.classes[link.tail], self.planning.classes[link.head])
            found[key] = found[key] & pairs if key in found else pairs
        return found

    def _fits_together(self, link: Link, tail: Keeping, head: Keeping) -> bool:
        if head not in RECOMPUTED or self.planning.space.sites[link.tail].is_input:
            return True
        if tail in AGAIN:
            before, after = self.split.again[link.tail, tail], self.split.again[link.head, head]
            return self.liveness.calls[before] < self.liveness.calls[after]
        return self.options.holds(link.tail, tail)

    # Memory.

    @cached_property
    def split(self) -> SplitSpace:
        return split_space(self.planning.space, self.options, self.planning.classes)

    @cached_property
    def liveness(self) -> Liveness:
        return self.planning.liveness.of(self.split.space)

    @cached_property
    def memory(self) -> MemoryTables:
        return MemoryTables(self.split.space, self.planning.memory.transients)

    def items(self) -> Iterator[Item]:
        """What lies in memory, and under which options."""
        for (name, result), interval in self.liveness.values.items():
            if name in self.planning.classes:
                yield self._item(interval, self.memory.of_value(name, result, self._copies(name)), (name,))
        for kept in self.liveness.on_links:
            if not self._is_of_view_again(kept):
                yield self._on_link(kept)
        for name, point in self.liveness.calls.items():
            if name not in self.split.late.values() and self.split.origin(name)[1] not in OFFLOADED:
                yield self._item(Interval(point, point), self.memory.of_call(name), (name,))
        for name in self.split.late:
            yield from self._late_items(name)
        for name in self._may_stay:
            yield from self._copy_beside(name)

    @cached_property
    def _may_stay(self) -> frozenset[str]:
        """Values of the forward of which it depends on keepings when they go: that may be held, and views."""
        sites = self.planning.space.sites
        forward = (name for name, site in sites.items() if site.phase == "forward" and not site.is_input)
        return frozenset(name for name in forward if name in self.split.late or sites[name].is_alias)

    def _copies(self, name: str) -> float:
        ratio = self.liveness.state_bytes_per_parameter_byte
        return 1 + ratio if name in self.liveness.parameters else 1.0

    def _is_of_view_again(self, kept: OnLink) -> bool:
        """Whether a link keeps the memory of a view that is recomputed, which is that of its second life."""
        link = self.split.space.links[kept.link]
        is_view = link.operand == 0 and self.split.space.sites[link.head].is_alias
        return is_view and link.head in self.split.sources and kept.held in (Held.EITHER, Held.COPY)

    def _on_link(self, kept: OnLink) -> Item:
        link, held = self.split.space.links[kept.link], kept.held
        if held is Held.LAST_RESHARD and (link.tail in self.split.sources or link.tail in self._may_stay):
            held = Held.RESHARD
        kept = dataclasses.replace(kept, held=held)
        if held is Held.VALUE and link.tail in self.split.late:
            return self._value_until_freed(kept, link)
        table = self.memory.on_link(kept)
        return self._item(kept.interval, table, (link.head,) if table.is_of_one else (link.tail, link.head))

    def _value_until_freed(self, kept: OnLink, link: Link) -> Item:
        """A value of the forward at its last use there, which its second life counts where it is held."""
        freed = tuple(not self.options.holds(link.tail, keeping) for keeping in self.keepings_of(link.tail))
        origin, want = self.split.origin(link.head)
        there = tuple(want is None or keeping is want for keeping in self.keepings_of(origin))
        variables = (self.planning.classes[link.tail], self.planning.classes[origin])
        return self._item_under(kept.interval, self.memory.on_link(kept), variables, (freed, there))

    def _late_items(self, name: str) -> Iterator[Item]:
        """A value behind the forward, under each keeping."""
        for result in range(len(self.planning.space.sites[name].results)):
            for keeping in self.keepings_of(name):
                if keeping in AGAIN or self.options.holds(name, keeping):
                    yield from self._late_item(name, result, keeping)

    def _late_item(self, name: str, result: int, keeping: Keeping) -> Iterator[Item]:
        start, end = self._start(name, keeping), self._end(name, result)
        table = self.memory.of_value(name, result)
        above = None if keeping in OFFLOADED else self.viewed.get(name)
        covered = start - 1 if above is None else min(end, self._end_of_viewed(above))
        if above is not None and start <= covered:
            yield self._covered_item(Interval(start, covered), table, above, keeping)
        if max(start, covered + 1) <= end:
            there = tuple(kept is keeping for kept in self.keepings_of(name))
            interval = Interval(max(start, covered + 1), end)
            yield self._item_under(interval, table, (self.planning.classes[name],), (there,))

    def _copy_beside(self, name: str) -> Iterator[Item]:
        """The copy that a view is, at its last use in the forward: it goes meanwhile, unless what it views is held."""
        link = self.viewed.get(name)
        if link is None or self.planning.space.sites[link.tail].is_input:
            return
        start, end = self._start(name, Keeping.AS_READ), self.deaths[name, 0]
        if start <= end:
            interval = Interval(start, end)
            table = self.memory.on_link(OnLink(self.planning.space.links.index(link), Held.COPY, interval))
            yield self._item(interval, table, (link.tail, name))

    @cached_property
    def viewed(self) -> dict[str, Link]:
        """The link from what is viewed into each view."""
        sites = self.planning.space.sites
        return {
            link.head: link for link in self.planning.space.links if link.operand == 0 and sites[link.head].is_alias
        }

    @cached_property
    def deaths(self) -> dict[tuple[str, int], int]:
        """The last use of every value of the split space, by way of views included."""
        links: dict[tuple[str, int], list[Link]] = defaultdict(list)
        for link in self.split.space.links:
            links[link.tail, link.result].append(link)
        found: dict[tuple[str, int], int] = {}
        for name, site in reversed(list(self.split.space.sites.items())):
            for result in range(len(site.results)):
                uses = [self._use(link, found) for link in links[name, result]]
                found[name, result] = max(uses, default=self.liveness.calls.get(name, 0))
        return found

    def _use(self, link: Link, found: Mapping[tuple[str, int], int]) -> int:
        head = self.split.space.sites[link.head]
        if leaves_program(head, link):
            return self.liveness.points - 1
        if head.is_alias and link.operand == 0:
            return max(found[link.head, result] for result in range(len(head.results)))
        return self.liveness.calls[link.head]

    def _end(self, name: str, result: int) -> int:
        """Up to which point a value behind the forward is counted; from then on, its last reader says what is there."""
        late = self.split.late[name], result
        return self.deaths[late] if name in self.viewed else self.liveness.values[late].death

    def _start(self, name: str, keeping: Keeping) -> int:
        """From which point a value behind the forward is counted."""
        if keeping in AGAIN:
            return self.liveness.calls[self.split.again[name, keeping]]
        return max(self.reshard_points[name], default=self.liveness.calls[name]) + 1

    @cached_property
    def reshard_points(self) -> dict[str, list[int]]:
        """When the forward reads the values of a site."""
        found: dict[str, list[int]] = defaultdict(list)
        for kept in self.liveness.on_links:
            if kept.held in (Held.RESHARD, Held.LAST_RESHARD):
                found[self.split.space.links[kept.link].tail].append(kept.interval.birth)
        return found

    def _end_of_viewed(self, link: Link) -> int:
        """Up to which point the memory of what is viewed is there, if it is held or recomputed."""
        if self.planning.space.sites[link.tail].is_input:
            return self.liveness.points
        return self._end(link.tail, link.result) if link.tail in self.split.late else -1

    def _covered_item(self, interval: Interval, table: Table, link: Link, keeping: Keeping) -> Item:
        """A view that takes memory only where what it views is resharded, or not there.

        A part of what is not held keeps the whole in memory. So where several parts are to be held, the whole is.
        """
        tail, head = self.planning.space.sites[link.tail], self.planning.space.sites[link.head]
        moved = differs(specs_of(tail, link.result), needs_of(head, link), self.planning.space.mesh)
        alone = np.where(moved, table.sizes, np.maximum(table.sizes, self._viewed_bytes(link.tail)[:, None]))
        rows = []
        for kept in self.keepings_of(link.tail):
            covers = tail.is_input or self.options.holds(link.tail, kept)
            covers = covers or (kept in AGAIN and keeping in RECOMPUTED)
            rows.append(np.where(moved, table.sizes, 0.0) if covers else alone)
        there = [other is keeping for other in self.keepings_of(link.head)]
        sizes = np.concatenate([np.concatenate([row * now for now in there], axis=1) for row in rows])
        return Item(interval, Table(sizes), (self.planning.classes[link.tail], self.planning.classes[link.head]))

    def _viewed_bytes(self, name: str) -> Floats:
        """Bytes, by option, of what a view is a part of, which is there as long as the view; 0 for what is none."""
        link = self.viewed.get(name)
        if link is None:
            return np.zeros(len(self.planning.space.sites[name].strategies))
        value = self.planning.space.sites[link.tail].results[link.result]
        return local_bytes_of(value, needs_of(self.planning.space.sites[name], link), self.planning.space.mesh)

    def _item(self, interval: Interval, table: Table, names: tuple[str, ...]) -> Item:
        """An item of sites of the split space; what belongs to a recomputation is there if that happens."""
        origins = [self.split.origin(name) for name in names]
        there = tuple(tuple(kept is want or want is None for kept in self.keepings_of(name)) for name, want in origins)
        return self._item_under(interval, table, tuple(self.planning.classes[name] for name, _ in origins), there)

    def _item_under(
        self, interval: Interval, table: Table, variables: tuple[int, ...], there: tuple[tuple[bool, ...], ...]
    ) -> Item:
        """An item that is there under some keepings of its variables."""
        key = (id(table), there)
        if key not in self.spread:
            self.spread[key] = _spread(table, there)
        return Item(interval, self.spread[key], variables)


def _runs(keeping: Keeping) -> int:
    """How often a call runs in a step."""
    return 2 if keeping in RECOMPUTED else 1


def _spread(table: Table, there: tuple[tuple[bool, ...], ...]) -> Table:
    """A table for each combination of keepings: as it is where it is there under all of them, and else nothing."""
    if there == ((True,),) * len(there):
        return table
    counts = table.sizes.shape
    present = np.ones((), dtype=bool)
    for flags, count in zip(there, counts, strict=True):
        present = np.logical_and.outer(present, np.repeat(flags, count))
    tiled = np.tile(table.sizes, [len(flags) for flags in there])

    def find(*options: int) -> float:
        return table.at(*(option % count for option, count in zip(options, counts, strict=True)))

    return Table(np.where(present, tiled, 0.0), find)
