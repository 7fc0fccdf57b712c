"""`verify` proves compiled programs again; `prove` proves the program of a plan without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.arguments import check_optimizer
from autoshard.call import Call
from autoshard.errors import TraceError
from autoshard.ir.loss_scaling import scales_loss
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.program import describe
from autoshard.ir.request import CompiledProgram, Request
from autoshard.ir.verification_report import VerificationReport
from autoshard.runtime.micro_batches import parts_of
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from passes.driver.fixed_plan import update_for
from passes.driver.pipelines import pipeline_of
from passes.driver.plan_step import outer_search, plan_step
from passes.driver.planner import Planner
from passes.driver.planner_for import planner_for
from passes.driver.stage_plans import StagePlans, check_fits
from passes.driver.traces import check_example
from passes.verification.verify_cut_backward import verify_cut_backward
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from passes.verification.verify_schedule import verify_schedule

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def verify_compiled(compiled: ShardedModule | TrainStep) -> VerificationReport:
    """Prove again every program compiled so far, and return the proof of the latest, see `autoshard.verify`."""
    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    if not isinstance(sharded, ShardedModule):
        raise TraceError(
            f"verify(...): a {type(sharded).__name__} is not compiled; pass the result of autoshard.compile."
        )
    last = sharded.program
    if last is None:
        raise TraceError("verify(...): nothing has been compiled yet; call the model once, or pass example_inputs=.")
    is_added_up = isinstance(compiled, TrainStep) and compiled.micro_batches > 1
    reports = [_prove_again(program, is_added_up=is_added_up) for program in sharded.programs]
    report = reports[[program.phased for program in sharded.programs].index(last.phased)]
    return report if last.weights is None else report.assuming(f"micro-batches weigh as the loss says: {last.weights}")


def _prove_again(program: CompiledProgram, *, is_added_up: bool) -> VerificationReport:
    """Return the proof of a compiled program. For a pipeline, all stages and their order are proven.

    `is_added_up` says whether the program sums gradients over micro-batches.
    """
    reports = []
    for part in program.parts:
        verify_phases(part)
        verify_cut_backward(part)
        reports.append(verify_program(part.lowered.traced, part.lowered, part.carried if is_added_up else ()))
    if program.staged is not None:
        verify_schedule(program.staged.order, trains=program.update is not None)
    found = VerificationReport.together(reports)
    return found if program.plan is None else replace(found, mesh=program.plan.mesh)


def prove_model(call: Call) -> VerificationReport:
    """Plan a call, lower the plan, and return the proof of each rank's program, see `autoshard.prove`."""
    check_example(call)
    optimizer = call.optimizer
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, call.model.parameters())
    check_optimizer(optimizer, max_grad_norm=call.max_grad_norm)
    fixed = call.fixed
    precision = effective_precision(call.model, call.precision) if fixed is None else fixed.precision
    is_scaled = scales_loss(precision, optimizer)
    update = update_for(call.model, optimizer, call.max_grad_norm, fixed, strict=False, scales_loss=is_scaled)
    call = replace(call, optimizer=optimizer, precision=precision)
    planner = planner_for(call, update, torch.device("cpu"))
    if fixed is None:
        planned = plan_step(call, planner, update, outer_search(call))
        planner, request, plan = replace(planned.planner, made=planned.plan), planned.request, planned.plan
    else:
        args, kwargs = _micro_batch(fixed, *call.inputs)
        request = Request(
            call.model, args, kwargs, call.grad, update=update if call.grad else None, outputs=call.outputs
        )
        plan = fixed
    planner = replace(planner, micro_batches=plan.micro_batches, ceiling=None)
    return _prove_stages(planner, request, plan) if plan.stages else planner.prove(request, plan)


def _micro_batch(plan: Plan, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if plan.micro_batches == 1 or [describe(tensor) for tensor in tensors] == list(plan.inputs.values()):
        return args, kwargs
    part_args, part_kwargs = parts_of(args, kwargs, plan.micro_batches).parts[0]
    return tuple(part_args), part_kwargs


def _prove_stages(planner: Planner, request: Request, plan: Plan) -> VerificationReport:
    assert plan.order is not None, "a plan with stages has an order"
    pipeline = pipeline_of(plan.mesh, plan.schedule, plan.order.virtual_stages, plan.micro_batches)
    assert pipeline is not None, "an axis carries stages"
    program = planner.trace(replace(request, update=None))
    check_fits(plan, program, pipeline)
    _, reports = StagePlans(replace(planner, verify=True), pipeline).lower(program, plan, request)
    verify_schedule(plan.order)
    return replace(VerificationReport.together(reports), mesh=plan.mesh)
