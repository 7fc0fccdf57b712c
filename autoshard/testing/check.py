"""`check_plan`: run a plan on the simulator beside one device, and compare everything a user can see."""

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
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS
from autoshard.ir.program import InputKind, Program, describe
from autoshard.ir.request import CompiledProgram
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
    """Train a copy of a model for some steps on simulated ranks and another on one device, and compare.

    Compared are the outputs and gradients of the last step, and parameters and buffers after it; of whole steps the
    loss, and parameters, buffers and optimizer state. Where something differs, the program is shrunk to a few calls
    that differ too (`CheckReport.small_failure`).

    Args:
        model: any module; left as it is. One device draws the random numbers that ranks do, if it draws any.
        mesh: the mesh to simulate.
        inputs: positional arguments, or keyword arguments as a mapping.
        plan: the plan to run; None plans.
        steps: optimizer steps, at least 1.
        tolerance: largest difference relative to the largest element of each value; default: 1e-5, or the spacing of
            numbers at 1 in the type that is computed in, if it is narrower than float32: one rounding on either side.
        make_optimizer: from parameters to an optimizer; gradient descent at 0.01 if None.
        whole_step: train by `autoshard.compile(..., optimizer=...)`, the update being part of the program; the model
            returns its loss first. A plan is then one of a whole step, of one micro-batch.
        precise: run one device in this type as well, e.g. `torch.float64`, to learn how much it rounds: ill-conditioned
            values (gradients of nearly uniform attention) may then differ by that much. The error of one run may be
            small by chance: before a value counts as different, one device also runs on parameters and inputs that are
            each moved by one rounding. None: do not, or, where a precision is computed in, the model's own types.
            Where that does not explain a difference either, the same specs run in this type on both, and what agrees
            there to 1e-9 of its scale was rounding.
        precision: see `autoshard.compile`. One device then runs the same casts.
        traced: the program of the call (of a whole step: of a micro-batch), where it is traced already.

    Returns:
        A report; nothing is raised for values that differ (see `CheckReport.raise_if_different`).

    Raises:
        NotAvailableError: both `make_optimizer` and `whole_step` name an optimizer, no step is asked for, one device
            cannot run the model in `precise`.
    """
    if not isinstance(steps, int) or steps < 1:
        raise NotAvailableError(f"steps={steps!r} compares nothing; run at least one.")
    if make_optimizer is not None and whole_step is not None:
        raise NotAvailableError("make_optimizer= and whole_step= both name an optimizer; leave one of them out.")
    args, kwargs = split_inputs(inputs)
    training = Training(args, kwargs, steps, make_optimizer or gradient_descent, whole_step)
    alone = copy.deepcopy(model)
    sharded = _compile(copy.deepcopy(model), mesh, training, plan, precision, traced)
    if sharded.plan is None:
        raise AssertionError("with example inputs there is a plan")
    training = replace(training, draws=_draws(sharded))
    name = sharded.plan.precision
    exact = _exactly(model, precise, training) if precise is not None or name is not None else {}
    compared = compare_all(train_compiled(sharded, training), train_alone(alone, name, training), exact)
    report = CheckReport(sharded.plan, compared, _tolerance(name) if tolerance is None else tolerance)
    if exact:
        report = report.sampled(partial(train_nearby, model, name, training), exact)
    if report.is_equal or sharded.plan.stages:  # a program in stages is not shrunk
        return report
    if precise is not None and name is None:
        report = _settled(report, model, precise, training)
    return report if report.is_equal else replace(report, small_failure=_small_failure(model, sharded, training))


def _compile(
    model: nn.Module, mesh: Mesh, training: Training, plan: Plan | None, precision: str | None, traced: Program | None
) -> ShardedModule | TrainStep:
    whole = training.whole_step
    optimized = {} if whole is None else options_of(whole, model)
    compiled = api.compile(model, mesh, plan=plan, precision=precision, **optimized)
    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    if traced is not None:
        assert isinstance(sharded.compiler, Planner), "the compiler of api.compile"
        sharded.compiler = replace(sharded.compiler, traced=traced)
    with torch.enable_grad():
        compiled.compile_for(*training.args, **training.kwargs)
    return compiled


def _exactly(model: nn.Module, dtype: torch.dtype | None, training: Training) -> dict[str, torch.Tensor]:
    """What one device gives in a more precise type."""
    try:
        return train_precisely(model, dtype, training)
    except RuntimeError as error:
        if dtype is None:
            raise
        raise NotAvailableError(
            f"precise={dtype}: one device cannot run {type(model).__name__} in it: {error} Leave precise= out."
        ) from error


def _settled(report: CheckReport, model: nn.Module, dtype: torch.dtype, training: Training) -> CheckReport:
    """The report with the same specs beside one device in a more precise type, where the program is the same in it."""
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
    """A plan for the same model and inputs in other types."""
    program = trace_training(model, training.args, training.kwargs, training.whole_step)
    nodes = program.nodes_by_name()
    inputs = {slot.name: describe(nodes[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)}
    return replace(plan, program_digest=prepare_for(program, plan).digest(), inputs=inputs)


def _draws(compiled: ShardedModule | TrainStep) -> bool:
    """Whether what was compiled draws random numbers."""
    return bool(_compiled_program(compiled).phased.lowered.traced.inputs_of(InputKind.SEED))


def _compiled_program(compiled: ShardedModule | TrainStep) -> CompiledProgram:
    """What ran."""
    program = (compiled.sharded if isinstance(compiled, TrainStep) else compiled).program
    if program is None:
        raise AssertionError("what differs has been compiled")
    return program


def _small_failure(model: nn.Module, compiled: ShardedModule | TrainStep, training: Training) -> str:
    """Code that fails as the program of a call that differs; of several micro-batches, on the first."""
    program = _compiled_program(compiled)
    if program.plan is None:
        raise AssertionError("what differs was compiled by a plan")
    whole, called = training.whole_step, (training.args, training.kwargs)
    leaves = enumerate(pytree.tree_leaves(called if whole is None else whole.cut(*called)[0]))
    given = {("input", f"input:{index}"): leaf for index, leaf in leaves if isinstance(leaf, torch.Tensor)}
    given |= {("parameter", name): parameter.detach() for name, parameter in model.named_parameters()}
    given |= {("buffer", name): buffer for name, buffer in model.named_buffers()}
    return find_small_failure(program.phased.lowered.traced, program.plan, given)


def _tolerance(precision: str | None) -> float:
    """What rounding alone may do to a value, relative to its largest element."""
    return TOLERANCE if precision is None else max(TOLERANCE, torch.finfo(PRECISIONS[precision]).eps)
