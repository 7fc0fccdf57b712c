"""Repeats the unit that stands for blocks left out of a lowered program, in the order of a phase.

Calls of the program's four units run one unit after the other. These calls are *anchors*, and cut a phase into regions,
each up to the last anchor of a unit. Passes move other events: a gather of unit b may start in the region of the unit
before b. In the whole program the second copy of that gather starts in the region of the first copy of b. So

1. every event of b is in some region, at a distance in regions from b's own, its shift;
2. copy i is at that shift from the region of copy i, after as many anchors of that region;
3. events of earlier units in b's region go to the region of the first copy, events of later units to the last;
4. copies of an event far from b, or ahead of all anchors or after them, follow each other at its place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from passes.strategies.local_units import UnitSpot
from passes.strategies.repeated import BEHIND

_FARTHEST = 2
"""Most regions between an event and its unit: two units are ahead of the gap, and two behind it."""


class Event(Protocol):
    """An event in a phase."""

    @property
    def spot(self) -> UnitSpot | None:
        """The unit of the event."""
        ...

    @property
    def is_anchor(self) -> bool:
        """Whether the event keeps the order of its unit."""
        ...


_Event = TypeVar("_Event", bound=Event)
_Copy = tuple[_Event, int]
"""An event, and the number of its copy, from 1; 0 for an event outside repeated units."""


def unfolded(events: Sequence[_Event], left_out: Sequence[int]) -> list[_Copy[_Event]]:
    """The events of the whole phase, in order.

    Args:
        events: events of the phase without the missing units, in order.
        left_out: number of units that each repeat leaves out.
    """
    found = [(event, 0) for event in events]
    for repeat, count in enumerate(left_out):
        found = _Unfolding(repeat, 1 + count, found).run()
    return found


_Key = tuple[int, int, int]
"""Region, copy of the region's unit, and number of anchors of the region ahead."""


@dataclass(slots=True)
class _Unfolding(Generic[_Event]):
    """One repeat.

    Args:
        repeat: its number.
        copies: number of units that b stands for.
        events: all events of the phase.
        units: the unit of each region.
        anchors: the places of the anchors of each region.
    """

    repeat: int
    copies: int
    events: Sequence[_Copy[_Event]]
    units: list[int] = field(init=False)
    anchors: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        places = ((place, self._unit(event)) for place, (event, _) in enumerate(self.events) if event.is_anchor)
        runs = groupby((item for item in places if item[1] is not None), key=lambda item: item[1])
        found = [(unit, [place for place, _ in run]) for unit, run in runs]
        self.units = [unit for unit, _ in found if unit is not None]
        self.anchors = [run for _, run in found]

    def _unit(self, event: _Event) -> int | None:
        return event.spot.unit if event.spot is not None and event.spot.repeat == self.repeat else None

    def run(self) -> list[_Copy[_Event]]:
        """The events in order, with the copies of b's events."""
        lasts = [run[-1] for run in self.anchors]
        keyed: list[tuple[_Key, int, int, _Copy[_Event]]] = []
        for place, (event, copy) in enumerate(self.events):
            region = bisect_left(lasts, place)
            passed = bisect_left(self.anchors[region], place) if region < len(lasts) else 0
            unit = self._unit(event)
            if unit != BEHIND:
                keyed.append((self._once(region, passed, unit), place, 0, (event, copy)))
                continue
            for number, key in enumerate(self._copies(region, passed), 1):
                keyed.append((key, place, number, (event, number)))
        keyed.sort(key=lambda item: item[:3])
        return [item for *_, item in keyed]

    def _once(self, region: int, passed: int, unit: int | None) -> _Key:
        """The place of an event outside b."""
        if region >= len(self.units) or self.units[region] != BEHIND:
            return region, 0, passed
        is_behind = region + 1 < len(self.units) and unit is not None and self._is_behind(region, unit)
        return region, self.copies if is_behind else 1, passed

    def _is_behind(self, region: int, unit: int) -> bool:
        """Whether a unit runs after b around b's region; units run in the order of their numbers or in reverse."""
        return (unit > BEHIND) == (self.units[region + 1] > BEHIND)

    def _copies(self, region: int, passed: int) -> Iterator[_Key]:
        """The places of the copies of an event of b."""
        own = min(
            (number for number, unit in enumerate(self.units) if unit == BEHIND),
            key=lambda number: abs(number - region),
            default=None,
        )
        is_at_an_end = region == len(self.units) or (region, passed) == (0, 0)
        if own is None or is_at_an_end or abs(region - own) > _FARTHEST:
            yield from [(region, 0, passed)] * self.copies
            return
        here = len(self.anchors[region])
        inside = round(passed / here * len(self.anchors[own]))
        for number in range(1, self.copies + 1):
            target = number + region - own
            if 1 <= target <= self.copies:
                yield own, target, inside
            else:
                yield own + target - (1 if target < 1 else self.copies), 0, passed
