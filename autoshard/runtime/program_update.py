"""Run the update of a program, in two graphs if the program computes the norm of its gradients.

The first graph computes the norm; for a pipeline stage, the sum of squares of the stage's own gradients. The sums are
added over stages, and the step may stop here if the norm is not finite. The second graph takes values from the first
graph, and computes the new parameters and state. To clip, the second graph of a stage takes the sum over all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
        writes: slots of updated parameters and state. If the program computes the gradient norm, another slot has this
            norm. A pipeline stage has the sum of squares of its own gradients instead.
        engine: the engine that runs the update.
    """

    graph_module: fx.GraphModule
    gradients: int
    reads: Sequence[LocalSlot]
    writes: Sequence[LocalSlot]
    engine: Engine

    def load(self) -> None:
        """Load all graphs now. Loading may make process groups, so all ranks of a stage must load together."""
        _ = self._first, self._second

    def run_norm(
        self, carried: list[LocalValue], held: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, list[LocalValue]]:
        """Compute the norm of the gradients; for a pipeline stage, the sum of the gradients' squares.

        Return this scalar (None if the program does not compute it), and local values to pass to `run`.

        Args:
            carried: the gradients, summed over micro-batches; emptied.
            held: parameters, optimizer state and options, in the order of `reads`.
        """
        kept = carried.copy()
        carried.clear()
        if self._first is None or self._norm is None:
            return None, kept
        kept += self._read_by_first([held[index] for index in self._parts.read_by_first])
        norm, *kept = self._first(kept)
        return self.engine.write(norm, self.writes[self._norm]), kept

    @torch.no_grad()
    def run(self, kept: list[LocalValue], held: list[torch.Tensor], squares: torch.Tensor | None = None) -> None:
        """Update the user's parameters and state in place.

        Args:
            kept: values from `run_norm`; emptied.
            held: see `run_norm`.
            squares: the sum of the gradients' squares over all stages. Only a stage that clips needs it.
        """
        for index in self._places_of_squares:
            assert squares is not None, "a stage that clips gave its squares"
            held[index] = squares.to(self.reads[index].dtype)
        values = [*kept, *self._read(held)]
        kept.clear()
        self.engine.store([held[place] for place in self._places], self._second(values), self._updated)

    @cached_property
    def _read(self) -> Reader:
        return self.engine.reader(self.reads)

    @cached_property
    def _norm(self) -> int | None:
        """The position in `writes` of the norm, or of a stage's sum of squares; None if there is neither."""
        found = (index for index, slot in enumerate(self.writes) if slot.slot.kind in _NORMS)
        return next(found, None)

    @cached_property
    def _places_of_squares(self) -> tuple[int, ...]:
        return tuple(index for index, slot in enumerate(self.reads) if slot.slot.kind is InputKind.SQUARES)

    @cached_property
    def _updated(self) -> tuple[LocalSlot, ...]:
        return tuple(slot for index, slot in enumerate(self.writes) if index != self._norm)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """For each updated value, the position in `reads` of the value that it replaces."""
        places = {(slot.slot.kind, slot.slot.name): index for index, slot in enumerate(self.reads)}
        return tuple(places[OWNERS[OutputKind(slot.slot.kind)], slot.slot.name] for slot in self._updated)

    @cached_property
    def _parts(self) -> _CutUpdate:
        if self._norm is None:
            return _CutUpdate(None, (), self.graph_module, self.gradients)
        first, second, taken = cut_graph(self.graph_module, (self._norm,), hands_on=self.gradients)
        return _CutUpdate(first, _drop_unread(first, self.gradients), second, taken)

    @cached_property
    def _read_by_first(self) -> Reader:
        return self.engine.reader([self.reads[index] for index in self._parts.read_by_first])

    @cached_property
    def _first(self) -> Loaded | None:
        return None if self._parts.first is None else self.engine.load(self._parts.first)

    @cached_property
    def _second(self) -> Loaded:
        taken = self._parts.taken
        written = {index: taken + place for index, place in enumerate(self._places)}
        return self.engine.load(self._parts.second, written)


class _CutUpdate(NamedTuple):
    """The two graphs of an update.

    Args:
        first: computes the norm from the gradients; None without a norm.
        read_by_first: positions in `reads` of the values that `first` takes after the gradients. Only a step that
            scales the loss has such a value.
        second: computes parameters and state.
        taken: number of values that `second` takes from `first`; without `first`, the number of gradients.
    """

    first: fx.GraphModule | None
    read_by_first: tuple[int, ...]
    second: fx.GraphModule
    taken: int


def _drop_unread(graph_module: fx.GraphModule, kept: int) -> tuple[int, ...]:
    """Remove the inputs without readers, except the first `kept` inputs.

    Return the positions of the remaining inputs, counted from input `kept`, before the removal.
    """
    others = graph_module.graph.find_nodes(op="placeholder")[kept:]
    read = tuple(index for index, node in enumerate(others) if node.users)
    for node in (node for node in others if not node.users):
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return read


_NORMS = (OutputKind.SQUARES, OutputKind.NORM)
