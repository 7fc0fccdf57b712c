"""What an axis of the mesh can be used for, as restrictions of the search, and what a plan uses each axis for.

| role | parameters at rest | where they are used | gradients | optimizer state | batch | results of what uses them |
|---|---|---|---|---|---|---|
| data | whole | whole | | whole | split | split |
| zero-1 | whole | whole | | split | split | split |
| zero-2 | whole | whole | split | split | split | split |
| fsdp | split | whole: they are gathered | | split | split | split |
| tensor | | split | | | | |

each over the axis in question, as the search likes where nothing is said; other axes are free. What the calls of the
forward read counts as used, behind views and hubs.
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
from passes.prediction.name_layouts import forward_links, gradient_of, passes_on
from passes.strategies.enumerate_strategies import Link

Masks = dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class Role:
    """Whether parameters at rest and in use, gradients, state and the batch are split over an axis; None: either.

    With the batch, what is computed from it with parameters.
    """

    parameters: bool | None
    uses: bool
    state: bool | None
    gradients: bool | None = None
    batch: bool | None = True


ROLES: Mapping[str, Role] = {
    "data": Role(parameters=False, uses=False, state=False),
    "zero-1": Role(parameters=False, uses=False, state=True),
    "zero-2": Role(parameters=False, uses=False, state=True, gradients=True),
    "fsdp": Role(parameters=True, uses=False, state=True),
    "tensor": Role(parameters=None, uses=True, state=None, batch=None),
}


_Splits = Iterator[tuple[str, list[bool]]]
"""Sites, each with whether an axis splits a value there, for each of its strategies."""


def restrict(planning: PlanningProblem, role: Role, axis: str) -> Masks | None:
    """The options under which an axis has a role; None if the program has nothing that could be split so."""
    masks: Masks = {}
    wanted = (
        (_at_rest(planning, InputKind.PARAMETER, axis), role.parameters),
        (_at_rest(planning, InputKind.STATE, axis), role.state),
        (_in_use(planning, axis), role.uses),
        (_gradients(planning, axis), role.gradients),
        (_batches(planning, axis), role.batch),
        (_results(planning, axis), role.batch),
    )
    for splits, split in wanted:
        if split is None:
            continue
        is_there = [_keep(planning, masks, site, options, split) for site, options in splits]
        if split and not any(is_there):
            return None
    return masks


def _at_rest(planning: PlanningProblem, kind: InputKind, axis: str) -> _Splits:
    for slot in planning.space.program.inputs_of(kind):
        strategies = planning.space.sites[slot.node].strategies
        yield slot.node, [axis in strategy.outputs[0].sharded_axes for strategy in strategies]


def _in_use(planning: PlanningProblem, axis: str) -> _Splits:
    for slot in _matrices(planning):
        for link in uses_of(planning, slot.node):
            strategies = planning.space.sites[link.head].strategies
            yield link.head, [axis in strategy.inputs[link.operand].sharded_axes for strategy in strategies]


def _gradients(planning: PlanningProblem, axis: str) -> _Splits:
    nodes = planning.space.program.nodes_by_name()
    for slot in _matrices(planning):
        made = gradient_of(nodes[slot.node])
        if made is not None:
            strategies = planning.space.sites[made[0].name].strategies
            yield made[0].name, [axis in strategy.outputs[made[1]].sharded_axes for strategy in strategies]


def _batches(planning: PlanningProblem, axis: str) -> _Splits:
    for slot in planning.space.program.inputs_of(InputKind.INPUT):
        strategies = planning.space.sites[slot.node].strategies
        yield slot.node, [axis in strategy.outputs[0].axes_of(0) for strategy in strategies]


def _results(planning: PlanningProblem, axis: str) -> _Splits:
    for head in _users(planning):
        strategies = planning.space.sites[head].strategies
        yield head, [axis in strategy.outputs[0].sharded_axes for strategy in strategies]


def _users(planning: PlanningProblem) -> list[str]:
    """The calls of the forward that read matrices."""
    links = (link for slot in _matrices(planning) for link in uses_of(planning, slot.node))
    heads = dict.fromkeys(link.head for link in links)
    return [head for head in heads if planning.space.sites[head].results]


def _keep(planning: PlanningProblem, masks: Masks, site: str, options: Sequence[bool], split: bool) -> bool:
    """Keep the options of a site that split, or those that do not, if there are any; whether there are."""
    mask = np.array(options) == split
    variable = planning.classes[site]
    both = mask & masks.get(variable, mask)
    if not both.any():
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
    sizes = {"tensor": 0, "fsdp": 0, "zero-2": 0, "zero-1": 0, "data": 0}
    owners = {slot.name: slot for slot in planning.space.program.inputs_of(InputKind.STATE)}
    nodes = planning.space.program.nodes_by_name()
    for slot in _matrices(planning):
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
        sizes[kind] += math.prod(shape)
    most = max(sizes, key=sizes.__getitem__)
    return most if most == "tensor" or _splits_activations(planning, specs, axis) else ""


def has_role(planning: PlanningProblem, specs: SpecOf, axis: str, feature: str) -> bool:
    """Whether a plan uses an axis for something; ZeRO-2 is ZeRO-1 with gradients reduced to pieces."""
    role = role_of(planning, specs, axis)
    return role == feature or (feature, role) == ("zero-1", "zero-2")


def _splits_activations(planning: PlanningProblem, specs: SpecOf, axis: str) -> bool:
    """Whether most calls of the forward that read matrices give results that are split over an axis."""
    split = [axis in specs(head)[1][0].sharded_axes for head in _users(planning)]
    return 2 * sum(split) > len(split)
