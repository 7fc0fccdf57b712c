"""Finds the values of the forward that may be recomputed in the backward, or offloaded until then.

A site of the forward has a *policy*, as in torch's selective checkpointing. It says how the backward gets the value:

* AS_READ: the value stays for its readers in the backward, and is freed at once if there are none. This is the policy
  without recomputation.
* KEPT: the backward does not read the value, but it stays for the recomputation of other values.
* EARLY, LATE: the value is freed after the forward and recomputed. LATE recomputes just before the first read in the
  backward. EARLY recomputes before the backward first reads any recomputable value of the segment.
* HOST_EARLY, HOST_LATE: the value goes to the host, and is freed after the forward. HOST_LATE fetches just before the
  first read in the backward, HOST_EARLY before any recomputation might read the value.

A segment is a repeated block, or a run of sites between blocks. Values are recomputed from values that enter their
segment, so no recomputation reaches through several segments.

Recomputable values are pure and draw no random numbers. They do not leave the program, and no optimizer update reads
them. Only useful policies are offered: for values that the backward reads and that are not negligibly small, and for
unread operands that their recomputation needs. Offload is offered for the same values, and for such operands as cannot
be recomputed. Views and aliases of inputs are never offloaded.
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
"""Values smaller than this share of all values that the backward reads are not recomputed for their own sake."""


class ValuePolicy(Enum):
    """How the backward gets a value of the forward; see the module's docstring."""

    AS_READ = "as read"
    KEPT = "kept"
    EARLY = "early"
    LATE = "late"
    HOST_EARLY = "on the host, back early"
    HOST_LATE = "on the host, back late"


RECOMPUTED = (ValuePolicy.EARLY, ValuePolicy.LATE)
OFFLOADED = (ValuePolicy.HOST_EARLY, ValuePolicy.HOST_LATE)
RESTORED = (*RECOMPUTED, *OFFLOADED)
"""Policies that free a value after the forward, and recompute or fetch it in the backward."""

_AS_READ = (ValuePolicy.AS_READ,)


@dataclass(frozen=True, slots=True)
class RecomputeOptions:
    """The policies of each variable.

    Args:
        policies: variable to the policies of its sites' values; absent variables have AS_READ alone.
        anchors: site to the sites before which its value is recomputed or fetched, by policy; in program order.
        late: sites of the forward whose values the backward reads, perhaps through its own views.
    """

    policies: Mapping[int, tuple[ValuePolicy, ...]]
    anchors: Mapping[str, Mapping[ValuePolicy, str]]
    late: frozenset[str]

    def of(self, variable: int) -> tuple[ValuePolicy, ...]:
        """The policies of a variable."""
        return self.policies.get(variable, _AS_READ)

    def holds(self, name: str, policy: ValuePolicy) -> bool:
        """Whether a site's value stays in memory from the forward to the backward."""
        return policy is ValuePolicy.KEPT or (policy is ValuePolicy.AS_READ and name in self.late)

    def candidates(self, policies: Collection[ValuePolicy], counts: Mapping[str, int]) -> int:
        """The count of sites of the whole program that may have one of some policies; `counts` is
        `PlanningProblem.counts`.
        """
        may = (name for name, found in self.anchors.items() if not found.keys().isdisjoint(policies))
        return sum(counts.get(name, 1) for name in may)


def find_options(
    planning: PlanningProblem, least_share: float = LEAST_SHARE, *, offload: bool = False
) -> RecomputeOptions:
    """The useful policies, equal for all sites of a variable.

    Args:
        planning: the problem without recomputation.
        least_share: see `LEAST_SHARE`.
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
        """The first place at which the backward reads each site's value."""
        late = ((name, link) for name in self.forward for link in self.readers[name] if self.is_late(link))
        reads: dict[str, list[int]] = defaultdict(list)
        for name, link in late:
            reads[name].append(self.order[link.head])
        return {name: min(points) for name, points in reads.items()}

    @cached_property
    def pure(self) -> frozenset[str]:
        """Sites that may be recomputed."""
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
        """The variables to recompute, and the variables to keep for them."""
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
        """Whether a link joins sites of one segment."""
        return link.head in self.segment and self.segment[link.tail] == self.segment[link.head]

    def _is_unread(self, name: str) -> bool:
        return name not in self.first_read

    def _moved(self, members: Mapping[int, Sequence[str]], held: set[int]) -> set[int]:
        """The variables that are worth offloading."""
        movable = {number for number, names in members.items() if all(map(self.may_move, names))}
        return set(self._worthwhile(members, movable)) | (held & movable)

    def _worthwhile(self, members: Mapping[int, Sequence[str]], pure: set[int]) -> Iterable[int]:
        """Variables whose values the backward reads, without small ones."""
        read = self.first_read
        sizes = {
            number: sum(self.counts.get(name, 1) * _size(self.space.sites[name]) for name in names if name in read)
            for number, names in members.items()
        }
        least = self.least_share * sum(sizes.values())
        return (number for number in sorted(pure) if sizes[number] > 0 and sizes[number] >= least)

    def _anchors(self, remade: Iterable[str]) -> dict[str, dict[ValuePolicy, str]]:
        """The sites before which each site is recomputed; in program order."""
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
        """`anchors`, with the anchors of fetches; in program order."""
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
        """The sites before which a value is fetched: its first reader is a call of the backward or a recomputation."""
        direct = [link.head for link in self.readers[name] if self.is_late(link)]
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
        """The place before which each value is recomputed: its first read by the backward, else by a recomputation.
        Last
        sites come first.
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
        """The policies that every one of these values may have."""
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
