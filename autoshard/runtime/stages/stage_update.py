"""The update of a pipeline's stage, cut where it needs the norm of all stages' gradients.

Before → after: `gradients → squares; gradients, squares of all stages → parameters, state` as one graph → two graphs:
what the stage's own sum of squares needs, and the rest, which takes what the first has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import fx

from autoshard.graphs.cut_graph import cut_graph
from autoshard.ir.program import OWNERS, InputKind, OutputKind
from autoshard.runtime.engine import Loaded, LocalValue
from autoshard.runtime.executable import Executable


class StageUpdate:
    """The update of one stage.

    Args:
        stage: its program.
    """

    def __init__(self, stage: Executable) -> None:
        self.stage = stage
        self._slots = list(stage.updated)
        kinds = [slot.slot.kind for slot in self._slots]
        self._squares = kinds.index(OutputKind.SQUARES) if OutputKind.SQUARES in kinds else None

    def load(self) -> None:
        """Load both parts now; they may bind process groups, which all ranks of the stage do together."""
        if self.stage.phased.update is not None:
            _ = self._first, self._second

    def run_squares(
        self, carried: Sequence[LocalValue], held: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, list[LocalValue]]:
        """The sum of the squares of the stage's gradients, a scalar, and what `run` takes over of the computation.

        Args:
            carried: the gradients of all micro-batches.
            held: parameters, optimizer state and hyper-parameters, in the order of `read_by_update`.
        """
        if self._squares is None:
            return None, []
        for index, slot in enumerate(self.stage.read_by_update):
            if slot.slot.kind is InputKind.SQUARES:
                held[index] = torch.zeros((), dtype=slot.dtype, device=self.stage.engine.device)
        squares, *kept = self._first([*carried, *self._read(held)])
        return self.stage.engine.write(squares, self._slots[self._squares]), kept

    @torch.no_grad()
    def run(
        self,
        carried: list[LocalValue],
        kept: Sequence[LocalValue],
        held: list[torch.Tensor],
        squares: torch.Tensor | None,
    ) -> None:
        """Update what users hold, in place.

        Args:
            carried: as for `run_squares`; emptied.
            kept: what that gave.
            held: as for `run_squares`.
            squares: the sum over all stages.
        """
        for index, slot in enumerate(self.stage.read_by_update):
            if slot.slot.kind is InputKind.SQUARES:
                assert squares is not None, "a stage that clips gave its squares"
                held[index] = squares.to(slot.dtype)
        values = [*kept, *carried, *self._read(held)]
        carried.clear()
        results = self._second(values)
        slots = [self._slots[index] for index in self._second_outputs]
        self.stage.engine.store([held[place] for place in self._places], results, slots)

    def _read(self, held: Sequence[torch.Tensor]) -> list[LocalValue]:
        return [
            self.stage.engine.read(tensor, slot) for tensor, slot in zip(held, self.stage.read_by_update, strict=True)
        ]

    @cached_property
    def _second_outputs(self) -> tuple[int, ...]:
        return tuple(index for index in range(len(self._slots)) if index != self._squares)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Of each result, the place in `read_by_update` of what it takes the place of."""
        places = {(slot.slot.kind, slot.slot.name): n for n, slot in enumerate(self.stage.read_by_update)}
        slots = (self._slots[index].slot for index in self._second_outputs)
        return tuple(places[OWNERS[OutputKind(slot.kind)], slot.name] for slot in slots)

    @cached_property
    def _parts(self) -> tuple[fx.GraphModule | None, fx.GraphModule, int]:
        """Both graphs, and how many values the second takes of the first."""
        update = self.stage.phased.update
        assert update is not None, "a stage updates"
        if self._squares is None:
            return None, update, 0
        return cut_graph(update, (self._squares,))

    @cached_property
    def _first(self) -> Loaded:
        graph_module = self._parts[0]
        return self.stage.engine.load(graph_module) if graph_module is not None else lambda values: ()

    @cached_property
    def _second(self) -> Loaded:
        _, graph_module, taken = self._parts
        first = taken + len(self.stage.phased.carried)
        return self.stage.engine.load(graph_module, {index: first + place for index, place in enumerate(self._places)})
