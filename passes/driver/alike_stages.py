"""Give all alike stages of a pipeline one plan, with the names of values changed for each stage.

Two stages are alike if their graphs are equal node by node: the same calls at the same places, on values of the same
shapes. Their slots have the same kinds and the same requirements. Names of nodes, parameters and crossing values may
differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import fx

from autoshard.ir.lowered import LocalSlot, PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, InputSlot, OutputSlot, Program, describe, tensor_values
from autoshard.ir.restored_nodes import RestoredNode
from autoshard.ir.staged import crosses_stages, is_of_weights
from passes.lowering.lower_program import prepare, prepare_for

Requirements = Callable[[str], Hashable]
"""A function that takes a slot's name and returns the requirements on the slot's value.

The requirements are the constraints on the value, and the spec that it already has.
"""


def stage_key(stage: Program, requirements: Requirements) -> str:
    """Return a short hash of a stage's program and of the requirements that its plan must meet.

    The program is the stage's part of the step, with its update. Alike stages have the same hash.
    """
    return hashlib.sha256("\n".join(_lines(stage, requirements)).encode()).hexdigest()


def _lines(stage: Program, requirements: Requirements) -> Iterator[str]:
    places: dict[fx.Node, int] = {}
    for node in stage.graph.nodes:
        if node.op == "output":
            continue
        target = str(node.target) if node.op == "call_function" else ""
        arguments = fx.map_arg((node.args, node.kwargs), lambda operand: f"%{places[operand]}")
        strides = [value if value is None else value.stride() for value in tensor_values(node)]
        phase = node.meta.get("phase")
        yield f"{node.op} {target} {arguments} {describe(node.meta.get('val'))} {strides} {phase}"
        places[node] = len(places)
    named = {node.name: place for node, place in places.items()}
    for slot in stage.inputs:
        aliases = [requirements(name) for name in slot.aliases]
        yield f"{named[slot.node]} {_slot_form(slot.name, slot.kind, requirements)} {aliases}"
    for slot in stage.outputs:
        yield f"{named[slot.node]} {_slot_form(slot.name, slot.kind, requirements)} {slot.detached}"


def _slot_form(name: str, kind: str, requirements: Requirements) -> tuple[Hashable, ...]:
    role, colon, _ = name.partition(":")
    return kind, role if colon else "", crosses_stages(name), is_of_weights(name), requirements(name)


def rename_plan(plan: Plan, alike: Program, stage: Program) -> Plan:
    """Return the plan of `stage`: the plan of the program `alike`, with the names of values and slots in `stage`.

    Both programs are single stages of one step, and their stages are alike.
    """
    names = _same_places(prepare(alike), prepare(stage))
    modules = {node.name: node.meta.get("module", "") for node in prepare(stage).graph.nodes}
    recompute = replace(
        plan.recompute, nodes=tuple(_renamed_node(item, names, modules) for item in plan.recompute.nodes)
    )
    offload = replace(plan.offload, nodes=tuple(_renamed_node(item, names, modules) for item in plan.offload.nodes))
    running = prepare_for(stage, replace(plan, recompute=recompute, offload=offload))
    names = _same_places(prepare_for(alike, plan), running)
    taken, given = _slot_names(alike, stage)
    return replace(
        plan,
        program_digest=running.digest(),
        inputs={taken[InputKind.INPUT, name]: text for name, text in plan.inputs.items()},
        nodes={names[name]: node for name, node in plan.nodes.items()},
        outputs={given[name]: spec for name, spec in plan.outputs.items()},
        parameters={taken[InputKind.PARAMETER, name]: item for name, item in plan.parameters.items()},
        recompute=recompute,
        offload=offload,
    )


def rename_slots(phased: PhasedProgram, alike: Program, stage: Program) -> PhasedProgram:
    """Return the lowered program of `stage`: the lowered program of `alike` with the slot names of `stage`.

    The result shares its graphs with `phased`.
    """
    taken, given = _slot_names(alike, stage)
    lowered = phased.lowered
    inputs = tuple(_named(slot, taken[slot.slot.kind.value, slot.slot.name]) for slot in lowered.inputs)
    outputs = tuple(
        _named(slot, given[_key(slot.slot)].removeprefix(f"{slot.slot.kind.value} ")) for slot in lowered.outputs
    )
    return replace(phased, lowered=replace(lowered, inputs=inputs, outputs=outputs))


def _key(slot: InputSlot | OutputSlot) -> str:
    return f"{slot.kind.value} {slot.name}"


def _named(slot: LocalSlot, name: str) -> LocalSlot:
    return replace(slot, slot=replace(slot.slot, name=name))


_Restored = TypeVar("_Restored", bound=RestoredNode)


def _renamed_node(item: _Restored, names: Mapping[str, str], modules: Mapping[str, str]) -> _Restored:
    name = names[item.name]
    return replace(item, name=name, before=names[item.before], module=modules[name])


def _same_places(alike: Program, stage: Program) -> dict[str, str]:
    """Return for each node's name in `alike` the name of the node at the same position in the graph of `stage`."""
    return {one.name: other.name for one, other in zip(alike.graph.nodes, stage.graph.nodes, strict=True)}


def _slot_names(alike: Program, stage: Program) -> tuple[dict[tuple[str, str], str], dict[str, str]]:
    """Return the names in `stage` of the slots of `alike`, as two dicts. Slots at the same position correspond.

    The first dict maps (kind, name) of an input of `alike` to the name of the input of `stage`. The second dict maps
    the key of a result of `alike`, such as "output 0" (`result_key`), to the key of the result of `stage`.
    """
    taken = {(one.kind.value, one.name): other.name for one, other in zip(alike.inputs, stage.inputs, strict=True)}
    given = {_key(one): _key(other) for one, other in zip(alike.outputs, stage.outputs, strict=True)}
    return taken, given
