"""`plan(recipe=)` for our own runtime: the recipe's meshes and micro-batches, each planned within its restriction."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError, DoesNotFitError, RecipeError, TraceError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recipe import Recipe, least_stages, named_schedule
from autoshard.ir.request import Request
from autoshard.runtime.micro_batches import batch_size
from cost_models.hardware import Cluster
from cost_models.schedule_orders import admits
from passes.driver.pipelines import pipeline_of
from passes.driver.planner import Planner
from passes.driver.stage_plans import counts_to_try, plan_stages
from passes.planning.recipe_meshes import (
    DATA,
    EXPERT,
    REPLICA,
    check_mesh,
    meshes_of_recipe,
    pipeline_ranks,
    restricts,
)

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what made it.

    Args:
        planner: as it was made with.
        request: the call of a micro-batch.
        program: what it is a plan of; None: of stages.
        plan: the plan.
    """

    planner: Planner
    request: Request
    program: Program | None
    plan: Plan

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.predicted.step_time_s


def plan_recipe(
    planner: Planner,
    request: Request,
    meshes: Sequence[Mesh],
    recipe: Recipe,
    global_batch: int,
    *,
    in_time: bool = False,
) -> Planned:
    """The fastest plan within a recipe.

    Where the number of micro-batches is free, it rises until a plan fits with nothing computed again or offloaded. A
    pipeline takes the fastest of a few numbers, multiples of its ranks if possible.

    Args:
        planner: with all else that was asked for.
        request: a call with any batch.
        meshes: on which the recipe may lie.
        recipe: complete or not.
        global_batch: sequences of a step.
        in_time: what does not end in time is not planned at all; see `Planner.plan_call` and `StagePlans.plan`.

    Raises:
        RecipeError, NotAvailableError: the recipe does not fit the model, the meshes, the batch or the time.
        DoesNotFitError: no plan within it fits.
    """
    planner, ceiling = replace(planner, recipe=recipe).begun()
    counts = _by_micro_batches(meshes, recipe, global_batch)
    ranks = pipeline_ranks(meshes[0])
    if ranks > 1:
        runs = [n for n in counts if admits(named_schedule(recipe), ranks, n, least_stages(recipe))]
        counts = {parts: counts[parts] for parts in counts_to_try(runs or counts, ranks)}
    found: list[Planned] = []
    failure: AutoshardError | None = None
    for parts, places in counts.items():
        if recipe.micro_batch is None and ranks == 1 and any(_is_plain(item.plan) for item in found):
            break
        if found and ceiling.cuts():
            break
        each = replace(planner, micro_batches=parts)
        try:
            found.append(_plan_on(each, _with_batch(request, global_batch // parts), places, in_time=in_time))
        except (DoesNotFitError, RecipeError) as error:
            _LOGGER.debug("%d micro-batches: %s", parts, error)
            failure = error
    if not found:
        assert failure is not None, "something was tried"
        if isinstance(failure, DoesNotFitError) and recipe.recompute == "none":
            raise DoesNotFitError(
                f"{failure} The recipe recomputes nothing; recompute=None lets the search decide what to recompute.",
                smallest_bytes=failure.smallest_bytes,
            ) from failure
        raise failure
    best = min(found, key=attrgetter("step_time_s"))
    return replace(best, plan=replace(best.plan, was_cut=True)) if ceiling.has_cut else best


def _plan_on(planner: Planner, request: Request, meshes: Sequence[Mesh], *, in_time: bool) -> Planned:
    """The fastest plan of a call on any of some meshes, in stages or not."""
    recipe = planner.recipe
    assert recipe is not None, "it is planned within one"
    if pipeline_ranks(meshes[0]) == 1:
        return Planned(planner, request, *planner.plan_call(request, meshes, in_time=in_time))
    plans, failure = [], None
    for mesh in meshes:
        pipeline = pipeline_of(mesh, recipe.schedule, recipe.virtual_stages or 1, planner.micro_batches)
        assert pipeline is not None, "an axis carries stages"
        try:
            plans.append(Planned(planner, request, None, plan_stages(planner, pipeline, request, in_time=in_time)))
        except DoesNotFitError as error:
            failure = error
    if not plans:
        assert failure is not None, "there is a mesh"
        raise failure
    return min(plans, key=attrgetter("step_time_s"))


def meshes_for(recipe: Recipe, target: object, mesh: Mesh | None) -> list[Mesh]:
    """The meshes on which a recipe may lie: the one that is given, or those that a cluster's devices make."""
    if isinstance(target, DeviceMesh):
        target = Mesh.from_device_mesh(target)
    given = target if isinstance(target, Mesh) else mesh
    if given is None:
        assert isinstance(target, Cluster), "a target is a mesh or a cluster"
        meshes = meshes_of_recipe(recipe, target.size, target.devices_per_node)
    else:
        meshes = [given]
    for each in meshes:
        check_mesh(recipe, each)
    return meshes


def batch_of(global_batch: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Sequences of a step: as asked for, or those of the example inputs."""
    return global_batch or _batch(args, kwargs)


def _by_micro_batches(meshes: Sequence[Mesh], recipe: Recipe, global_batch: int) -> dict[int, list[Mesh]]:
    """Numbers of micro-batches, the fewest first, and the meshes on which a step may have so many."""
    found: dict[int, list[Mesh]] = {}
    for mesh in meshes:
        for parts in _micro_batches(mesh, recipe, global_batch):
            found.setdefault(parts, []).append(mesh)
    if not found:
        raise RecipeError(
            f"global_batch={global_batch} is no multiple of micro_batch={recipe.micro_batch or 1} x data="
            f"{_replicas(meshes[0])} on {', '.join(map(str, meshes))}: each replica must run whole micro-batches."
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
    """Ranks along the axes that replicas lie on."""
    sizes = dict(mesh.axes)
    return sizes.get(REPLICA, 1) * sizes.get(DATA, 1) * sizes.get(EXPERT, 1)


def _is_plain(plan: Plan) -> bool:
    return not plan.recompute.nodes and not plan.offload.nodes


def _with_batch(request: Request, size: int) -> Request:
    """The call with so many sequences: the first ones, or all of them again and again."""
    if size == _batch(request.args, request.kwargs):
        return request

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return torch.cat([leaf] * -(-size // len(leaf)))[:size]

    args, kwargs = pytree.tree_map(resized, (request.args, request.kwargs))
    return replace(request, args=args, kwargs=kwargs)


def _batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The size of dim 0 that the tensors of a call share."""
    size = batch_size(args, kwargs)
    if size is None:
        raise TraceError(
            "A recipe takes dim 0 of every input for the batch, but the inputs have several sizes there, or none. Give "
            "all inputs one batch size."
        )
    return size
