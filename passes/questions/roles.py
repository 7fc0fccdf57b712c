"""Roles of a plan's mesh axes, in the words of `passes.planning.restrictions`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autoshard.ir.program import InputKind
from autoshard.ir.spec import PartitionSpec
from passes.planning.build_assignment import PlanningProblem
from passes.planning.parameter_uses import gradient_of, uses_of
from passes.planning.restrictions import matrices, users

SpecOf = Callable[[str], tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]]]
"""Specs of the operands and of the results of a site."""


Stages = Sequence[tuple[PlanningProblem, SpecOf]]
"""The planning problem of each stage, and the specs of its plan."""


def role_of(stages: Stages, axis: str) -> str:
    """The role of a mesh axis in a plan, by the layout of most parameter elements; "" without a role.

    Args:
        stages: stages of the plan.
        axis: axis of a stage's mesh.
    """
    sizes = {"tensor": 0, "fsdp": 0, "zero-2": 0, "zero-1": 0, "data": 0}
    for planning, specs in stages:
        for kind, size in _roles_of_matrices(planning, specs, axis):
            sizes[kind] += size
    most = max(sizes, key=sizes.__getitem__)
    return most if most == "tensor" or _splits_activations(stages, axis) else ""


def has_role(stages: Stages, axis: str, feature: str) -> bool:
    """Whether a plan uses an axis for something; ZeRO-2 is ZeRO-1 with gradients reduced to pieces."""
    role = role_of(stages, axis)
    return role == feature or (feature, role) == ("zero-1", "zero-2")


def _roles_of_matrices(planning: PlanningProblem, specs: SpecOf, axis: str) -> Iterator[tuple[str, int]]:
    """The role of an axis for each matrix, and the matrix's elements."""
    owners = {slot.name: slot for slot in planning.space.program.inputs_of(InputKind.STATE)}
    nodes = planning.space.program.nodes_by_name()
    for slot in matrices(planning):
        shape = planning.space.sites[slot.node].results[0].shape
        state = [item.node for name, item in owners.items() if name.endswith(f":{slot.name}")]
        made = gradient_of(nodes[slot.node])
        if any(axis in specs(link.head)[0][link.operand].sharded_axes for link in uses_of(planning, slot.node)):
            kind = "tensor"
        elif axis in specs(slot.node)[1][0].sharded_axes:
            kind = "fsdp"
        elif not any(axis in specs(node)[1][0].sharded_axes for node in state):
            kind = "data"
        elif made is not None and axis in specs(made[0].name)[1][made[1]].sharded_axes:
            kind = "zero-2"
        else:
            kind = "zero-1"
        yield kind, math.prod(shape)


def _splits_activations(stages: Stages, axis: str) -> bool:
    """Whether an axis splits the results of most forward calls that read matrices."""
    split = [axis in specs(head)[1][0].sharded_axes for planning, specs in stages for head in users(planning)]
    return 2 * sum(split) > len(split)
