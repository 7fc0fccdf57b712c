"""The update of a lowered program in the form that processes run: in place, with many parameters in one call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import fx

from autoshard.graphs.write_in_place import write_in_place
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.bucket_updates import BucketUpdates


def written_of(phased: PhasedProgram) -> dict[int, int]:
    """Map the index of each updated value among the update's results to the index of the placeholder it overwrites."""
    inputs, outputs, first = phased.lowered.inputs, phased.lowered.outputs, len(phased.carried)
    read = [inputs[index].slot for index in phased.update_inputs]
    places = {(slot.kind, slot.name): first + place for place, slot in enumerate(read)}
    slots = [outputs[index].slot for index in phased.update_outputs]
    updates = ((index, slot, slot.kind.removesuffix("_update")) for index, slot in enumerate(slots))
    return {index: places[kind, slot.name] for index, slot, kind in updates if kind != slot.kind}  # type: ignore[index]


def in_place(phased: PhasedProgram) -> PhasedProgram:
    """Return the program with its update in the form that processes run."""
    assert phased.update is not None, "only whole steps have an update"
    return replace(phased, update=_writing(phased.update, tuple(written_of(phased).items())))


@lru_cache(maxsize=1)
def _writing(update: fx.GraphModule, written: tuple[tuple[int, int], ...]) -> fx.GraphModule:
    """Return an update that writes in place, with many parameters in one call."""
    return BucketUpdates()(write_in_place(update, dict(written)))
