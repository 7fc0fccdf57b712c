"""Count how often each site and link of a program runs in the whole model, if the program leaves out repeated blocks.

A long model has many equal units of blocks. A program for planning may have only four of them (`autoshard.ir.repeat`).
Call them n, a, b and m, in program order. The whole model has k more units between a and b. This module checks that the
four units are alike:

* they have the same sites in the same order. The *place* of a site is its index in its unit;
* the links into the sites of one place come from corresponding sources. The sources lie at one place of the same or of
  a neighbouring unit, or all are one site outside of the units.

The k left-out units then continue the pattern of the four units, so

* each site of b stands for 1 + k sites;
* each link into b stands for 1 + k links, with one exception. In the backward, unit a reads values of unit b. A link
  from b into a stands for 1 + k links, and the same link into b, from m, stands for itself;
* left-out units use the strategies of b, so they need as many bytes as b.

**Lifetimes of values of left-out units.** A *run* is a part of a unit whose sites follow each other in the program. It
is the unit's forward, its backward, or a part of its update. Runs of left-out units lie between the runs of a and b, in
the same order. So all k values of one place are made between two neighbouring runs, and freed between two other runs.
`passes.memory.repeated_lifetimes` finds these points.

**The peak of memory is never inside a left-out unit.** Number the units n, a, the left-out units, b and m from 0 to
k + 3. Take the moment at which unit x runs one of its sites. The values of any place are alive in the units up to
x, from x on, in x alone, or in a neighbour of x. A value from outside is alive for all units from a to b, or for none
of them. So the bytes in use are an affine function of x, and largest for a or for b. The program has both of these
units.

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
    """The four units of a repeat are not alike, so the program cannot stand for the whole model."""


class Spot(NamedTuple):
    """The position of a site in repeated blocks.

    Args:
        repeat: index of the repeat in `Program.repeats`.
        unit: index of the site's unit in `Repeat.units`, 0 to 3.
        place: index of the site among the sites of its unit, in program order.
    """

    repeat: int
    unit: int
    place: int


BEFORE_GAP, AFTER_GAP = 1, 2
"""Indices in `Repeat.units` of the units a and b. The left-out units lie between a and b."""


@dataclass(frozen=True, slots=True)
class AlikeSites:
    """The names of the sites at one place (`Spot.place`) of the four units of a repeat.

    `left_out` is the number of units that the program leaves out.
    """

    names: tuple[str, str, str, str]
    left_out: int


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """The repeated units of a search space.

    Args:
        sites: the sites of the four units of each repeat, one entry for each place.
        links: index of a link → the number of equal links in the left-out units for which it also stands. Each four
            links that correspond to each other have one entry.
        spots: position of each site of a repeated unit, by the site's name.
        starts: (`Spot.repeat`, `Spot.place`) → a site. The sites at this place of the two units beside the gap lie in
            two neighbouring runs of calls. The value is the first site of the later run.
    """

    sites: tuple[AlikeSites, ...] = ()
    links: Mapping[int, int] = field(default_factory=dict)
    spots: Mapping[str, Spot] = field(default_factory=dict, repr=False)
    starts: Mapping[tuple[int, int], str] = field(default_factory=dict, repr=False)

    def site_counts(self) -> dict[str, int]:
        """Return, by a site's name, how many equal sites of the whole model it stands for.

        An absent site stands for itself alone.
        """
        return {alike.names[AFTER_GAP]: 1 + alike.left_out for alike in self.sites}

    def link_counts(self) -> dict[int, int]:
        """Return, by a link's index, how many equal links of the whole model it stands for.

        An absent link stands for itself alone.
        """
        return {link: 1 + left_out for link, left_out in self.links.items()}


NO_REPEATED_UNITS = RepeatedUnits()


def find_repeated(space: SearchSpace, paths: Mapping[str, str] | None = None) -> RepeatedUnits:
    """Find the repeated units of a search space, and check that they are alike.

    Args:
        space: the search space. If its program has all blocks of the model, the result is empty.
        paths: the module path that tells each site's unit, by name. None: the path of the module that issued the site.

    Raises:
        NotAlikeError: the four units of a repeat are not alike.
    """
    if not space.program.repeats:
        return NO_REPEATED_UNITS
    paths = module_paths(space.program) if paths is None else paths
    order = {name: point for point, name in enumerate(space.sites)}
    sites: list[AlikeSites] = []
    links: dict[int, int] = {}
    spots: dict[str, Spot] = {}
    starts: dict[tuple[int, int], str] = {}
    for number, repeat in enumerate(space.program.repeats):
        units = _Units(space, number, repeat, paths)
        sites += units.sites()
        links |= dict.fromkeys(units.links(), repeat.left_out)
        spots |= units.spots
        starts |= {(number, place): later for places, later in units.runs(order) for place in places}
    return RepeatedUnits(tuple(sites), links, spots, starts)


def paths_where_run(space: SearchSpace, paths: Mapping[str, str], again: Collection[str]) -> dict[str, str]:
    """Return a copy of `paths` in which recomputed sites belong to the unit in which they run.

    This is the unit of the next site in the program that is not recomputed. For example, if a value is recomputed in
    the backward of the next block, its site gets the path of the same module there. The path is "" if the next site is
    in no repeated block.

    Args:
        paths: module path by the name of each site.
        again: names of the recomputed sites.
    """
    found, before = dict(paths), ""
    for name in reversed(list(space.sites)):
        if name in again:
            places = (repeat.same_place_in_unit_of(paths[name], before) for repeat in space.program.repeats)
            found[name] = next(filter(None, places), "")
        else:
            before = paths.get(name, "")
    return found


def tie(representatives: Mapping[str, str], repeated: RepeatedUnits) -> dict[str, str]:
    """Return `representatives` with one common representative for the four sites at each place of repeated units.

    `representatives` is the result of `fold_blocks`.
    """
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
"""The facts of a link into a site that must agree between units: (operand, result, source).

The source is the pair (unit of the source minus unit of the reader, place of the source). For a source outside of the
units it is the name of the site.
"""


@dataclass(slots=True)
class _Units:
    """The four units of one repeat. The constructor checks that they are alike.

    Args:
        number: index of the repeat in `Program.repeats`.
        paths: module path by the name of each site.
        columns: for each unit, the names of its sites in program order.
        spots: position of each site of the units, by name.
        incoming: for each site of the program, the links into it with their indices.
    """

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
            if tail is not None and tail.unit in (BEFORE_GAP, AFTER_GAP) and link.head not in self.spots:
                raise NotAlikeError(f"{link.tail} of a repeated block is read by {link.head}, outside of the blocks")
        for names in zip(*self.columns, strict=True):
            self._check_links(names)

    def _columns(self) -> Iterator[list[str]]:
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
        """Raise `NotAlikeError` unless the four sites `names` of one place read values from corresponding sources.

        The four units are called n, a, b and m, in order. Unit n may read any value in place of a value that unit a
        reads from n. Unit m may read any value in place of a value that unit b reads from m.
        """
        first, before_gap, after_gap, last = map(self._relations, names)
        outer_ok = _agree(first, before_gap, step=-1) and _agree(last, after_gap, step=1)
        if before_gap != after_gap or not outer_ok:
            raise NotAlikeError(f"{', '.join(names)} of alike blocks do not read alike values")

    def sites(self) -> list[AlikeSites]:
        return [AlikeSites(names, self.repeat.left_out) for names in zip(*self.columns, strict=True)]

    def links(self) -> Iterator[int]:
        """Yield the index of the link that stands for the left-out links, per place and operand of the sites there."""
        for names in zip(*self.columns, strict=True):
            for alike in zip(*(self.incoming[name] for name in names), strict=True):
                indices, found = zip(*alike, strict=True)
                tail = self.spots.get(found[BEFORE_GAP].tail)
                stand_in = BEFORE_GAP if tail is not None and tail.unit == AFTER_GAP else AFTER_GAP
                yield indices[stand_in]

    def runs(self, order: Mapping[str, int]) -> Iterator[tuple[list[int], str]]:
        """Yield the places of each two neighbouring runs of the units beside the gap, and the later run's first site.

        A run is a part of a unit whose sites follow each other in the program. `order` has the index of each site.

        Raises:
            NotAlikeError: a run of one unit is not beside the same run of the other unit.
        """
        names = [
            name
            for name in (*self.columns[BEFORE_GAP], *self.columns[AFTER_GAP])
            if not self.space.sites[name].is_input
        ]
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
            yield places, later[0]
        if len(runs) % 2:
            raise NotAlikeError(f"blocks of {self.repeat.path} do not run one after the other")


def _agree(outer: Sequence[_Relation], inner: Sequence[_Relation], step: int) -> bool:
    """Whether an outer unit (n or m) reads from the same sources as the inner unit beside it (a or b).

    The arguments are the sources of two sites at the same place. A source of the inner site that is `step` units away
    (-1 for n and a, 1 for m and b) is not compared. For the outer site it would lie outside of the four units.
    """
    if len(outer) != len(inner):
        return False
    free = [isinstance(where, tuple) and where[0] == step for _, _, where in inner]
    return all(is_free or one == two for one, two, is_free in zip(outer, inner, free, strict=True))
