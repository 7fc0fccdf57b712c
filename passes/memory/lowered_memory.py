"""The most bytes that a lowered program has in use on a rank, by walking through it as processes run it.

The planner counts by its plan (`passes.memory.liveness`); here the program that runs is read, and the two agree.
Parameters, buffers, optimizer state and inputs are held throughout; what the forward saves, until the backward has used
it; gradients to the end, or until the update, which writes over what it updates. A call hands its outputs out as
they lie; a training step keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx

from autoshard.graphs.fill_buckets import filled
from autoshard.graphs.owned_results import owned_results
from autoshard.graphs.write_in_place import written_in_place
from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import OWNERS, OutputKind
from passes.memory.storages import Storage, Storages


def peak_bytes(phased: PhasedProgram, micro_batches: int = 1) -> int:
    """The largest number of bytes in use on each rank in one call, or in one training step.

    Args:
        phased: the program.
        micro_batches: how many a step has; it is their last one that is counted.
    """
    memory = Storages()
    lowered = phased.lowered
    inputs = [memory.new(local_bytes(slot, lowered.mesh)) for slot in lowered.inputs]
    sums = [memory.new(size) for size in carried_bytes(phased)] if micro_batches > 1 else []
    once = _run_once(memory, phased, inputs)
    held = [*inputs, *sums, *once]
    results = memory.run(
        filled(phased.forward.graph), [*(inputs[index] for index in phased.forward_inputs), *once], held
    )
    count = len(phased.forward_outputs)
    outputs, saved = results[:count], results[count:]
    if phased.update is None:
        slots = (phased.lowered.outputs[index].slot for index in phased.forward_outputs)
        held += [value for slot, value in zip(slots, outputs, strict=True) if slot.kind == OutputKind.OUTPUT]
    tangents = [inputs[index] for index in phased.backward_inputs]
    gradients = memory.run(filled(phased.backward.graph), [*saved, *tangents], held)
    if phased.update is not None:
        carried = gradients[len(phased.backward_outputs) :]
        if sums:
            owned = owned_results(phased.backward.graph)[len(phased.backward_outputs) :]
            carried = _add(memory, sums, carried, owned, [*inputs, *once])
        read = [*carried, *(inputs[index] for index in phased.update_inputs)]
        memory.run(update_in_place(phased.update, written_by_update(phased)), read, inputs)
    return memory.peak


_IN_PLACE = "autoshard: the update written over what it updates"


def update_in_place(update: fx.GraphModule, written: Mapping[int, int]) -> fx.Graph:
    """`written_in_place` of an update; made once, and kept with the update."""
    of_graph, of_written, made = update.meta.get(_IN_PLACE, (None, None, None))
    if made is None or of_graph is not update.graph or of_written != written:
        made = written_in_place(update.graph, written)
        update.meta[_IN_PLACE] = (update.graph, written, made)
    return made


def _run_once(memory: Storages, phased: PhasedProgram, inputs: Sequence[Storage]) -> list[Storage]:
    """What is computed once for all micro-batches."""
    if phased.hoisted is None:
        return []
    return memory.run(filled(phased.hoisted.graph), [inputs[index] for index in phased.hoisted_inputs], inputs)


def _add(
    memory: Storages,
    sums: Sequence[Storage],
    gradients: Sequence[Storage],
    owned: Sequence[bool],
    held: Sequence[Storage],
) -> list[Storage]:
    """Sums: first those that are added where they lie, then new ones; with each, what it is the sum of goes.

    Sums lie where the first micro-batch's gradients did, so together where `gradients` do.
    """
    left = [index for index, is_owned in enumerate(owned) if not is_owned]
    found = [gradient for gradient, is_owned in zip(gradients, owned, strict=True) if is_owned]
    for place, index in enumerate(left):
        found.append(memory.new(memory.bytes_of([gradients[index]])))
        addends = (value[other] for other in left[place:] for value in (sums, gradients))
        memory.peak = max(memory.peak, memory.bytes_of([*held, *addends, *found]))
    return found


def carried_bytes(phased: PhasedProgram) -> list[int]:
    """Bytes of the gradients that the backward carries into the update."""
    values = [node.meta["val"] for node in carried_nodes(phased)]
    return [value.numel() * value.element_size() for value in values]


def carried_nodes(phased: PhasedProgram) -> list[fx.Node]:
    """The gradients that the backward carries into the update."""
    return _results(phased.backward)[len(phased.backward_outputs) :]


def written_by_update(phased: PhasedProgram) -> dict[int, int]:
    """The results of an update that are written over its inputs, as `runtime.executable` has it."""
    first = len(phased.carried)
    slots = [phased.lowered.inputs[index].slot for index in phased.update_inputs]
    places = {(slot.kind, slot.name): first + index for index, slot in enumerate(slots)}
    updated = [phased.lowered.outputs[index].slot for index in phased.update_outputs]
    owners = ((index, OWNERS.get(OutputKind(slot.kind)), slot.name) for index, slot in enumerate(updated))
    return {index: places[kind, name] for index, kind, name in owners if kind is not None}


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


def local_bytes(slot: LocalSlot, mesh: Mesh) -> int:
    """Bytes of a value on each rank."""
    return math.prod(slot.spec.local_shape(slot.shape, mesh)) * slot.dtype.itemsize
