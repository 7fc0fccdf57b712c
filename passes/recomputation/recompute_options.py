"""Find the values of the forward that may be recomputed or offloaded, and the sites before which they are restored.

A *policy* says what happens to a value after its last use in the forward:

* AS_READ: the value stays if the backward reads it, and otherwise is freed at once. Without recomputation, all values
  have this policy.
* KEPT: the value stays for a recomputation, though the backward does not read it.
* EARLY, LATE: the value is freed after the forward and recomputed. LATE recomputes the value just before its first
  reader in the backward. EARLY recomputes it before the backward reads any recomputable value of the same segment.
* HOST_EARLY, HOST_LATE: the value goes to the host and is freed after the forward. LATE fetches it just before the
  backward first reads it. EARLY fetches it before any recomputation might read it.

A segment is a repeated block, or a run of sites between blocks. Values are recomputed from values that enter their
segment, so no recomputation reaches through several segments.

A value may be recomputed if its call is pure and draws no random number from a generator. The value must not leave the
program, and no optimizer update may read it. Values that the backward reads get policies unless they are negligibly
small, and so do their operands, which a recomputation needs. Large values that the backward reads may be offloaded, and
so may operands that a recomputation needs kept. Views and aliases of inputs are never offloaded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.forward_calls import ForwardCalls
from passes.recomputation.recompute_segments import segments
from passes.strategies.enumerate_strategies import Link, Site

LEAST_SHARE = 1e-3
"""A variable gets policies if its values are at least this share of the bytes that the backward reads.

Values that a recomputation needs get policies at any size.
"""


class ValuePolicy(Enum):
    """A choice for a value after the forward: keep, recompute or offload it (see the module's docstring)."""

    AS_READ = "as read"
    KEPT = "kept"
    EARLY = "early"
    LATE = "late"
    HOST_EARLY = "on the host, back early"
    HOST_LATE = "on the host, back late"


RECOMPUTED = (ValuePolicy.EARLY, ValuePolicy.LATE)
OFFLOADED = (ValuePolicy.HOST_EARLY, ValuePolicy.HOST_LATE)
RESTORED = (*RECOMPUTED, *OFFLOADED)
"""Policies under which a value is freed after the forward, and restored in the backward."""

_AS_READ = (ValuePolicy.AS_READ,)


@dataclass(frozen=True, slots=True)
class RecomputeOptions:
    """The possible policies of values. A variable is one decision for all sites (nodes) that are alike.

    Args:
        policies: the possible policies of each variable that has other policies than AS_READ.
        anchors: for each site and policy, the site before which the value is restored. Sites are in program order.
        late: names of forward sites whose values the backward reads, directly or through views that the backward makes.
    """

    policies: Mapping[int, tuple[ValuePolicy, ...]]
    anchors: Mapping[str, Mapping[ValuePolicy, str]]
    late: frozenset[str]

    def of(self, variable: int) -> tuple[ValuePolicy, ...]:
        """Return the policies (keep, recompute, offload) that a variable's values may have."""
        return self.policies.get(variable, _AS_READ)

    def holds(self, name: str, policy: ValuePolicy) -> bool:
        """Whether a site's value stays in memory from the forward to the backward under a policy."""
        return policy is ValuePolicy.KEPT or (policy is ValuePolicy.AS_READ and name in self.late)

    def candidates(self, policies: Collection[ValuePolicy], counts: Mapping[str, int]) -> int:
        """Return the number of sites of the whole model that may have one of `policies`.

        `counts` has the number of sites for which a site stands, as from `PlanningProblem.counts`.
        """
        may = (name for name, found in self.anchors.items() if not found.keys().isdisjoint(policies))
        return sum(counts.get(name, 1) for name in may)


def find_options(
    planning: PlanningProblem, least_share: float = LEAST_SHARE, *, offload: bool = False
) -> RecomputeOptions:
    """Return the policies (keep, recompute, offload) that the values of each variable may have.

    Args:
        planning: the problem without recomputation.
        least_share: a variable gets policies if its values are at least this share of the bytes that the backward
            reads. Values that a recomputation needs get policies at any size.
        offload: whether values may go to the host.
    """
    return _OptionSearch(planning.space, planning.classes, planning.counts(), least_share, offload).run()


@dataclass
class _OptionSearch(ForwardCalls):
    classes: Mapping[str, int]
    counts: Mapping[str, int]
    least_share: float
    offload: bool

    @cached_property
    def segment(self) -> Mapping[str, int]:
        return segments([self.space.sites[name] for name in self.forward])

    @cached_property
    def first_read(self) -> dict[str, int]:
        """The index in program order of the first call after the forward that reads a site's value, by the site's name.

        Sites whose values no such call reads are absent.
        """
        reads = {name: [self.order[head] for head in self.late_readers(name)] for name in self.forward}
        return {name: min(points) for name, points in reads.items() if points}

    @cached_property
    def pure(self) -> frozenset[str]:
        return frozenset(filter(self.may_be_remade, self.forward))

    def run(self) -> RecomputeOptions:
        members: dict[int, list[str]] = defaultdict(list)
        for name in self.forward:
            members[self.classes[name]].append(name)
        pure = {number for number, names in members.items() if all(name in self.pure for name in names)}
        remade, held = self._needed(members, pure)
        anchors = self._anchors([name for number in remade for name in members[number]])
        moved = self._moved(members, held) if self.offload else set[int]()
        anchors = self._with_host_anchors([name for number in moved for name in members[number]], anchors)
        policies: dict[int, tuple[ValuePolicy, ...]] = {}
        for number in sorted(remade | held | moved):
            policies[number] = self._policies(members[number], anchors)
        return RecomputeOptions(
            {number: found for number, found in policies.items() if len(found) > 1}, anchors, frozenset(self.first_read)
        )

    def _needed(self, members: Mapping[int, Sequence[str]], pure: set[int]) -> tuple[set[int], set[int]]:
        """Return the variables that may be recomputed, and the variables that may have to be kept for recomputations.

        The first are the variables of `_worthwhile`, and the variables of their operands in the same segment. `members`
        has the forward sites of each variable, and `pure` the variables whose sites may all be recomputed.
        """
        remade, held = set(self._worthwhile(members, pure)), set[int]()
        waiting = [name for number in remade for name in members[number]]
        while waiting:
            name = waiting.pop()
            for link in self.operands[name]:
                number = self.classes[link.tail]
                if number in remade or link.tail not in self.segment:
                    continue
                if number in pure and self._is_within(link) and self._is_unread(link.tail):
                    remade.add(number)
                    waiting += members[number]
                elif self._is_unread(link.tail):
                    held.add(number)
        return remade, held

    def _is_within(self, link: Link) -> bool:
        return link.head in self.segment and self.segment[link.tail] == self.segment[link.head]

    def _is_unread(self, name: str) -> bool:
        return name not in self.first_read

    def _moved(self, members: Mapping[int, Sequence[str]], held: set[int]) -> set[int]:
        """Return the variables that may be offloaded.

        Their values are large values that the backward reads, or operands in `held` that recomputations need kept.
        """
        movable = {number for number, names in members.items() if all(map(self.may_move, names))}
        return set(self._worthwhile(members, movable)) | (held & movable)

    def _worthwhile(self, members: Mapping[int, Sequence[str]], pure: set[int]) -> Iterable[int]:
        """Return the variables of `pure` with at least `least_share` of the bytes of values that the backward reads."""
        read = self.first_read
        sizes = {
            number: sum(self.counts.get(name, 1) * _size(self.space.sites[name]) for name in names if name in read)
            for number, names in members.items()
        }
        least = self.least_share * sum(sizes.values())
        return (number for number in sorted(pure) if sizes[number] > 0 and sizes[number] >= least)

    def _anchors(self, remade: Iterable[str]) -> dict[str, dict[ValuePolicy, str]]:
        """Return the sites before which each site in `remade` is recomputed, by policy (EARLY, LATE).

        The dict is in program order.
        """
        names = list(self.space.sites)
        late = self._late_points(set(remade))
        early: dict[int, int] = {}
        for name in late:
            number = self.segment[name]
            early[number] = min(early.get(number, len(names)), late[name])
        return {
            name: {ValuePolicy.EARLY: names[early[self.segment[name]]], ValuePolicy.LATE: names[point]}
            for name, point in reversed(late.items())
        }

    def _with_host_anchors(
        self, moved: Collection[str], anchors: Mapping[str, Mapping[ValuePolicy, str]]
    ) -> dict[str, dict[ValuePolicy, str]]:
        """Return `anchors` with the sites before which the values of `moved` are fetched from the host.

        The dict is in program order.
        """
        moved = set(moved)
        found: dict[str, dict[ValuePolicy, str]] = {}
        for name in self.forward:
            item = dict(anchors.get(name, {}))
            if name in moved:
                item |= self._host_anchors(name, anchors)
            if item:
                found[name] = item
        return found

    def _host_anchors(self, name: str, anchors: Mapping[str, Mapping[ValuePolicy, str]]) -> dict[ValuePolicy, str]:
        """Return the sites before which an offloaded value is fetched, by policy (HOST_EARLY, HOST_LATE).

        The site is the first reader in the backward. If only recomputations read the value, it is the site in `anchors`
        before which the first of them runs.
        """
        direct = self.late_readers(name)
        clones = [anchors[link.head] for link in self.readers[name] if ValuePolicy.EARLY in anchors.get(link.head, {})]
        late = direct or [clone[ValuePolicy.LATE] for clone in clones]
        early = direct + [clone[ValuePolicy.EARLY] for clone in clones]
        if not early:
            return {}
        return {
            ValuePolicy.HOST_EARLY: min(early, key=self.order.__getitem__),
            ValuePolicy.HOST_LATE: min(late, key=self.order.__getitem__),
        }

    def _late_points(self, remade: Collection[str]) -> dict[str, int]:
        """Return for each site in `remade` the index of the first site after the forward that needs its value.

        If only recomputed sites read the value, the least of their own results is taken. The dict is in reverse program
        order.
        """
        found: dict[str, int] = {}
        for name in reversed(self.forward):
            if name in remade:
                links = [link for link in self.readers[name] if self._is_within(link)]
                after = [found[link.head] for link in links if link.head in found]
                if name in self.first_read or after:
                    found[name] = self.first_read[name] if name in self.first_read else min(after)
        return found

    def _policies(
        self, names: Sequence[str], anchors: Mapping[str, Mapping[ValuePolicy, str]]
    ) -> tuple[ValuePolicy, ...]:
        found = [ValuePolicy.AS_READ]
        if any(self._is_unread(name) for name in names):
            found.append(ValuePolicy.KEPT)
        for early, late in (RECOMPUTED, OFFLOADED):
            if all(early in anchors.get(name, {}) for name in names):
                found.append(early)
                if any(anchors[name][late] != anchors[name][early] for name in names):
                    found.append(late)
        return tuple(found)


def _size(site: Site) -> int:
    return sum(math.prod(value.shape) * value.itemsize for value in site.results)
