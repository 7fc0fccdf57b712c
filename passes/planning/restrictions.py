"""Recipes as restrictions of the search: each axis of the mesh has a role, and a role leaves options of values.

| role | parameters at rest | where they are used | gradients | optimizer state | inputs | what is computed from them |
|---|---|---|---|---|---|---|
| data | whole | whole | | whole | split | split |
| zero-1 | whole | whole | | split | split | split |
| zero-2 | whole | whole | split | split | split | split |
| fsdp | split | whole: they are gathered | | split | split | split |
| tensor | | split | | | | |

each over the axis in question, as the search likes where nothing is said; other axes are free. What the calls of the
forward read counts as used, behind views and hubs. Inputs are split along the batch; over "context", along the
sequence. A restriction leaves out what no option of a value can do: a dim that does not divide, a value without such a
dim.

The axes of a recipe are "replica" (copies of groups of ZeRO), "data", "context" and "model", the outermost first.
"model" does as Megatron-LM's tensor parallelism: it splits matrices where they are used, inputs are whole over it, and
what normalisations give lies along the sequence with sequence parallelism, and does not without (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind, InputSlot
from autoshard.ir.recipe import Recipe
from passes.planning.build_assignment import PlanningProblem
from passes.planning.parameter_uses import gradient_of, uses_of

Masks = dict[int, np.ndarray]
Roles = Mapping[str, "Role"]

REPLICA, DATA, CONTEXT, MODEL = AXES = ("replica", "data", "context", "model")
"""The axes of a recipe's mesh, the outermost first."""


@dataclass(frozen=True, slots=True)
class Role:
    """Use of a mesh axis: whether each kind of value is split over it; None: as the search likes.

    Args:
        parameters: parameters at rest.
        matrices: of parameters at rest, those of two dims or more.
        uses: matrices where the forward uses them.
        state: the optimizer's state.
        gradients: gradients as soon as they are made.
        inputs: inputs, along `dim`; those that are not split along another dim either.
        results: what the forward computes from inputs.
        between: what the forward computes with vectors alone (norms), along the sequence, its last dim but one.
        dim: of inputs: 0, the batch, or 1, the sequence.
    """

    parameters: bool | None = None
    matrices: bool | None = None
    uses: bool | None = None
    state: bool | None = None
    gradients: bool | None = None
    inputs: bool | None = True
    results: bool | None = True
    between: bool | None = None
    dim: int = 0


ROLES: Roles = {
    "data": Role(parameters=False, uses=False, state=False),
    "zero-1": Role(parameters=False, uses=False, state=True),
    "zero-2": Role(parameters=False, uses=False, state=True, gradients=True),
    "fsdp": Role(parameters=True, uses=False, state=True),
    "tensor": Role(uses=True, inputs=None, results=None),
}
_OF_ZERO: Mapping[int | None, Role] = {
    None: Role(uses=False),
    **dict(enumerate(ROLES[name] for name in ("data", "zero-1", "zero-2", "fsdp"))),
}
"""Role of an axis of replicas, by `Recipe.zero`."""

MEGATRON = Role(matrices=True, uses=True, inputs=False, results=None)


def roles_of(recipe: Recipe, mesh: Mesh) -> Roles:
    """Role of each axis of a mesh under a recipe.

    Raises:
        RecipeError: the mesh is not that of the recipe.
        NotAvailableError: the recipe does what no restriction of specs is.
    """
    _check(recipe, mesh)
    sharded = _OF_ZERO[recipe.zero]
    roles = {
        REPLICA: ROLES["data"],
        DATA: sharded,
        CONTEXT: replace(sharded, dim=1),
        MODEL: replace(MEGATRON, between=recipe.sequence_parallel),
    }
    return {axis: roles[axis] for axis, size in mesh.axes if size > 1}


def restricted(planning: PlanningProblem, recipe: Recipe) -> Masks:
    """The options that a recipe leaves.

    Raises:
        RecipeError, NotAvailableError: see `roles_of`; or the program has nothing that an axis could split as asked.
    """
    roles = roles_of(recipe, planning.space.mesh)
    masks: Masks = {}
    has_state = bool(planning.space.program.inputs_of(InputKind.STATE))
    for axis, role in roles.items():
        found = restrict(planning, role if has_state else replace(role, state=None), axis, masks)
        if found is None:
            raise RecipeError(
                f"{recipe.words}: nothing in the model can be split over axis {axis!r} of {planning.space.mesh} as "
                "that asks. Leave the field free (None), or take a size that divides the model's dims."
            )
        masks = found
    return masks


def restrict_all(planning: PlanningProblem, roles: Roles) -> Masks | None:
    """The options under which each axis has its role; None if there are none."""
    masks: Masks | None = {}
    for axis, role in roles.items():
        masks = None if masks is None else restrict(planning, role, axis, masks)
    return masks


def restrict(
    planning: PlanningProblem, role: Role, axis: str, within: Mapping[int, np.ndarray] | None = None
) -> Masks | None:
    """The options under which an axis has a role; None if the program has nothing that could be split so.

    `within`: the options that other axes leave.
    """
    masks: Masks = dict(within or {})
    has_state = bool(planning.space.program.inputs_of(InputKind.STATE))
    wanted = (
        (_at_rest(planning, InputKind.PARAMETER, axis), role.parameters),
        (_matrices_at_rest(planning, axis), role.matrices),
        (_at_rest(planning, InputKind.STATE, axis), role.state if has_state or not role.parameters else None),
        (_in_use(planning, axis), role.uses),
        (_gradients(planning, axis), role.gradients),
        (_inputs(planning, axis, role.dim if role.inputs else None), role.inputs),
        (_results(planning, axis, role.dim), role.results),
        (_between(planning, axis), role.between),
    )
    for splits, split in wanted:
        if split is None:
            continue
        is_there = [_keep(planning, masks, site, options, split) for site, options in splits]
        if split and not any(is_there):
            return None
    return masks


_Splits = Iterator[tuple[str, list[bool]]]
"""Sites, each with whether an axis splits a value there, for each of its strategies."""


def _at_rest(planning: PlanningProblem, kind: InputKind, axis: str) -> _Splits:
    for slot in planning.space.program.inputs_of(kind):
        strategies = planning.space.sites[slot.node].strategies
        yield slot.node, [axis in strategy.outputs[0].sharded_axes for strategy in strategies]


def _matrices_at_rest(planning: PlanningProblem, axis: str) -> _Splits:
    nodes = {slot.node for slot in matrices(planning)}
    return (pair for pair in _at_rest(planning, InputKind.PARAMETER, axis) if pair[0] in nodes)


def _in_use(planning: PlanningProblem, axis: str) -> _Splits:
    for slot in matrices(planning):
        for link in uses_of(planning, slot.node):
            strategies = planning.space.sites[link.head].strategies
            yield link.head, [axis in strategy.inputs[link.operand].sharded_axes for strategy in strategies]


def _gradients(planning: PlanningProblem, axis: str) -> _Splits:
    nodes = planning.space.program.nodes_by_name()
    for slot in matrices(planning):
        made = gradient_of(nodes[slot.node])
        if made is not None:
            strategies = planning.space.sites[made[0].name].strategies
            yield made[0].name, [axis in strategy.outputs[made[1]].sharded_axes for strategy in strategies]


def _inputs(planning: PlanningProblem, axis: str, dim: int | None) -> _Splits:
    """Inputs, split along a dim; None: along any."""
    for slot in planning.space.program.inputs_of(InputKind.INPUT):
        specs = [strategy.outputs[0] for strategy in planning.space.sites[slot.node].strategies]
        if dim is None:
            yield slot.node, [axis in spec.sharded_axes for spec in specs]
        elif dim < len(planning.space.sites[slot.node].results[0].shape):
            yield slot.node, [axis in spec.axes_of(dim) for spec in specs]


def _results(planning: PlanningProblem, axis: str, dim: int) -> _Splits:
    """Results of the forward that depend on inputs, split or awaiting sums.

    Over an axis of sequences they are not split along the batch.
    """
    for name in _from_inputs(planning):
        specs = [strategy.outputs[0] for strategy in planning.space.sites[name].strategies]
        has_sequence = dim > 0 and len(planning.space.sites[name].results[0].shape) > 2
        yield name, [axis in spec.axes and not (has_sequence and axis in spec.axes_of(0)) for spec in specs]


def _from_inputs(planning: PlanningProblem) -> list[str]:
    """The calls of the forward whose results depend on inputs."""
    space = planning.space
    found = {slot.node for slot in space.program.inputs_of(InputKind.INPUT)}
    operands: dict[str, list[str]] = defaultdict(list)
    for link in space.links:
        operands[link.head].append(link.tail)
    for name, site in space.sites.items():  # in program order
        if site.phase == "forward" and not found.isdisjoint(operands[name]):
            found.add(name)
    return [name for name in space.sites if name in found and (site := space.sites[name]).results and not site.is_input]


def _between(planning: PlanningProblem, axis: str) -> _Splits:
    """The results of calls of the forward that read vectors and no matrix, along the sequence."""
    vectors = [slot for slot in planning.space.program.inputs_of(InputKind.PARAMETER) if _ndim(planning, slot) == 1]
    with_matrices = set(users(planning))
    for head in dict.fromkeys(link.head for slot in vectors for link in uses_of(planning, slot.node)):
        site = planning.space.sites[head]
        sequence = len(site.results[0].shape) - 2 if site.results else -1
        if head not in with_matrices and sequence > 0:
            yield head, [axis in strategy.outputs[0].axes_of(sequence) for strategy in site.strategies]


def users(planning: PlanningProblem) -> list[str]:
    """The calls of the forward that read matrices."""
    links = (link for slot in matrices(planning) for link in uses_of(planning, slot.node))
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


def matrices(planning: PlanningProblem) -> list[InputSlot]:
    """The parameters of two dims or more; of all if there are none."""
    slots = planning.space.program.inputs_of(InputKind.PARAMETER)
    return [slot for slot in slots if _ndim(planning, slot) > 1] or list(slots)


def _ndim(planning: PlanningProblem, slot: InputSlot) -> int:
    return len(planning.space.sites[slot.node].results[0].shape)


def meshes_of_recipe(recipe: Recipe, devices: int, per_node: int) -> list[Mesh]:
    """The meshes of so many devices on which a recipe may lie: one, or those of every size of an axis that is free.

    Raises:
        RecipeError: no sizes of the free axes make so many devices.
        NotAvailableError: see `roles_of`.
    """
    _refuse_without_program(recipe)
    free = [size for size in range(1, per_node + 1) if per_node % size == 0]
    tensors = free if recipe.tensor is None else [recipe.tensor]
    contexts = free if recipe.context is None else [recipe.context]
    found = []
    for tensor, context in product(tensors, contexts):
        data, rest = divmod(devices, tensor * context)
        if not rest and data and recipe.data in (None, data):
            found.append(_mesh(recipe, data, context, tensor))
    if not found:
        asked = {"data": recipe.data, "context": recipe.context, "tensor": recipe.tensor}
        said = " x ".join(f"{name}={size}" for name, size in asked.items() if size is not None)
        raise RecipeError(f"{said} does not make {devices} devices; give axes that do, or leave one free (None).")
    return found


def _mesh(recipe: Recipe, data: int, context: int, tensor: int) -> Mesh:
    """The mesh of axes of some sizes, without those of one rank."""
    group = data if recipe.zero_group is None else recipe.zero_group
    if data % group:
        raise RecipeError(f"zero_group={group} must divide data={data}.")
    sizes = {REPLICA: data // group, DATA: group, CONTEXT: context, MODEL: tensor}
    return Mesh({axis: size for axis, size in sizes.items() if size > 1} or {DATA: 1})


def _refuse_without_program(recipe: Recipe) -> None:
    """Refuse a recipe that is no restriction of specs on any mesh."""
    refused = {
        f"pipeline={recipe.pipeline}": recipe.pipeline > 1,
        f"expert={recipe.expert}": recipe.expert > 1,
        f"islands={recipe.islands}": recipe.islands is not None,
        f"recompute={recipe.recompute!r}": recipe.recompute == "selective",
        f"offload={recipe.offload!r}": recipe.offload in ("optimizer", "parameters"),
        f"precision={recipe.precision!r}": recipe.precision == "f8",
        "offload='activations' with recompute=None": recipe.offload == "activations" and recipe.recompute is None,
        f"zero_group={recipe.zero_group} with context={recipe.context}": recipe.zero_group is not None
        and recipe.context not in (None, 1),
    }
    for said, is_asked in refused.items():
        if is_asked:
            raise NotAvailableError(
                f"{said} has no program yet that compile runs. Leave the field out, or price the recipe as another "
                "runtime would execute it, with runtime='megatron', 'fsdp2' or 'deepspeed'."
            )


def _check(recipe: Recipe, mesh: Mesh) -> None:
    """Refuse a recipe that is no restriction of specs on a mesh."""
    _refuse_without_program(recipe)
    sizes = dict(mesh.axes)
    unknown = [axis for axis, size in sizes.items() if axis not in AXES and size > 1]
    if unknown:
        raise RecipeError(
            f"A recipe has the axes {', '.join(map(repr, AXES))}, and {mesh} has {unknown[0]!r}. Name the mesh's "
            "axes so."
        )
    replicas, group = sizes.get(REPLICA, 1), sizes.get(DATA, 1)
    if (recipe.zero_group or replicas * group) != (group if replicas > 1 else replicas * group):
        raise RecipeError(
            f"zero_group={recipe.zero_group} takes an axis 'data' of that size, and copies of it over an axis "
            f"'replica'; the mesh is {mesh}."
        )
    for name, asked, found in (
        ("data", recipe.data, replicas * group),
        ("context", recipe.context, sizes.get(CONTEXT, 1)),
        ("tensor", recipe.tensor, sizes.get(MODEL, 1)),
    ):
        if asked not in (None, found):
            axis = MODEL if name == "tensor" else name
            raise RecipeError(f"{name}={asked}, but the mesh {mesh} has {found} ranks along {axis!r}.")
