"""Find the role that each mesh axis has in a plan, e.g. "tensor" or "fsdp" (`passes.planning.restrictions.ROLES`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autoshard.ir.program import InputKind
from autoshard.ir.spec import PartitionSpec
from passes.planning.build_assignment import PlanningProblem
from passes.planning.parameter_uses import gradient_of, uses_of
from passes.planning.restrictions import matrices, users

SpecOf = Callable[[str], tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]]]
"""Function that takes a site's name, and returns the specs of its operands and of its results, in a plan."""


Stages = Sequence[tuple[PlanningProblem, SpecOf]]
"""For each stage, its planning problem and the specs of its plan."""


def has_role(stages: Stages, axis: str, feature: str) -> bool:
    """Whether a mesh axis has the role `feature` in a plan: "tensor", "fsdp", "zero-2", "zero-1" or "data".

    An axis may have different roles for different matrices. The role with the most elements of matrices counts. Roles
    other than "tensor" also require that the axis splits activations. An axis with the role ZeRO-2 also has the role
    ZeRO-1.
    """
    sizes = {"tensor": 0, "fsdp": 0, "zero-2": 0, "zero-1": 0, "data": 0}
    for planning, specs in stages:
        for kind, size in _roles_of_matrices(planning, specs, axis):
            sizes[kind] += size
    role = max(sizes, key=sizes.__getitem__)
    is_asked = role == feature or (feature, role) == ("zero-1", "zero-2")
    return is_asked and (role == "tensor" or _splits_activations(stages, axis))


def _roles_of_matrices(planning: PlanningProblem, specs: SpecOf, axis: str) -> Iterator[tuple[str, int]]:
    """Yield for each matrix of a stage its role over a mesh axis, and its number of elements.

    For example, the role is "fsdp" if the axis splits the matrix, and the forward gathers it.
    """
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
