"""When left-out blocks hold values: see `passes.strategies.repeated`.

In each run of calls (forward, backward, parts of the update), left-out units stand between the two units beside them.
So a value that the unit behind them makes in a run is there, of left-out units, from the start of the second of the two
units in that run. A value that a unit reads last in a run has gone by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from passes.memory.liveness import Held, Interval, Liveness, OnLink, RepeatedLifetimes
from passes.strategies.enumerate_strategies import SearchSpace, leaves_program
from passes.strategies.repeated import AHEAD, BEHIND, RepeatedUnits

Key = tuple[str | int, Hashable]
"""What keeps something in memory, a site or the link of an index; and which of what it keeps."""


def with_repeated(liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace) -> Liveness:
    """The lifetimes of a program, with those of what it leaves out."""
    kept = numbered(liveness.on_links)
    intervals: dict[Key, Interval] = {**liveness.values, **{key: each.interval for key, each in kept.items()}}
    found = repeated_intervals(liveness, repeated, space, intervals)
    values = {key: found[key] for key in liveness.values if key in found}
    on_links = ((replace(kept[key], interval=found[key][0]), found[key][1]) for key in kept if key in found)
    return replace(liveness, repeated=RepeatedLifetimes(values, tuple(on_links)))


def repeated_intervals(
    liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace, intervals: Mapping[Key, Interval]
) -> dict[Key, tuple[Interval, int]]:
    """When left-out units hold values, and how many these units are, by the key of the value that stands for them.

    Args:
        liveness: the points of the program.
        repeated, space: the left-out units, and the space without them.
        intervals: what is in memory when.
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
    """What links keep, what one link keeps of a kind numbered in order."""
    counts: dict[tuple[int, Held], int] = defaultdict(int)
    found: dict[Key, OnLink] = {}
    for kept in on_links:
        found[kept.link, (kept.held, counts[kept.link, kept.held])] = kept
        counts[kept.link, kept.held] += 1
    return found


def _gaps(liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace) -> dict[int, int]:
    """Each point of a unit to the first point of the second of the two units beside the left-out ones, in its run.

    The points of a unit are those of its calls, of the reshards on links into these or from these out of the program,
    and of adding its gradients up over micro-batches.
    """
    into: dict[str, list[int]] = defaultdict(list)
    for link, point in zip(space.links, map(liveness.reshards.__getitem__, range(len(space.links))), strict=True):
        if not leaves_program(space.sites[link.head], link):
            into[link.head].append(point)
    gaps: dict[int, int] = {}
    adding: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    starts = {place: min([liveness.calls[name], *into[name]]) for place, name in repeated.starts.items()}
    for name, spot in repeated.spots.items():
        start = starts.get((spot.repeat, spot.place))
        if start is not None:
            gaps |= dict.fromkeys((liveness.calls[name], *into[name]), start)
        if name in liveness.adding:
            adding[spot.repeat][spot.unit].append(liveness.adding[name])
    for index, link in enumerate(space.links):
        spot = repeated.spots.get(link.tail)
        if spot is not None and leaves_program(space.sites[link.head], link):
            gaps[liveness.reshards[index]] = starts.get((spot.repeat, spot.place), liveness.reshards[index])
    for units in adding.values():
        start = max(min(units[AHEAD]), min(units[BEHIND]))
        gaps |= {point: start for points in units.values() for point in points}
    return gaps
