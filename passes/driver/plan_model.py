"""`autoshard.plan`: find out how a model would run, and predict the time and memory of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autoshard.arguments import (
    check_optimizer,
    check_previous,
    check_runtime,
    check_traced,
    check_trains,
    checked_cluster,
    checked_constraints,
)
from autoshard.call import Call
from autoshard.cluster import device_of_plans
from autoshard.errors import DoesNotFitError, NotAvailableError
from autoshard.ir.loss_scaling import scales_loss
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.text import format_bytes
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.traced_optimizer import update_of
from cost_models.hardware import Cluster
from passes.driver.pipelines import check_pipeline
from passes.driver.plan_again import PlanAgain
from passes.driver.plan_step import outer_search, plan_step
from passes.driver.planner_for import planner_for
from passes.driver.price_again import price_found
from passes.driver.pricing import price
from passes.driver.recipe_search import optimizer_name, products_precision
from passes.driver.traces import check_example
from passes.questions.ask import Questions
from passes.questions.formulas import CountsOfPlan, PlanFormulas


def plan_model(call: Call) -> Plan:
    """Return the plan of a model's step with its predicted time and memory, see `autoshard.plan`."""
    _check_together(call)
    check_example(call)
    if call.recipe is not None and call.runtime is not None:
        return _price(call)
    if call.runtime is not None:
        checked_cluster(call.target)
    search = outer_search(call)
    if search is not None and call.global_batch is not None:
        if call.runtime is not None:
            return price_found(search, *search.run())
        call = replace(call, constraints=None, previous=None)
    call = _with_optimizer(call)
    optimizer = call.optimizer
    assert not isinstance(optimizer, str), "it was made"
    is_scaled = scales_loss(call.precision, optimizer)
    update = update_of(optimizer, call.model, call.max_grad_norm, strict=call.strict, scales_loss=is_scaled)
    planner = planner_for(call, update, device_of_plans(call.cluster or call.target), progress=call.progress)
    planned = plan_step(call, planner, update, search)
    found, again = planned.plan, PlanAgain(call, planned, partial(check_pipeline, update, call), search)
    stages, request = planned.stage_plans, planned.request
    if stages is None:
        check_traced(planned.program, planner.constraints, optimizer)
    cut = None if stages is None else partial(stages.cut, request=request)
    counts = CountsOfPlan(planner.trace, request, planner.cluster_for, planner.state_ratio, cut)
    return replace(found, formulas=PlanFormulas(counts), alternatives=Questions(again))


def _with_optimizer(call: Call) -> Call:
    optimizer = call.optimizer
    if call.recipe is not None:
        optimizer = optimizer or "adamw"
    check_trains(call.model, optimizer)
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, call.model.parameters())
    check_optimizer(optimizer, max_grad_norm=call.max_grad_norm)
    return replace(
        call,
        optimizer=optimizer,
        precision=effective_precision(call.model, call.precision),
        constraints=checked_constraints(call.constraints),
    )


def _check_together(call: Call) -> None:
    recipe, profile, batch = call.recipe, call.runtime, call.global_batch
    check_runtime(recipe, profile and profile.name, batch)
    if profile is not None and call.backend != "auto":
        raise NotAvailableError(
            f"backend={call.backend!r} says which kernels compile runs; runtime={profile.name!r} has its own. Leave "
            "one of the two out."
        )
    is_priced = recipe is not None and profile is not None
    of_recipes = recipe is None and batch is not None and isinstance(call.target, Cluster)
    check_previous(call.previous, call.model, of_recipes=of_recipes, is_priced=is_priced)


def _price(call: Call) -> Plan:
    """Return the predicted step of the call's recipe as another framework runs it, as a plan.

    Raises:
        DoesNotFitError: the recipe needs more than `memory_budget`.
    """
    runtime, cluster = call.runtime, checked_cluster(call.target)
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
        runtime=runtime,
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
