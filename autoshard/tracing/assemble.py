"""Turns the joint graph of forward and backward, which AOTAutograd made, into a `Program`, in four steps.

1. Find the name and kind of each placeholder and each result, from AOTAutograd's descriptors.
2. Note for each node its module, its line of the user's code, and its phase. A node is in the forward if outputs,
   buffer updates or guarded values depend on it, but it depends on no tangent. A guarded value is a value of a tensor
   that Python code read during the trace.
3. Copy the nodes that results need into a new graph, without redundant nodes (`simplify`). A node that only the
   backward needs, such as a copy of a later overwritten value, comes after all nodes of the forward.
4. Copy the nodes that compute guarded values from the inputs into a program of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as aot

from autoshard.errors import TraceError
from autoshard.graphs.copy_nodes import copied
from autoshard.graphs.extract_graph import needed
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.program import Guard, InputKind, InputSlot, OutputKind, OutputSlot, Program
from autoshard.tracing.calling import TracedCall
from autoshard.tracing.checks import tie_checks
from autoshard.tracing.joint import JointGraph
from autoshard.tracing.operand_types import refuse_types
from autoshard.tracing.provenance import attribute_nodes
from autoshard.tracing.random_numbers import is_random
from autoshard.tracing.reach import unreached_gradients
from autoshard.tracing.simplify import Copier

_KEPT_META = ("val", "phase", "module", "source")


@dataclass(frozen=True, slots=True)
class _JointResults:
    """The results of a joint graph.

    Args:
        outputs: node, kind and name of each output, buffer update and gradient.
        guarded: the nodes of values that Python code read during the trace.
    """

    outputs: tuple[tuple[fx.Node, OutputKind, str], ...]
    guarded: tuple[fx.Node, ...]


def assemble_program(joint: JointGraph, model: nn.Module, call: TracedCall) -> Program:
    """Return the program of a traced call.

    Raises:
        TraceError: the model changes an input or a parameter in place, draws numbers that would depend on the mesh, or
            uses unsupported operand types.
    """
    graph = joint.graph_module.graph
    tie_checks(graph, len(joint.result.indices))
    attribute_nodes(graph)
    inputs = _read_inputs(graph, joint, model, call)
    results = _read_results(graph, joint, call)
    _set_phases(graph, inputs, results)
    copier = Copier(joint.graph_module, _KEPT_META)
    live = needed([node for node, _, _ in results.outputs] + list(results.guarded))
    slots = _copy_inputs(copier, inputs, live)
    unreached = unreached_gradients(graph, inputs, results.outputs, _reached(joint, inputs))
    computed = [node for node in graph.nodes if node in live and node.op not in ("placeholder", "output")]
    for node in sorted(computed, key=lambda node: node.meta["phase"] != "forward"):
        copier.copy(node)
    program = _finish(copier, slots, results, unreached, joint, call)
    _check_operators(program)
    refuse_types(program)
    return program


def _reached(joint: JointGraph, inputs: Iterable[tuple[fx.Node, InputSlot]]) -> dict[str, frozenset[str]]:
    """Return a dict from the name of each output's tangent to the names of inputs, for the tangents in `inputs`.

    The inputs are those to which autograd's graph surely leads from the output.
    """
    tangents = {slot.name for _, slot in inputs if slot.kind is InputKind.TANGENT}
    pairs = zip(joint.result.indices, joint.result.reached, strict=False)
    named = {f"tangent:{index}": frozenset(joint.slots[place][1] for place in places) for index, places in pairs}
    return {tangent: names for tangent, names in named.items() if tangent in tangents}


def _finish(
    copier: Copier,
    slots: tuple[InputSlot, ...],
    results: _JointResults,
    unreached: Mapping[str, frozenset[str]],
    joint: JointGraph,
    call: TracedCall,
) -> Program:
    pairs = [
        (copier.node(node), value)
        for node, value in zip(results.guarded, joint.guarded_values, strict=True)
        if any(ancestor.op == "placeholder" for ancestor in needed([copier.node(node)]))
    ]
    guard_program = _cut_out(copier, [node for node, _ in pairs]) if pairs else None
    copier.finish(tuple(copier.node(node) for node, _, _ in results.outputs))
    guards = tuple(Guard(node.name, value) for node, value in pairs)
    detached = {f"output:{index}" for index in joint.result.detached}
    outputs = tuple(
        OutputSlot(copier.node(node).name, kind, name, detached=kind is OutputKind.OUTPUT and name in detached)
        for node, kind, name in results.outputs
    )
    return Program(
        graph_module=copier.graph_module,
        inputs=slots,
        outputs=outputs,
        output_tree=joint.result.tree,
        output_constants=dict(joint.result.constants),
        kept=dict(joint.result.kept),
        guards=guards,
        guard_program=guard_program,
        unreached=unreached,
        own_gradients=joint.result.own_gradients,
    )


def _read_inputs(
    graph: fx.Graph, joint: JointGraph, model: nn.Module, call: TracedCall
) -> tuple[tuple[fx.Node, InputSlot], ...]:
    aliases = {
        **_aliases(model.named_parameters(remove_duplicate=False)),
        **_aliases(model.named_buffers(remove_duplicate=False)),
    }
    found = []
    for node in graph.nodes:
        if node.op == "placeholder":
            slot = _input_slot(node, joint, call)
            found.append((node, replace(slot, aliases=aliases.get(slot.name, ()))))
    return tuple(found)


def _aliases(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return a dict from the first name of each named tensor to its other names, which only tied tensors have."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values()}


def _input_slot(node: fx.Node, joint: JointGraph, call: TracedCall) -> InputSlot:
    what = node.meta["desc"]
    match what:
        case aot.PlainAOTInput(idx=index):
            return InputSlot(node.name, *joint.slots[index])
        case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
            return InputSlot(node.name, InputKind.TANGENT, f"tangent:{joint.result.indices[index]}")
        case aot.TangentAOTInput(output=aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput(idx=index))):
            if joint.slots[index][0] is not InputKind.BUFFER:
                raise _changed_in_place(joint.slots[index], call)
            raise TraceError(
                f"{_owner(joint.slots[index], call).capitalize()} is updated in forward with a value that requires "
                f"grad; a program can only update buffers, with values that do not. Update it under torch.no_grad()."
            )
    raise TraceError(f"AOTAutograd made an input that autoshard does not know: {what!r}.")


def _owner(slot: tuple[InputKind, str], call: TracedCall) -> str:
    """Return the kind and name of an input of the graph as text for messages, such as "parameter 'wte.weight'"."""
    kind, name = slot
    if kind is InputKind.INPUT:
        return f"input {call.paths[int(name.removeprefix('input:'))]}"
    return f"{kind.value} {name!r}"


def _changed_in_place(slot: tuple[InputKind, str], call: TracedCall) -> TraceError:
    advice = "Work on a copy (`x = x.clone()`), or make it a buffer."
    if slot[0] is InputKind.PARAMETER:
        advice = (
            "Move an average (a teacher, a momentum encoder) after the call instead, under torch.no_grad(), or keep it "
            "in buffers (register_buffer). An embedding with max_norm= goes without it: before each call scale the "
            "rows, weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))."
        )
    return TraceError(
        f"The model changes {_owner(slot, call)} in place in forward; a program can only update buffers. {advice}"
    )


def _read_results(graph: fx.Graph, joint: JointGraph, call: TracedCall) -> _JointResults:
    output = graph.output_node()
    plain = len(joint.result.indices)
    found: list[tuple[fx.Node, OutputKind, str]] = []
    guarded: list[fx.Node] = []
    results: Any = output.args[0]
    for node, what in zip(results, output.meta["desc"], strict=True):
        if node is None:
            continue
        if isinstance(what, aot.PlainAOTOutput) and what.idx >= plain:
            guarded.append(node)
        else:
            found.append((node, *_output_kind(what, joint, call)))
    found.sort(key=lambda item: _ORDER_OF[item[1]])
    return _JointResults(tuple(found), tuple(guarded))


_ORDER_OF = {
    OutputKind.OUTPUT: 0, OutputKind.BUFFER_UPDATE: 1, OutputKind.GRADIENT: 2, OutputKind.INPUT_GRADIENT: 3,
}  # fmt: skip


def _output_kind(what: Any, joint: JointGraph, call: TracedCall) -> tuple[OutputKind, str]:
    match what:
        case aot.PlainAOTOutput(idx=index):
            return OutputKind.OUTPUT, f"output:{joint.result.indices[index]}"
        case aot.GradAOTOutput(grad_of=aot.PlainAOTInput(idx=index)):
            kind, name = joint.slots[index]
            return (OutputKind.INPUT_GRADIENT if kind is InputKind.INPUT else OutputKind.GRADIENT), name
        case aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput(idx=index)):
            kind, name = joint.slots[index]
            if kind is InputKind.BUFFER:
                return OutputKind.BUFFER_UPDATE, name
            raise _changed_in_place(joint.slots[index], call)
    raise TraceError(f"AOTAutograd made a result that autoshard does not know: {what!r}.")


def _set_phases(graph: fx.Graph, inputs: Iterable[tuple[fx.Node, InputSlot]], results: _JointResults) -> None:
    forward_results = [n for n, kind, _ in results.outputs if kind in (OutputKind.OUTPUT, OutputKind.BUFFER_UPDATE)]
    forward = needed([*forward_results, *results.guarded])
    after_tangent = {node for node, slot in inputs if slot.kind is InputKind.TANGENT}
    for node in graph.nodes:
        if any(operand in after_tangent for operand in node.all_input_nodes):
            after_tangent.add(node)
        is_forward = node not in after_tangent and (node in forward or node.op == "placeholder")
        node.meta["phase"] = "forward" if is_forward else "backward"
        if node.target is operator.getitem:
            node.meta["phase"] = node.args[0].meta["phase"]


def _copy_inputs(
    copier: Copier, inputs: Iterable[tuple[fx.Node, InputSlot]], live: set[fx.Node]
) -> tuple[InputSlot, ...]:
    """Copy the graph's placeholders, and return the slots of the copies. Unused seeds and tangents are left out."""
    slots = []
    for node, slot in inputs:
        if node in live or slot.kind not in (InputKind.SEED, InputKind.TANGENT):
            copy = copier.copy_placeholder(node, slot)
            slots.append(replace(slot, node=copy.name))
    return tuple(slots)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _cut_out(copier: Copier, roots: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a graph module that computes only the guarded values `roots`.

    Views become reshapes, because kernels may return other strides than in the trace.
    """
    graph, copies = copied(sorted(needed(roots)))
    for copy in copies.values():
        if copy.target in _VIEWS:
            copy.target = torch.ops.aten.reshape.default
    graph.output(tuple(copies[node] for node in roots))
    return lazy_module(copier.graph_module, graph)


def _check_operators(program: Program) -> None:
    for node in program.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        where = _where(node.meta)
        if is_random(node):
            raise TraceError(
                f"The model uses the random operator {target}{where}, whose values would depend on how the program "
                f"is sharded. Use one that does not (docs/reference/randomness.md lists them), or draw the values "
                f"outside the model and pass them in as an input."
            )
        if target._schema.is_mutable:
            raise TraceError(
                f"The operator {target}{where} changes its operands, and could not be made functional. Use the "
                f"out-of-place form, or register it with torch.library.custom_op(mutates_args=())."
            )


def _where(meta: Mapping[str, Any]) -> str:
    return f" at {meta['source']}" if meta.get("source") else ""
