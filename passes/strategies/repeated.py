r"""Repeated blocks that a program leaves out (`autoshard.ir.repeat`): their counts, lifetimes and memory.

A program has the units n, a, b and m of a run (`Repeat.units`); k units are missing between a and
b. The four units are checked to be alike. They have the same sites at the same *places*. Every link between two places
joins the same unit or neighbouring units, or leads to one common site outside. So the k missing units continue the
pattern, and

* every site of b stands for 1 + k sites;
* so does every link into b from b itself, from outside, or from a; and every link into a from b (as in the backward);
* missing units take the options of b, so their values have equal sizes.

**Lifetimes.** A unit's sites lie in *runs* of consecutive points: its forward, its backward, parts of its update. The
runs of a and b are neighbours, and the runs of missing units lie between them, in the same order. So, seen from the
program's own points, all k values of a place are created between two neighbouring runs, and freed between two others.
`repeated_lifetimes` finds these points.

**Points inside missing units need no check.** Number n, a, the missing units, b and m from 0 to k + 3. Consider a point
at a given place inside unit x, and the values of one place in all units. A value is alive or not depending on whether
its unit's number is at most x, at least x, equal to x, or one off. A value from outside is alive at the place in all of
a to b, or in none. So the bytes in use are an affine function of x between a and b. The largest value is at a or b, and
both have points of their own.

If the four units are not alike, `NotAlikeError` is raised, and the whole model must be traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autoshard.ir.repeat import Repeat
from passes.strategies.enumerate_strategies import Link, SearchSpace
from passes.strategies.fold_blocks import module_paths


class NotAlikeError(Exception):
    """Units that should be alike differ, so a program without some of them does not represent the whole program."""


class Spot(NamedTuple):
    """Number of a site's repeat, index of its unit among the four, and place inside the unit."""

    repeat: int
    unit: int
    place: int


AHEAD, BEHIND = 1, 2
"""Indices in `Repeat.units` of the units beside the gap."""


@dataclass(frozen=True, slots=True)
class AlikeSites:
    """The sites at one place of the four units, and k."""

    names: tuple[str, str, str, str]
    left_out: int


@dataclass(frozen=True, slots=True)
class AlikeLinks:
    """Indices of the same link into each of the four units, the index that stands for the missing units, and k."""

    indices: tuple[int, int, int, int]
    standing: int
    left_out: int


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """The units left out of a search space, and the sites and links that stand for them.

    Args:
        sites: the sites of repeated units.
        links: the links into them.
        runs: the sites of each repeated run, in order, and its number of further executions.
        spots: place of each site in the units.
        starts: repeat and place to the first site of the later of two neighbouring runs.
    """

    sites: tuple[AlikeSites, ...] = ()
    links: tuple[AlikeLinks, ...] = ()
    runs: tuple[tuple[tuple[str, ...], int], ...] = ()
    spots: Mapping[str, Spot] = field(default_factory=dict, repr=False)
    starts: Mapping[tuple[int, int], str] = field(default_factory=dict, repr=False)

    def site_counts(self) -> dict[str, int]:
        """Number of sites in the whole program that a site stands for; sites not listed count once."""
        return {alike.names[BEHIND]: 1 + alike.left_out for alike in self.sites}

    def link_counts(self) -> dict[int, int]:
        """Number of links in the whole program that a link stands for, by index. Links not listed count once."""
        return {alike.standing: 1 + alike.left_out for alike in self.links}


NO_REPEATED_UNITS = RepeatedUnits()


def find_repeated(space: SearchSpace, paths: Mapping[str, str] | None = None) -> RepeatedUnits:
    """Find the repeated units of a search space.

    Args:
        space: search space of the program.
        paths: path of each site, which determines its unit; None: its module's path.

    Raises:
        NotAlikeError: the units beside the gap are not alike.
    """
    if not space.program.repeats:
        return NO_REPEATED_UNITS
    paths = module_paths(space.program) if paths is None else paths
    order = {name: point for point, name in enumerate(space.sites)}
    sites: list[AlikeSites] = []
    links: list[AlikeLinks] = []
    runs: list[tuple[tuple[str, ...], int]] = []
    spots: dict[str, Spot] = {}
    starts: dict[tuple[int, int], str] = {}
    for number, repeat in enumerate(space.program.repeats):
        units = _Units(space, number, repeat, paths)
        sites += units.sites()
        links += units.links()
        spots |= units.spots
        for places, later in units.runs(order):
            starts |= {(number, place): later[0] for place in places}
            runs.append((later, repeat.left_out))
    return RepeatedUnits(tuple(sites), tuple(links), tuple(runs), spots, starts)


def paths_where_run(space: SearchSpace, paths: Mapping[str, str], again: Collection[str]) -> dict[str, str]:
    """`paths`, except that each recomputed site (`again`) belongs to the unit of the site that it runs before.

    A value that the next block reads is recomputed while that block's backward runs.
    """
    found, before = dict(paths), ""
    for name in reversed(list(space.sites)):
        if name in again:
            places = (repeat.beside(paths[name], before) for repeat in space.program.repeats)
            found[name] = next(filter(None, places), "")
        else:
            before = paths.get(name, "")
    return found


def tie(representatives: Mapping[str, str], repeated: RepeatedUnits) -> dict[str, str]:
    """Site to representative, where sites at one place of alike units share a representative."""
    merged: dict[str, str] = {}

    def last(name: str) -> str:
        while name in merged:
            name = merged[name]
        return name

    for alike in repeated.sites:
        first, *others = (last(representatives[name]) for name in alike.names)
        merged |= {other: first for other in others if other != first}
    return {name: last(representative) for name, representative in representatives.items()}


_Relation = tuple[int, int, tuple[int, int] | str]
"""Operand, result, and origin of the value: unit (as a difference) and place, or a site outside."""


@dataclass(slots=True)
class _Units:
    """The four units of a repeat, checked to be alike."""

    space: SearchSpace
    number: int
    repeat: Repeat
    paths: Mapping[str, str]
    columns: tuple[list[str], ...] = ()
    spots: dict[str, Spot] = field(default_factory=dict)
    incoming: dict[str, list[tuple[int, Link]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.columns = tuple(self._columns())
        for unit, names in enumerate(self.columns):
            self.spots |= {name: Spot(self.number, unit, place) for place, name in enumerate(names)}
        for index, link in enumerate(self.space.links):
            self.incoming[link.head].append((index, link))
            tail = self.spots.get(link.tail)
            if tail is not None and tail.unit in (AHEAD, BEHIND) and link.head not in self.spots:
                raise NotAlikeError(f"{link.tail} of a repeated block is read by {link.head}, outside of the blocks")
        for names in zip(*self.columns, strict=True):
            self._check_links(names)

    def _columns(self) -> Iterator[list[str]]:
        """The sites of each unit, in program order."""
        columns: list[list[str]] = [[] for _ in self.repeat.units]
        forms: list[list[object]] = [[] for _ in self.repeat.units]
        for name, site in self.space.sites.items():
            where = self.repeat.place(self.paths.get(name, ""))
            if where is not None:
                unit, rest = where
                columns[unit].append(name)
                forms[unit].append((rest, site.phase, site.call, site.results, id(site.strategies)))
        if not columns[0] or any(form != forms[0] for form in forms[1:]):
            raise NotAlikeError(f"blocks {self.repeat.units} of {self.repeat.path} do not run the same operators")
        yield from columns

    def _relations(self, name: str) -> list[_Relation]:
        head = self.spots[name]
        found: list[_Relation] = []
        for _, link in self.incoming[name]:
            tail = self.spots.get(link.tail)
            where = link.tail if tail is None else (tail.unit - head.unit, tail.place)
            found.append((link.operand, link.result, where))
        return found

    def _check_links(self, names: Sequence[str]) -> None:
        """Check that the sites at one place read alike; reads of the outer units beyond the four are ignored."""
        first, ahead, behind, last = map(self._relations, names)
        outer_ok = _agree(first, ahead, step=-1) and _agree(last, behind, step=1)
        if ahead != behind or not outer_ok:
            raise NotAlikeError(f"{', '.join(names)} of alike blocks do not read alike values")

    def sites(self) -> list[AlikeSites]:
        """The sites of the units, place by place."""
        return [AlikeSites(names, self.repeat.left_out) for names in zip(*self.columns, strict=True)]

    def links(self) -> Iterator[AlikeLinks]:
        """The links into the units, place by place."""
        for names in zip(*self.columns, strict=True):
            for alike in zip(*(self.incoming[name] for name in names), strict=True):
                indices, found = zip(*alike, strict=True)
                tail = self.spots.get(found[AHEAD].tail)
                standing = AHEAD if tail is not None and tail.unit == BEHIND else BEHIND
                yield AlikeLinks(indices, indices[standing], self.repeat.left_out)

    def runs(self, order: Mapping[str, int]) -> Iterator[tuple[list[int], tuple[str, ...]]]:
        """The places of each pair of neighbouring runs, and the sites of the later one."""
        names = [name for name in (*self.columns[AHEAD], *self.columns[BEHIND]) if not self.space.sites[name].is_input]
        names.sort(key=order.__getitem__)
        runs: list[list[str]] = []
        for name in names:
            last = runs[-1][-1] if runs else None
            joins = last is not None and order[name] == order[last] + 1
            if joins and last is not None and self.spots[name].unit == self.spots[last].unit:
                runs[-1].append(name)
            else:
                runs.append([name])
        for earlier, later in zip(runs[::2], runs[1::2], strict=False):
            places, others = ([self.spots[name].place for name in run] for run in (earlier, later))
            if places != others or order[later[0]] != order[earlier[-1]] + 1:
                raise NotAlikeError(f"blocks of {self.repeat.path} do not run one after the other")
            yield places, tuple(later)
        if len(runs) % 2:
            raise NotAlikeError(f"blocks of {self.repeat.path} do not run one after the other")


def _agree(outer: Sequence[_Relation], inner: Sequence[_Relation], step: int) -> bool:
    """Whether two sites read alike, ignoring the inner site's reads from `step` units further."""
    if len(outer) != len(inner):
        return False
    free = [isinstance(where, tuple) and where[0] == step for _, _, where in inner]
    return all(is_free or one == two for one, two, is_free in zip(outer, inner, free, strict=True))
