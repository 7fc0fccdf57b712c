"""Find the peak memory of a lowered program on each rank, by a walk through its nodes in the order in which ranks run.

Parameters, buffers, constants, optimizer state and inputs are in memory throughout. Saved values live until the
backward has used them, and gradients until the update, which overwrites its inputs. A call returns its outputs in the
plan's spec; a training step keeps no outputs. Units of blocks that the program leaves out count too
(`passes.memory.storages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.graphs.add_to_sums import adding
from autoshard.graphs.fill_buckets import filled
from autoshard.graphs.owned_results import owned_results
from autoshard.graphs.write_in_place import written_in_place
from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import OWNERS, InputKind, OutputKind
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.memory.storages import ACTIVATIONS, GRADIENTS, INPUTS, PARAMETERS, PARTS, STATE, Storages, Value
from passes.strategies.local_units import LocalUnits

_OF_MICRO_BATCH = (InputKind.INPUT, InputKind.TANGENT)
_PART_OF: Mapping[InputKind, str] = {InputKind.PARAMETER: PARAMETERS, InputKind.STATE: STATE}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes in use on each rank at the peak of one call or training step, by category (`storages.PARTS`)."""

    parts: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes in use on each rank at the peak, summed over all categories."""
        return sum(self.parts.values())


def peak_bytes(phased: PhasedProgram, micro_batches: int = 1, load: StageLoad = ONE_STAGE) -> int:
    """Return the bytes in use on each rank at the peak of one call or training step.

    The arguments are those of `step_memory`.
    """
    return step_memory(phased, micro_batches, load).peak_bytes


def step_memory(phased: PhasedProgram, micro_batches: int = 1, load: StageLoad = ONE_STAGE) -> StepMemory:
    """Find the memory on each rank at the peak of one call, or of one training step.

    Args:
        phased: the program of one micro-batch.
        micro_batches: number of micro-batches of a step. If there are several, their sums of gradients take memory too.
        load: the stages and micro-batches that the rank has in memory at once.
    """
    memory = Storages(LocalUnits.of(phased.lowered))
    inputs = _inputs(memory, phased)
    constants = memory.hold_constants(graphs_of(phased))
    sums = _sums(memory, phased) if micro_batches > 1 else []
    once = _run_once(memory, phased, inputs, constants)
    held = [*inputs, *constants, *once]
    read = [*(inputs[index] for index in phased.forward_inputs), *once]
    results = memory.run(graph_that_runs(phased.forward), read, [*held, *sums])
    count = len(phased.forward_outputs)
    outputs, saved = results[:count], results[count:]
    if phased.update is None:
        slots = (phased.lowered.outputs[index].slot for index in phased.forward_outputs)
        held += [value for slot, value in zip(slots, outputs, strict=True) if slot.kind == OutputKind.OUTPUT]
    tangents = [inputs[index] for index in phased.backward_inputs]
    backward = graph_that_runs(phased.backward, len(sums))
    gradients = memory.run(backward, [*saved, *tangents, *sums], held, GRADIENTS)
    if phased.update is not None:
        carried = gradients[len(phased.backward_outputs) :]
        read = [*carried, *(inputs[index] for index in phased.update_inputs)]
        memory.run(update_in_place(phased.update, written_by_update(phased)), read, [*inputs, *constants])
    parts = memory.parts or dict.fromkeys(PARTS, 0)
    if load == ONE_STAGE:
        return StepMemory(parts)
    pairs = zip(phased.lowered.inputs, inputs, strict=True)
    own = [value for slot, value in pairs if slot.slot.kind not in _OF_MICRO_BATCH] + [*constants, *sums, *once]
    beside = (load.stages - 1) * memory.bytes_of(own)
    beside += (load.in_flight - 1) * (memory.bytes_of([*own, *saved]) - memory.bytes_of(own))
    return StepMemory({**parts, ACTIVATIONS: parts[ACTIVATIONS] + beside})


def _inputs(memory: Storages, phased: PhasedProgram) -> list[Value]:
    lowered = phased.lowered
    nodes = lowered.graph_module.graph.find_nodes(op="placeholder")
    return [
        memory.new(local_bytes(slot, lowered.mesh), _PART_OF.get(InputKind(slot.slot.kind), INPUTS), node)
        for slot, node in zip(lowered.inputs, nodes, strict=True)
    ]


_RUNS = "autoshard: the graphs that run in place of this module's own"


def _cached(module: fx.GraphModule, options: Hashable, make: Callable[[], fx.Graph]) -> fx.Graph:
    """Return the graph that `make` returns for a module and options, cached in `module.meta` for the module's graph."""
    of_graph, known = module.meta.get(_RUNS, (None, {}))
    if of_graph is not module.graph:
        known = {}
        module.meta[_RUNS] = (module.graph, known)
    if options not in known:
        known[options] = make()
    return known[options]


def graph_that_runs(phase: fx.GraphModule, sums: int = 0) -> fx.Graph:
    """Return the graph of a phase as ranks run it: buckets are filled in place, and gradients are added to sums.

    The last results, as many as `sums`, are added to sums, which are further placeholders. The graph is cached in
    `phase.meta`.
    """

    def make() -> fx.Graph:
        graph = filled(phase.graph)
        return adding(graph, owned_results(phase.graph)[-sums:]) if sums else graph

    return _cached(phase, sums, make)


def update_in_place(update: fx.GraphModule, written: Mapping[int, int]) -> fx.Graph:
    """Return the graph of an update with each result written over the input that `written` gives.

    `written` maps the index of a result to the index of an input. The graph is cached in `update.meta`.
    """
    return _cached(update, tuple(written.items()), lambda: written_in_place(update.graph, written))


def graphs_of(phased: PhasedProgram) -> list[fx.Graph]:
    """Return the graphs that a program runs: what is hoisted, forward, backward and update."""
    modules = (phased.hoisted, phased.forward, phased.backward, phased.update)
    return [module.graph for module in modules if module is not None]


def _run_once(
    memory: Storages, phased: PhasedProgram, inputs: Sequence[Value], constants: Sequence[Value]
) -> list[Value]:
    if phased.hoisted is None:
        return []
    read = [inputs[index] for index in phased.hoisted_inputs]
    return memory.run(graph_that_runs(phased.hoisted), read, [*inputs, *constants])


def _sums(memory: Storages, phased: PhasedProgram) -> list[Value]:
    """Return one new storage for each carried gradient: its sum over the earlier micro-batches."""
    pairs = zip(carried_bytes(phased), carried_nodes(phased), strict=True)
    return [memory.new(size, GRADIENTS, node) for size, node in pairs]


def carried_bytes(phased: PhasedProgram) -> list[int]:
    """Return the bytes on each rank of each gradient that the backward passes to the update, in order."""
    values = [node.meta["val"] for node in carried_nodes(phased)]
    return [value.numel() * value.element_size() for value in values]


def carried_nodes(phased: PhasedProgram) -> list[fx.Node]:
    """Return the backward's nodes of the gradients that the backward passes to the update, in order."""
    return _results(phased.backward)[len(phased.backward_outputs) :]


def written_by_update(phased: PhasedProgram) -> dict[int, int]:
    """Return the input that each result of the update overwrites: index of the result → index of the input.

    Results that overwrite no input, such as a gradient norm, are absent.
    """
    first = len(phased.carried)
    slots = [phased.lowered.inputs[index].slot for index in phased.update_inputs]
    places = {(slot.kind, slot.name): first + index for index, slot in enumerate(slots)}
    updated = [phased.lowered.outputs[index].slot for index in phased.update_outputs]
    owners = ((index, OWNERS.get(OutputKind(slot.kind)), slot.name) for index, slot in enumerate(updated))
    return {index: places[kind, name] for index, kind, name in owners if kind is not None}


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


def local_bytes(slot: LocalSlot, mesh: Mesh) -> int:
    """Return the bytes of an input or output of a program on each rank."""
    return math.prod(slot.spec.local_shape(slot.shape, mesh)) * slot.dtype.itemsize
