"""Lifetimes of values in blocks left out (`passes.strategies.repeated`).

In each run of calls (forward, backward, parts of the update), the missing units stand between the two units beside
them. A value of the unit behind the gap has copies in the missing units. In its run, all copies exist from the
start of the second of the two units. Values whose last reader is in the run are freed by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from passes.memory.liveness import Held, Interval, Liveness, OnLink, RepeatedLifetimes
from passes.strategies.enumerate_strategies import SearchSpace, leaves_program
from passes.strategies.repeated import BEHIND, RepeatedUnits

Key = tuple[str | int, Hashable]
"""The site or link index that keeps a value in memory, and the value's number."""


def with_repeated(liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace) -> Liveness:
    """Add the lifetimes of missing units to those of a program."""
    kept = numbered(liveness.on_links)
    intervals: dict[Key, Interval] = {**liveness.values, **{key: each.interval for key, each in kept.items()}}
    found = repeated_intervals(liveness, repeated, space, intervals)
    values = {key: found[key] for key in liveness.values if key in found}
    on_links = ((replace(kept[key], interval=found[key][0]), found[key][1]) for key in kept if key in found)
    return replace(liveness, repeated=RepeatedLifetimes(values, tuple(on_links)))


def repeated_intervals(
    liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace, intervals: Mapping[Key, Interval]
) -> dict[Key, tuple[Interval, int]]:
    """Lifetimes of missing units' values, and the number of units, by the key of the value that stands for them.

    Args:
        liveness: the points of the program.
        repeated, space: the missing units, and the space without them.
        intervals: lifetimes of the program's own values.
    """
    gaps = _gaps(liveness, repeated, space)
    standing: dict[str | int, int] = {sites.names[BEHIND]: sites.left_out for sites in repeated.sites}
    standing |= {links.standing: links.left_out for links in repeated.links}
    found: dict[Key, tuple[Interval, int]] = {}
    for (keeper, which), interval in intervals.items():
        if keeper in standing:
            first = gaps.get(interval.birth, interval.birth)
            last = gaps[interval.death] - 1 if interval.death in gaps else interval.death
            if first <= last:
                found[keeper, which] = Interval(first, last), standing[keeper]
    return found


def numbered(on_links: Iterable[OnLink]) -> dict[Key, OnLink]:
    """The values that links keep, numbered in order for each link and kind."""
    counts: dict[tuple[int, Held], int] = defaultdict(int)
    found: dict[Key, OnLink] = {}
    for kept in on_links:
        found[kept.link, (kept.held, counts[kept.link, kept.held])] = kept
        counts[kept.link, kept.held] += 1
    return found


def _gaps(liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace) -> dict[int, int]:
    """Map each point of a unit to the first point of the second of the two units beside the gap, in its run.

    A unit has points for its calls, for reshards on links into them or from them out of the program, and for the
    addition of its gradients to the sums over micro-batches.
    """
    into: dict[str, list[int]] = defaultdict(list)
    for link, point in zip(space.links, map(liveness.reshards.__getitem__, range(len(space.links))), strict=True):
        if not leaves_program(space.sites[link.head], link):
            into[link.head].append(point)
    gaps: dict[int, int] = {}
    starts = {place: min([liveness.calls[name], *into[name]]) for place, name in repeated.starts.items()}
    for name, spot in repeated.spots.items():
        start = starts.get((spot.repeat, spot.place))
        if start is not None:
            added = [liveness.adding[name]] if name in liveness.adding else []
            gaps |= dict.fromkeys((liveness.calls[name], *into[name], *added), start)
    for index, link in enumerate(space.links):
        spot = repeated.spots.get(link.tail)
        if spot is not None and leaves_program(space.sites[link.head], link):
            gaps[liveness.reshards[index]] = starts.get((spot.repeat, spot.place), liveness.reshards[index])
    return gaps
