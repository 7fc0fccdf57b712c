"""Leave out the inner blocks of a traced pipeline stage, as `autoshard.tracing.leave_out_blocks` does for a model.

Before → after: blocks 8 to 27 run the same operators. Blocks 8, 9, 26 and 27 stay, and a `Repeat` counts the missing
blocks. In the forward, block 26 reads the values of block 9 instead of those of block 25. In the backward, block 9
reads the values of block 26 instead of those of block 10.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.program import OWNERS, Program, describe
from autoshard.ir.repeat import Repeat
from autoshard.tracing.leave_out_blocks import inner_runs
from passes.strategies.fold_blocks import module_paths
from passes.strategies.node_spots import NodeSpot, node_spots

_BLOCK = re.compile(r"((?:.*?\.)??[^.]+)\.(\d+)(?:\.(.*))?$")


def leave_out_units(program: Program, margin: int) -> Program | None:
    """Return the program without the inner units of its runs of equal blocks, or None without such runs.

    A unit is one block, or several blocks if kinds of blocks alternate. The result is also None if the short
    program would need a value of a left-out unit. An example is a loss that reads the output of every block.

    Args:
        program: the traced program of a stage, with its update.
        margin: the number of units kept at each end of a run, in addition to one unit on each side of the gap.
    """
    paths = module_paths(program)
    repeats = tuple(_repeats(program, paths, margin))
    if not repeats:
        return None
    try:
        return _LeavingOut(program, repeats, node_spots(program, repeats, paths)).run()
    except _CannotLeaveOutError:
        return None


class _CannotLeaveOutError(Exception):
    """The short program would need a value of a left-out unit."""


def _repeats(program: Program, paths: Mapping[str, str], margin: int) -> Iterator[Repeat]:
    """Yield a `Repeat` for each run of units with equal nodes, such as a run in the blocks "layers.0" to "layers.31".

    `paths` has the module of each node, by the node's name. `margin` is the argument of `leave_out_units`.
    """
    forms: dict[str, dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))
    for node in program.graph.nodes:
        found = _BLOCK.match(paths[node.name])
        if found is not None:
            target = str(node.target) if node.op == "call_function" else ""
            form = (found[3], node.op, target, node.meta.get("phase"), describe(node.meta.get("val")))
            forms[found[1]][int(found[2])].append(form)
    for path, blocks in forms.items():
        numbers = sorted(blocks)
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            continue
        known: dict[tuple[object, ...], int] = {}
        kinds = [known.setdefault(tuple(blocks[number]), len(known)) for number in numbers]
        for period, before, behind in inner_runs(kinds, margin):
            yield Repeat(path, period, numbers[before], numbers[behind])


@dataclass(slots=True)
class _LeavingOut:
    """Copies a program without the units that its repeats leave out. `at` has the nodes of units by their positions."""

    program: Program
    repeats: Sequence[Repeat]
    spots: Mapping[fx.Node, NodeSpot]
    at: dict[NodeSpot, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.at = {spot: node for node, spot in self.spots.items()}

    def run(self) -> Program:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        names = self.program.nodes_by_name()
        kept = [slot for slot in self.program.outputs if not self._is_left_out(names[slot.node])]
        if any(slot.kind not in OWNERS for slot in self.program.outputs if slot not in kept):
            raise _CannotLeaveOutError
        for node in self.program.graph.nodes:
            if node.op == "output" or self._is_left_out(node):
                continue
            copies[node] = copy_node(graph, node, lambda operand, reader=node: copies[self._read(reader, operand)])
        graph.output(tuple(copies[names[slot.node]] for slot in kept))
        inputs = tuple(slot for slot in self.program.inputs if not self._is_left_out(names[slot.node]))
        made = lazy_module(self.program.graph_module, graph)
        return replace(self.program, graph_module=made, inputs=inputs, outputs=tuple(kept), repeats=tuple(self.repeats))

    def _is_left_out(self, node: fx.Node) -> bool:
        spot = self.spots.get(node)
        return spot is not None and spot.first not in self.repeats[spot.repeat].units

    def _read(self, reader: fx.Node, operand: fx.Node) -> fx.Node:
        """Return the node that the copy of `reader` reads instead of `operand`.

        In the whole program, the operand's unit is some number of units away from the reader's unit. The returned node
        has the same distance, counted without the missing units. An operand outside of the reader's run is returned
        itself.
        """
        here, there = self.spots.get(reader), self.spots.get(operand)
        if there is not None and here is not None and here.repeat == there.repeat:
            repeat = self.repeats[here.repeat]
            unit = repeat.units.index(here.first) + (there.first - here.first) // repeat.period
            if 0 <= unit < len(repeat.units):
                found = self.at.get(there._replace(first=repeat.units[unit]))
                if found is None:
                    raise _CannotLeaveOutError
                return found
        if self._is_left_out(operand):
            raise _CannotLeaveOutError
        return operand
