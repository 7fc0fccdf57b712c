"""`autoshard.plan`: how a model would run, and what it would cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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
from autoshard.errors import DoesNotFitError, NotAvailableError
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.request import Request
from autoshard.ir.runtime import TRITON
from autoshard.ir.text import format_bytes
from autoshard.runtime.micro_batches import batch_size, parts_of
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.traced_optimizer import update_of
from passes.counting.formulas import PlanFormulas
from passes.driver.backends import has_kernels
from passes.driver.pipelines import Asked, check_pipeline, pipeline_of
from passes.driver.planner_for import planner_for
from passes.driver.pricing import price
from passes.driver.recipe_plans import Planned, batch_of, meshes_for, plan_recipe
from passes.driver.recipe_search import (
    RecipeForecast,
    RecipeSearch,
    optimizer_name,
    products_precision,
    recipe_search,
)
from passes.driver.searched_plans import plan_searched
from passes.driver.stage_plans import search_stages
from passes.planning.recipe_meshes import pipeline_ranks


def plan_model(call: Call) -> Plan:
    """How a model would run, and what it would cost. See `autoshard.plan`."""
    _check_together(call)
    if call.recipe is not None and call.runtime is not None:
        return _price(call)
    search, optimizer = None, call.optimizer
    device = device_of_plans(call.target)
    if call.recipe is None and call.global_batch is not None:
        search = _recipe_search(call, with_kernels=has_kernels(call.backend, device))
        if call.runtime is not None or search.forecast:
            search, found, kinds = search.run()
            return search.price(found, kinds)
        call = replace(call, constraints=None, previous=None)
    check_target(call.target, call.mesh)
    if call.recipe is not None:
        optimizer = optimizer or "adamw"
    check_trains(call.model, optimizer)
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, call.model.parameters())
    check_optimizer(optimizer, micro_batches=call.micro_batches, max_grad_norm=call.max_grad_norm)
    call = replace(
        call,
        optimizer=optimizer,
        precision=effective_precision(call.model, call.precision),
        constraints=checked_constraints(call.constraints),
    )
    update = update_of(optimizer, call.model, call.max_grad_norm, strict=call.strict)
    planner = planner_for(call, update, device, progress=call.progress)
    update = update if call.grad else None
    args, kwargs = call.inputs

    def request_of(parts: int) -> Request:
        part_args, part_kwargs = parts_of(args, kwargs, parts)[0]
        return Request(call.model, tuple(part_args), part_kwargs, call.grad, update=update, outputs=call.outputs)

    request = request_of(call.micro_batches or 1)
    check_stages = partial(check_pipeline, update, call)
    if search is not None:
        planned = plan_searched(planner, request, search, check_stages)
    elif call.recipe is None:
        meshes = meshes_of(call.target, call.mesh)
        asked = Asked(call.micro_batches, call.schedule, call.virtual_stages or 1)
        if pipeline_of(meshes[0], call.schedule, asked.virtual_stages, call.micro_batches) is not None:
            check_stages()
            return search_stages(planner, meshes[0], asked, batch_size(args, kwargs), request_of)
        planned = Planned(planner, request, *planner.plan_call(request, meshes))
    else:
        meshes = meshes_for(call.recipe, call.target, call.mesh)
        if pipeline_ranks(meshes[0]) > 1:
            check_stages()
        batch = batch_of(call.global_batch, args, kwargs)
        planned = plan_recipe(planner, request, meshes, call.recipe, batch)
    return planned.plan if planned.program is None else _with_answers(call, planned)


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


def _with_answers(call: Call, planned: Planned) -> Plan:
    """The plan, which answers questions by searching again."""
    planner, program, found = planned.planner, planned.program, planned.plan
    assert program is not None, "it is not of stages"
    check_traced(program, planner.constraints, call.optimizer)
    formulas = PlanFormulas(planner.trace, planned.request, planner.cluster_for, planner.state_ratio)
    assert call.example_inputs is not None, "plan takes example inputs"
    forecast = RecipeForecast(
        *(call.model, planner.cluster_for(found.mesh), call.example_inputs, call.loss_fn, call.optimizer),
        constrained=bool(planner.constraints),
        with_kernels=planner.with_kernels,
        time_budget_s=call.time_budget_s,
    )
    return replace(found, formulas=formulas, alternatives=planner.alternatives(program, found.mesh, forecast))


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
