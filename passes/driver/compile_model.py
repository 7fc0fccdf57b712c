"""`autoshard.compile`: make a module, or a training step, that runs on a mesh, from the checked arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard import tracing
from autoshard.arguments import check_of_step, check_optimizer, checked_reduce_dtype
from autoshard.call import Call
from autoshard.errors import NotAvailableError
from autoshard.ir.loss_scaling import LossScaling, scales_loss
from autoshard.ir.mesh import Mesh
from autoshard.ir.profile import PredictedSteps
from autoshard.ir.request import CompiledProgram
from autoshard.runtime.agreement.step_agreement import Check
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.executor import Executor
from autoshard.runtime.graph_loader import Loading
from autoshard.runtime.launch import world_size
from autoshard.runtime.lengths import Lengths
from autoshard.runtime.loss_scale import LossScale
from autoshard.runtime.optimizer_state import rebind_optimizer
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.stages.stage_engines import make_engines
from autoshard.runtime.train_step import TrainStep
from cost_models.errors import UnknownOperatorError
from cost_models.hardware import Cluster
from passes.driver.backends import finish, graphs_of, wrap_of
from passes.driver.candidates import batch_of, by_micro_batches
from passes.driver.choose_mesh import choose_mesh
from passes.driver.fixed_plan import check_loss_scaling, micro_batches_of, precision_of, update_for
from passes.driver.pipelines import check_pipeline, pipeline_arguments, pipeline_of, whole_mesh
from passes.driver.planner import Planner
from passes.driver.planner_for import planner_for
from passes.driver.stage_planner import StagePlanner
from passes.driver.traces import check_example
from passes.padding.prove_padding import prove_padding
from passes.planning.recipe_meshes import check_mesh
from passes.prediction.predict_steps import predict_steps
from passes.verification.verify_in_place import verify_in_place
from passes.verification.verify_schedule import verify_schedule
from passes.verification.weigh_step import weigh_call


def compile_model(call: Call) -> ShardedModule | TrainStep:
    """Return a training step (with an optimizer) or a module that runs on a mesh, see `autoshard.compile`."""
    model, mesh, options, optimizer = call.model, call.target, call.options, call.optimizer
    tracing.check_apart(model)
    check_optimizer(optimizer, micro_batches=call.micro_batches, max_grad_norm=call.max_grad_norm)
    check_of_step(optimizer, on_nonfinite=options.on_nonfinite, grad_norm=options.grad_norm or None)
    check_of_step(optimizer, loss_scaling=options.loss_scaling)
    assert not isinstance(optimizer, str), "it was checked"
    _check_micro_batch(call)
    check_example(call)
    precision = precision_of(model, call.precision, call.fixed)
    check_loss_scaling(options.loss_scaling, precision)
    is_scaled = scales_loss(precision, optimizer)
    update = update_for(
        model,
        optimizer,
        call.max_grad_norm,
        call.fixed,
        strict=call.strict,
        returns_norm=options.returns_norm,
        scales_loss=is_scaled,
    )
    device = _device_of(call)
    planner = planner_for(
        replace(call, precision=precision),
        update,
        device,
        reduce_dtype=checked_reduce_dtype(model, options.reduce_dtype),
        progress=False,
    )
    if isinstance(mesh, Cluster):
        planner, mesh = choose_mesh(replace(call, precision=precision), mesh, planner, update)
    if call.recipe is not None and isinstance(mesh, DeviceMesh | Mesh):
        check_mesh(call.recipe, whole_mesh(mesh))
    known = planner.fixed or planner.made
    wanted = call.micro_batches if known else _micro_batches(call, whole_mesh(mesh))
    arguments = pipeline_arguments(known, mesh, wanted, call.recipe)
    micro_batches = micro_batches_of(known, arguments.micro_batches, trains=optimizer is not None)
    planner = replace(planner, micro_batches=micro_batches)
    pipeline = pipeline_of(mesh, arguments.schedule, arguments.virtual_stages, micro_batches)
    if pipeline is not None:
        check_pipeline(update, call)
    check = verify_in_place if call.verify else None
    loading = Loading(wrap_of(call.backend), check, finish)
    engine, messages = make_engines(mesh, device, loading, options.timeout_s)
    if call.backend == "inductor" and isinstance(engine, SimulatorEngine):
        raise NotAvailableError("backend='inductor' needs a process per rank; the simulator runs eagerly.")
    engine.ranges.are_on = options.name_ranges
    graphs = graphs_of(options.cuda_graph, engine, is_traced=update is not None, has_stages=pipeline is not None)
    executor = Executor(messages, verify_schedule if call.verify else None)
    sharded = ShardedModule(
        model,
        engine,
        planner if pipeline is None else StagePlanner(planner, pipeline, messages.rank if messages else None),
        max_programs=options.max_programs,
        lengths=Lengths(model, options.dynamic_lengths, prove_padding) if options.dynamic_lengths else None,
        check=Check(options.check),
        outputs=call.handed_out,
        executor=executor,
    )
    step = sharded
    if optimizer is not None:
        rebind_optimizer(optimizer, sharded.parameters())
        step = TrainStep(
            sharded,
            optimizer,
            max_grad_norm=call.max_grad_norm,
            returns_norm=options.returns_norm,
            on_nonfinite=options.on_nonfinite,
            micro_batches=micro_batches,
            traced=update is not None,
            executor=executor,
            graphs=graphs,
            loss_scale=LossScale(options.loss_scaling or LossScaling()) if is_scaled else None,
            weigh=partial(weigh_call, replace(planner, traced=None).trace),
            predict=partial(_predicted, planner),
            plans_any_batch=known is None and call.recipe is None and not _has_boundaries(call.constraints),
        )
    if call.example_inputs is not None:
        args, kwargs = call.inputs
        with torch.enable_grad():
            step.compile_for(*args, **kwargs)
    return step


def _predicted(planner: Planner, program: CompiledProgram) -> PredictedSteps:
    """Return the predicted step of a program, on the hardware that its plan was priced for.

    A given plan of one micro-batch may run with several micro-batches, which are predicted.

    Raises:
        NotAvailableError: an operator of the program has no cost formula.
    """
    assert program.plan is not None, "it was planned"
    plan = replace(program.plan, micro_batches=planner.micro_batches)
    try:
        return predict_steps(replace(program, plan=plan), planner.cluster_for(plan.mesh))
    except UnknownOperatorError as error:
        raise NotAvailableError(
            f"step.profile prices each operator, and {error} Compile with backend='auto'."
        ) from error


def _has_boundaries(constraints: Mapping[str, Any] | None) -> bool:
    """Whether a name pattern in `constraints` may match an input or output of the model, such as "input:0"."""
    boundaries = ("input:0", "output:0")
    return any(":" in name or any(fnmatchcase(each, name) for each in boundaries) for name in constraints or ())


def _check_micro_batch(call: Call) -> None:
    """Raise `NotAvailableError` if the recipe has `micro_batch`, and the call does not go with it.

    The call must have an optimizer, and example inputs or a plan. It must not have `micro_batches` too.
    """
    recipe = call.recipe
    if recipe is None or recipe.micro_batch is None:
        return
    size = f"recipe=Recipe(micro_batch={recipe.micro_batch})"
    if call.micro_batches is not None:
        raise NotAvailableError(f"{size} and micro_batches={call.micro_batches} say the same thing: leave one out.")
    if call.optimizer is None:
        raise NotAvailableError(f"{size} belongs to a training step: pass optimizer= too.")
    if call.example_inputs is None and call.fixed is None:
        raise NotAvailableError(
            f"{size} takes a batch that is known: pass example_inputs=, or micro_batches= in place of micro_batch."
        )


def _micro_batches(call: Call, mesh: Mesh) -> int | None:
    """Return the number of micro-batches in a step, or None if the call leaves it open.

    The number is the call's argument. If the recipe has `micro_batch`, the number follows from the size of the batch.
    """
    if call.recipe is None or call.recipe.micro_batch is None:
        return call.micro_batches
    return next(iter(by_micro_batches([mesh], call.recipe, batch_of(*call.inputs))))


def _device_of(call: Call) -> torch.device:
    """Return the device of a model's tensors.

    For a model on the meta device, return the device of a `DeviceMesh`. Without a `DeviceMesh`, return the accelerator
    if there is one, and no process simulates several ranks. Otherwise return torch's default device, but the CPU
    instead of meta.
    """
    tensors = (*call.model.parameters(), *call.model.buffers())
    found = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    if found is not None:
        return found
    if isinstance(call.target, DeviceMesh):
        return torch.device(call.target.device_type)
    has_own_device = world_size() > 1 or call.target.size == 1
    if has_own_device and (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        return accelerator
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default
