"""The units of repeated blocks that nodes of a lowered program belong to, if the program leaves out units.

A node belongs to the unit of the traced node at whose place it stands (`autoshard.ir.repeat`). The unit behind the
left-out units stands for them too.
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
from passes.strategies.repeated import BEHIND


class UnitSpot(NamedTuple):
    """The number of a repeat, and the index of a node's unit in `Repeat.units`."""

    repeat: int
    unit: int


@dataclass(frozen=True, slots=True)
class LocalUnits:
    """The units of the nodes of a lowered program.

    Args:
        repeats: the repeats of the program.
        paths: traced node to the path of its module.
    """

    repeats: tuple[Repeat, ...]
    paths: Mapping[str, str]
    _known: dict[str, UnitSpot | None] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lowered: LoweredProgram) -> LocalUnits:
        """Return the units of a lowered program; a whole program has none."""
        repeats = lowered.traced.repeats
        return cls(repeats, module_paths(lowered.traced) if repeats else {})

    def spot(self, node: fx.Node) -> UnitSpot | None:
        """Return the unit of a node; None outside of all units."""
        if not self.repeats:
            return None
        path = self.paths.get(node.meta.get(EMITTED_AT, "")) or node.meta.get("module", "")
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

    def count(self, node: fx.Node) -> int:
        """Number of nodes of the whole program that a node stands for."""
        return self.runs(self.spot(node))

    def runs(self, spot: UnitSpot | None) -> int:
        """Number of units that the unit of a spot stands for."""
        return 1 if spot is None or spot.unit != BEHIND else 1 + self.repeats[spot.repeat].left_out

    def _find(self, path: str) -> UnitSpot | None:
        for number, repeat in enumerate(self.repeats):
            place = repeat.place(path)
            if place is not None:
                return UnitSpot(number, place[0])
        return None
