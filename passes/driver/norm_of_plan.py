"""Extend a plan of a step without a gradient norm to the step that returns the norm of its gradients.

So a plan that was made without `Options(on_nonfinite=, grad_norm=)` runs with these options. Before → after, on the
nodes of the update:

    update(g) → update(g); sum_of_squares(g), add, ..., sqrt

1. The sum of squares reads each gradient with the spec that the gradient's update reads.
2. The sums are added as partial sums over all axes that split a gradient.
3. The norm is whole: one reduction over these axes.

The prediction of the plan stays that of the step without the norm.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autoshard.errors import PlanMismatchError
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import OutputKind, OutputSlot, Program
from autoshard.ir.spec import PartitionSpec
from passes.lowering.lower import check_digest, result_key
from passes.lowering.lower_program import prepare_for
from passes.preparation.rewriting import copy_program
from passes.strategies.enumerate_strategies import operands_of

_SQUARES = torch.ops.autoshard.sum_of_squares.default


def lacks_norm(plan: Plan, program: Program) -> bool:
    """Whether `program` returns a gradient norm that `plan` lacks. False if the program also clips by this norm."""
    slot = _slot_of(program)
    return slot is not None and result_key(slot) not in plan.outputs and not _has_other_readers(program, slot)


def without_norm(program: Program) -> Program:
    """Return a copy of a program without its gradient norm. The program must not clip gradients."""
    slot, program = _slot_of(program), copy_program(program)
    assert slot is not None, "the program has a norm"
    removed, output = _nodes_of(program, slot), program.graph.output_node()
    place = program.outputs.index(slot)
    results = output.args[0]
    assert isinstance(results, tuple), "a program returns a tuple"
    output.args = ((*results[:place], *results[place + 1 :]),)
    for node in reversed(removed):
        program.graph.erase_node(node)
    program.graph_module.recompile()
    return replace(program, outputs=(*program.outputs[:place], *program.outputs[place + 1 :]))


def with_norm(plan: Plan, program: Program) -> Plan:
    """Return the plan of `program`, which has a gradient norm, from the plan of the same program without this norm.

    Raises:
        PlanMismatchError: the plan belongs to another program, or to an optimizer that does not update all parameters.
    """
    check_digest(plan, prepare_for(without_norm(program), plan))
    running, slot = prepare_for(program, plan), _slot_of(program)
    assert slot is not None, "the program has a norm"
    nodes = _nodes_of(running, slot)
    _check_has_gradients(plan, [node for node in running.graph.nodes if node not in nodes])
    read = {node: _spec_read(node.all_input_nodes[0], plan) for node in nodes if node.target is _SQUARES}
    axes = dict.fromkeys(axis for spec in read.values() for axis in spec.axes)
    summed, whole = _partial(sorted(axes)), PartitionSpec()
    found = dict(plan.nodes)
    for node in nodes:
        if node in read:
            found[node.name] = NodePlan((read[node],), (_partial(sorted(read[node].axes)),))
        else:
            spec = summed if len(operands_of(node)) > 1 else whole
            found[node.name] = NodePlan((spec,) * len(operands_of(node)), (spec,))
    outputs = {**plan.outputs, result_key(slot): whole}
    return replace(plan, nodes=found, outputs=outputs, program_digest=running.digest())


def _slot_of(program: Program) -> OutputSlot | None:
    """Return the slot of the gradient norm or of a stage's sum of squares, or None if the program has neither."""
    found = (*program.outputs_of(OutputKind.NORM), *program.outputs_of(OutputKind.SQUARES))
    return found[0] if found else None


def _nodes_of(program: Program, slot: OutputSlot) -> dict[fx.Node, None]:
    """Return the calls of the update that compute the gradient norm `slot`, as the keys of a dict in program order."""
    nodes = program.nodes_by_name()
    found, waiting = set[fx.Node](), [nodes[slot.node]]
    while waiting:
        node = waiting.pop()
        if node.meta.get("phase") == "update" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return {node: None for node in nodes.values() if node in found}


def _has_other_readers(program: Program, slot: OutputSlot) -> bool:
    nodes = _nodes_of(program, slot)
    return any(user not in nodes and user.op != "output" for node in nodes for user in node.users)


def _check_has_gradients(plan: Plan, nodes: Sequence[fx.Node]) -> None:
    """Raise `PlanMismatchError` if the plan lacks a call of `nodes`.

    Such a call serves the norm alone. An example is the gradient of a parameter that the optimizer does not update.
    """
    for node in nodes:
        if node.op == "call_function" and node.target is not operator.getitem and node.name not in plan.nodes:
            raise PlanMismatchError(
                "The plan lacks the gradients of parameters that the optimizer does not update, but the norm of all "
                f"gradients needs {node.name!r} of module {node.meta.get('module', '')!r}. Call requires_grad_(False) "
                "on these parameters, leave plan= out, or leave on_nonfinite and grad_norm out."
            )


def _spec_read(gradient: fx.Node, plan: Plan) -> PartitionSpec:
    """Return the spec with which the update of a gradient's parameter reads the gradient.

    A gradient without an update is read as the backward leaves it, but not as a partial value.
    """
    for user in gradient.users:
        if user.meta.get("phase") == "update" and user.target is not _SQUARES and user.name in plan.nodes:
            return plan.nodes[user.name].inputs[operands_of(user).index(gradient)]
    return PartitionSpec(*plan.nodes[gradient.name].outputs[0].dims)


def _partial(axes: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(partial=dict.fromkeys(axes, "sum"))
