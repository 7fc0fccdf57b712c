"""Plan a step: on given meshes, within a recipe, or on meshes that the outer search proposes.

The outer search is over recipes: mesh, stages, schedule and micro-batches. Specs are then searched on the meshes of the
fastest recipes. The fastest result is the plan.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autoshard.arguments import check_tensors
from autoshard.call import Call
from autoshard.errors import AutoshardError, DoesNotFitError, NotAvailableError, RecipeError
from autoshard.ir.recipe import Recipe
from autoshard.ir.request import Request
from autoshard.ir.staged import PIPELINE_AXIS
from autoshard.ir.update import Update
from autoshard.runtime.micro_batches import batch_size, parts_of
from cost_models.hardware import Cluster
from passes.driver.candidates import (
    Candidate,
    batch_of,
    candidates_found,
    candidates_of,
    meshes_for,
    with_batch,
)
from passes.driver.pipelines import check_pipeline
from passes.driver.plan_candidates import Planned, plan_candidates
from passes.driver.planner import Planner
from passes.driver.recipe_search import RecipeSearch, recipe_search
from passes.search.search_recipes import NOTHING

_LOGGER = logging.getLogger(__name__)


def plan_step(call: Call, planner: Planner, update: Update | None, search: RecipeSearch | None) -> Planned:
    """Return the fastest plan of a checked call.

    Args:
        update: the traced update of the call's optimizer; None if a step has no traced update.
        search: the result of `outer_search`. None: only the given meshes are planned.

    Raises:
        AutoshardError: an example input has no elements, or no candidate has a plan.
    """
    check_tensors(*call.inputs)
    check_stages = partial(check_pipeline, update, call)
    request_of = partial(_request, call, update if call.grad else None)
    if search is None:
        return plan_candidates(planner, _candidates(call), request_of, check_stages)
    return _plan_proposed(call, planner, search, request_of, check_stages)


def outer_search(call: Call) -> RecipeSearch | None:
    """Return the search over recipes that proposes meshes, stages and micro-batches; None if the call needs no search.

    Training steps on a cluster are searched, with `global_batch` sequences or the batch of the example inputs. A given
    recipe restricts the search. There is no search if the recipe leaves only one mesh. Constraints, another plan or a
    number of micro-batches also exclude the search, unless `global_batch` is given without a recipe.

    Raises:
        AutoshardError: `global_batch` is given without a recipe, and recipes do not support the call.
    """
    assert call.example_inputs is not None, "there is an example call"
    if not isinstance(call.target, Cluster):
        return None
    if call.recipe is None and call.global_batch is not None:
        return recipe_search(call, call.global_batch)
    is_given = call.constraints or call.previous or call.fixed or call.micro_batches
    batch = call.global_batch or batch_size(*call.inputs)
    if is_given or call.optimizer is None or batch is None:
        return None
    if call.recipe is not None and not _leaves_a_mesh_open(call.recipe, call.target):
        return None
    try:
        return recipe_search(call, batch)
    except AutoshardError as error:
        _LOGGER.debug("meshes are tried without a search over recipes: %s", error)
        return None


def _leaves_a_mesh_open(recipe: Recipe, cluster: Cluster) -> bool:
    """Whether several meshes of a cluster, or several numbers of stages, agree with a recipe."""
    sizes = (recipe.data, recipe.tensor, recipe.context, recipe.pipeline)
    given = math.prod(size for size in sizes if size is not None)
    return recipe.stage_layers is None and given < cluster.size and sum(size is None for size in sizes) > 1


def _request(call: Call, update: Update | None, parts: int) -> Request:
    """Return the call of one micro-batch of a step with `parts` micro-batches."""
    args, kwargs = call.inputs
    whole = Request(call.model, args, kwargs, call.grad, update=update, outputs=call.outputs)
    if call.global_batch is not None:
        return with_batch(whole, call.global_batch // parts)
    part_args, part_kwargs = parts_of(args, kwargs, parts).parts[0]
    return replace(whole, args=tuple(part_args), kwargs=part_kwargs)


def _candidates(call: Call) -> Sequence[Candidate]:
    """Return the candidates on the given meshes, with the call's recipe as their restriction.

    The call may leave the number of micro-batches open. In these cases there is then one micro-batch:

    * the call asks for no recipe, batch or stages;
    * the call has no optimizer;
    * the size of the batch is unknown, and the recipe has no `micro_batch`.
    """
    recipe = call.recipe or Recipe()
    meshes = meshes_for(recipe, call.target)
    parts, batch = call.micro_batches, call.global_batch or batch_size(*call.inputs)
    is_asked = call.recipe is not None or call.global_batch is not None or PIPELINE_AXIS in meshes[0].axis_names
    if parts is None and (not is_asked or call.optimizer is None or (batch is None and recipe.micro_batch is None)):
        parts = 1
    found = candidates_of(recipe, meshes, 1 if parts is not None else batch or batch_of(*call.inputs), parts)
    return [replace(each, recipe=call.recipe) for each in found]


def _spares(call: Call) -> Sequence[Candidate]:
    """Return the candidates of a call, to be planned if the outer search's candidates have no plan.

    The result is empty if the recipe runs on none of the given meshes.
    """
    try:
        return [replace(each, is_spare=True) for each in _candidates(call)]
    except RecipeError as error:
        _LOGGER.debug("%s", error)
        return ()


_SAVING = {"recompute": ("full",), "offload": ("none",)}
"""The restriction of recipes to those that recompute all blocks and offload nothing.

The plan that is made for such a recipe may recompute less.
"""

_LESS = (1.0, 0.9, 0.8)
"""Fractions of the memory limit for the outer search, tried in turn until a plan fits in the whole limit."""


def _plan_proposed(
    call: Call,
    planner: Planner,
    search: RecipeSearch,
    request_of: Callable[[int], Request],
    check_stages: Callable[[], None],
) -> Planned:
    start, is_asked = time.monotonic(), call.global_batch is not None and call.recipe is None
    planner = planner.begun()[0]
    failure: AutoshardError | None = None
    tried: set[Recipe | None] = set()
    for share in _LESS if is_asked else _LESS[:1]:
        problem = search.problem.within(share * search.problem.memory_limit)
        try:
            found, kinds = replace(search, problem=problem).run()
        except (DoesNotFitError, NotAvailableError):
            if failure is not None:
                break
            if is_asked:
                raise
            return plan_candidates(planner, _candidates(call), request_of, check_stages)
        proposed, saving = [found], NOTHING
        if not found.was_interrupted:
            proposed, saving = [found, *kinds.values()], problem.best(only=_SAVING, ceiling=planner.ceiling)
        shapes = candidates_found(proposed, problem.pinned, problem, saving)
        candidates = [each for each in shapes if each.proposal not in tried]
        tried |= {each.proposal for each in candidates}
        if not is_asked:
            candidates += _spares(call)
        if not candidates:
            continue
        try:
            planned = plan_candidates(planner, candidates, request_of, check_stages)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        plan = planned.plan
        ended = {
            "was_cut": found.was_cut or plan.was_cut,
            "was_interrupted": found.was_interrupted or plan.was_interrupted,
        }
        return replace(planned, plan=replace(plan, search_time_s=time.monotonic() - start, **ended))
    assert failure is not None, "nothing fits"
    raise failure
