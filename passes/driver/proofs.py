"""Proofs asked for: `verify` proves again what was compiled, `prove` what a plan would run, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.arguments import (
    ExampleInputs,
    check_flags,
    check_limits,
    check_loss,
    check_model,
    check_optimizer,
    check_target,
    checked_budget,
    checked_outputs,
    split_inputs,
)
from autoshard.cluster import meshes_of
from autoshard.errors import TraceError
from autoshard.ir.garbage import seldom_collecting
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.request import Request
from autoshard.runtime.optimizer_state import named_optimizer, state_bytes_per_parameter_byte
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster
from passes.driver.fixed_plan import of_specs, update_for
from passes.driver.planner import LossFunction, Planner

if TYPE_CHECKING:
    from passes.verification.verify_program import VerificationReport


@seldom_collecting
def verify(compiled: ShardedModule | TrainStep) -> VerificationReport:
    """Prove again that every program compiled so far computes what its traced program does.

    Args:
        compiled: what `compile` gave.

    Returns:
        The report on the program that ran last (or was compiled last).

    Raises:
        VerificationError: a program could not be shown equal; names the node, and the line it comes from.
        TraceError: nothing has been compiled yet, or it is not what `compile` gave.
    """
    from passes.verification.verify_phases import verify_phases
    from passes.verification.verify_program import verify_program

    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    if not isinstance(sharded, ShardedModule):
        raise TraceError(f"verify(...): a {type(sharded).__name__} is not compiled; pass what autoshard.compile gave.")
    last = sharded.program
    if last is None:
        raise TraceError("verify(...): nothing has been compiled yet; call the model once, or pass example_inputs=.")
    phases = [program.phased for program in sharded.programs]
    for phased in phases:
        verify_phases(phased)
    is_added_up = isinstance(compiled, TrainStep) and compiled.micro_batches > 1
    reports = [
        verify_program(item.lowered.traced, item.lowered, item.carried if is_added_up else ()) for item in phases
    ]
    report = reports[phases.index(last.phased)]
    return report if last.weights is None else report.assuming(f"micro-batches weigh as the loss says: {last.weights}")


@seldom_collecting
def prove(
    model: nn.Module,
    target: DeviceMesh | Mesh | Cluster | Plan,
    *,
    example_inputs: ExampleInputs,
    mesh: Mesh | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    loss_fn: LossFunction | None = None,
    memory_budget: int | None = None,
    precision: str | None = "bf16",
    time_budget_s: float = 60.0,
    outputs: str = "all",
    gather_outputs: bool = False,
) -> VerificationReport:
    """Plan a call, lower it to the program of each rank, and prove that; nothing is run, and the model may be on meta.

    Args:
        target: where to plan for, as `plan` takes it; or a plan, which is proven as it is, in its own precision.
        others: see `plan`.

    Raises:
        VerificationError: it could not be shown that the program computes what the model does.
        AutoshardError: as `plan`, and `PlanMismatchError` for a plan of another model, inputs or optimizer.
    """
    check_model(model, (ShardedModule, TrainStep))
    check_loss(loss_fn)
    memory_budget = checked_budget(memory_budget)
    check_limits(time_budget_s=time_budget_s)
    check_flags(gather_outputs=gather_outputs)
    handed_out = checked_outputs(outputs, gather_outputs=gather_outputs)
    if not isinstance(target, Plan):
        check_target(target, mesh)
    fixed = of_specs(target) if isinstance(target, Plan) else None
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, model.parameters())
    check_optimizer(optimizer, max_grad_norm=max_grad_norm)
    update = update_for(model, optimizer, max_grad_norm, fixed, strict=False)
    grad = any(parameter.requires_grad for parameter in model.parameters())
    args, kwargs = split_inputs(example_inputs)
    handed_out = handed_out if optimizer is None else Outputs.LOSS
    request = Request(model, args, kwargs, grad, update=update if grad else None, outputs=handed_out)
    planner = Planner(
        cluster=target if isinstance(target, Cluster) else None,
        fixed=fixed,
        loss_fn=loss_fn,
        precision=effective_precision(model, precision) if fixed is None else fixed.precision,
        memory_budget=memory_budget,
        state_ratio=0.0 if optimizer is None else state_bytes_per_parameter_byte(optimizer),
        time_budget_s=time_budget_s,
        gather_outputs=gather_outputs,
    )
    return planner.prove(request, () if fixed is not None else meshes_of(target, mesh))
