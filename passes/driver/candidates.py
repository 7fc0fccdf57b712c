"""The candidate layouts of a training step: mesh, stages and number of micro-batches, with a recipe or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard.errors import RecipeError, TraceError
from autoshard.ir.execution import Execution
from autoshard.ir.mesh import Mesh
from autoshard.ir.recipe import Recipe, is_several, least_stages, named_schedule
from autoshard.ir.request import Request
from autoshard.ir.staged import PIPELINE_AXIS
from autoshard.runtime.micro_batches import batch_size
from cost_models.hardware import Cluster
from cost_models.schedule_orders import admits
from passes.driver.pipelines import whole_mesh
from passes.planning.recipe_meshes import (
    DATA,
    EXPERT,
    REPLICA,
    check_mesh,
    meshes_of_recipe,
    pipeline_ranks,
    restricts,
)
from passes.search.recipe_problem import RecipeProblem
from passes.search.search_recipes import NOTHING, FoundRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout of a step, for which specs are searched.

    Args:
        meshes: specs are searched on each of these meshes, and the fastest plan is kept. A pipeline has one mesh.
        micro_batches: number of micro-batches in a step.
        recipe: restricts the plan; None: no restriction.
        proposal: the recipe that the outer search proposed, without the fields that the search over specs decides.
        is_spare: whether the candidate is planned only if no earlier candidate has a plan.
        is_for_memory: whether the candidate is planned only if each earlier plan recomputes or offloads values.
        exact: the recipe that the outer search proposed, with all its fields. If the time budget cuts the search, and
            the plan is much slower than `price_s`, the candidate is planned again within this recipe.
        price_s: the price of the proposed recipe, in seconds of a step; None if the recipe has no price.
        varies: whether micro-batches may be larger or smaller than the proposal's, see `resized`.
        price_of_size: takes the size of a micro-batch; returns the price of the recipe with this size, in seconds of a
            step. None if the recipe has no price.
    """

    meshes: Sequence[Mesh]
    micro_batches: int
    recipe: Recipe | None = None
    proposal: Recipe | None = None
    is_spare: bool = False
    is_for_memory: bool = False
    exact: Recipe | None = None
    price_s: float | None = None
    varies: bool = False
    price_of_size: Callable[[int], float] | None = None

    @property
    def has_stages(self) -> bool:
        """Whether the mesh of the candidate has the axis "pipeline"."""
        return PIPELINE_AXIS in self.meshes[0].axis_names

    @property
    def keeps_all(self) -> bool:
        """Whether the proposed recipe neither recomputes nor offloads values."""
        return self.exact is not None and _keeps_all(self.exact)


_MOST_COUNTS = 3
"""The largest number of different micro-batch counts to try for a pipeline, if the count is free."""


def candidates_of(
    recipe: Recipe, meshes: Sequence[Mesh], global_batch: int, micro_batches: int | None = None
) -> list[Candidate]:
    """Return the candidates within a recipe, with the fewest micro-batches first. `micro_batches` fixes their number.

    Without stages, a candidate with more micro-batches is planned only if all earlier plans recompute or offload
    values. With stages, a few numbers of micro-batches are tried. They are multiples of the number of pipeline ranks if
    possible.

    Raises:
        RecipeError: no mesh runs whole micro-batches of the batch.
    """
    counts = by_micro_batches(meshes, recipe, global_batch) if micro_batches is None else {micro_batches: meshes}
    ranks, each = pipeline_ranks(meshes[0]), least_stages(recipe)
    if ranks == 1:
        rises = recipe.micro_batch is None
        return [
            Candidate(meshes=places, micro_batches=parts, recipe=recipe, is_for_memory=rises)
            for parts, places in counts.items()
        ]
    runs = [parts for parts in counts if admits(named_schedule(recipe), ranks, parts, each)]
    return [
        Candidate(meshes=[mesh], micro_batches=parts, recipe=recipe)
        for parts in _counts_to_try(runs or list(counts), ranks)
        for mesh in counts[parts]
    ]


_FREE = ("zero", "sequence_parallel", "recompute", "offload")
"""Fields of a recipe that the search over specs decides by its own prices, unless constraints decide them."""

_MOST_SHAPES, _NEAR, _NEAR_IF_SAVING = 3, 1.05, 1.5
"""Limits of planning, in order: the number of planned recipes, and two ratios of step times.

A recipe is planned if its step takes at most `_NEAR` times as long as the fastest recipe's. If it has no stages and
recomputes or offloads, the ratio is `_NEAR_IF_SAVING`, because a plan recomputes single values, and a recipe whole
blocks. For example, a Llama-3 8B had 60 % of the memory of 64 H100s. The plan of a recipe that was priced 15 % slower
was 14 % faster.
"""

_AXES_IN_TIME = 2
"""Largest number of mesh axes for a search over all specs. On more axes the recipe restricts the specs.

A recipe that splits experts always restricts them, because the search over all specs misses such a split. For example,
it plans a step of 0.495 s for a small Mixtral on two CPUs. Within the recipe the step takes 0.439 s (2026-11-30).
"""


def shape_of(recipe: Recipe, fixed: Mapping[str, object]) -> Recipe:
    """Return a recipe without the fields that the search over specs decides, and without `stage_layers`.

    Fields that the search decides stay if `fixed` names them. If `fixed` names `offload`, `recompute` stays too.
    """
    names = {*fixed, "recompute"} if "offload" in fixed else fixed  # an offloaded value is not recomputed
    return replace(recipe, **{name: None for name in _FREE if name not in names}, stage_layers=None)


def candidates_found(
    found: Sequence[FoundRecipe],
    fixed: Mapping[str, object],
    problem: RecipeProblem,
    saving: FoundRecipe = NOTHING,
) -> list[Candidate]:
    """Return the candidates for the recipes that the outer search found.

    Candidates without stages come before candidates with stages, because they are planned in less time. Within each
    group, the fastest recipe comes first. Only one recipe with stages is planned. If it has no plan, the next recipe
    with stages is planned.

    Args:
        found: recipes, each with its price.
        fixed: the fields that constraints decide, with their allowed values.
        problem: the problem of the outer search, with its prices.
        saving: the fastest recipe that recomputes all blocks. It is planned only if memory is short.
    """
    shapes: dict[Recipe, tuple[Execution, float]] = {}
    for each in sorted([*found, saving], key=lambda each: each.objective):
        if each.recipe is not None:
            shapes.setdefault(shape_of(each.recipe.recipe, fixed), (each.recipe, each.objective))
    usual = {shape_of(each.recipe.recipe, fixed) for each in found if each.recipe is not None}
    least_s, has_stages, planned = min((step_s for _, step_s in shapes.values()), default=0.0), False, 0
    made: list[Candidate] = []
    for shape, (execution, step_s) in shapes.items():
        recipe = execution.recipe
        in_stages, saves = is_several(shape.pipeline), not _keeps_all(recipe)
        is_far = step_s > (_NEAR_IF_SAVING if saves and not in_stages else _NEAR) * least_s
        is_spare = is_far or (in_stages and has_stages) or planned >= _MOST_SHAPES
        has_stages, planned = has_stages or in_stages, planned + (not is_spare)
        for candidate in candidates_of(shape, meshes_for(shape, problem.cluster), problem.base.batch):
            is_bound = fixed or candidate.has_stages or is_several(shape.expert)
            is_free = not is_bound and len(candidate.meshes[0].axes) <= _AXES_IN_TIME
            is_for_memory = candidate.is_for_memory or shape not in usual
            own = {"recipe": None if is_free else shape, "proposal": shape, "exact": recipe, "price_s": step_s}
            varies = not candidate.has_stages and "micro_batch" not in fixed
            own["price_of_size"] = partial(_price_of_size, problem, execution)
            flags = {"is_spare": is_spare, "is_for_memory": is_for_memory, "varies": varies}
            made.append(replace(candidate, **own, **flags))
    return sorted(made, key=lambda each: (each.is_spare, each.has_stages))


def _keeps_all(recipe: Recipe) -> bool:
    return (recipe.recompute, recipe.offload) == ("none", "none")


def _price_of_size(problem: RecipeProblem, execution: Execution, size: int) -> float:
    """Return the price of a recipe with micro-batches of a size, in seconds of a step.

    It recomputes as large a share of its blocks as memory demands. Both time and memory are linear in this share.
    """
    kept, again = (
        replace(execution, micro_batch=size, offload="none", recompute=recompute) for recompute in ("none", "full")
    )
    pricer = problem.pricer
    most, least = pricer.memory_bytes(kept), pricer.memory_bytes(again)
    share = min(max((most - problem.memory_limit) / max(most - least, 1), 0.0), 1.0)
    return (1 - share) * pricer.time_s(kept) + share * pricer.time_s(again)


def resized(candidate: Candidate, *, larger: bool) -> Candidate | None:
    """Return the candidate with micro-batches of twice the size (`larger`), or of half the size.

    None if the candidate does not vary, or if its micro-batches would not be whole.
    """
    proposal, parts = candidate.proposal, candidate.micro_batches
    if not candidate.varies or proposal is None or proposal.micro_batch is None:
        return None
    size = proposal.micro_batch
    if (parts if larger else size) % 2:
        return None
    parts, size = (parts // 2, 2 * size) if larger else (2 * parts, size // 2)
    recipe = candidate.recipe and replace(candidate.recipe, micro_batch=size)
    own = {"micro_batches": parts, "recipe": recipe, "proposal": replace(proposal, micro_batch=size)}
    return replace(candidate, **own, exact=None, price_s=None)


def meshes_for(recipe: Recipe, target: DeviceMesh | Mesh | Cluster) -> list[Mesh]:
    """Return the meshes that fit a recipe: the given mesh, or the meshes of a cluster's devices.

    Raises:
        RecipeError: the given mesh, or each mesh of the cluster, does not fit the recipe.
    """
    if isinstance(target, Cluster):
        meshes = meshes_of_recipe(recipe, target.size, target.devices_per_node)
    else:
        meshes = [whole_mesh(target)]
    for each in meshes:
        check_mesh(recipe, each)
    return meshes


def _counts_to_try(counts: Sequence[int], ranks: int) -> list[int]:
    """Return the numbers of micro-batches to plan a pipeline with, from the ascending possible numbers `counts`.

    The result has the first `_MOST_COUNTS` multiples of `ranks`, or the largest number if there is no multiple.
    """
    return [n for n in counts if n % ranks == 0][:_MOST_COUNTS] or list(counts[-1:])


def by_micro_batches(meshes: Sequence[Mesh], recipe: Recipe, global_batch: int) -> dict[int, list[Mesh]]:
    """Return the possible numbers of micro-batches in ascending order, each with the meshes that it is possible on.

    Raises:
        RecipeError: no mesh runs whole micro-batches of the batch.
    """
    found: dict[int, list[Mesh]] = {}
    for mesh in meshes:
        for parts in _micro_batches(mesh, recipe, global_batch):
            found.setdefault(parts, []).append(mesh)
    if not found:
        least = min(meshes, key=_replicas)
        each = (recipe.micro_batch or 1) * _replicas(least)
        raise RecipeError(
            f"global_batch={global_batch} is no multiple of micro_batch={recipe.micro_batch or 1} x data="
            f"{_replicas(least)} on {least}: each replica must run whole micro-batches. The next multiple is "
            f"{(global_batch // each + 1) * each}."
        )
    return dict(sorted(found.items()))


def _micro_batches(mesh: Mesh, recipe: Recipe, global_batch: int) -> Iterator[int]:
    is_free = recipe.micro_batch is None and not restricts(recipe, DATA)  # no axis has to split the batch
    each, rest = divmod(global_batch, 1 if is_free else _replicas(mesh))
    if rest:
        return
    if recipe.micro_batch is None:
        yield from (parts for parts in range(1, each + 1) if each % parts == 0)
    elif each % recipe.micro_batch == 0:
        yield each // recipe.micro_batch


def _replicas(mesh: Mesh) -> int:
    """Return the number of ranks along the axes that split the batch."""
    sizes = dict(mesh.axes)
    return sizes.get(REPLICA, 1) * sizes.get(DATA, 1) * sizes.get(EXPERT, 1)


def with_batch(request: Request, size: int) -> Request:
    """Return the call with `size` sequences: its first sequences, or all its sequences repeated."""
    if size == batch_of(request.args, request.kwargs):
        return request

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return torch.cat([leaf] * -(-size // len(leaf)))[:size]

    args, kwargs = pytree.tree_map(resized, (request.args, request.kwargs))
    return replace(request, args=args, kwargs=kwargs)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the size of dim 0, which all tensors of a call must share.

    Raises:
        TraceError: sizes of dim 0 differ, or the call has no tensors.
    """
    size = batch_size(args, kwargs)
    if size is None:
        raise TraceError(
            "A recipe takes dim 0 of every input for the batch, but the inputs have several sizes there, or none. Give "
            "all inputs one batch size."
        )
    return size
