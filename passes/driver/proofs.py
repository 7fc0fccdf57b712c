"""Proofs asked for: `verify` proves again what was compiled, `prove` what a plan would run, without running it."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.arguments import check_optimizer
from autoshard.call import Call
from autoshard.errors import TraceError
from autoshard.ir.precision import effective_precision
from autoshard.ir.recipe import Recipe
from autoshard.ir.request import CompiledProgram, Request
from autoshard.ir.verification_report import VerificationReport
from autoshard.runtime.optimizer_state import named_optimizer
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from passes.driver.candidates import meshes_for
from passes.driver.fixed_plan import update_for
from passes.driver.planner_for import planner_for
from passes.verification.verify_cut_backward import verify_cut_backward
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from passes.verification.verify_schedule import verify_schedule


def verify_compiled(compiled: ShardedModule | TrainStep) -> VerificationReport:
    """Prove again every program compiled so far. See `autoshard.verify`."""
    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    if not isinstance(sharded, ShardedModule):
        raise TraceError(f"verify(...): a {type(sharded).__name__} is not compiled; pass what autoshard.compile gave.")
    last = sharded.program
    if last is None:
        raise TraceError("verify(...): nothing has been compiled yet; call the model once, or pass example_inputs=.")
    is_added_up = isinstance(compiled, TrainStep) and compiled.micro_batches > 1
    reports = [_prove_again(program, is_added_up=is_added_up) for program in sharded.programs]
    report = reports[[program.phased for program in sharded.programs].index(last.phased)]
    return report if last.weights is None else report.assuming(f"micro-batches weigh as the loss says: {last.weights}")


def _prove_again(program: CompiledProgram, *, is_added_up: bool) -> VerificationReport:
    """Prove a program, or all stages of one and their order."""
    reports = []
    for part in program.parts:
        verify_phases(part)
        verify_cut_backward(part)
        reports.append(verify_program(part.lowered.traced, part.lowered, part.carried if is_added_up else ()))
    if program.staged is not None:
        verify_schedule(program.staged.order, trains=program.update is not None)
    return VerificationReport.together(reports)


def prove_model(call: Call) -> VerificationReport:
    """Plan a call, lower it, and prove the program of each rank. See `autoshard.prove`."""
    optimizer = call.optimizer
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, call.model.parameters())
    check_optimizer(optimizer, max_grad_norm=call.max_grad_norm)
    fixed = call.fixed
    update = update_for(call.model, optimizer, call.max_grad_norm, fixed, strict=False)
    precision = effective_precision(call.model, call.precision) if fixed is None else fixed.precision
    call = replace(call, optimizer=optimizer, precision=precision)
    request = Request(call.model, *call.inputs, call.grad, update=update if call.grad else None, outputs=call.outputs)
    planner = planner_for(call, update, torch.device("cpu"))
    return planner.prove(request, () if fixed is not None else meshes_for(Recipe(), call.target))
