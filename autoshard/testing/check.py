"""`check_plan`: train by a plan on the simulator, and compare every result that a user can see with one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import api
from autoshard.arguments import split_inputs
from autoshard.errors import AutoshardError, NotAvailableError
from autoshard.ir.loss_scaling import LossScaling, scales_loss
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS
from autoshard.ir.program import InputKind, Program, describe
from autoshard.ir.request import CompiledProgram
from autoshard.runtime.four_bit import take_over_4bit_layers
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from autoshard.testing.report import TOLERANCE, CheckReport, compare_all
from autoshard.testing.shrink import find_small_failure
from autoshard.testing.training import (
    Training,
    gradient_descent,
    in_type,
    options_of,
    train_alone,
    train_as_is,
    train_compiled,
    train_nearby,
    train_precisely,
)
from autoshard.testing.whole_step import MakeOptimizer, WholeStep, trace_training
from passes.driver.planner import Planner
from passes.lowering.lower_program import prepare_for

_LOGGER = logging.getLogger(__name__)

Inputs = tuple[Any, ...] | Mapping[str, Any]


def check_plan(
    model: nn.Module,
    mesh: Mesh,
    inputs: Inputs,
    *,
    plan: Plan | None = None,
    steps: int = 1,
    tolerance: float | None = None,
    make_optimizer: MakeOptimizer | None = None,
    whole_step: WholeStep | None = None,
    precise: torch.dtype | None = None,
    precision: str | None = None,
    traced: Program | None = None,
) -> CheckReport:
    """Train a copy of a model for some steps on simulated ranks, train another copy on one device, and compare.

    The compared values are the outputs and gradients of the last step, and the parameters and buffers after it. With
    `whole_step` they are the loss, parameters, buffers and optimizer state. If a value differs, the program is shrunk
    to a few calls that still differ (`CheckReport.small_failure`).

    Args:
        model: any module; it is not changed. If it uses random numbers, one device gets the same numbers as the ranks.
        mesh: the mesh to simulate.
        inputs: positional arguments as a tuple, or keyword arguments as a mapping.
        plan: the plan to run; None: plan now.
        steps: number of optimizer steps, at least 1.
        tolerance: largest difference relative to the largest element of each value. None: 1e-5, or the machine epsilon
            of `precision` if it is larger.
        make_optimizer: takes parameters, and returns an optimizer, which runs outside the program. None: gradient
            descent with learning rate 0.01.
        whole_step: train by `autoshard.compile(..., optimizer=...)`, with the update in the program. The model returns
            its loss first. A `plan` must then be for a whole step, with one micro-batch.
        precise: a wider dtype, such as `torch.float64`, in which one device runs too, to measure each value's rounding
            error. A value may then differ by 4 times this error, which ill-conditioned gradients need. If a value
            differs, more runs on slightly moved inputs and a run of the mesh in the wider dtype decide. None: no wider
            run; with `precision`, one device also runs in the model's own dtypes.
        precision: the compute precision, such as "bf16" (see `autoshard.compile`). One device then runs the same casts.
            None: that of `plan`, or the model's own dtypes.
        traced: the traced program, if it is known, such as a result of `traced_call`. None: trace now.

    Returns:
        A report; differing values raise no error (see `CheckReport.raise_if_different`).

    Raises:
        NotAvailableError: `make_optimizer` and `whole_step` are both given, `steps` is not a whole number of at least
            1, or one device cannot run the model in `precise`.
    """
    if not isinstance(steps, int) or steps < 1:
        raise NotAvailableError(f"steps={steps!r} compares nothing; run at least one step.")
    if make_optimizer is not None and whole_step is not None:
        raise NotAvailableError("make_optimizer= and whole_step= both name an optimizer; leave one of them out.")
    args, kwargs = split_inputs(inputs)
    training = Training(args, kwargs, steps, make_optimizer or gradient_descent, whole_step)
    model = copy.deepcopy(model)
    take_over_4bit_layers(model)
    alone = copy.deepcopy(model)
    sharded = _compile(copy.deepcopy(model), mesh, training, plan, precision, traced)
    if sharded.plan is None:
        raise AssertionError("with example inputs there is a plan")
    name = sharded.plan.precision
    training = replace(training, draws=_draws(sharded), loss_scaling=_scaling(whole_step, name))
    exact = _exactly(model, precise, training) if precise is not None or name is not None else {}
    compared = compare_all(train_compiled(sharded, training), train_alone(alone, name, training), exact)
    report = CheckReport(sharded.plan, compared, _tolerance(name) if tolerance is None else tolerance)
    if exact:
        report = report.sampled(partial(train_nearby, model, name, training), exact)
    if report.is_equal or sharded.plan.stages:  # programs in stages are not shrunk
        return report
    if precise is not None and name is None:
        report = _settled(report, model, precise, training)
    return report if report.is_equal else replace(report, small_failure=_small_failure(model, sharded, training))


def _scaling(whole_step: WholeStep | None, precision: str | None) -> LossScaling | None:
    """Return the settings of the scale of the loss; None if the loss is not scaled."""
    if whole_step is None or not scales_loss(precision, whole_step.make_optimizer):
        return None
    return whole_step.loss_scaling or LossScaling()


def _compile(
    model: nn.Module, mesh: Mesh, training: Training, plan: Plan | None, precision: str | None, traced: Program | None
) -> ShardedModule | TrainStep:
    whole = training.whole_step
    optimized = {} if whole is None else options_of(whole, model)
    if whole is not None and (precision or (plan and plan.precision)) == "f16":
        optimized["options"] = api.Options(loss_scaling=whole.loss_scaling)
    compiled = api.compile(model, mesh, plan=plan, precision=precision, **optimized)
    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    if traced is not None:
        assert isinstance(sharded.compiler, Planner), "the compiler of api.compile"
        sharded.compiler = replace(sharded.compiler, traced=traced)
    with torch.enable_grad():
        compiled.compile_for(*training.args, **training.kwargs)
    return compiled


def _exactly(model: nn.Module, dtype: torch.dtype | None, training: Training) -> dict[str, torch.Tensor]:
    """Train on one device in `dtype` (None: the model's own dtypes); return the results by name.

    Raises:
        NotAvailableError: an operator of the model does not run in `dtype`.
    """
    try:
        return train_precisely(model, dtype, training)
    except RuntimeError as error:
        if dtype is None:
            raise
        raise NotAvailableError(
            f"precise={dtype}, but one device cannot run {type(model).__name__} in it: {error} Leave precise= out."
        ) from error


def _settled(report: CheckReport, model: nn.Module, dtype: torch.dtype, training: Training) -> CheckReport:
    """Return the report with a second comparison (`precisely`): mesh and one device both train in the wider `dtype`.

    If the plan's specs cannot be used for the model in this dtype, the report stays as it is.
    """
    precise, training = in_type(model, dtype, training)
    try:
        plan = _plan_in_type(report.plan, precise, training)
        compiled = _compile(copy.deepcopy(precise), plan.mesh, training, plan, None, None)
    except AutoshardError as error:
        _LOGGER.info("the same specs cannot be run in %s: %s", dtype, error)
        return report
    compared = compare_all(train_compiled(compiled, training), train_as_is(precise, precise, training))
    return replace(report, precisely=compared)


def _plan_in_type(plan: Plan, model: nn.Module, training: Training) -> Plan:
    program = trace_training(model, training.args, training.kwargs, training.whole_step)
    nodes = program.nodes_by_name()
    inputs = {slot.name: describe(nodes[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)}
    return replace(plan, program_digest=prepare_for(program, plan).digest(), inputs=inputs)


def _draws(compiled: ShardedModule | TrainStep) -> bool:
    return bool(_compiled_program(compiled).phased.lowered.traced.inputs_of(InputKind.SEED))


def _compiled_program(compiled: ShardedModule | TrainStep) -> CompiledProgram:
    program = (compiled.sharded if isinstance(compiled, TrainStep) else compiled).program
    if program is None:
        raise AssertionError("a model that differs has been compiled")
    return program


def _small_failure(model: nn.Module, compiled: ShardedModule | TrainStep, training: Training) -> str:
    """Return a script of a few operator calls that differ from one device under the plan's specs; "" if none is found.

    The inputs are those of the first micro-batch.
    """
    program = _compiled_program(compiled)
    if program.plan is None:
        raise AssertionError("a model that differs was compiled by a plan")
    whole, called = training.whole_step, (training.args, training.kwargs)
    leaves = enumerate(pytree.tree_leaves(called if whole is None else whole.cut(*called)[0]))
    given = {("input", f"input:{index}"): leaf for index, leaf in leaves if isinstance(leaf, torch.Tensor)}
    given |= {("parameter", name): parameter.detach() for name, parameter in model.named_parameters()}
    given |= {("buffer", name): buffer for name, buffer in model.named_buffers()}
    return find_small_failure(program.phased.lowered.traced, program.plan, given)


def _tolerance(precision: str | None) -> float:
    """Return the default tolerance: the largest difference by rounding, relative to a value's largest element."""
    return TOLERANCE if precision is None else max(TOLERANCE, torch.finfo(PRECISIONS[precision]).eps)
