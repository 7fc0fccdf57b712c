"""When each value of a program is in memory, and so how many bytes are in use at each point, as a function of the plan.

Each owned value occupies memory from the node that computes it to its last use, uses through views included.
Parameters, buffers and inputs are there from the start; parameters also carry optimizer state. A value that is
resharded on its way into a node is a copy, which lives for that node, or, if the node is a view or a hub, as long as
the view's own result does. What leaves the program is resharded as soon as it is computed, and what comes of that stays
to the end; where there is nothing to reshard, the value itself stays. An update is written over what it updates, so
that nothing stays of it. Points are program positions; folded blocks keep their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.ir.program import InputKind
from passes.enumerate_strategies import Link, SearchSpace, Site

UPDATE = "update"
"""The phase of an optimizer's update."""


@dataclass(frozen=True, slots=True)
class Interval:
    """From which point to which point (both inclusive) something is in memory."""

    birth: int
    death: int


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lifetimes by value and by link.

    Args:
        points: number of program points.
        values: (site, result) to lifetime, for values that own memory.
        copies: index of a link to the lifetime of the copy that a reshard on it makes.
        kept: index of a link that leaves the program to the time, after its other uses, for which the value itself
            stays in memory if there is no reshard on the link.
        state_bytes_per_parameter_byte: optimizer state, as a multiple of a parameter's bytes.
        parameters: the placeholders that are parameters.
    """

    points: int
    values: Mapping[tuple[str, int], Interval]
    copies: Mapping[int, Interval]
    kept: Mapping[int, Interval]
    state_bytes_per_parameter_byte: float
    parameters: frozenset[str]


def find_lifetimes(space: SearchSpace, state_bytes_per_parameter_byte: float) -> Liveness:
    """The lifetimes of all values and copies of a search space."""
    order = {name: position for position, name in enumerate(space.sites)}
    last = len(order) - 1
    readers: dict[tuple[str, int], list[Link]] = defaultdict(list)
    for link in space.links:
        readers[link.tail, link.result].append(link)
    deaths = _deaths(space, readers, order, last)
    values, copies = {}, {}
    for name, site in space.sites.items():
        birth = 0 if site.is_input else order[name]
        for result in range(len(site.results)):
            if not site.is_alias:
                values[name, result] = Interval(birth, deaths[name, result])
    kept = {}
    for index, link in enumerate(space.links):
        copies[index] = _copy_lifetime(space, link, order, deaths, last)
        end = deaths[link.tail, link.result]
        is_update = space.sites[link.tail].phase == UPDATE
        if leaves_program(space.sites[link.head], link) and end < last and not is_update:
            kept[index] = Interval(end + 1, last)
    parameters = frozenset(slot.node for slot in space.program.inputs_of(InputKind.PARAMETER))
    return Liveness(last + 1, values, copies, kept, state_bytes_per_parameter_byte, parameters)


def _deaths(
    space: SearchSpace, readers: Mapping[tuple[str, int], list[Link]], order: Mapping[str, int], last: int
) -> dict[tuple[str, int], int]:
    """The last use of every value; a view's uses are uses of what it views."""
    deaths: dict[tuple[str, int], int] = {}
    for name in reversed(list(space.sites)):
        site = space.sites[name]
        for result in range(len(site.results)):
            uses = [_use(space.sites[link.head], link, order, deaths) for link in readers[name, result]]
            deaths[name, result] = last if site.is_input else max(uses, default=order[name])
    _prolong_views_that_leave(space, deaths)
    return deaths


def _prolong_views_that_leave(space: SearchSpace, deaths: dict[tuple[str, int], int]) -> None:
    """A view that leaves the program stays after the last use of its memory, by other views too."""
    viewed = {link.head: link for link in space.links if link.operand == 0 and space.sites[link.head].is_alias}
    for link in space.links:
        if leaves_program(space.sites[link.head], link) and link.tail in viewed:
            chain = [(link.tail, link.result)]
            while chain[-1][0] in viewed:
                above = viewed[chain[-1][0]]
                chain.append((above.tail, above.result))
            end = max(deaths[value] for value in chain)
            deaths.update(dict.fromkeys(chain[:-1], end))


def _use(head: Site, link: Link, order: Mapping[str, int], deaths: Mapping[tuple[str, int], int]) -> int:
    if leaves_program(head, link):
        return order[link.tail]
    if head.is_alias and link.operand == 0:
        return max(deaths[head.name, result] for result in range(len(head.results)))
    return order[head.name]


def _copy_lifetime(
    space: SearchSpace, link: Link, order: Mapping[str, int], deaths: Mapping[tuple[str, int], int], last: int
) -> Interval:
    head = space.sites[link.head]
    if UPDATE in (space.sites[link.tail].phase, head.phase):
        point = order[link.tail if leaves_program(head, link) else head.name]
        return Interval(point, point)
    if leaves_program(head, link):
        return Interval(order[link.tail], last)
    return Interval(order[head.name], _use(head, link, order, deaths))


def leaves_program(head: Site, link: Link) -> bool:
    """Whether a link carries a gradient, an update or a result out of the program."""
    return link.operand < 0 or head.node is None
