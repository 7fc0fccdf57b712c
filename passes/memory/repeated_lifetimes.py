"""Find the lifetimes of values in the repeated units that a program leaves out (`passes.strategies.repeated`).

The left-out units are missing between two units of the program; the unit behind this gap stands for them. Each unit has
runs of consecutive calls: its forward, its backward, and parts of the update. In each run, the left-out units would lie
just before the later of the two units beside the gap. So if a run makes a value, the value's copies count from the
first point of the later unit in this run. If the last reader of a value is in a run, the copies are freed just before
this point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from passes.memory.liveness import Held, Interval, Liveness, OnLink, RepeatedLifetimes
from passes.strategies.enumerate_strategies import SearchSpace, leaves_program
from passes.strategies.repeated import AFTER_GAP, RepeatedUnits

Key = tuple[str | int, Hashable]
"""Key of some memory: (name of a site, index of its result), or (index of a link, (kind, number)) as in `numbered`."""


def with_repeated(liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace) -> Liveness:
    """Return `liveness` with its field `repeated`: the lifetimes of the values in the units that `space` leaves out."""
    kept = numbered(liveness.on_links)
    intervals: dict[Key, Interval] = {**liveness.values, **{key: each.interval for key, each in kept.items()}}
    found = repeated_intervals(liveness, repeated, space, intervals)
    values = {key: found[key] for key in liveness.values if key in found}
    on_links = ((replace(kept[key], interval=found[key][0]), found[key][1]) for key in kept if key in found)
    return replace(liveness, repeated=RepeatedLifetimes(values, tuple(on_links)))


def repeated_intervals(
    liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace, intervals: Mapping[Key, Interval]
) -> dict[Key, tuple[Interval, int]]:
    """Return the lifetime and the number of the copies that each value has in left-out units.

    Values without copies are absent. `intervals` has the lifetimes of the values of the program. A key names a value,
    or the memory of a link (`numbered`).
    """
    gaps = _gaps(liveness, repeated, space)
    of_sites = {sites.names[AFTER_GAP]: sites.left_out for sites in repeated.sites}
    standing: dict[str | int, int] = {**of_sites, **repeated.links}
    found: dict[Key, tuple[Interval, int]] = {}
    for (keeper, which), interval in intervals.items():
        if keeper in standing:
            first = gaps.get(interval.birth, interval.birth)
            last = gaps[interval.death] - 1 if interval.death in gaps else interval.death
            if first <= last:
                found[keeper, which] = Interval(first, last), standing[keeper]
    return found


def numbered(on_links: Iterable[OnLink]) -> dict[Key, OnLink]:
    """Return memory of links by a key (link, (kind, number)).

    `number` counts the entries with the same link and kind, from 0.
    """
    counts: dict[tuple[int, Held], int] = defaultdict(int)
    found: dict[Key, OnLink] = {}
    for kept in on_links:
        found[kept.link, (kept.held, counts[kept.link, kept.held])] = kept
        counts[kept.link, kept.held] += 1
    return found


def _gaps(liveness: Liveness, repeated: RepeatedUnits, space: SearchSpace) -> dict[int, int]:
    """Return for each point of a repeated unit the point at which left-out units of the same run would end.

    This is the first point, in the same run, of the later of the two units beside the gap. Points of a unit are its
    calls, the reshards of its operands and results, and the additions of its gradients.
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
