"""Run the update of a program, in two graphs if a pipeline stage needs the norm of all stages' gradients.

To clip gradients, the first graph computes the stage's own sum of squares, and the sums are added over stages. The
second graph takes the total, and values from the first graph, and computes the new parameters and state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autoshard.graphs.cut_graph import cut_graph
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.program import OWNERS, InputKind, OutputKind
from autoshard.runtime.engine import Engine, Loaded, LocalValue, Reader


@dataclass(frozen=True, eq=False)
class ProgramUpdate:
    """The update of one program, or of one pipeline stage.

    Args:
        graph_module: takes the gradients, summed over micro-batches, then `reads`; returns `writes`.
        gradients: the number of gradients.
        reads: slots of parameters, optimizer state and options.
        writes: slots of updated parameters and state; for a stage that clips, also of its sum of squares.
        engine: runs the graph.
    """

    graph_module: fx.GraphModule
    gradients: int
    reads: Sequence[LocalSlot]
    writes: Sequence[LocalSlot]
    engine: Engine

    def load(self) -> None:
        """Load all graphs now. Loading may make process groups, so all ranks of a stage must load together."""
        _ = self._first, self._second

    def run_squares(
        self, carried: Sequence[LocalValue], held: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, list[LocalValue]]:
        """Return the sum of the squares of a stage's gradients, a scalar, or None if the stage does not clip gradients.

        The second result are local values for the argument `kept` of `run`.

        Args:
            carried: local values of the gradients, summed over micro-batches.
            held: the user's tensors, in the order of `reads`.
        """
        if self._first is None or self._squares is None:
            return None, []
        for index in self._places_of_squares:
            held[index] = torch.zeros((), dtype=self.reads[index].dtype, device=self.engine.device)
        squares, *kept = self._first([*carried, *self._read(held)])
        return self.engine.write(squares, self.writes[self._squares]), kept

    @torch.no_grad()
    def run(
        self,
        carried: list[LocalValue],
        held: list[torch.Tensor],
        kept: Sequence[LocalValue] = (),
        squares: torch.Tensor | None = None,
    ) -> None:
        """Update the user's parameters and optimizer state in place.

        Args:
            carried: local values of the gradients, summed over micro-batches. The list is emptied.
            held: the user's tensors, in the order of `reads`.
            kept: the local values from `run_squares`.
            squares: the sum of squares of all stages' gradients; None if stages do not clip.
        """
        for index in self._places_of_squares:
            assert squares is not None, "a stage that clips gave its squares"
            held[index] = squares.to(self.reads[index].dtype)
        values = [*kept, *carried, *self._read(held)]
        carried.clear()
        self.engine.store([held[place] for place in self._places], self._second(values), self._updated)

    @cached_property
    def _read(self) -> Reader:
        return self.engine.reader(self.reads)

    @cached_property
    def _squares(self) -> int | None:
        """The position of the sum of squares in `writes`; None if the update does not return it."""
        kinds = [slot.slot.kind for slot in self.writes]
        return kinds.index(OutputKind.SQUARES) if OutputKind.SQUARES in kinds else None

    @cached_property
    def _places_of_squares(self) -> tuple[int, ...]:
        return tuple(index for index, slot in enumerate(self.reads) if slot.slot.kind is InputKind.SQUARES)

    @cached_property
    def _updated(self) -> tuple[LocalSlot, ...]:
        return tuple(slot for index, slot in enumerate(self.writes) if index != self._squares)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """For each updated value, the position in `reads` of the value that it replaces."""
        places = {(slot.slot.kind, slot.slot.name): index for index, slot in enumerate(self.reads)}
        return tuple(places[OWNERS[OutputKind(slot.slot.kind)], slot.slot.name] for slot in self._updated)

    @cached_property
    def _parts(self) -> tuple[fx.GraphModule | None, fx.GraphModule, int]:
        """The first graph, the second graph, and how many values the second takes from the first.

        The first is None if the stage does not return its sum of squares.
        """
        if self._squares is None:
            return None, self.graph_module, 0
        return cut_graph(self.graph_module, (self._squares,))

    @cached_property
    def _first(self) -> Loaded | None:
        graph_module = self._parts[0]
        return None if graph_module is None else self.engine.load(graph_module)

    @cached_property
    def _second(self) -> Loaded:
        _, graph_module, taken = self._parts
        first = taken + self.gradients
        return self.engine.load(graph_module, {index: first + place for index, place in enumerate(self._places)})
