"""Find the unit of repeated blocks to which each node of a lowered program belongs.

A program that leaves out most of a model's equal blocks (`autoshard.ir.repeat`) has four of many equal units of blocks.
The third unit, which follows the gap, stands for the left-out units too: its nodes count several times. A node of a
lowered program belongs to the unit of the traced node for which it was emitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.repeat import Repeat
from passes.strategies.fold_blocks import module_paths
from passes.strategies.local_tracer import EMITTED_AT
from passes.strategies.repeated import AFTER_GAP


class UnitSpot(NamedTuple):
    """The unit of repeated blocks that a node belongs to.

    Args:
        repeat: index of the repeat in `Program.repeats`.
        unit: index of the unit in `Repeat.units`, 0 to 3.
    """

    repeat: int
    unit: int


@dataclass(frozen=True, slots=True)
class LocalUnits:
    """The units of repeated blocks of a lowered program's nodes.

    Args:
        repeats: the repeats of the traced program.
        paths: module path of each node of the traced program, by name.
    """

    repeats: tuple[Repeat, ...]
    paths: Mapping[str, str]
    _known: dict[str, UnitSpot | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lowered: LoweredProgram) -> LocalUnits:
        """Return the units of a lowered program's nodes. If the program leaves out no blocks, no node has a unit."""
        repeats = lowered.traced.repeats
        return cls(repeats, module_paths(lowered.traced) if repeats else {})

    def spot(self, node: fx.Node) -> UnitSpot | None:
        """Return the unit of repeated blocks to which a node belongs, or None outside of repeated blocks."""
        if not self.repeats:
            return None
        path = self.paths.get(node.meta.get(EMITTED_AT, "")) or node.meta.get("module", "")
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    def count(self, node: fx.Node) -> int:
        """Return how many equal nodes of the model `node` stands for, itself included."""
        return self.runs(self.spot(node))

    def runs(self, spot: UnitSpot | None) -> int:
        """Return how many equal units of the model the unit at `spot` stands for, itself included.

        For example, the result is 29 for the unit after a gap of 28 left-out units. It is 1 if `spot` is None.
        """
        return 1 if spot is None or spot.unit != AFTER_GAP else 1 + self.repeats[spot.repeat].left_out

    def _find(self, path: str) -> UnitSpot | None:
        for number, repeat in enumerate(self.repeats):
            place = repeat.place(path)
            if place is not None:
                return UnitSpot(number, place[0])
        return None
