r"""What a program with blocks left out (`autoshard.ir.repeat`) says of the whole one: what counts how often, and when.

Of a run of alike units the program holds n, a, b and m (`Repeat.units`), and k more lie between a and b. It is checked
that these four are alike: the same sites at the same *places*, and every link from a place to a place leads to the same
unit, to the one beside it, or to one and the same site outside. So the k elided ones continue the pattern, and

* every site of b stands for 1 + k;
* so does every link into b from within, from outside, or from a; and every link into a from b (as in the backward);
* elided units take the options of b, so what they hold in memory is as large.

**When elided units hold what.** A unit's sites lie in *runs* of consecutive points: its forward, its backward, parts of
its update. The runs of a and b are neighbours, and those of elided units lie between them, in the same order. So, seen
from the points that the program has, all k values of a place come into being between two neighbouring runs, and they
die between two others: `elided_lifetimes` finds these points.

**Points inside elided units need not be looked at.** Number n, a, the elided ones, b and m from 0 to k + 3. At a point
inside unit x, at a given place, each of the values of one place of all units is alive or not by its number being at
most x, at least x, equal to x or one off; values from outside of the units are alive at the place in all of a to b,
or in none. So the bytes in use are an affine function of x between a and b, and largest at one of them, and both have
points of their own.

`NotAlikeError`, where the four units are not alike; then the whole model is to be traced.
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
    """Units that should be alike are not, so that a program without some of them does not tell what the whole does."""


class Spot(NamedTuple):
    """Where a site stands: which run of units, which of its four, and which place of the unit."""

    repeat: int
    unit: int
    place: int


AHEAD, BEHIND = 1, 2
"""The units of `Repeat.units` between which the elided ones lie."""


@dataclass(frozen=True, slots=True)
class AlikeSites:
    """The sites at one place of the four units, and k."""

    names: tuple[str, str, str, str]
    elided: int


@dataclass(frozen=True, slots=True)
class AlikeLinks:
    """Indices of the same link into each of the four units, that of them which stands for the elided ones, and k."""

    indices: tuple[int, int, int, int]
    standing: int
    elided: int


@dataclass(frozen=True, slots=True)
class Elided:
    """What is left out of a search space, and what stands for it.

    Args:
        sites: the sites of repeated units.
        links: the links into them.
        runs: the sites of each run that is repeated, in order, and how many more times it runs.
        spots: site to where it is in the units.
        starts: repeat and place to the site with which the second of two neighbouring runs begins.
    """

    sites: tuple[AlikeSites, ...] = ()
    links: tuple[AlikeLinks, ...] = ()
    runs: tuple[tuple[tuple[str, ...], int], ...] = ()
    spots: Mapping[str, Spot] = field(default_factory=dict, repr=False)
    starts: Mapping[tuple[int, int], str] = field(default_factory=dict, repr=False)

    def site_counts(self) -> dict[str, int]:
        """Site to how many of the whole program it stands for; those that are not there stand for themselves."""
        return {alike.names[BEHIND]: 1 + alike.elided for alike in self.sites}

    def link_counts(self) -> dict[int, int]:
        """Index of a link to how many of the whole program it stands for, likewise."""
        return {alike.standing: 1 + alike.elided for alike in self.links}


NOTHING_ELIDED = Elided()


def find_elided(space: SearchSpace, paths: Mapping[str, str] | None = None) -> Elided:
    """What the blocks left out of a program add to it.

    Args:
        space: of the program.
        paths: site to the path that says in which unit it is; None: that of the module that issued it.

    Raises:
        NotAlikeError: the units beside them are not alike.
    """
    if not space.program.repeats:
        return NOTHING_ELIDED
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
    return Elided(tuple(sites), tuple(links), tuple(runs), spots, starts)


def paths_where_run(space: SearchSpace, paths: Mapping[str, str], again: Collection[str]) -> dict[str, str]:
    """`paths`, where those sites that run `again` are in the unit of the site before which they do so.

    A value that the next block reads is there again while that block's backward runs.
    """
    found, before = dict(paths), ""
    for name in reversed(list(space.sites)):
        if name in again:
            places = (repeat.beside(paths[name], before) for repeat in space.program.repeats)
            found[name] = next(filter(None, places), "")
        else:
            before = paths.get(name, "")
    return found


def tie(representatives: Mapping[str, str], elided: Elided) -> dict[str, str]:
    """Site to representative, with alike units made one: what one of them chooses, the elided ones do too."""
    merged: dict[str, str] = {}

    def last(name: str) -> str:
        while name in merged:
            name = merged[name]
        return name

    for alike in elided.sites:
        first, *others = (last(representatives[name]) for name in alike.names)
        merged |= {other: first for other in others if other != first}
    return {name: last(representative) for name, representative in representatives.items()}


_Relation = tuple[int, int, tuple[int, int] | str]
"""Operand, result, and where the value comes from: unit (as a difference) and place, or a site outside."""


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
        """The sites at one place of the four units read alike; what the outer ones read beyond the four is free."""
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
    """Whether two sites read alike but for what the inner one reads from `step` units further."""
    if len(outer) != len(inner):
        return False
    free = [isinstance(where, tuple) and where[0] == step for _, _, where in inner]
    return all(is_free or one == two for one, two, is_free in zip(outer, inner, free, strict=True))
