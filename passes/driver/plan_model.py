"""`autoshard.plan`: how a model would run, and what it would cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from autoshard.arguments import (
    check_optimizer,
    check_previous,
    check_recipes,
    check_target,
    check_traced,
    check_trains,
    checked_cluster,
    checked_constraints,
)
from autoshard.call import Call
from autoshard.cluster import device_of_plans, meshes_of
from autoshard.errors import DoesNotFitError, NotAvailableError, RecipeError
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.request import Request
from autoshard.ir.runtime import TRITON
from autoshard.ir.text import format_bytes
from autoshard.ir.update import Update
from autoshard.runtime.micro_batches import batch_size, parts_of
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.traced_optimizer import update_of
from passes.counting.formulas import PlanFormulas
from passes.driver.backends import has_kernels
from passes.driver.candidates import (
    Candidate,
    batch_of,
    candidates_found,
    candidates_of,
    candidates_on,
    meshes_for,
    with_batch,
)
from passes.driver.pipelines import check_pipeline, pipeline_of
from passes.driver.plan_again import PlanAgain
from passes.driver.plan_candidates import Planned, plan_candidates
from passes.driver.planner import Planner
from passes.driver.planner_for import planner_for
from passes.driver.pricing import price
from passes.driver.recipe_search import RecipeSearch, optimizer_name, products_precision, recipe_search
from passes.questions.ask import Questions


def plan_model(call: Call) -> Plan:
    """How a model would run, and what it would cost. See `autoshard.plan`."""
    _check_together(call)
    if call.recipe is not None and call.runtime is not None:
        return _price(call)
    search = None
    device = device_of_plans(call.target)
    if call.recipe is None and call.global_batch is not None:
        search = _recipe_search(call, with_kernels=has_kernels(call.backend, device))
        if call.runtime is not None or search.forecast:
            return search.priced_plan()
        call = replace(call, constraints=None, previous=None)
    check_target(call.target, call.mesh)
    call = _with_optimizer(call)
    update = update_of(_made(call.optimizer), call.model, call.max_grad_norm, strict=call.strict)
    planner = planner_for(call, update, device, progress=call.progress)
    check_stages = partial(check_pipeline, update, call)
    request_of = _requests(call, update if call.grad else None)
    if search is None:
        planned = plan_candidates(planner, _candidates(call), request_of, check_stages)
    else:
        searched = _plan_searched(call, planner, search, request_of, check_stages)
        if isinstance(searched, Plan):
            return searched
        planned = searched
    return _with_answers(planned, PlanAgain(call, planned, check_stages, search))


def _with_optimizer(call: Call) -> Call:
    """The call with an optimizer in place of its name, and with checked constraints and precision."""
    optimizer = call.optimizer
    if call.recipe is not None:
        optimizer = optimizer or "adamw"
    check_trains(call.model, optimizer)
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, call.model.parameters())
    check_optimizer(optimizer, micro_batches=call.micro_batches, max_grad_norm=call.max_grad_norm)
    return replace(
        call,
        optimizer=optimizer,
        precision=effective_precision(call.model, call.precision),
        constraints=checked_constraints(call.constraints),
    )


def _made(optimizer: str | torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    assert not isinstance(optimizer, str), "it was made"
    return optimizer


def _requests(call: Call, update: Update | None) -> Callable[[int], Request]:
    """The call of a micro-batch, by how many a step has."""
    args, kwargs = call.inputs
    whole = Request(call.model, args, kwargs, call.grad, update=update, outputs=call.outputs)

    def request_of(parts: int) -> Request:
        if call.global_batch is not None:
            return with_batch(whole, call.global_batch // parts)
        part_args, part_kwargs = parts_of(args, kwargs, parts)[0]
        return replace(whole, args=tuple(part_args), kwargs=part_kwargs)

    return request_of


def _candidates(call: Call) -> Sequence[Candidate]:
    """The ways to run a step on given meshes, or within a recipe."""
    if call.recipe is not None:
        batch = call.global_batch or batch_of(*call.inputs)
        return candidates_of(call.recipe, meshes_for(call.recipe, call.target, call.mesh), batch)
    meshes, batch = meshes_of(call.target, call.mesh), batch_size(*call.inputs)
    pipeline_of(meshes[0], call.schedule, call.virtual_stages or 1, call.micro_batches)  # checks the schedule
    return candidates_on(meshes, batch, call.micro_batches, call.schedule, call.virtual_stages or 1)


def _plan_searched(
    call: Call,
    planner: Planner,
    search: RecipeSearch,
    request_of: Callable[[int], Request],
    check_stages: Callable[[], None],
) -> Planned | Plan:
    """The fastest plan of the fastest recipes; the price of the fastest recipe where none has a plan in time.

    The search over recipes is the outer search: mesh, stages, schedule and micro-batches.
    """
    start = time.monotonic()
    search, found, kinds = search.run()
    if search.forecast:
        return search.price(found, kinds)
    if found.was_interrupted:
        return search.price(found, kinds, "Ctrl-C ended the search before specs were planned")
    planner, ceiling = planner.begun()
    problem, batch = search.problem, search.problem.base.batch
    candidates = candidates_found(
        [found, *kinds.values()], problem.pinned, call.model, problem.cluster, batch, planner.time_budget_s
    )
    try:
        planned = plan_candidates(planner, candidates, request_of, check_stages)
    except (DoesNotFitError, RecipeError, NotAvailableError) as error:
        why = f"time_budget_s={planner.time_budget_s:g} was up: {error}" if ceiling.has_cut else str(error)
        return replace(search.price(found, kinds, why), was_cut=found.was_cut or ceiling.has_cut)
    was_cut = found.was_cut or planned.plan.was_cut
    return replace(planned, plan=replace(planned.plan, search_time_s=time.monotonic() - start, was_cut=was_cut))


def _check_together(call: Call) -> None:
    """Refuse arguments that do not go with each other."""
    recipe, profile, batch = call.recipe, call.runtime, call.global_batch
    check_recipes(
        recipe,
        profile and profile.name,
        batch,
        micro_batches=call.micro_batches,
        schedule=call.schedule,
        virtual_stages=call.virtual_stages,
    )
    is_priced = recipe is not None and profile is not None
    of_recipes = recipe is None and batch is not None
    check_previous(call.previous, call.model, of_recipes=of_recipes, is_priced=is_priced)


def _recipe_search(call: Call, *, with_kernels: bool) -> RecipeSearch:
    """The search over recipes for `global_batch` sequences."""
    assert call.example_inputs is not None, "plan takes example inputs"
    assert call.global_batch is not None, "recipes are searched for a batch"
    return recipe_search(
        call.model,
        checked_cluster(call.target, call.mesh),
        example_inputs=call.example_inputs,
        optimizer=call.optimizer,
        global_batch=call.global_batch,
        loss_fn=call.loss_fn,
        constraints=call.constraints,
        memory_budget=call.memory_budget,
        precision=call.precision,
        with_kernels=with_kernels,
        runtime=call.runtime,
        previous=call.previous,
        time_budget_s=call.time_budget_s,
        progress=call.progress,
    )


def _with_answers(planned: Planned, again: PlanAgain) -> Plan:
    """The plan, which answers questions by planning again."""
    planner, found = planned.planner, planned.plan
    if found.stages:
        return replace(found, alternatives=Questions(again))
    check_traced(planned.program, planner.constraints, again.call.optimizer)
    formulas = PlanFormulas(planner.trace, planned.request, planner.cluster_for, planner.state_ratio)
    return replace(found, formulas=formulas, alternatives=Questions(again))


def _price(call: Call) -> Plan:
    """The price of a recipe under another runtime, which must fit in `memory_budget`."""
    runtime, cluster = call.runtime, checked_cluster(call.target, call.mesh)
    if call.constraints:
        raise NotAvailableError(
            f"constraints={call.constraints!r} does not go with recipe=, which leaves nothing to choose. Leave one of "
            "them out, or search recipes with global_batch=."
        )
    assert call.example_inputs is not None, "plan takes example inputs"
    assert call.recipe is not None, "it is priced"
    assert runtime is not None, "it is of another runtime"
    priced = price(
        call.model,
        cluster,
        call.recipe,
        example_inputs=call.example_inputs,
        loss_fn=call.loss_fn,
        runtime=replace(runtime, kernels=TRITON) if has_kernels(call.backend, device_of_plans(cluster)) else runtime,
        optimizer="adamw" if call.optimizer is None else optimizer_name(call.optimizer),
        precision=call.precision or products_precision(call.model, None),
        global_batch=call.global_batch,
    )
    needed, memory_budget = priced.predicted.peak_memory_bytes, call.memory_budget
    if memory_budget is not None and needed > memory_budget:
        raise DoesNotFitError(
            f"The recipe needs {format_bytes(needed)} per device, more than memory_budget={memory_budget}. Price it "
            "without memory_budget=, or search for one that fits with global_batch=.",
            smallest_bytes=needed,
        )
    return replace(priced, memory_budget=memory_budget)
