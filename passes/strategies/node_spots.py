"""Find the positions of a traced program's nodes in repeated units of blocks (`autoshard.ir.repeat`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from autoshard.ir.program import Program
from autoshard.ir.repeat import Repeat


class NodeSpot(NamedTuple):
    """The position of a node in a repeated unit.

    Args:
        repeat: index of the `Repeat` in a sequence of repeats.
        first: number of the first block of the unit.
        place: index of the node among the nodes of the unit.
    """

    repeat: int
    first: int
    place: int


def node_spots(program: Program, repeats: Sequence[Repeat], paths: Mapping[str, str]) -> dict[fx.Node, NodeSpot]:
    """Return the positions of nodes in repeated units, in program order. A node outside of units has none.

    The units are the left-out units, as far as the program has them, and two units on each side of the gap. `paths` is
    the result of `module_paths` for the program.
    """
    counts: dict[tuple[int, int], int] = defaultdict(int)
    spots: dict[fx.Node, NodeSpot] = {}
    for node in program.graph.nodes:
        for number, repeat in enumerate(repeats):
            first = repeat.first_block(paths[node.name])
            if first is not None:
                spots[node] = NodeSpot(number, first, counts[number, first])
                counts[number, first] += 1
    return spots
