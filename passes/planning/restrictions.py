"""Restrict the search to a recipe: each mesh axis gets a role, which allows only some options of the search.

The table says whether values are split or whole over an axis with a role. The search decides empty cells.

| role | parameters at rest | in use | gradients | optimizer state | inputs | results of inputs |
|---|---|---|---|---|---|---|
| data | whole | whole | | whole | split | split |
| zero-1 | whole | whole | | split | split | split |
| zero-2 | whole | whole | split | split | split | split |
| fsdp | split | whole: they are gathered | | split | split | split |
| tensor | | split | | | | |

A parameter is *used* by the calls of the forward that read it, directly or through views and fan-outs. Inputs are split
along the batch, and over the axis "context" along the sequence. A value that cannot be split as its role demands, for
example because the dim does not divide, is not restricted.

From the outermost, the axes of a recipe are "pipeline", "replica" (copies of ZeRO groups), "data", "expert", "context"
and "model". Each stage of the pipeline has a program of its own. "expert" divides the experts among ranks of data
parallelism. For other values it is one more axis of data parallelism. "model" is Megatron-LM's tensor parallelism. It
splits matrices where they are used, and inputs are whole over it. With sequence parallelism, it splits results of
normalisations along the sequence (Korthikanti et al., "Reducing activation recomputation in large transformer models",
2022).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from autoshard.errors import RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind, InputSlot, Program
from autoshard.ir.recipe import Recipe
from autoshard.ir.staged import crosses_stages, is_of_weights
from autoshard.ir.update import parameter_of
from autoshard.kernels import experts as experts_operator
from autoshard.kernels.experts import FIRST_MATRIX
from passes.planning.build_assignment import PlanningProblem
from passes.planning.parameter_uses import gradient_of, uses_of
from passes.planning.recipe_meshes import CONTEXT, DATA, EXPERT, MODEL, REPLICA, check_mesh, restricts
from passes.strategies.enumerate_strategies import Link

Masks = dict[int, np.ndarray]
Roles = Mapping[str, "Role"]


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a mesh axis: whether each kind of value is split over the axis (True), whole (False), or free (None).

    Args:
        parameters: parameters at rest.
        matrices: parameters at rest that have two dims or more.
        uses: matrices where the forward uses them.
        state: optimizer state.
        gradients: gradients of matrices as soon as they are made.
        inputs: inputs of the program, along dim `dim`. If False, inputs are not split along any dim.
        results: values that the forward computes from inputs.
        between: results of forward calls that read vectors but no matrix, such as norms, along the sequence. The
            sequence is their last dim but one.
        dim: the dim along which inputs are split: 0 for the batch, 1 for the sequence.
        experts: the use of the axis for matrices of experts, instead of the fields above. None: the fields above apply.
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
    experts: Experts | None = None


class Experts(StrEnum):
    """The use of a mesh axis for the matrices of experts.

    SHARED_OUT: each rank has some of the experts. SPLIT: each rank has a part of every expert. WHOLE: each rank has all
    experts whole. FREE: the search decides.
    """

    SHARED_OUT = "shared out"
    SPLIT = "split"
    WHOLE = "whole"
    FREE = "free"

    @property
    def is_split(self) -> bool | None:
        """Whether the axis splits the matrices of experts; None if the search decides."""
        return None if self is Experts.FREE else self is not Experts.WHOLE


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
"""Role of an axis of data-parallel ranks, by the ZeRO stage of the recipe (`Recipe.zero`)."""

MEGATRON = Role(matrices=True, uses=True, inputs=False, results=None)


def roles_of(recipe: Recipe, mesh: Mesh) -> Roles:
    """Return the role of each mesh axis with several ranks whose use the recipe decides (`recipe_meshes.FIELDS`).

    Raises:
        RecipeError: the mesh does not fit the recipe.
        NotAvailableError: the recipe has a field for which no program exists yet.
    """
    check_mesh(recipe, mesh)
    within = {None: Experts.FREE, 1: Experts.WHOLE}.get(recipe.expert_tensor, Experts.SPLIT)
    shared = Experts.FREE if recipe.expert is None else None
    sharded = replace(_OF_ZERO[recipe.zero], experts=shared)
    roles = {
        REPLICA: replace(ROLES["data"], experts=shared),
        DATA: sharded,
        EXPERT: replace(sharded, experts=Experts.SHARED_OUT),
        CONTEXT: replace(sharded, dim=1),
        MODEL: replace(MEGATRON, between=recipe.sequence_parallel, experts=within),
    }
    return {axis: roles[axis] for axis, size in mesh.axes if size > 1 and restricts(recipe, axis)}


def restricted(planning: PlanningProblem, recipe: Recipe) -> Masks:
    """Return masks of the options that a recipe allows, by variable. Variables without a restriction are absent.

    Raises:
        RecipeError: the mesh does not fit the recipe, or no value of some kind can be split over an axis as the recipe
            says. In a pipeline stage, values of a kind may be missing without an error.
        NotAvailableError: the recipe has a field for which no program exists yet.
    """
    roles = roles_of(recipe, planning.space.mesh)
    masks: Masks = {}
    program = planning.space.program
    has_state = bool(program.inputs_of(InputKind.STATE))
    for axis, role in roles.items():
        role = role if has_state else replace(role, state=None)
        role = role if program.trains else replace(role, gradients=None)
        found = restrict(planning, role, axis, masks, of_stage=is_stage(program))
        if found is None:
            raise RecipeError(
                f"{recipe.words}: nothing in the model can be split over axis {axis!r} of {planning.space.mesh} as "
                "the recipe says. Leave the field free (None), or take a size that divides the model's dims."
            )
        masks = found
    return masks


def is_stage(program: Program) -> bool:
    """Whether a program is one stage of a pipeline. Such a program takes or returns values of other stages."""
    return any(crosses_stages(slot.name) for slot in (*program.inputs, *program.outputs))


def restrict_all(
    planning: PlanningProblem, roles: Roles, within: Masks | None = None, *, of_stage: bool = False
) -> Masks | None:
    """Return masks of the options under which each axis of `roles` has its role, by variable.

    The result is None if the role of some axis demands splits that no value of the program allows, as for `restrict`.
    `within` and `of_stage` are also the arguments of `restrict`.
    """
    masks: Masks | None = dict(within or {})
    for axis, role in roles.items():
        masks = None if masks is None else restrict(planning, role, axis, masks, of_stage=of_stage)
    return masks


def restrict(
    planning: PlanningProblem,
    role: Role,
    axis: str,
    within: Mapping[int, np.ndarray] | None = None,
    *,
    of_stage: bool = False,
) -> Masks | None:
    """Return masks of the options under which an axis has a role, by variable.

    The result is None if the role demands a split of a kind of value, and no value of this kind can be split.

    Args:
        within: masks of the options that the roles of other axes allow.
        of_stage: whether the program may lack values of a kind that is to be split, as a pipeline stage may.
    """
    masks: Masks = dict(within or {})
    has_state = bool(planning.space.program.inputs_of(InputKind.STATE))
    experts = frozenset[str]() if role.experts is None else matrices_of_experts(planning)
    wanted = (
        (_at_rest(planning, InputKind.PARAMETER, axis, experts), role.parameters),
        (_matrices_at_rest(planning, axis, experts), role.matrices),
        (_at_rest(planning, InputKind.STATE, axis, experts), role.state if has_state or not role.parameters else None),
        (_in_use(planning, axis, experts), role.uses),
        (_gradients(planning, axis, experts), role.gradients),
        (_experts(planning, axis, role.experts, experts), None if role.experts is None else role.experts.is_split),
        (_inputs(planning, axis, role.dim if role.inputs else None), role.inputs),
        (_results(planning, axis, role.dim), role.results),
        (_between(planning, axis), role.between),
    )
    for splits, split in wanted:
        if split is None:
            continue
        is_there = [_keep(planning, masks, site, options, split) for site, options in splits]
        if split and not any(is_there) and not (of_stage and not is_there):
            return None
    return masks


_Splits = Iterator[tuple[str, list[bool]]]
"""Sites by name, each with a flag for each of its strategies: whether an axis splits the value."""


def _at_rest(planning: PlanningProblem, kind: InputKind, axis: str, without: Collection[str]) -> _Splits:
    for slot in planning.space.program.inputs_of(kind):
        parameter = parameter_of(slot.name) if kind is InputKind.STATE else slot.name
        if parameter not in without:
            strategies = planning.space.sites[slot.node].strategies
            yield slot.node, [axis in strategy.outputs[0].sharded_axes for strategy in strategies]


def _matrices_at_rest(planning: PlanningProblem, axis: str, without: Collection[str]) -> _Splits:
    nodes = {slot.node for slot in matrices(planning)}
    return (pair for pair in _at_rest(planning, InputKind.PARAMETER, axis, without) if pair[0] in nodes)


def _in_use(planning: PlanningProblem, axis: str, without: Collection[str]) -> _Splits:
    for slot in matrices(planning):
        for link in uses_of(planning, slot.node) if slot.name not in without else ():
            strategies = planning.space.sites[link.head].strategies
            yield link.head, [axis in strategy.inputs[link.operand].sharded_axes for strategy in strategies]


def _gradients(planning: PlanningProblem, axis: str, without: Collection[str]) -> _Splits:
    nodes = planning.space.program.nodes_by_name()
    for slot in matrices(planning):
        made = gradient_of(nodes[slot.node])
        if made is not None and slot.name not in without:
            strategies = planning.space.sites[made[0].name].strategies
            yield made[0].name, [axis in strategy.outputs[made[1]].sharded_axes for strategy in strategies]


def _inputs(planning: PlanningProblem, axis: str, dim: int | None) -> _Splits:
    """Yield the site of each input, with a flag for each strategy: whether it splits the input over `axis` along `dim`.

    If `dim` is None, a split along any dim counts.
    """
    for slot in _batch_inputs(planning):
        specs = [strategy.outputs[0] for strategy in planning.space.sites[slot.node].strategies]
        if dim is None:
            yield slot.node, [axis in spec.sharded_axes for spec in specs]
        elif dim < len(planning.space.sites[slot.node].results[0].shape):
            yield slot.node, [axis in spec.axes_of(dim) for spec in specs]


def _experts(planning: PlanningProblem, axis: str, experts: Experts | None, names: Collection[str]) -> _Splits:
    """Yield sites that use matrices of experts, with a flag for each strategy.

    The flag says whether the strategy splits the matrices over `axis` as `experts` says. For WHOLE, it says whether the
    strategy splits the matrices over `axis` at all. For SHARED_OUT, the parameters are yielded too, because experts
    that are shared out among ranks are shared out at rest.
    """
    for slot in planning.space.program.inputs_of(InputKind.PARAMETER):
        if experts is None or slot.name not in names:
            continue
        if experts is Experts.SHARED_OUT:
            strategies = planning.space.sites[slot.node].strategies
            yield slot.node, [axis in strategy.outputs[0].axes_of(0) for strategy in strategies]
        for link in uses_of(planning, slot.node):
            specs = [strategy.inputs[link.operand] for strategy in planning.space.sites[link.head].strategies]
            split = [axis in spec.sharded_axes for spec in specs]
            along = [axis in spec.axes_of(0) for spec in specs]
            inner = [one and not other for one, other in zip(split, along, strict=True)]
            yield link.head, {Experts.WHOLE: split, Experts.SHARED_OUT: along, Experts.SPLIT: inner}[experts]


def matrices_of_experts(planning: PlanningProblem) -> frozenset[str]:
    """Return the names of the parameters that a call of `autoshard.kernels.experts` reads as matrices of experts."""
    return frozenset(
        slot.name
        for slot in planning.space.program.inputs_of(InputKind.PARAMETER)
        for link in uses_of(planning, slot.node)
        if _is_of_experts(planning, link)
    )


def _is_of_experts(planning: PlanningProblem, link: Link) -> bool:
    node = planning.space.sites[link.head].node
    return node is not None and node.target is experts_operator and link.operand >= FIRST_MATRIX


def _batch_inputs(planning: PlanningProblem) -> list[InputSlot]:
    """Return the program's inputs that depend on the batch.

    Values of other pipeline stages that are computed from parameters alone are left out.
    """
    return [slot for slot in planning.space.program.inputs_of(InputKind.INPUT) if not is_of_weights(slot.name)]


def _results(planning: PlanningProblem, axis: str, dim: int) -> _Splits:
    """Yield each call of the forward that depends on inputs, with a flag for each strategy.

    The flag says whether the call's result is split over `axis`, or partial. An axis that splits sequences (`dim` 1)
    must not split a result with three or more dims along the batch.
    """
    for name in _from_inputs(planning):
        specs = [strategy.outputs[0] for strategy in planning.space.sites[name].strategies]
        has_sequence = dim > 0 and len(planning.space.sites[name].results[0].shape) > 2
        yield name, [axis in spec.axes and not (has_sequence and axis in spec.axes_of(0)) for spec in specs]


def _from_inputs(planning: PlanningProblem) -> list[str]:
    """Return the names of the calls of the forward whose results depend on inputs, in program order."""
    space = planning.space
    found = {slot.node for slot in _batch_inputs(planning)}
    operands: dict[str, list[str]] = defaultdict(list)
    for link in space.links:
        operands[link.head].append(link.tail)
    for name, site in space.sites.items():  # in program order
        if site.phase == "forward" and not found.isdisjoint(operands[name]):
            found.add(name)
    return [name for name in space.sites if name in found and (site := space.sites[name]).results and not site.is_input]


def _between(planning: PlanningProblem, axis: str) -> _Splits:
    """Yield each call of the forward on a vector and no matrix, with a flag for each strategy.

    The flag says whether the strategy splits the result along the sequence, the last dim but one, over `axis`.
    """
    vectors = [slot for slot in planning.space.program.inputs_of(InputKind.PARAMETER) if _ndim(planning, slot) == 1]
    with_matrices = set(users(planning))
    for head in dict.fromkeys(link.head for slot in vectors for link in uses_of(planning, slot.node)):
        site = planning.space.sites[head]
        sequence = len(site.results[0].shape) - 2 if site.results else -1
        if head not in with_matrices and sequence > 0:
            yield head, [axis in strategy.outputs[0].axes_of(sequence) for strategy in site.strategies]


def users(planning: PlanningProblem) -> list[str]:
    """Return the names of the calls of the forward that use a matrix and have results."""
    links = (link for slot in matrices(planning) for link in uses_of(planning, slot.node))
    heads = dict.fromkeys(link.head for link in links)
    return [head for head in heads if planning.space.sites[head].results]


def _keep(planning: PlanningProblem, masks: Masks, site: str, options: Sequence[bool], split: bool) -> bool:
    """Restrict a site to the strategies whose flag in `options` equals `split`, and return True.

    A flag says whether the strategy splits the value. If no allowed strategy is left, `masks` stays unchanged, and
    False is returned.
    """
    mask = np.array(options) == split
    variable = planning.classes[site]
    both = mask & masks.get(variable, mask)
    if not both.any():
        return False
    masks[variable] = both
    return True


def matrices(planning: PlanningProblem) -> list[InputSlot]:
    """Return the parameters that have two dims or more, or all parameters if none has."""
    slots = planning.space.program.inputs_of(InputKind.PARAMETER)
    return [slot for slot in slots if _ndim(planning, slot) > 1] or list(slots)


def _ndim(planning: PlanningProblem, slot: InputSlot) -> int:
    return len(planning.space.sites[slot.node].results[0].shape)
