r"""Memory rows that are exact for one choice, and count no more than there is under every other.

A search whose rows are so is exact: each problem that it solves is a relaxation of the true one, and each choice that
does not fit is cut off by the row of a point at which it does not (`search_exactly`).

What is in memory at a point under a choice (`storage_walk`) is there for a reason: something made it, and views with no
reshard between them led to what still needs it. Under another choice that agrees with the reason it is there as well.
So the row of a point is the sum over what is there of

1. `_of_made`: what a call or a reshard made and needs no view to be needed: by the specs of that, any option;
2. `_of_needed`: the only storage of a value and its views: what needs one there needs one of its size, whoever made it;
3. `_as_chosen`: all else: bytes, less as many for each variable whose option gives it another reason.

Different storages have different reasons for being made, so nothing is counted twice. Where sizes under other options
are not sure (padding, views of parts), a smaller one stands for them, and 3. adds the difference under this one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoshard.ir.spec import PartitionSpec
from passes.memory.liveness import Held, Interval, OnLink
from passes.memory.memory_tables import differs, is_on_host, traced_value
from passes.memory.transients import LocalForm
from passes.planning.build_assignment import PlanningProblem
from passes.planning.storage_walk import Local, Reshard, Rewritten, Storage, Use, Walk, viewed_operands, walk_through
from passes.planning.wiring import AsTraced, Facts, Wiring, both
from passes.solver.assignment import Floats, MemoryRow
from passes.strategies.enumerate_strategies import Link, Site, needs_of, specs_of
from passes.strategies.price import local_bytes_of


@dataclass
class ExactRows:
    """The memory rows that are exact for a choice.

    Args:
        planning: the problem of the program that runs under the choice, without elided units.
        choice: of strategies.
        wiring: of that program among those of other choices.
    """

    planning: PlanningProblem
    choice: Sequence[int]
    wiring: Wiring = field(default_factory=AsTraced)

    @cached_property
    def walk(self) -> Walk:
        """What is stored when under the choice."""
        return walk_through(self.planning, self.choice)

    def at(self, point: int, edge_between: Mapping[tuple[int, ...], int]) -> MemoryRow:
        """The row of a point; `edge_between` gives the edges of pairs of variables."""
        terms = _Terms(self.planning, self.choice, self.wiring, self.walk, point)
        row = _Row(edge_between)
        for variables, sizes, facts in terms.all():
            row.add(variables, sizes, facts)
        row.only_under(terms.at_point())
        return row.finished()


_Term = tuple[tuple[int, ...], Floats, Facts]
"""Variables, two at most; bytes by their options; and under what these are there."""


@dataclass(slots=True)
class _Row:
    """A memory row under construction."""

    edge_between: Mapping[tuple[int, ...], int]
    variables: dict[int, Floats] = field(default_factory=dict)
    edges: dict[int, Floats] = field(default_factory=dict)
    constant: float = 0.0
    most: float = 0.0

    def add(self, variables: tuple[int, ...], sizes: Floats, facts: Facts) -> None:
        """Add bytes that are there under some facts; those about other variables cost them all where they are not."""
        if len(variables) == 2 and variables[0] == variables[1]:
            variables, sizes = variables[:1], np.diagonal(sizes)
        there = np.ones((), dtype=bool)
        for variable, count in zip(variables, sizes.shape, strict=True):
            there = np.logical_and.outer(there, facts.get(variable, np.ones(count, dtype=bool)))
        sizes = np.where(there, sizes, np.minimum(sizes, 0.0))
        match variables:
            case ():
                self.constant += float(sizes)
            case (variable,):
                self._add(variable, sizes)
            case _:
                index = self.edge_between[variables]
                self.edges[index] = self.edges.get(index, 0.0) + sizes
        most = max(0.0, float(sizes.max()))
        self.most += most
        for variable, mask in facts.items():
            if variable not in variables and most and not mask.all():
                self._add(variable, np.where(mask, 0.0, -most))

    def _add(self, variable: int, sizes: Floats) -> None:
        self.variables[variable] = self.variables.get(variable, 0.0) + sizes

    def only_under(self, facts: Facts) -> None:
        """Let nothing be there where some facts do not hold."""
        for variable, mask in facts.items():
            self._add(variable, np.where(mask, 0.0, -self.most))

    def finished(self) -> MemoryRow:
        return MemoryRow(self.constant, self.variables, self.edges)


@dataclass
class _Terms:
    """What is there at one point."""

    planning: PlanningProblem
    choice: Sequence[int]
    wiring: Wiring
    walk: Walk
    point: int

    def all(self) -> Iterator[_Term]:
        """All storages, and what is there for a moment."""
        there = [item for item in self.walk.storages.values() if self._is_there(item)]
        families = Counter(self._family(item) for item in there)
        for item in there:
            yield from self._of_storage(item, is_alone=families[self._family(item)] == 1)
        for reshard in self.walk.reshards:
            if reshard.point == self.point:
                yield from self._of_reshard(reshard)
        for call in self.walk.rewritten:
            if call.point == self.point:
                yield from self._of_call(call)

    def _is_there(self, item: Storage) -> bool:
        name = item.key[0]
        is_elsewhere = isinstance(name, str) and is_on_host(self.planning.space.sites[name])
        return item.birth <= self.point <= item.death and not is_elsewhere

    def at_point(self) -> Facts:
        """Under which choices there is this point."""
        liveness, links = self.planning.liveness, self.planning.space.links
        names = [name for name, point in liveness.calls.items() if point == self.point]
        names += [links[index].head for index, point in liveness.reshards.items() if point == self.point]
        return both(*(self.wiring.exists(name) for name in names))

    # Storages.

    def _of_storage(self, item: Storage, *, is_alone: bool) -> Iterator[_Term]:
        use, factor = self._use(item), 1.0
        if item.part == "parameters":
            factor += self.planning.liveness.state_bytes_per_parameter_byte
        if is_alone and use is not None and self._is_even(use.link):
            variables, sizes, facts = self._of_needed(use)
        elif use is None or self._is_needed_as_made(item, use):
            variables, sizes, facts = self._of_made(item)
            facts = facts if use is None else both(facts, self._use_facts(use))
        else:
            variables, sizes, facts = (), np.zeros(()), {}
        if variables:
            yield variables, factor * sizes, facts
        left = factor * (item.size - float(sizes[tuple(self.choice[variable] for variable in variables)]))
        if left:
            used = {} if use is None else both(self._use_facts(use), *map(self._path_facts, use.path))
            unmoved = {} if use is None or self._is_waiting(use) else self._link_facts(use.link)
            yield from self._as_chosen(left, self._made_facts(item), used, unmoved)

    def _is_needed_as_made(self, item: Storage, use: Use) -> bool:
        """Whether what needs a storage needs it however it is resharded from there."""
        return not use.path and (self._is_waiting(use) or item.key == (use.link, "copy"))

    def _use(self, item: Storage) -> Use | None:
        """The use for which something is in memory at the point, by way of fewest views; None if it needs none."""
        if item.birth == self.point or not item.uses or self._is_input(item):
            return None
        return min((use for use in item.uses if use.point >= self.point), key=lambda use: len(use.path), default=None)

    def _is_input(self, item: Storage) -> bool:
        name = item.key[0]
        return isinstance(name, str) and self.planning.space.sites[name].is_input

    def _is_waiting(self, use: Use) -> bool:
        """Whether what a link carries is still to be resharded, if it is."""
        return self.point <= self.planning.liveness.reshards[use.link]

    def _use_facts(self, use: Use) -> Facts:
        if self._is_waiting(use):
            return self.wiring.will_read(use.link, self.point)
        return self.wiring.exists(self.planning.space.links[use.link].head)

    def _of_needed(self, use: Use) -> _Term:
        """What needs a storage: what is to be resharded as it is, else as its reader has it."""
        link = self.planning.space.links[use.link]
        tail, head = self.planning.space.sites[link.tail], self.planning.space.sites[link.head]
        if self._is_waiting(use):
            facts = self.wiring.needs(use.link, self.point)
            return self._by_specs(link.tail, tail, link.result, specs_of(tail, link.result), facts)
        return self._by_specs(link.head, tail, link.result, needs_of(head, link), self.wiring.exists(link.head))

    def _by_specs(self, name: str, owner: Site, result: int, specs: tuple[PartitionSpec, ...], facts: Facts) -> _Term:
        """Bytes of a value by the options of site `name`, which say its spec."""
        sizes = local_bytes_of(owner.results[result], specs, self.planning.space.mesh)
        variable = self.planning.classes[name]
        return (variable,), np.tile(sizes, self.wiring.options(variable)), facts

    def _of_made(self, item: Storage) -> _Term:
        """What a call or a reshard made, whatever its specs."""
        keeper, _ = item.key
        space = self.planning.space
        if isinstance(keeper, int):
            link = space.links[keeper]
            tail, head = space.sites[link.tail], space.sites[link.head]
            needs = needs_of(head, link)
            exists = self.wiring.exists(link.head)
            sizes = local_bytes_of(tail.results[link.result], needs, space.mesh)
            moved = differs(specs_of(tail, link.result), needs, space.mesh)
            return self._of_pair(link, np.where(moved, sizes, 0.0), exists)
        return self._of_one(keeper, self._made_bytes(item), self.wiring.exists(keeper))

    def _made_bytes(self, item: Storage) -> Floats:
        """Bytes of what a call makes in place of a storage, by its option; none where that lies in an operand's."""
        name, which = item.key
        assert isinstance(name, str), "links make copies"
        site = self.planning.space.sites[name]
        result = self._result(item)
        sizes = local_bytes_of(site.results[result], specs_of(site, result), self.planning.space.mesh)
        if isinstance(which, str) or site.is_input:
            return sizes
        for option in range(len(sizes)):
            form = self._form(name, option)
            if form is not None:
                number = form.results[result]
                sizes[option] = 0 if number is None else form.made.get(number, 0)
            elif site.is_alias:
                sizes[option] = 0
        return sizes

    def _result(self, item: Storage) -> int:
        """The first result that lies in a storage made by a call."""
        name, which = item.key
        form = None if isinstance(which, str) else self._form(str(name), self.choice[self.planning.classes[str(name)]])
        if form is not None:
            return form.results.index(which)
        return which if isinstance(which, int) else 0

    def _of_one(self, name: str, sizes: Floats, facts: Facts) -> _Term:
        variable = self.planning.classes[name]
        return (variable,), np.tile(sizes, self.wiring.options(variable)), facts

    def _of_pair(self, link: Link, sizes: Floats, facts: Facts) -> _Term:
        tail, head = self.planning.classes[link.tail], self.planning.classes[link.head]
        times = self.wiring.options(tail), self.wiring.options(head)
        return (tail, head), np.tile(sizes, times), facts

    def _form(self, name: str, option: int) -> LocalForm | None:
        site = self.planning.space.sites[name]
        return self.walk.local_form(site, site.strategies[option])

    # What is there for a moment.

    def _of_reshard(self, reshard: Reshard) -> Iterator[_Term]:
        link = self.planning.space.links[reshard.link]
        freed = reshard.storage.death == reshard.point
        size = float(self.planning.memory.transients.of_reshard(reshard.moved, freed=freed))
        facts = [self._facts_of(reshard.value), self._link_facts(reshard.link), self._strided_facts(reshard.link)]
        if not freed:
            facts.append(self._later_facts(reshard.storage))
        if self._is_even(reshard.link) and reshard.moved.value.is_contiguous():
            exists = self.wiring.exists(link.head)
            kept = OnLink(reshard.link, Held.LAST_RESHARD, Interval(reshard.point, reshard.point))
            sizes = self.planning.memory.on_link(kept).whole()
            yield self._of_pair(link, sizes, exists)
            chosen = self.choice[self.planning.classes[link.tail]], self.choice[self.planning.classes[link.head]]
            size -= float(sizes[chosen])
        yield from self._as_chosen(size, *facts)

    def _of_call(self, call: Rewritten) -> Iterator[_Term]:
        """A rewritten call, under this strategy; under others what it makes may not be there."""
        transients = self.planning.memory.transients
        size = call.beside(transients)
        variable = self.planning.classes[call.site.name]
        facts = [self._facts_of(operand) for operand in call.operands]
        facts += [self._option_facts(variable)]
        given = dict.fromkeys(operand.storage for operand in call.operands)
        facts += [self._later_facts(item) for item in given if item.death > call.point]
        least = np.array([self._least_beside(call.site.name, option) for option in range(len(call.site.strategies))])
        yield self._of_one(call.site.name, least, {})
        yield from self._as_chosen(size - least[self.choice[variable]], *facts)

    def _least_beside(self, name: str, option: int) -> float:
        """What a call takes beside operands and results at least: operands are there first, and results last."""
        form = self._form(name, option)
        if form is None:
            return 0.0
        unused = (node.meta["val"] for node in form.graph.nodes if node.op == "placeholder" and not node.users)
        return -float(sum(form.made.values()) + sum(value.numel() * value.element_size() for value in unused))

    # Facts.

    def _as_chosen(self, size: float, *facts: Facts) -> Iterator[_Term]:
        """Bytes that are there under some facts, and maybe not under others."""
        if size:
            yield (), np.array(size), both(*facts) if size > 0 else {}

    def _facts_of(self, value: Local) -> Facts:
        """Under which choices a value lies in this storage, as large."""
        return both(self._made_facts(value.storage), *map(self._path_facts, value.path))

    def _later_facts(self, item: Storage) -> Facts:
        """Under which choices a storage is there behind the point."""
        if self._is_input(item):
            return {}
        use = min((use for use in item.uses if use.point > self.point), key=lambda use: len(use.path))
        link = self.planning.space.links[use.link]
        exists = self.wiring.exists(link.head)
        path = map(self._path_facts, use.path)
        waits = self.point < self.planning.liveness.reshards[use.link]
        unmoved = {} if waits else self._link_facts(use.link)
        return both(self._made_facts(item), exists, self.wiring.reads(use.link), unmoved, *path)

    def _made_facts(self, item: Storage) -> Facts:
        keeper = item.key[0]
        if isinstance(keeper, int):
            return self._link_facts(keeper)
        variable, sizes = self.planning.classes[keeper], self._made_bytes(item)
        result = self._result(item)
        same = self._same(specs_of(self.planning.space.sites[keeper], result), self.choice[variable])
        return both(self.wiring.exists(keeper), self._mask(variable, same & (sizes == sizes[self.choice[variable]])))

    def _link_facts(self, index: int) -> Facts:
        """That a link joins the specs that it does."""
        link = self.planning.space.links[index]
        tail, head = self.planning.space.sites[link.tail], self.planning.space.sites[link.head]
        first, second = self.planning.classes[link.tail], self.planning.classes[link.head]
        before = self._same(specs_of(tail, link.result), self.choice[first])
        after = self._same(needs_of(head, link), self.choice[second])
        exists = self.wiring.exists(link.head)
        return both(exists, self._mask(first, before), self._mask(second, after))

    def _path_facts(self, index: int) -> Facts:
        """That a value goes on in the same memory by way of a link."""
        link = self.planning.space.links[index]
        variable = self.planning.classes[link.head]
        facts = both(self._link_facts(index), self.wiring.reads(index))
        if self._form(link.head, self.choice[variable]) is not None:
            return both(facts, self._option_facts(variable))
        site = self.planning.space.sites[link.head]
        plain = np.array([self._form(link.head, option) is None for option in range(len(site.strategies))])
        return both(facts, self._mask(variable, plain))

    def _strided_facts(self, index: int) -> Facts:
        """That a value lies strided or not, as it does."""
        link = self.planning.space.links[index]
        site = self.planning.space.sites[link.tail]
        if site.is_input or traced_value(site, link.result).is_contiguous():
            return {}
        into = self.walk.into[link.tail]
        return both(*map(self._link_facts, into), *map(self._strided_facts, into))

    def _option_facts(self, variable: int) -> Facts:
        mask = np.zeros(len(self.planning.assignment.costs[variable]), dtype=bool)
        mask[self.choice[variable]] = True
        return self._mask(variable, mask)

    def _mask(self, variable: int, mask: np.ndarray) -> Facts:
        return {variable: np.tile(mask, self.wiring.options(variable))}

    def _same(self, specs: Sequence[PartitionSpec], option: int) -> np.ndarray:
        return ~differs((specs[option],), specs, self.planning.space.mesh)[0]

    # Families.

    def _family(self, item: Storage) -> str:
        """The site whose value, or a view or copy of it, lies in a storage."""
        keeper, which = item.key
        if isinstance(keeper, int):
            link = self.planning.space.links[keeper]
            return self._root(link.tail, link.result)
        if isinstance(which, str):
            return f"{keeper}, {which}"
        return self._root(keeper, self._result(item))

    def _root(self, name: str, result: int) -> str:
        original = self.wiring.family(name)
        site = self.planning.space.sites[original]
        if not site.is_alias:
            return f"{original}:{result}"
        above = self._viewed(site, result)
        return self._root(above.tail, above.result)

    def _viewed(self, site: Site, result: int) -> Link:
        operand = viewed_operands(site)[result]
        links = (self.planning.space.links[index] for index in self.walk.into[site.name])
        return next(link for link in links if link.operand == operand)

    def _is_even(self, index: int) -> bool:
        """Whether a link carries a value of which every storage has the bytes of its spec: no part, no padding."""
        link = self.planning.space.links[index]
        return self._is_whole(link.tail, link.result)

    def _is_whole(self, name: str, result: int) -> bool:
        site, size = self.planning.space.sites[name], self.planning.space.mesh.size
        shape = site.results[result].shape
        if any(count != 1 and count % size for count in shape):
            return False
        if not site.is_alias:
            forms = (self._form(name, option) for option in range(len(site.strategies)))
            return all(form is None or form.results[result] in form.made for form in forms)
        above = self._viewed(site, result)
        read = self.planning.space.sites[above.tail].results[above.result]
        return math.prod(read.shape) == math.prod(shape) and self._is_whole(above.tail, above.result)
