"""How often each site and link of a program runs in the whole model, where the program leaves out repeated blocks.

A program may hold only four of many alike units of blocks (`autoshard.ir.repeat`): n, a, b and m, in program order.
The whole model has k more units between a and b. This module checks that the four units are alike:

* they have the same sites, each at its *place* in its unit;
* each link from one place to another leads to the same unit, to a neighbouring unit, or to one site outside.

So the k left-out units continue the pattern of the four, and

* each site of b stands for 1 + k sites;
* each link into b stands for 1 + k links. It may come from b, from a or from outside. In the backward, links lead from
  b into a, and a link from b into a stands for 1 + k links;
* left-out units take the options of b, so they hold as many bytes.

**Lifetimes of values of left-out units.** A unit's sites lie in *runs* of consecutive points: its forward, its backward
and parts of its update. Runs of left-out units lie between the runs of a and b, in the same order. So all k values of
one place are made between two neighbouring runs, and die between two other runs. `passes.memory.repeated_lifetimes`
finds these points.

**The peak is never inside a left-out unit.** Number the units n, a, the left-out units, b and m from 0 to k + 3. Take a
point at one place of unit x. The values of one place are then alive in units whose number is at most x, at least x, x,
or one off. Values from outside the units are alive there in all units from a to b, or in none. So the bytes in use are
an affine function of x, and largest in a or in b. The program has the points of both.

If the four units are not alike, `NotAlikeError` is raised, and the whole model has to be traced.
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
    """Units that should be alike are not, so the program cannot stand for the whole model."""


class Spot(NamedTuple):
    """The position of a site: the number of its repeat, its unit (0 to 3) and its place in the unit."""

    repeat: int
    unit: int
    place: int


AHEAD, BEHIND = 1, 2
"""Indices of units a and b of `Repeat.units`; the left-out units lie between them."""


@dataclass(frozen=True, slots=True)
class AlikeSites:
    """The sites at one place of the four units, and the number of left-out units."""

    names: tuple[str, str, str, str]
    left_out: int


@dataclass(frozen=True, slots=True)
class AlikeLinks:
    """One link in each of the four units, and the number of left-out units.

    Args:
        indices: the index of the link in each unit.
        standing: the one of these indices that stands for the left-out units too.
        left_out: the number of left-out units.
    """

    indices: tuple[int, int, int, int]
    standing: int
    left_out: int


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """The repeated units of a search space.

    Args:
        sites: the sites of repeated units.
        links: the links into these sites.
        runs: the sites of each run that is repeated, in order, and how many more times the run runs.
        spots: site to its position in the units.
        starts: repeat and place to the first site of the later of two neighbouring runs.
    """

    sites: tuple[AlikeSites, ...] = ()
    links: tuple[AlikeLinks, ...] = ()
    runs: tuple[tuple[tuple[str, ...], int], ...] = ()
    spots: Mapping[str, Spot] = field(default_factory=dict, repr=False)
    starts: Mapping[tuple[int, int], str] = field(default_factory=dict, repr=False)

    def site_counts(self) -> dict[str, int]:
        """Site to the number of sites that it stands for; an absent site stands for itself alone."""
        return {alike.names[BEHIND]: 1 + alike.left_out for alike in self.sites}

    def link_counts(self) -> dict[int, int]:
        """Index of a link to the number of links that it stands for; an absent link stands for itself alone."""
        return {alike.standing: 1 + alike.left_out for alike in self.links}


NO_REPEATED_UNITS = RepeatedUnits()


def find_repeated(space: SearchSpace, paths: Mapping[str, str] | None = None) -> RepeatedUnits:
    """Find the repeated units of a search space.

    Args:
        space: the search space of a program that may leave out units.
        paths: site to the module path that tells its unit. None: the path of the module that issued the site.

    Raises:
        NotAlikeError: the four units of a repeat are not alike.
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
    """Return `paths` with each site of `again` put into the unit of the site that it runs before.

    For example, if the next block reads a value, the value is recomputed while the backward of that block runs.
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
    """Return `representatives` with the sites at one place of all units tied to one representative."""
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
"""Operand, result, and source: a pair of (difference of units, place), or the name of a site outside the units."""


@dataclass(slots=True)
class _Units:
    """The four units of one repeat, checked to be alike."""

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
        """Return the sites of each unit, in program order."""
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
        """Check that the sites at one place read alike values. The outer units n and m may read anything beyond the
        four units.
        """
        first, ahead, behind, last = map(self._relations, names)
        outer_ok = _agree(first, ahead, step=-1) and _agree(last, behind, step=1)
        if ahead != behind or not outer_ok:
            raise NotAlikeError(f"{', '.join(names)} of alike blocks do not read alike values")

    def sites(self) -> list[AlikeSites]:
        """Return the sites of the units, place by place."""
        return [AlikeSites(names, self.repeat.left_out) for names in zip(*self.columns, strict=True)]

    def links(self) -> Iterator[AlikeLinks]:
        """Return the links into the units, place by place."""
        for names in zip(*self.columns, strict=True):
            for alike in zip(*(self.incoming[name] for name in names), strict=True):
                indices, found = zip(*alike, strict=True)
                tail = self.spots.get(found[AHEAD].tail)
                standing = AHEAD if tail is not None and tail.unit == BEHIND else BEHIND
                yield AlikeLinks(indices, indices[standing], self.repeat.left_out)

    def runs(self, order: Mapping[str, int]) -> Iterator[tuple[list[int], tuple[str, ...]]]:
        """Return the places of each pair of neighbouring runs, and the sites of the later run."""
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
    """Whether two sites read alike values, leaving out the values that the inner site reads from `step` units further
    on.
    """
    if len(outer) != len(inner):
        return False
    free = [isinstance(where, tuple) and where[0] == step for _, _, where in inner]
    return all(is_free or one == two for one, two, is_free in zip(outer, inner, free, strict=True))
