"""The most bytes that a lowered program has in use on a rank, by walking through it as processes run it.

The planner counts by its plan (`passes.memory.liveness`); here the program that runs is read, and the two agree.
Parameters, buffers, optimizer state and inputs are held throughout; what the forward saves, until the backward has used
it; gradients to the end, or until the update, which writes over what it updates. A call hands its outputs out whole; a
training step keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import OWNERS, OutputKind
from autoshard.ir.reshard import plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.write_in_place import write_in_place
from passes.memory.storages import Storage, Storages
from passes.strategies.scratch import emitted_reshard


def peak_bytes(phased: PhasedProgram, sharded_outputs: Collection[str] = (), micro_batches: int = 1) -> int:
    """The largest number of bytes in use on each rank in one call, or in one training step.

    Args:
        phased: the program.
        sharded_outputs: names of the outputs that are handed out as they lie.
        micro_batches: how many a step has; it is their last one that is counted.
    """
    memory = Storages()
    lowered = phased.lowered
    inputs = [memory.new(_local_bytes(slot, lowered.mesh)) for slot in lowered.inputs]
    sums = [memory.new(size) for size in _carried_bytes(phased)] if micro_batches > 1 else []
    held = [*inputs, *sums]
    results = memory.run(phased.forward.graph, [inputs[index] for index in phased.forward_inputs], held)
    count = len(phased.forward_outputs)
    outputs, saved = results[:count], results[count:]
    if phased.update is None:
        held += _hand_out(memory, phased, outputs, [*held, *results], sharded_outputs)
    tangents = [inputs[index] for index in phased.backward_inputs]
    gradients = memory.run(phased.backward.graph, [*saved, *tangents], held)
    if phased.update is not None:
        carried = gradients[len(phased.backward_outputs) :]
        if sums:
            carried = _add(memory, sums, carried, inputs)
        read = [*carried, *(inputs[index] for index in phased.update_inputs)]
        memory.run(write_in_place(phased.update, _written(phased)).graph, read, inputs)
    return memory.peak


def _add(
    memory: Storages, sums: Sequence[Storage], gradients: Sequence[Storage], held: Sequence[Storage]
) -> list[Storage]:
    """New sums, one after the other: with each, what it is the sum of goes."""
    found: list[Storage] = []
    for index, gradient in enumerate(gradients):
        found.append(memory.new(memory.bytes_of([gradient])))
        memory.peak = max(memory.peak, memory.bytes_of([*held, *sums[index:], *gradients[index:], *found]))
    return found


def _carried_bytes(phased: PhasedProgram) -> list[int]:
    """Bytes of the gradients that the backward carries into the update."""
    results = phased.backward.graph.output_node().args[0]
    values = [node.meta["val"] for node in results[len(phased.backward_outputs) :]]
    return [value.numel() * value.element_size() for value in values]


def _hand_out(
    memory: Storages,
    phased: PhasedProgram,
    outputs: Sequence[Storage],
    there: Sequence[Storage],
    sharded_outputs: Collection[str],
) -> list[Storage]:
    """What users hold of a call's outputs, gathered one after the other while all that is `there` stays."""
    lowered = phased.lowered
    handed: list[Storage] = []
    held, traced = phased.forward.graph.output_node().args[0], lowered.traced.nodes_by_name()
    for index, value, node in zip(phased.forward_outputs, outputs, held, strict=False):
        slot = lowered.outputs[index]
        if slot.slot.kind != OutputKind.OUTPUT:
            continue
        steps = plan_reshard(slot.spec, PartitionSpec(), slot.shape, lowered.mesh, itemsize=slot.dtype.itemsize)
        if slot.slot.name in sharded_outputs or all(step.axis_size == 1 for step in steps):
            handed.append(value)
            continue
        is_strided = not node.meta["val"].is_contiguous()
        graph = emitted_reshard(traced[slot.slot.node].meta["val"], steps, lowered.mesh, as_traced=is_strided)
        handed += memory.run(graph, [value], [*there, *handed])
    memory.peak = max(memory.peak, memory.bytes_of([*there, *handed]))
    return handed


def _written(phased: PhasedProgram) -> dict[int, int]:
    """The results of an update that are written over its inputs, as `runtime.executable` has it."""
    first = len(phased.carried)
    slots = [phased.lowered.inputs[index].slot for index in phased.update_inputs]
    places = {(slot.kind, slot.name): first + index for index, slot in enumerate(slots)}
    updated = [phased.lowered.outputs[index].slot for index in phased.update_outputs]
    return {index: places[OWNERS[OutputKind(slot.kind)], slot.name] for index, slot in enumerate(updated)}


def _local_bytes(slot: LocalSlot, mesh: Mesh) -> int:
    return math.prod(slot.spec.local_shape(slot.shape, mesh)) * slot.dtype.itemsize
