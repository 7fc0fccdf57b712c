"""Put the left-out blocks of a traced model back, so that a deep model need not be traced whole.

Before → after: a program has the blocks 0 to 3 and 28 to 31 of 32 equal blocks. Block 28 is copied for the blocks 4 to
27. In the forward, a copy reads the values of the block before it. In the backward, a copy reads the values of the
block behind it. The result is the program that a trace of the whole model gives, with the same names of nodes.

`leave_out_units` is the opposite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import NamedTuple

from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.program import OWNERS, InputSlot, OutputSlot, Program, describe
from autoshard.ir.repeat import Repeat, names_represented_by
from autoshard.tracing.number_nodes import number_nodes
from autoshard.tracing.simplify import input_name
from passes.strategies.fold_blocks import module_paths
from passes.strategies.node_spots import NodeSpot, node_spots
from passes.strategies.repeated import NotAlikeError


def put_back_units(program: Program) -> Program:
    """Return the traced program of the whole model, from the program of a model without some inner blocks.

    Args:
        program: a traced program before preparation, with `repeats`.

    Raises:
        NotAlikeError: the units beside a gap run different nodes, or a node outside of the repeated units reads a value
            of these units. An example is a loss that reads the output of every block.
    """
    return _PuttingBack(program).run()


class _UnitRun(NamedTuple):
    """A part of a program in which the units of a repeat follow each other, such as the forward.

    Args:
        repeat: index of the repeat.
        before: the nodes of the unit before the gap.
        standing: the nodes of the unit behind the gap, which stands for the left-out units.
    """

    repeat: int
    before: Sequence[fx.Node]
    standing: Sequence[fx.Node]


@dataclass(slots=True)
class _PuttingBack:
    """Copies a program, and left-out units with it.

    Args:
        paths: the module path of each node, by name.
        spots: the position of each node in the four units of a repeat.
        copies: for each node of the program, its copy in `graph`.
        at: the nodes of `graph` in units, by their positions in the whole model.
        inputs: the placeholders of `graph` so far, with their slots.
    """

    program: Program
    paths: dict[str, str] = field(init=False)
    spots: dict[fx.Node, NodeSpot] = field(init=False)
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    at: dict[NodeSpot, fx.Node] = field(default_factory=dict)
    inputs: list[tuple[fx.Node, InputSlot]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = module_paths(self.program)
        self.spots = node_spots(self.program, self.program.repeats, self.paths)

    def run(self) -> Program:
        slots = {slot.node: slot for slot in self.program.inputs}
        ahead, behind = dict[fx.Node, _UnitRun](), dict[fx.Node, _UnitRun]()
        order = {node: number for number, node in enumerate(self.program.graph.nodes)}
        for run in self._runs(slots):
            self._check_alike(run)
            if order[run.before[0]] < order[run.standing[0]]:
                ahead[run.standing[0]] = run
            else:  # a backward runs units in reverse
                behind[run.standing[-1]] = run
        for node in self.program.graph.nodes:
            if node.op == "output":
                continue
            if node in ahead:
                self._put_back(ahead[node], slots)
            self.copies[node] = self._copy(node, self.spots.get(node))
            if node.op == "placeholder":
                self.inputs.append((self.copies[node], slots[node.name]))
            if node in behind:
                self._put_back(behind[node], slots)
        return self._finished()

    def _runs(self, slots: Mapping[str, InputSlot]) -> Iterator[_UnitRun]:
        def part(node: fx.Node) -> tuple[int, str]:
            return self.spots[node].first, slots[node.name].kind if node.op == "placeholder" else node.meta["phase"]

        for number, repeat in enumerate(self.program.repeats):
            nodes = [node for node, spot in self.spots.items() if spot.repeat == number]
            found: dict[int, list[list[fx.Node]]] = defaultdict(list)
            for (first, _), run in groupby(nodes, part):
                found[first].append(list(run))
            before, standing = found[repeat.before], found[repeat.behind]
            if len(before) != len(standing):
                raise NotAlikeError(f"the units beside the gap of {repeat} run in different numbers of parts")
            yield from (_UnitRun(number, *pair) for pair in zip(before, standing, strict=True))

    def _check_alike(self, run: _UnitRun) -> None:
        """Raise `NotAlikeError` unless both units of a run have the same nodes, which read corresponding values."""
        if list(map(self._form, run.before)) != list(map(self._form, run.standing)):
            raise NotAlikeError(f"the units beside the gap of {self.program.repeats[run.repeat]} run different nodes")

    def _form(self, node: fx.Node) -> Hashable:
        """Return a value that is equal for nodes at the same place of two units that read corresponding values."""
        here = self.spots[node]
        repeat = self.program.repeats[here.repeat]
        _, path = repeat.place(self.paths[node.name]) or (0, "")

        def corresponding(operand: fx.Node) -> str:
            there = self.spots.get(operand)
            if there is None or there.repeat != here.repeat:
                return operand.name
            return f"{repeat.distance(here.first, there.first)} units on, place {there.place}"

        target = "" if node.op == "placeholder" else str(node.target)
        arguments = str(fx.map_arg((node.args, dict(node.kwargs)), corresponding))
        return path, here.place, node.op, target, describe(node.meta.get("val")), arguments

    def _put_back(self, run: _UnitRun, slots: Mapping[str, InputSlot]) -> None:
        """Copy the nodes of a run for each left-out unit."""
        repeat = self.program.repeats[run.repeat]
        is_behind = run.standing[0] in self.copies
        for index, first in sorted(enumerate(repeat.inner), reverse=is_behind):
            for node in run.standing:
                made = self._copy(node, self.spots[node]._replace(first=first))
                if node.op == "placeholder":
                    slot = _slot_of_unit(slots[node.name], repeat, index)
                    made.target = input_name(slot.kind, slot.name)
                    self.inputs.append((made, slot))
                else:
                    made.meta["module"] = repeat.represented_by(node.meta["module"])[index]

    def _copy(self, node: fx.Node, spot: NodeSpot | None) -> fx.Node:
        """Copy a node. `spot` is the position of the copy in the whole model, or None outside of all units.

        Raises:
            NotAlikeError: the whole model computes an operand later, or an operand is in repeated units that do not
                contain the node.
        """

        def read(operand: fx.Node) -> fx.Node:
            there = self.spots.get(operand)
            if spot is not None and there is not None and there.repeat == spot.repeat:
                repeat = self.program.repeats[spot.repeat]
                units = repeat.distance(self.spots[node].first, there.first)
                found = self.at.get(there._replace(first=spot.first + units * repeat.period))
            else:
                self._check_is_outside(operand)
                found = self.copies.get(operand)
            if found is None:
                raise NotAlikeError(f"{node.name} reads {operand.name}, which the whole model runs later")
            return found

        made = copy_node(self.graph, node, read)
        if spot is not None:
            self.at[spot] = made
        return made

    def _check_is_outside(self, node: fx.Node) -> None:
        """Raise `NotAlikeError` if a node stands for nodes of left-out units, or is in the last unit before them."""
        spot = self.spots.get(node)
        if spot is not None:
            repeat = self.program.repeats[spot.repeat]
            if spot.first in (repeat.before, repeat.behind):
                raise NotAlikeError(f"{node.name} of a repeated block is read outside of the repeated blocks")

    def _outputs(self) -> Iterator[tuple[fx.Node, OutputSlot]]:
        """Yield the nodes of `graph` that the whole program returns, with their slots."""
        nodes = self.program.nodes_by_name()
        for (number, _), group in groupby(self.program.outputs, lambda slot: (self._stands_in(slot), slot.kind)):
            slots = list(group)
            repeat = None if number is None else self.program.repeats[number]
            for (index, first), slot in product(enumerate(repeat.inner if repeat else ()), slots):
                spot = self.spots.get(nodes[slot.node])
                if repeat is None or spot is None or spot[:2] != (number, repeat.behind):
                    raise NotAlikeError(f"{slot.name} is computed outside of its block")
                name = names_represented_by((repeat,), slot.name)[index]
                yield self.at[spot._replace(first=first)], replace(slot, name=name)
            for slot in slots:
                if slot.kind not in OWNERS:
                    self._check_is_outside(nodes[slot.node])
                yield self.copies[nodes[slot.node]], slot

    def _stands_in(self, slot: OutputSlot) -> int | None:
        """Return the index of the repeat for whose left-out units a result stands too; None if it stands for itself."""
        found = (n for n, each in enumerate(self.program.repeats) if len(names_represented_by((each,), slot.name)) > 1)
        return next(found, None)

    def _finished(self) -> Program:
        outputs = list(self._outputs())
        self.graph.output(tuple(node for node, _ in outputs))
        self.graph.output_node().meta.update(self.program.graph.output_node().meta)
        number_nodes(self.graph)
        repeats = self.program.repeats
        return replace(
            self.program,
            graph_module=lazy_module(self.program.graph_module, self.graph),
            inputs=tuple(replace(slot, node=node.name) for node, slot in self.inputs),
            outputs=tuple(replace(slot, node=node.name) for node, slot in outputs),
            unreached={
                tangent: frozenset(whole for name in names for whole in names_represented_by(repeats, name))
                for tangent, names in self.program.unreached.items()
            },
            repeats=(),
        )


def _slot_of_unit(slot: InputSlot, repeat: Repeat, index: int) -> InputSlot:
    """Return the slot of the same input in the left-out unit number `index`, from 0.

    Raises:
        NotAlikeError: the input is tied to a tensor outside of its block.
    """
    name, *aliases = (names_represented_by((repeat,), name) for name in (slot.name, *slot.aliases))
    if any(len(names) == 1 for names in aliases):
        raise NotAlikeError(f"{slot.name} is tied to a tensor outside of its block")
    return replace(slot, name=name[index], aliases=tuple(names[index] for names in aliases))
