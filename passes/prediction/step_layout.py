"""What the simulated step of a planning problem looks like whatever the choice: its parts, and which of them are alike.

A part is a run of nodes of one phase that belong to one block (a module whose path holds a number, up to that number)
or to none; what belongs to none, between two blocks, goes with the one before it. Parts of one structure hold the same
calls, reading each other's values and those of alike nodes outside in the same places. So under a choice, parts of one
structure are equal if equal options are chosen in their slots (the variables that they touch, in order).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.program import InputKind
from passes.planning.build_assignment import PlanningProblem
from passes.strategies.enumerate_strategies import Link, Site, leaves_program


@dataclass(frozen=True, slots=True)
class SiteRun:
    """A run of sites.

    Args:
        name: phase and block.
        sites: their names, in program order.
        structure: equal for parts of one structure.
        slots: the variables that it touches, [slots].
    """

    name: str
    sites: tuple[str, ...]
    structure: int
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The parts of a step.

    Args:
        parts: in program order.
        incoming: site name to the links of its operands.
        leaving: site name to the links on which its results leave the program.
        free: sites whose values need no computation that a step waits for: inputs, and what parameters alone make.
    """

    parts: tuple[SiteRun, ...]
    incoming: Mapping[str, Sequence[Link]]
    leaving: Mapping[str, Sequence[Link]]
    free: frozenset[str]


def step_layout(planning: PlanningProblem) -> StepLayout:
    """The layout of a problem's step, found once and kept with it."""
    if "step_layout" not in planning.derived:
        planning.derived["step_layout"] = _find_layout(planning)
    return planning.derived["step_layout"]


def _find_layout(planning: PlanningProblem) -> StepLayout:
    incoming, leaving = defaultdict[str, list[Link]](list), defaultdict[str, list[Link]](list)
    for link in planning.space.links:
        if leaves_program(planning.space.sites[link.head], link):
            leaving[link.tail].append(link)
        else:
            incoming[link.head].append(link)
    free = _free_of_the_step(planning, incoming)
    structures = _Structures(planning, incoming, leaving, free)
    parts = [structures.part(name, sites) for name, sites in _runs(planning, leaving)]
    for run, more in planning.elided.runs:
        parts = _repeated(parts, run, more)
    return StepLayout(tuple(parts), dict(incoming), dict(leaving), free)


def _repeated(parts: Sequence[SiteRun], run: Sequence[str], more: int) -> list[SiteRun]:
    """The parts of a step with those of a run of sites `more` times more, ahead of it."""
    first = next(index for index, part in enumerate(parts) if part.sites[0] == run[0])
    last = next(index for index, part in enumerate(parts) if part.sites[-1] == run[-1])
    return [*parts[:first], *(list(parts[first : last + 1]) * (1 + more)), *parts[last + 1 :]]


@dataclass(slots=True)
class _Structures:
    """Numbers for sites that are alike, and for parts that are."""

    planning: PlanningProblem
    incoming: Mapping[str, Sequence[Link]]
    leaving: Mapping[str, Sequence[Link]]
    free: frozenset[str]
    kinds: dict[object, int] = field(default_factory=dict)
    kind_of: dict[str, int] = field(default_factory=dict)
    found: dict[tuple[object, ...], int] = field(default_factory=dict)

    def part(self, name: str, sites: Sequence[str]) -> SiteRun:
        places = {site: index for index, site in enumerate(sites)}
        slots: dict[int, int] = {}
        key: list[object] = []
        for site in sites:
            key.append((self._alike(site, slots), self.planning.space.sites[site].phase))
            for link in self.incoming.get(site, ()):
                outside = link.tail in self.free
                key.append((places.get(link.tail, -1), link.result, outside, self._alike(link.tail, slots)))
            for link in self.leaving.get(site, ()):
                key.append((link.result, link.operand, self._alike(link.head, slots)))
        structure = self.found.setdefault(tuple(key), len(self.found))
        return SiteRun(name, tuple(sites), structure, np.array(list(slots), dtype=np.int64))

    def _alike(self, name: str, slots: dict[int, int]) -> tuple[int, int]:
        """The kind of a site, and the slot of its variable."""
        if name not in self.kind_of:
            site = self.planning.space.sites[name]
            key = (site.call, id(site.strategies), site.results if site.call < 0 else ())
            self.kind_of[name] = self.kinds.setdefault(key, len(self.kinds))
        return self.kind_of[name], slots.setdefault(self.planning.classes[name], len(slots))


def _runs(planning: PlanningProblem, leaving: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Name and sites of each part: calls, and inputs that leave the program as they are."""
    sites = [
        site
        for name, site in planning.space.sites.items()
        if site.node is not None and (site.node.op == "call_function" or name in leaving)
    ]
    for (block, phase), run in groupby(zip(_blocks(sites), sites, strict=True), lambda item: (item[0], item[1].phase)):
        yield f"{phase} of {block or 'the model'}", [site.name for _, site in run]


def _blocks(sites: Sequence[Site]) -> list[str]:
    """The block of each site; what belongs to none, between two blocks of its phase, goes with the one before it."""
    found = [_block(site.node.meta.get("module", "")) if site.node is not None else "" for site in sites]
    last = None
    for index, (block, site) in enumerate(zip(found, sites, strict=True)):
        if block:
            if last is not None and sites[last].phase == site.phase:
                found[last:index] = [found[last]] * (index - last)
            last = index
    return found


def _block(module: str) -> str:
    """The path up to the first number: "layers.3.mlp" is in "layers.3"; "" for a path without one."""
    parts = module.split(".")
    for end, part in enumerate(parts, 1):
        if part.isdigit():
            return ".".join(parts[:end])
    return ""


def _free_of_the_step(planning: PlanningProblem, incoming: Mapping[str, Sequence[Link]]) -> frozenset[str]:
    kinds = {slot.node: slot.kind for slot in planning.space.program.inputs}
    inputs = {name for name, site in planning.space.sites.items() if site.node is not None and site.node.op in _GIVEN}
    fixed = {name for name in inputs if kinds.get(name) in (None, InputKind.PARAMETER, InputKind.BUFFER)}
    for name, links in incoming.items():
        if all(link.tail in fixed for link in links):
            fixed.add(name)
    return frozenset(inputs | fixed)


_GIVEN = ("placeholder", "get_attr")
