"""What an axis of the mesh can be used for, as restrictions of the search, and what a plan uses each axis for.

| role | parameters at rest | where they are used | optimizer state |
|---|---|---|---|
| data | whole | whole | whole |
| zero-1 | whole | whole | split |
| fsdp | split | whole: they are gathered | split |
| tensor | split, or cut when used | split | as the search likes |

each over the axis in question; other axes are free. What the calls of the forward read counts as used, behind views and
hubs.
A restriction leaves out what no option of a value can do (a dim that does not divide, a value without such a dim).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.ir.program import InputKind, InputSlot
from autoshard.ir.spec import PartitionSpec
from passes.planning.build_assignment import PlanningProblem
from passes.prediction.name_layouts import forward_links, passes_on
from passes.strategies.enumerate_strategies import Link

Masks = dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class Role:
    """Whether parameters at rest, parameters in use, and state are split over an axis; None leaves them free."""

    parameters: bool | None
    uses: bool
    state: bool | None


ROLES: Mapping[str, Role] = {
    "data": Role(parameters=False, uses=False, state=False),
    "zero-1": Role(parameters=False, uses=False, state=True),
    "fsdp": Role(parameters=True, uses=False, state=True),
    "tensor": Role(parameters=None, uses=True, state=None),
}


def restrict(planning: PlanningProblem, role: Role, axis: str) -> Masks | None:
    """The options under which an axis has a role; None if the program has nothing that could be split so."""
    masks: Masks = {}
    found = {InputKind.PARAMETER: False, InputKind.STATE: False}
    for kind, split in ((InputKind.PARAMETER, role.parameters), (InputKind.STATE, role.state)):
        for slot in planning.space.program.inputs_of(kind):
            site = planning.space.sites[slot.node]
            specs = [strategy.outputs[0] for strategy in site.strategies]
            found[kind] |= _keep(planning, masks, slot.node, specs, axis, split)
    used = False
    for slot in _matrices(planning):
        for link in uses_of(planning, slot.node):
            specs = [strategy.inputs[link.operand] for strategy in planning.space.sites[link.head].strategies]
            used |= _keep(planning, masks, link.head, specs, axis, role.uses)
    wanted = (role.parameters, found[InputKind.PARAMETER]), (role.state, found[InputKind.STATE]), (role.uses, used)
    return masks if all(is_there for split, is_there in wanted if split) else None


def _keep(
    planning: PlanningProblem,
    masks: Masks,
    site: str,
    specs: Sequence[PartitionSpec],
    axis: str,
    split: bool | None,
) -> bool:
    """Keep the options whose spec is split over an axis or is not, if there are any; whether there are."""
    mask = np.array([(axis in spec.sharded_axes) == split for spec in specs])
    variable = planning.classes[site]
    both = mask & masks.get(variable, mask)
    if split is None or not both.any():
        return False
    masks[variable] = both
    return True


def uses_of(planning: PlanningProblem, name: str) -> Iterator[Link]:
    """The links by which calls of the forward read a value, behind views, hubs and casts."""
    sites = planning.space.sites
    return (link for link in forward_links(planning, name) if not passes_on(sites[link.head], link))


def _matrices(planning: PlanningProblem) -> list[InputSlot]:
    """The parameters of two dims or more; of all if there are none."""
    slots = planning.space.program.inputs_of(InputKind.PARAMETER)
    return [slot for slot in slots if len(planning.space.sites[slot.node].results[0].shape) > 1] or list(slots)


SpecOf = Callable[[str], tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]]]
"""Specs of the operands and of the results of a site."""


def role_of(planning: PlanningProblem, specs: SpecOf, axis: str) -> str:
    """What a plan uses an axis for, by where most elements of its parameters lie; "" where it does not use it.

    Args:
        planning: the problem that the plan solves.
        specs: of the plan.
        axis: of the mesh.
    """
    sizes = {"tensor": 0, "fsdp": 0, "zero-1": 0, "": 0}
    owners = {slot.name: slot for slot in planning.space.program.inputs_of(InputKind.STATE)}
    for slot in _matrices(planning):
        shape = planning.space.sites[slot.node].results[0].shape
        state = [item.node for name, item in owners.items() if name.endswith(f":{slot.name}")]
        if any(axis in specs(link.head)[0][link.operand].sharded_axes for link in uses_of(planning, slot.node)):
            kind = "tensor"
        elif axis in specs(slot.node)[1][0].sharded_axes:
            kind = "fsdp"
        elif any(axis in specs(node)[1][0].sharded_axes for node in state):
            kind = "zero-1"
        else:
            kind = ""
        sizes[kind] += math.prod(shape)
    most = max(sizes, key=sizes.__getitem__)
    return most or ("data" if _splits_activations(planning, specs, axis) else "")


def _splits_activations(planning: PlanningProblem, specs: SpecOf, axis: str) -> bool:
    """Whether most results of the forward's calls are split over an axis."""
    names = [name for name, site in planning.space.sites.items() if site.phase == "forward" and site.node is not None]
    calls = [name for name in names if not planning.space.sites[name].is_input and planning.space.sites[name].results]
    split = sum(axis in specs(name)[1][0].sharded_axes for name in calls)
    return 2 * split > len(calls)
