"""Count the memory of a program that may recompute or offload values, for each choice of strategies and policies.

A value of the forward has two lives. In its *first life* the forward reads it, and in its *second life* the rest of the
step does. `recompute_split` makes a program with a further site (node) for each second life and for each possible
recomputation. Memory is counted on that program. First lives depend on no policies. A second life begins where the
first life ends if the value is held, or else at its recomputation or its fetch from the host. Operands of a
recomputation are in memory if the recomputation happens.

An item (`UsedBytes`) is memory in use: an interval of program points, and a table of bytes. The table has an axis for
each variable that the bytes depend on, over the variable's options.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from passes.memory.liveness import Held, Interval, Liveness, OnLink
from passes.memory.memory_tables import MemoryTables, differs
from passes.memory.memory_usage import UsedBytes
from passes.memory.repeated_lifetimes import Key, numbered, repeated_intervals
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, RESTORED, RecomputeOptions, ValuePolicy
from passes.recomputation.recompute_split import SplitSpace, split_space
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import Link, leaves_program, needs_of, specs_of
from passes.strategies.fold_blocks import module_paths
from passes.strategies.price import local_bytes_of
from passes.strategies.repeated import RepeatedUnits, find_repeated, paths_where_run


@dataclass
class RecomputeMemory:
    """The memory of a program with recomputation and offload, as items (`UsedBytes`).

    Args:
        planning: the problem without recomputation.
        spread: a cache of tables of bytes, in which equal values share a table.
        wholes: a cache for `_whole_bytes`, by the name of a view.
    """

    planning: PlanningProblem
    options: RecomputeOptions
    spread: dict[tuple[object, ...], Floats] = field(default_factory=dict)
    wholes: dict[str, Floats] = field(default_factory=dict)

    def policies_of(self, name: str) -> tuple[ValuePolicy, ...]:
        return self.options.of(self.planning.classes[name])

    @cached_property
    def split(self) -> SplitSpace:
        return split_space(self.planning.space, self.options, self.planning.classes)

    @cached_property
    def liveness(self) -> Liveness:
        return self.planning.liveness.of(self.split.space)

    @cached_property
    def memory(self) -> MemoryTables:
        return MemoryTables(self.split.space)

    @cached_property
    def repeated(self) -> RepeatedUnits:
        """The repeated units of the program in which each value has two lives."""
        paths = module_paths(self.planning.space.program)
        paths |= {copy: paths[name] for copy, (name, _) in self.split.sources.items()}
        restored = set(self.split.restored.values())
        return find_repeated(self.split.space, paths_where_run(self.split.space, paths, restored))

    def items(self) -> Iterator[tuple[str, UsedBytes]]:
        """Yield (name of a site, item of memory) pairs. An item's table has all options and policies.

        The name is "" for an item that is not a value.

        Raises:
            NotAlikeError: the program leaves out blocks, and the blocks beside them do not keep equal values in memory
                for equal times.
        """
        for name, point in self.liveness.calls.items():
            if name not in self.split.late.values() and self.split.origin(name)[1] not in OFFLOADED:
                workspace = self.memory.of_call(name)
                if workspace is not None:
                    yield "", self._item(Interval(point, point), workspace, (name,))
        held: dict[Key, UsedBytes] = {}
        for key, item in self._held():
            held[key] = item
            yield _site(key), item
        intervals = {key: item.interval for key, item in held.items()}
        for key, there in repeated_intervals(self.liveness, self.repeated, self.split.space, intervals).items():
            yield _site(key), dataclasses.replace(held[key], interval=there[0], number=there[1])

    def _held(self) -> Iterator[tuple[Key, UsedBytes]]:
        """Yield the items that stay in memory after their call, each with a key.

        The key names the value or the link that keeps the memory.
        """
        for (name, result), interval in self.liveness.values.items():
            if name in self.planning.classes:
                table = self.memory.of_value(name, result, self._copies(name))
                yield (name, result), self._item(interval, table, (name,))
        for key, kept in numbered(self.liveness.on_links).items():
            if not self._is_of_restored_view(kept):
                yield key, self._on_link(kept)
                yield from ((("behind", key), item) for item in self._result_behind(kept))
        for name, copy in self.split.late.items():
            for policy in self.policies_of(name):
                for number, item in enumerate(self._late_items(name, policy)):
                    yield (copy, (policy, number)), item

    def _copies(self, name: str) -> float:
        ratio = self.liveness.state_bytes_per_parameter_byte
        return 1 + ratio if name in self.liveness.parameters else 1.0

    def _is_of_restored_view(self, kept: OnLink) -> bool:
        """Whether a link's memory is that of a recomputed view. The view's second life counts this memory already."""
        link = self.split.space.links[kept.link]
        is_view = link.operand == 0 and self.split.space.sites[link.head].is_alias
        return is_view and link.head in self.split.sources and kept.held in (Held.EITHER, Held.COPY)

    def _on_link(self, kept: OnLink) -> UsedBytes:
        link, held = self.split.space.links[kept.link], kept.held
        if held is Held.VALUE and link.tail in self.split.late:
            return self._value_behind(kept, link, is_held=False)
        table = self.memory.on_link(kept)
        return self._item(kept.interval, table, (link.head,) if table.ndim == 1 else (link.tail, link.head))

    def _value_behind(self, kept: OnLink, link: Link, *, is_held: bool) -> UsedBytes:
        """Return the item for the memory of a forward value on a link, after the value's last use in the forward.

        `kept` has the interval, and `link` joins the value to its reader. With `is_held`, the item exists under the
        policies that hold the value in memory, and otherwise under all other policies.
        """
        is_there = tuple(self.options.holds(link.tail, policy) is is_held for policy in self.policies_of(link.tail))
        origin, want = self.split.origin(link.head)
        there = tuple(want is None or policy is want for policy in self.policies_of(origin))
        variables = (self.planning.classes[link.tail], self.planning.classes[origin])
        return self._item_under(kept.interval, self.memory.on_link(kept), variables, (is_there, there))

    def _result_behind(self, kept: OnLink) -> Iterator[UsedBytes]:
        """Yield the item of a value that leaves the program, from the end of its second life to the last point.

        Nothing is yielded if the link `kept` does not carry such a value.
        """
        link = self.split.space.links[kept.link]
        is_result = kept.held is Held.VALUE and leaves_program(self.split.space.sites[link.head], link)
        if is_result and link.tail in self.split.late:
            is_view = link.tail in self.viewed
            over = self.ends[link.tail, 0] if is_view else self._end(link.tail, link.result)
            interval = Interval(max(kept.interval.birth, over + 1), kept.interval.death)
            if interval.birth <= interval.death:
                yield self._value_behind(dataclasses.replace(kept, interval=interval), link, is_held=True)

    def _late_items(self, name: str, policy: ValuePolicy) -> Iterator[UsedBytes]:
        if policy in RESTORED or self.options.holds(name, policy):
            is_owner = name not in self.viewed or policy in OFFLOADED
            yield from self._owned(name, policy) if is_owner else self._seen(name, policy)

    def _owned(self, name: str, policy: ValuePolicy) -> Iterator[UsedBytes]:
        """Yield the items of a value that owns its memory, for its life after the forward under one policy.

        A recomputed call makes all its results, also the results that no later call reads.
        """
        there = tuple(kept is policy for kept in self.policies_of(name))
        start = self._start(name, policy)
        for result in range(len(self.planning.space.sites[name].results)):
            end = self._end(name, result)
            interval = Interval(start, max(start, end) if policy in RECOMPUTED else end)
            if interval.birth <= interval.death:
                table = self.memory.of_value(name, result)
                yield self._item_under(interval, table, (self.planning.classes[name],), (there,))

    def _seen(self, name: str, policy: ValuePolicy) -> Iterator[UsedBytes]:
        """Yield the items of a view, for its life after the forward under one policy.

        While the viewed value is in memory anyway, the view takes no bytes. After that, the view keeps this memory.
        """
        start, end = self._start(name, policy), self.ends[name, 0]
        covered = min(end, self._end_of_viewed(self.viewed[name]))
        if start <= covered:
            yield self._view_item(Interval(start, covered), name, policy, is_covered=True)
        if max(start, covered + 1) <= end:
            yield self._view_item(Interval(max(start, covered + 1), end), name, policy, is_covered=False)

    @cached_property
    def viewed(self) -> dict[str, Link]:
        """Name of a view → the link from the viewed value to the view."""
        sites = self.planning.space.sites
        return {
            link.head: link for link in self.planning.space.links if link.operand == 0 and sites[link.head].is_alias
        }

    @cached_property
    def deaths(self) -> dict[tuple[str, int], int]:
        """The last use, also through views, of each value of the split space, as a program point.

        A key is a site's name and the index of a result.
        """
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
        """Return the last program point of the second life of result number `result` of site `name`."""
        late = self.split.late[name], result
        return self.deaths[late] if name in self.viewed else self.liveness.values[late].death

    @cached_property
    def ends(self) -> dict[tuple[str, int], int]:
        """The last program point at which a value's memory is counted for its second life.

        Keys are those of `_memory_of`. The last view of the value may live longer. Its own items then count the memory.
        """
        found: dict[tuple[str, int], int] = {}
        for place, reach in self.reaches.items():
            *others, _ = 0, 0, *sorted(self.reaches[view, 0] for view in self.views[place])
            link = self.viewed.get(place[0])
            above = found.get(self._memory_of(link), 0) if link is not None else 0
            found[place] = max(self._last_end(place), *others, min(above, reach))
        return found

    @cached_property
    def reaches(self) -> dict[tuple[str, int], int]:
        """The last program point at which a value or a view of it is used after the forward.

        Keys are those of `_memory_of`.
        """
        found: dict[tuple[str, int], int] = {}
        for name, site in reversed(list(self.planning.space.sites.items())):
            if name in self.split.late:
                for place in reversed([(name, result) for result in range(1 if site.is_alias else len(site.results))]):
                    found[place] = max(self._last_end(place), *(found[view, 0] for view in self.views[place]), 0)
        return dict(reversed(found.items()))

    @cached_property
    def views(self) -> dict[tuple[str, int], list[str]]:
        """The names of the views of a value that have second lives. Keys are those of `_memory_of`."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, link in self.viewed.items():
            if name in self.split.late:
                found[self._memory_of(link)].append(name)
        return found

    def _memory_of(self, link: Link) -> tuple[str, int]:
        """Return the key of the memory behind a link's value: (name of the site that makes it, index of the result).

        All results of a view share memory, so their index is 0.
        """
        return link.tail, 0 if self.planning.space.sites[link.tail].is_alias else link.result

    def _last_end(self, place: tuple[str, int]) -> int:
        name, result = place
        results = range(len(self.planning.space.sites[name].results)) if name in self.viewed else (result,)
        return max(self._end(name, each) for each in results)

    def _start(self, name: str, policy: ValuePolicy) -> int:
        if policy in RESTORED:
            return self.liveness.calls[self.split.restored[name, policy]]
        return max(self.reshard_points[name], default=self.liveness.calls[name]) + 1

    @cached_property
    def reshard_points(self) -> dict[str, list[int]]:
        """For the name of each site, the program points at which its results are resharded for their readers."""
        found: dict[str, list[int]] = defaultdict(list)
        for index, point in self.liveness.reshards.items():
            found[self.split.space.links[index].tail].append(point)
        return found

    def _end_of_viewed(self, link: Link) -> int:
        """Return the last program point at which the memory of a link's value is counted for the value itself (`ends`).

        The value is taken to be held or recomputed. The result is -1 if it has no second life.
        """
        if self.planning.space.sites[link.tail].is_input:
            return self.liveness.points
        return self.ends.get(self._memory_of(link), -1)

    def _view_item(self, interval: Interval, name: str, policy: ValuePolicy, *, is_covered: bool) -> UsedBytes:
        """Return the item of a view's memory under a policy.

        The memory is the resharded copy of the view's operand, or without a reshard the operand itself. `is_covered`
        says whether the operand's memory is counted already.
        """
        link = self.viewed[name]
        tail, head = self.planning.space.sites[link.tail], self.planning.space.sites[name]
        held = []
        for kept in self.policies_of(link.tail):
            is_of_it = tail.is_input or self.options.holds(link.tail, kept)
            is_of_it = is_of_it or (kept in RESTORED and policy in RECOMPUTED)
            whole = self._own_bytes(link) if kept in OFFLOADED and is_of_it else self._whole_bytes(link)
            held.append(np.zeros_like(whole) if is_covered and is_of_it else whole)
        there = tuple(other is policy for other in self.policies_of(name))
        alike = (tail.results[link.result], id(tail.strategies), link.result, id(head.strategies), link.operand)
        key = (*alike, there, *(whole.tobytes() for whole in held))
        if key not in self.spread:
            moved = differs(specs_of(tail, link.result), needs_of(head, link), self.planning.space.mesh)
            rows = [np.where(moved, self._copy_bytes(name), whole[:, None]) for whole in held]
            self.spread[key] = np.concatenate([np.concatenate([row * now for now in there], axis=1) for row in rows])
        return UsedBytes(interval, self.spread[key], (self.planning.classes[link.tail], self.planning.classes[name]))

    def _copy_bytes(self, name: str) -> Floats:
        """Return the bytes of the resharded operand of a view, [the view's options]."""
        link, head = self.viewed[name], self.planning.space.sites[name]
        value = self.planning.space.sites[link.tail].results[link.result]
        key = ("copy", value, id(head.strategies), link.operand)
        if key not in self.spread:
            self.spread[key] = local_bytes_of(value, needs_of(head, link), self.planning.space.mesh)
        return self.spread[key]

    def _own_bytes(self, link: Link) -> Floats:
        return self.planning.memory.of_value(link.tail, link.result)

    def _whole_bytes(self, link: Link) -> Floats:
        """Return the bytes of the memory that contains a link's value, for each option of the value's site.

        If the value is a view of a part, the memory of the whole counts. Some reshards copy the part out of the whole.
        If this depends on options, the larger memory counts.
        """
        above = self.viewed.get(link.tail)
        if above is None:
            return self._own_bytes(link)
        if link.tail not in self.wholes:
            site, needs = self.planning.space.sites[above.tail], needs_of(self.planning.space.sites[link.tail], above)
            moved = differs(specs_of(site, above.result), needs, self.planning.space.mesh)
            whole = np.where(moved, 0.0, 0.0 if site.is_input else self._whole_bytes(above)[:, None])
            self.wholes[link.tail] = np.maximum(self._copy_bytes(link.tail), whole.max(axis=0))
        return self.wholes[link.tail]

    def _item(self, interval: Interval, table: Floats, names: tuple[str, ...]) -> UsedBytes:
        """Return an item whose table has an axis for the options and policies of each site in `names`.

        If a site is a recomputation, the item exists only under the policy of this recomputation.
        """
        origins = [self.split.origin(name) for name in names]
        there = tuple(tuple(kept is want or want is None for kept in self.policies_of(name)) for name, want in origins)
        return self._item_under(interval, table, tuple(self.planning.classes[name] for name, _ in origins), there)

    def _item_under(
        self, interval: Interval, table: Floats, variables: tuple[int, ...], there: tuple[tuple[bool, ...], ...]
    ) -> UsedBytes:
        """Return an item that exists only under some policies of its variables.

        `there` has a flag for each policy of each variable.
        """
        key = (id(table), there)
        if key not in self.spread:
            self.spread[key] = _spread(table, there)
        return UsedBytes(interval, self.spread[key], variables)


def _site(key: Key) -> str:
    """Return the name of the site that a key of `RecomputeMemory._held` names, or "" for the memory of a link."""
    return key[0] if isinstance(key[0], str) else ""


def _spread(table: Floats, there: tuple[tuple[bool, ...], ...]) -> Floats:
    """Return a table of bytes with each axis repeated for each policy of its variable.

    The bytes are zero under a policy whose flag in `there` is False.
    """
    if there == ((True,),) * len(there):
        return table
    present = np.ones((), dtype=bool)
    for flags, count in zip(there, table.shape, strict=True):
        present = np.logical_and.outer(present, np.repeat(flags, count))
    return np.where(present, np.tile(table, [len(flags) for flags in there]), 0.0)
