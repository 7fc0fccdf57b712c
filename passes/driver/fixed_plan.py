"""Check a plan that the user gives (`plan=`) against the call, and read the arguments that the plan decides."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.errors import NotAvailableError, PlanMismatchError
from autoshard.ir.loss_scaling import LossScaling
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.program import InputKind, OutputKind, Program, describe
from autoshard.ir.update import Update
from autoshard.runtime.traced_optimizer import update_of


def micro_batches_of(fixed: Plan | None, micro_batches: int | None, *, trains: bool) -> int:
    """Return the number of micro-batches in a step, from the argument `micro_batches` or the plan `fixed`.

    The plan's number counts only if the call trains. A plan of one micro-batch runs with any number of them.

    Raises:
        PlanMismatchError: the plan has several micro-batches, and the argument is another number.
    """
    planned = fixed.micro_batches if fixed is not None and trains else 1
    if planned > 1 and micro_batches not in (None, planned):
        raise PlanMismatchError(
            f"The plan is of a step of {planned} micro-batches, and micro_batches={micro_batches} is asked for. Leave "
            "micro_batches out, or plan again."
        )
    return micro_batches or planned


def precision_of(model: nn.Module, precision: str | None, fixed: Plan | None) -> str | None:
    """Return the precision of calls, from the argument or the plan. None stands for the types of the parameters.

    Raises:
        NotAvailableError: a precision is given, and the model has no floating parameters.
        PlanMismatchError: the plan has another precision than the argument.
    """
    if precision is not None and not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise NotAvailableError(
            f"precision={precision!r} casts floating parameters, and {type(model).__qualname__} has none: leave it out."
        )
    found = effective_precision(model, precision)
    if fixed is None:
        return found
    if precision is not None and found != fixed.precision:
        raise PlanMismatchError(
            f"The plan is of a program in precision={fixed.precision!r}, and precision={precision!r} is asked for. "
            "Leave precision out, or plan again."
        )
    return fixed.precision


def refuse_unscaled(precision: str | None) -> None:
    """Raise `NotAvailableError` if `precision` is "f16". Gradients without a training step have no scaled loss."""
    if precision == "f16":
        raise NotAvailableError(
            "precision='f16' with gradients needs a training step, which scales the loss: without a scale, gradients "
            "below 6e-8 vanish. Pass optimizer=, call the model under torch.no_grad(), or use precision='bf16'."
        )


def check_loss_scaling(loss_scaling: LossScaling | None, precision: str | None) -> None:
    """Raise `NotAvailableError` if `loss_scaling` is given, but `precision` is not "f16"."""
    if loss_scaling is not None and precision != "f16":
        raise NotAvailableError(
            f"options=Options(loss_scaling={loss_scaling}) belongs to precision='f16', and the step computes in "
            f"precision={precision!r}. Pass precision='f16' with wider parameters, or leave loss_scaling out."
        )


def update_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    max_grad_norm: float | None,
    fixed: Plan | None,
    *,
    strict: bool,
    returns_norm: bool = False,
    scales_loss: bool = False,
) -> Update | None:
    """Return an optimizer's update as data, or None if the program has no update.

    The program has no update without an optimizer, if the optimizer cannot be traced, or if the given plan has only
    forward and backward.

    Raises:
        NotAvailableError: with `strict`, the optimizer cannot be traced.
    """
    if fixed is not None and not fixed.updates:
        return None
    return update_of(optimizer, model, max_grad_norm, strict=strict, returns_norm=returns_norm, scales_loss=scales_loss)


def has_more_outputs(plan: Plan, program: Program) -> bool:
    """Whether a plan has a spec for an output that `program`, traced from the same call, does not have."""
    return not _outputs_of(plan) <= _names_of(program)


def _outputs_of(plan: Plan) -> set[str]:
    kind = f"{OutputKind.OUTPUT.value} "
    return {name.removeprefix(kind) for name in plan.outputs if name.startswith(kind)}


def _names_of(program: Program) -> set[str]:
    return {slot.name for slot in program.outputs_of(OutputKind.OUTPUT)}


def check_same_parameters(plan: Plan, program: Program) -> None:
    """Raise `PlanMismatchError` if a program and a plan differ in the name or shape of a parameter."""
    nodes = program.nodes_by_name()
    shapes = {slot.name: tuple(nodes[slot.node].meta["val"].shape) for slot in program.inputs_of(InputKind.PARAMETER)}
    planned = {name: tuple(item.shape) for name, item in plan.parameters.items()}
    for name in dict.fromkeys([*shapes, *planned]):
        if shapes.get(name) != planned.get(name):
            raise PlanMismatchError(
                f"The plan is of another model: parameter {name!r} has shape={planned.get(name)} in the plan and "
                f"shape={shapes.get(name)} in the model. Plan again for this model."
            )


def check_plan_fits(plan: Plan, program: Program, *, compare_inputs: bool) -> None:
    """Raise `PlanMismatchError` if a program differs from the program that a plan is for.

    Parameters are compared. With `compare_inputs`, inputs and outputs are compared too.
    """
    check_same_parameters(plan, program)
    nodes = program.nodes_by_name()
    if compare_inputs and not plan.repeats and [*_outputs_of(plan)] == ["output:0"] != [*_names_of(program)]:
        raise PlanMismatchError(
            "The plan is of a call that hands out the loss alone, and this one hands out more. Compile with "
            "outputs='loss' (or optimizer=), or plan again."
        )
    inputs = {slot.name: describe(nodes[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)}
    if compare_inputs and inputs != dict(plan.inputs):
        raise PlanMismatchError(
            f"The plan is for inputs {dict(plan.inputs)}, the call has {inputs}. Call with those shapes, or plan "
            "again for these (leave plan= out, and each kind of call is planned when it comes)."
        )
