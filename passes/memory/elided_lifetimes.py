"""When what elided blocks hold is in memory: see `passes.strategies.elided`, whose proof rests on what is checked here.

The points of a unit are those of its calls, of the reshards on the links into these and on those on which their results
leave the program, and those at which its gradients are added up over micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.memory.liveness import ElidedLifetimes, Held, Interval, Liveness, OnLink
from passes.strategies.elided import AHEAD, BEHIND, Elided, NotAlikeError
from passes.strategies.enumerate_strategies import SearchSpace, leaves_program

Key = tuple[str | int, Hashable]
"""What keeps something in memory, a site or the link of an index; and which of what it keeps."""


def with_elided(liveness: Liveness, elided: Elided, space: SearchSpace) -> Liveness:
    """The lifetimes of a program, with those of what it leaves out.

    Raises:
        NotAlikeError: the units beside what is left out do not hold alike values at alike points.
    """
    kept = numbered(liveness.on_links)
    intervals: dict[Key, Interval] = {**liveness.values, **{key: each.interval for key, each in kept.items()}}
    found = elided_intervals(liveness, elided, space, intervals)
    values = {key: found[key] for key in liveness.values if key in found}
    on_links = ((replace(kept[key], interval=found[key][0]), found[key][1]) for key in kept if key in found)
    return replace(liveness, elided=ElidedLifetimes(values, tuple(on_links)))


def elided_intervals(
    liveness: Liveness, elided: Elided, space: SearchSpace, intervals: Mapping[Key, Interval]
) -> dict[Key, tuple[Interval, int]]:
    """When elided units hold what, and how many they are, by the key of what stands for it.

    Args:
        liveness: the points of the program.
        elided, space: what is left out, and of what.
        intervals: what is in memory when.

    Raises:
        NotAlikeError: the units beside what is left out do not hold alike values at alike points.
    """
    if not elided.sites:
        return {}
    kept_by: dict[str | int, list[Hashable]] = defaultdict(list)
    for keeper, which in intervals:
        kept_by[keeper].append(which)
    alike: list[tuple[Sequence[str | int], str | int, int]] = [
        *((sites.names, sites.names[BEHIND], sites.elided) for sites in elided.sites),
        *((links.indices, links.standing, links.elided) for links in elided.links),
    ]
    rows = [
        _UnitValues(tuple((keeper, which) for keeper in keepers), (standing, which), number)
        for keepers, standing, number in alike
        for which in dict.fromkeys(which for keeper in keepers for which in kept_by[keeper])
    ]
    return _intervals(_Points.of(liveness, elided, space), rows, intervals)


def numbered(on_links: Iterable[OnLink]) -> dict[Key, OnLink]:
    """What links keep, what one link keeps of a kind numbered in order."""
    counts: dict[tuple[int, Held], int] = defaultdict(int)
    found: dict[Key, OnLink] = {}
    for kept in on_links:
        found[kept.link, (kept.held, counts[kept.link, kept.held])] = kept
        counts[kept.link, kept.held] += 1
    return found


@dataclass(frozen=True, slots=True)
class _UnitValues:
    """The same value (or link) in each of the four units, that which stands for the elided ones, and their number."""

    keys: Sequence[Key]
    standing: Key
    number: int


@dataclass(frozen=True, slots=True)
class _Points:
    """Where points stand in the units.

    Args:
        spots: point to its unit, and what it is of: equal for the same point of alike units.
        starts: what a point is of to the first point of the second of the neighbouring runs that it lies in.
    """

    spots: Mapping[int, tuple[int, Hashable]]
    starts: Mapping[Hashable, int]

    @classmethod
    def of(cls, liveness: Liveness, elided: Elided, space: SearchSpace) -> _Points:
        into: dict[str, list[int]] = defaultdict(list)
        leaving = [leaves_program(space.sites[link.head], link) for link in space.links]
        for index, link in enumerate(space.links):
            if not leaving[index]:
                into[link.head].append(liveness.reshards[index])
        spots: dict[int, tuple[int, Hashable]] = {}
        places: dict[Hashable, tuple[int, int]] = {}
        for name, spot in elided.spots.items():
            if (spot.repeat, spot.place) in elided.starts:
                spots[liveness.calls[name]] = spot.unit, ("call", spot.repeat, spot.place)
                places["call", spot.repeat, spot.place] = spot.repeat, spot.place
        for row, alike in enumerate(elided.links):
            for unit, index in enumerate(alike.indices):
                link = space.links[index]
                spot = elided.spots.get(link.tail if leaving[index] else link.head)
                if spot is not None and (spot.repeat, spot.place) in elided.starts:
                    spots[liveness.reshards[index]] = unit, ("link", row)
                    places["link", row] = spot.repeat, spot.place
        firsts = {name: min([liveness.calls[name], *into[name]]) for name in elided.starts.values()}
        starts = {what: firsts[elided.starts[place]] for what, place in places.items()}
        starts |= _add_adding(liveness, elided, spots)
        return cls(spots, starts)

    def is_shifted(self, one: int, two: int) -> bool:
        """Whether `two` is the point of the next unit that is like `one`."""
        first, second = self.spots.get(one), self.spots.get(two)
        return first is not None and second == (first[0] + 1, first[1])

    def is_inside(self, point: int) -> bool:
        """Whether a point is of a unit that the elided ones lie beside."""
        spot = self.spots.get(point)
        return spot is not None and spot[0] in (AHEAD, BEHIND)

    def between(self, ahead: Interval, behind: Interval) -> Interval | None:
        """The points at which what elided units hold is there, all of it; None: at none.

        Args:
            ahead: when it is there of the unit ahead.
            behind: of the unit behind.
        """
        birth = self._start(ahead.birth, behind.birth, back=1)
        death = self._start(ahead.death, behind.death)
        first = behind.birth if birth is None else birth
        last = behind.death if death is None else death - 1
        return Interval(first, last) if first <= last else None

    def _start(self, one: int, two: int, back: int = 0) -> int | None:
        """The start of the second of the neighbouring runs that two points lie in; None for one and the same point.

        Of what begins right behind a point of the unit, that point counts (`back`).
        """
        if one == two:
            return None
        for step in range(back + 1):
            if self.is_shifted(one - step, two - step):
                return self.starts[self.spots[one - step][1]]
        raise NotAlikeError(f"what alike units hold begins or ends at points {one} and {two}, which are not alike")


def _add_adding(liveness: Liveness, elided: Elided, spots: dict[int, tuple[int, Hashable]]) -> dict[Hashable, int]:
    """Note the points at which gradients are added up; the start of the second of the runs of each repeat."""
    runs: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    starts: dict[Hashable, int] = {}
    for name, point in liveness.adding.items():
        spot = elided.spots.get(name)
        if spot is not None:
            spots[point] = spot.unit, ("adding", spot.repeat, spot.place)
            runs[spot.repeat][spot.unit].append(point)
    for name in liveness.adding:
        spot = elided.spots.get(name)
        if spot is not None:
            units = runs[spot.repeat]
            starts["adding", spot.repeat, spot.place] = max(min(units[AHEAD]), min(units[BEHIND]))
    return starts


def _intervals(
    points: _Points, rows: Sequence[_UnitValues], intervals: Mapping[Key, Interval]
) -> dict[Key, tuple[Interval, int]]:
    """Of what stands for elided units: when these hold it, and how many they are."""
    found: dict[Key, tuple[Interval, int]] = {}
    outside = dict(intervals)
    for row in rows:
        first, ahead, behind, last = (intervals.get(key) for key in row.keys)
        for key in row.keys:
            outside.pop(key, None)
        if ahead is None or behind is None:
            if ahead is not behind:
                raise NotAlikeError(f"only one of {row.keys[AHEAD]} and {row.keys[BEHIND]} is held in memory")
            continue
        interval = points.between(ahead, behind)
        if interval is not None:
            found[row.standing] = (interval, row.number)
        _check_outer(points, first, ahead, step=1)
        _check_outer(points, last, behind, step=-1)
    for key, interval in outside.items():
        if points.is_inside(interval.birth) or points.is_inside(interval.death):
            raise NotAlikeError(f"{key}, outside of the repeated blocks, is in memory from or to a point inside of one")
    return found


def _check_outer(points: _Points, outer: Interval | None, inner: Interval, step: int) -> None:
    """What the outer units hold begins and ends inside the inner ones only as what the inner ones hold does."""
    if outer is None:
        return
    for one, two in ((outer.birth, inner.birth), (outer.death, inner.death)):
        if points.is_inside(one) and not points.is_shifted(*((one, two) if step == 1 else (two, one))):
            raise NotAlikeError(f"what alike blocks hold begins or ends at {one} and {two}, which are not alike")
