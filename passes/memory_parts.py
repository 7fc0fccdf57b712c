"""What fills the memory at one point of a program, by what it is: parameters, optimizer state, gradients, and so on.

What lies in memory comes in groups of alike values (or copies) of one size under any choice; which of them are alive at
a point is looked up in arrays, so that a point costs as many sizes as there are groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.program import InputKind
from passes.build_assignment import PlanningProblem
from passes.insert_hubs import is_gradient_hub
from passes.liveness import Interval, OnLink

PARTS = ("parameters", "optimizer state", "gradients", "inputs", "activations")

_PART_OF = {InputKind.PARAMETER: "parameters", InputKind.STATE: "optimizer state"}

_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Group:
    """What is of one size: alike values (a site and the index of its result), what alike links keep, or alike calls."""

    part: str
    site: str = ""
    result: int = 0
    kept: OnLink | None = None
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """All that lies in memory at some time: lifetimes (inclusive), groups and numbers, [items]."""

    births: _Integers
    deaths: _Integers
    members: _Integers
    numbers: _Integers
    groups: tuple[_Group, ...]

    def at(self, planning: PlanningProblem, choice: Sequence[int], point: int) -> dict[str, float]:
        """Bytes on each rank at a program point, by what they are."""
        alive = (self.births <= point) & (point <= self.deaths)
        counts = np.bincount(self.members[alive], self.numbers[alive], len(self.groups))
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for number in np.flatnonzero(counts):
            group = self.groups[number]
            size = _size(planning, choice, group) * int(counts[number])
            parts[group.part] += size
            if group.part == "parameters":
                parts["optimizer state"] += size * planning.liveness.state_bytes_per_parameter_byte
        return parts


def memory_parts(planning: PlanningProblem) -> MemoryParts:
    """The parts of a problem's memory, found once and kept with it."""
    if "memory_parts" not in planning.derived:
        planning.derived["memory_parts"] = _find_parts(planning)
    return planning.derived["memory_parts"]


def _find_parts(planning: PlanningProblem) -> MemoryParts:
    kinds = {slot.node: slot.kind for slot in planning.space.program.inputs}
    gradients = _gradients(planning)
    numbers: dict[object, int] = {}
    groups: list[_Group] = []
    intervals, members, counts = [], [], []

    def add(key: object, group: _Group, count: int = 1) -> None:
        counts.append(count)
        if key not in numbers:
            numbers[key] = len(groups)
            groups.append(group)
        members.append(numbers[key])

    for name, result, interval, number in planning.liveness.held_values():
        kind = kinds.get(name)
        part = _PART_OF.get(kind, "inputs") if kind is not None else "activations"
        part = "gradients" if (name, result) in gradients else part
        intervals.append(interval)
        value = planning.space.sites[name].results[result]
        add((part, planning.classes[name], result, value), _Group(part, name, result), number)
    for kept, number in planning.liveness.held_on_links():
        link = planning.space.links[kept.link]
        is_gradient = link.operand < 0 or is_gradient_hub(planning.space.sites[link.head].node)
        part = "gradients" if is_gradient else "activations"
        intervals.append(kept.interval)
        value = planning.space.sites[link.tail].results[link.result]
        add((part, *planning.link_key(link), value, kept.held), _Group(part, kept=kept), number)
    for name, point in planning.liveness.calls.items():
        intervals.append(Interval(point, point))
        add(("call", planning.classes[name]), _Group("activations", name, is_call=True))
    births = np.array([interval.birth for interval in intervals], dtype=np.int64)
    deaths = np.array([interval.death for interval in intervals], dtype=np.int64)
    members_of, numbers_of = (np.array(column, dtype=np.int64) for column in (members, counts))
    return MemoryParts(births, deaths, members_of, numbers_of, tuple(groups))


def _gradients(planning: PlanningProblem) -> set[tuple[str, int]]:
    """The values that an optimizer's update reads by way of a hub: gradients, and what they are views of."""
    sites = planning.space.sites
    viewed = {link.head: link for link in planning.space.links if link.operand == 0 and sites[link.head].is_alias}
    found = set()
    for name, site in sites.items():
        above = viewed.get(name) if is_gradient_hub(site.node) else None
        while above is not None:
            found.add((above.tail, above.result))
            above = viewed.get(above.tail)
    return found


def _size(planning: PlanningProblem, choice: Sequence[int], group: _Group) -> float:
    if group.kept is not None:
        return planning.link_bytes(group.kept, choice)
    option = choice[planning.classes[group.site]]
    if group.is_call:
        return planning.memory.of_call(group.site).at(option)
    return planning.memory.of_value(group.site, group.result).at(option)
