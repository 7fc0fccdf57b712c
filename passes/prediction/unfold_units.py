"""Repeat the events of the unit that stands for left-out blocks, in the order in which the whole program runs them.

A lowered program may contain only four of many equal units of blocks. One of these, unit b, stands for the left-out
units too (`passes.strategies.repeated`). An event is a call, the start of a collective, or a wait. Calls of the four
units run one unit after the other. These calls are *anchors*, and cut a phase into regions. Each region ends with the
last anchor of its unit. Passes may have moved all other events: a gather of unit b may start in the region of the unit
before b. In the whole program, the gather of the second copy of b then starts in the region of the first copy. So

1. Each event of b has a shift: the number of regions from b's own region to the event.
2. Copy i of the event has the same shift from the region of copy i of b, behind the same share of anchors there.
3. In b's region, events of units that run before b go to the region of the first copy. Events of units that run after b
   go to the region of the last copy.
4. If an event is far from b's region, before all anchors or after all anchors, its copies follow each other in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from passes.strategies.local_units import UnitSpot
from passes.strategies.repeated import AFTER_GAP

_FARTHEST = 2
"""The largest shift, because the program has only two units before the left-out units and two behind them."""


class Event(Protocol):
    """A call of a phase, the start of a collective, or a wait."""

    @property
    def spot(self) -> UnitSpot | None:
        """The unit of repeated blocks that the event belongs to; None outside of all units."""
        ...

    @property
    def is_anchor(self) -> bool:
        """Whether the event is a call of the traced program, and no reshard and no recomputation.

        Passes never move such a call into the region of another unit.
        """
        ...


_Event = TypeVar("_Event", bound=Event)
_Copy = tuple[_Event, int]
"""An event, and the number of its copy, from 1; 0 for an event outside repeated units."""


def unfolded(events: Sequence[_Event], left_out: Sequence[int]) -> list[_Copy[_Event]]:
    """Return the events of a phase of the whole program, in order, each with the number of its copy.

    Args:
        events: the phase's events in the lowered program, which has no left-out units.
        left_out: number of left-out units of each repeat.
    """
    found = [(event, 0) for event in events]
    for repeat, count in enumerate(left_out):
        found = _Unfolding(repeat, 1 + count, found).run()
    return found


_Key = tuple[int, int, int]
"""A sort key: (region, number of the copy of b, number of the region's anchors before the event).

Outside of b's own region, the number of the copy is 0.
"""


@dataclass(slots=True)
class _Unfolding(Generic[_Event]):
    """Repeats the events of unit b of one repeat. Unit b (`AFTER_GAP`) stands for `copies` units, itself included.

    Regions are numbered in order. `units` has the unit of each region. `anchors` has, for each region, the indices of
    its anchors in `events`.
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
        lasts = [run[-1] for run in self.anchors]
        keyed: list[tuple[_Key, int, int, _Copy[_Event]]] = []
        for place, (event, copy) in enumerate(self.events):
            region = bisect_left(lasts, place)
            passed = bisect_left(self.anchors[region], place) if region < len(lasts) else 0
            unit = self._unit(event)
            if unit != AFTER_GAP:
                keyed.append((self._once(region, passed, unit), place, 0, (event, copy)))
                continue
            for number, key in enumerate(self._copies(region, passed), 1):
                keyed.append((key, place, number, (event, number)))
        keyed.sort(key=lambda item: item[:3])
        return [item for *_, item in keyed]

    def _once(self, region: int, passed: int, unit: int | None) -> _Key:
        """Return the sort key of an event that does not belong to unit b.

        The event is in region `region`, behind `passed` of the region's anchors.
        """
        if region >= len(self.units) or self.units[region] != AFTER_GAP:
            return region, 0, passed
        is_behind = region + 1 < len(self.units) and unit is not None and self._is_behind(region, unit)
        return region, self.copies if is_behind else 1, passed

    def _is_behind(self, region: int, unit: int) -> bool:
        """Whether a phase runs `unit` after unit b, whose region is `region`.

        A forward runs units in their order, and a backward in reverse.
        """
        return (unit > AFTER_GAP) == (self.units[region + 1] > AFTER_GAP)

    def _copies(self, region: int, passed: int) -> Iterator[_Key]:
        own = min(
            (number for number, unit in enumerate(self.units) if unit == AFTER_GAP),
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
