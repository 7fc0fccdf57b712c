"""What a user calls: `compile` runs a model on a mesh, `plan` only says how it would run.

Here the parts meet that must not know each other: tracing, planning (the package `passes`, imported when
first needed) and the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.arguments import (
    ExampleInputs,
    check_agreement,
    check_backend,
    check_beside_recipe,
    check_flags,
    check_limits,
    check_loss,
    check_model,
    check_optimizer,
    check_previous,
    check_programs,
    check_recipes,
    check_target,
    check_traced,
    check_trains,
    checked_budget,
    checked_cluster,
    checked_constraints,
    checked_hardware,
    checked_outputs,
    checked_reduce_dtype,
    split_inputs,
)
from autoshard.cluster import device_of_plans, meshes_of
from autoshard.errors import DoesNotFitError, NotAvailableError
from autoshard.ir.garbage import seldom_collecting
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.precision import effective_precision
from autoshard.ir.recipe import TRITON, Recipe
from autoshard.ir.request import Request
from autoshard.ir.runtime import AUTOSHARD, Runtime, runtime_named
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.text import format_bytes
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.agreement.step_agreement import Check
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.launch import world_size
from autoshard.runtime.lengths import Lengths, Prove
from autoshard.runtime.micro_batches import batch_size, parts_of
from autoshard.runtime.optimizer_state import named_optimizer, rebind_optimizer, state_bytes_per_parameter_byte
from autoshard.runtime.sharded_module import MAX_PROGRAMS, ShardedModule
from autoshard.runtime.stages.stage_engines import make_engines
from autoshard.runtime.stages.staged_forward import StagedForward
from autoshard.runtime.traced_optimizer import update_of
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster
from passes.driver.backends import bucketing_of, check_in_place, graphs_of, has_kernels, wrap_of
from passes.driver.choose_mesh import choose_mesh
from passes.driver.fixed_plan import micro_batches_of, precision_of, read_plan, update_for
from passes.driver.pipelines import Asked, asked_of, check_pipeline, pipeline_of
from passes.driver.planner import LossFunction, Planner, refuse_scaling
from passes.driver.pricing import price
from passes.driver.recipe_plans import Planned, asked_by, batch_of, meshes_for, plan_recipe
from passes.driver.recipe_search import RecipeForecast, optimizer_name, recipe_search
from passes.driver.searched_plans import plan_searched
from passes.driver.stage_planner import StagePlanner
from passes.driver.stage_plans import search_stages


@seldom_collecting
def compile(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | Cluster,
    *,
    example_inputs: ExampleInputs | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | str | Path | None = None,
    constraints: Mapping[str, PartitionSpec] | None = None,
    memory_budget: int | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    micro_batches: int | None = None,
    max_grad_norm: float | None = None,
    strict: bool = False,
    backend: str = "auto",
    verify: bool = True,
    time_budget_s: float = 60.0,
    dynamic_lengths: Mapping[str, float] | None = None,
    max_programs: int = MAX_PROGRAMS,
    check: str = "always",
    timeout_s: float = TIMEOUT_S,
    outputs: str = "all",
    gather_outputs: bool = False,
    cluster: Cluster | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    cuda_graph: bool = False,
) -> ShardedModule | TrainStep:
    """The model, made to run on all ranks of a mesh; it computes what it computes on one device.

    With as many processes as the mesh has ranks (`torchrun`), each is a rank, and the model's parameters
    become DTensors; without, all ranks are simulated in this process, and parameters stay as they are.

    Args:
        model: any module, the same on all ranks. Where it is on the meta device (all of it, or a part), each rank gets
            memory for its shards alone when the first program is compiled; then call `init_weights`, or load weights.
        mesh: a torch `DeviceMesh`, an abstract `Mesh`, or a `Cluster`, for which the planner picks the axes
            (needs `example_inputs`).
        example_inputs: positional (a tuple) or keyword (a dict) arguments to plan for now; default: at the
            first call. Any later call of another kind is planned when it comes.
        optimizer: makes the result a `TrainStep`; over the model's parameters, and fresh. The update of SGD, Adam
            and AdamW is part of the program: where gradients and state lie is the planner's choice (ZeRO). Others
            take their own step, on parameters and gradients as they lie.
        loss_fn: `loss_fn(outputs, *targets)` for a model that returns no loss; targets are the last
            positional arguments of a call.
        plan: a plan, or a path to a saved one, for calls that train: no search. If it is for another mesh, the search
            starts from it, and finds nothing that is slower than it would be here.
        constraints: glob of qualified names, "input:0" or "output:0" to the spec it must have.
        memory_budget: bytes of values per device. None: the device's memory; of a GPU, less what the CUDA context, NCCL
            and cuBLAS take, and what the allocator loses to fragmentation (`cost_models.memory.room_bytes`).
        precision: "bf16", "f16" (without gradients) or "f32": compute in this type where parameters and inputs are
            wider. Parameters, gradients and optimizer state keep the model's types (master weights); see
            docs/precision.md. None: the model's own types, or the precision of `plan`.
        reduce_dtype: "bf16": gradients of float32 travel between ranks in 16 bits, and are added up in float32; see
            docs/precision.md. None: they travel as they are.
        micro_batches: with an optimizer: cut each batch in so many parts, see `TrainStep`; None: as `plan` says.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        strict: refuse operators without a sharding rule, instead of running them on every rank, and optimizers whose
            update is not traced.
        backend: "auto": every operator on the kernel that torch has for the device, cross-entropy on a GPU on ours, as
            torch has none that is fused; "reference": semantic operators
            (attention) by their definitions in plain PyTorch, for tests; "triton": fused kernels, hand-written and
            generated, which on a CPU stand back for their references unless Triton's interpreter is asked for
            (TRITON_INTERPRET=1); "inductor" (with processes): Inductor compiles forward and backward.
        verify: check that the program to run equals the traced one.
        time_budget_s: seconds that the search for a plan may take; Ctrl-C ends it too, see `plan`.
        dynamic_lengths: names of arguments to what their padding holds: {"input_ids": 0, "attention_mask": 0,
            "labels": -100}. Dim 1 of these is padded to one of few lengths, at most half more, and results are cut
            back, so that calls of many lengths share few programs. Before a program is compiled, it is proven that
            padding reaches no result; where that fails, calls are compiled at their own lengths, with a warning.
        max_programs: how many programs are kept, each for one kind of call; the least recently used are given up.
        check: when processes compare what they call: program, mode, hyperparameters, inputs, parameters. "always", at
            each call; "first", at the first call of each program; "off". See docs/running.md.
        timeout_s: seconds after which a process that neither comes to a call nor compiles is an error on all others.
        outputs: "all" that the model returns; or "loss", the first floating scalar among them: what only the others
            need is neither computed nor kept. A `TrainStep` needs the loss alone whatever this says.
        gather_outputs: hand outputs out whole, but for those in `constraints`. By default, where there are processes,
            those that are no scalars are DTensors that lie as the plan has them; see docs/running.md.
        cluster: with a mesh: the hardware that plans are for, such as what `calibrate` measured; default: this machine,
            and other hosts of `torchrun` as gigabit Ethernet joins them.
        schedule: with an axis "pipeline" in the mesh, which carries stages: "1F1B" (the default), "GPipe",
            "InterleavedZeroBubble" and others; see docs/pipelines.md.
        virtual_stages: with an axis "pipeline": stages on each of its ranks, 1 by default, 2 of a V. A plan of stages
            says this, the schedule and micro_batches itself.
        cuda_graph: with an optimizer whose update is traced, and processes on GPUs: forward and backward of a
            micro-batch are one launch from the third step on, for models that the host launches more slowly than the
            device computes; see docs/running.md.

    Raises:
        AutoshardError: each kind of mistake has its own class; see `autoshard.errors`.

    Example:
        >>> sharded = compile(nn.Linear(4, 2), Mesh({"data": 2}))
        >>> sharded(torch.ones(6, 4)).shape
        torch.Size([6, 2])
    """
    check_model(model, _COMPILED)
    check_backend(backend)
    check_loss(loss_fn)
    check_flags(strict=strict, verify=verify, gather_outputs=gather_outputs, cuda_graph=cuda_graph)
    handed_out = checked_outputs(outputs, gather_outputs=gather_outputs)
    memory_budget = checked_budget(memory_budget)
    check_limits(time_budget_s=time_budget_s)
    check_agreement(check=check, timeout_s=timeout_s)
    check_programs(dynamic_lengths=dynamic_lengths, max_programs=max_programs)
    fixed = read_plan(plan)
    asked = asked_of(fixed, mesh, micro_batches, schedule, virtual_stages)
    check_optimizer(optimizer, micro_batches=asked.micro_batches, max_grad_norm=max_grad_norm)
    micro_batches = micro_batches_of(fixed, asked.micro_batches, trains=optimizer is not None)
    precision = precision_of(model, precision, fixed)
    if optimizer is not None:
        refuse_scaling(precision)
    update = update_for(model, optimizer, max_grad_norm, fixed, strict=strict)
    device = _device_of(model, mesh)
    planner = Planner(
        cluster=checked_hardware(cluster, mesh),
        fixed=fixed,
        loss_fn=loss_fn,
        precision=precision,
        reduce_dtype=checked_reduce_dtype(model, reduce_dtype),
        constraints=checked_constraints(constraints),
        memory_budget=memory_budget,
        state_ratio=0.0 if optimizer is None else state_bytes_per_parameter_byte(optimizer),
        has_update=update is not None,
        micro_batches=micro_batches,
        strict=strict,
        verify=verify,
        time_budget_s=time_budget_s,
        with_kernels=has_kernels(backend, device),
        for_compiler=backend == "inductor",
        with_native=backend != "reference",
        cuda_graph=cuda_graph,
        gather_outputs=gather_outputs,
    )
    if isinstance(mesh, Cluster):
        first = handed_out if optimizer is None else Outputs.LOSS
        planner, mesh = choose_mesh(model, mesh, planner, example_inputs, update, timeout_s, first)
    pipeline = pipeline_of(mesh, asked.schedule, asked.virtual_stages, micro_batches)
    if pipeline is not None:
        check_pipeline(update, optimizer, planner, backend, dynamic_lengths)
    finish = bucketing_of(backend, device)
    in_place = check_in_place if verify else None
    engine, messages = make_engines(mesh, device, wrap_of(backend), in_place, finish, timeout_s)
    if backend == "inductor" and isinstance(engine, SimulatorEngine):
        raise NotAvailableError("backend='inductor' needs a process per rank; the simulator runs eagerly.")
    graphs = graphs_of(cuda_graph, engine, is_traced=update is not None, has_stages=pipeline is not None)
    lengths = None if dynamic_lengths is None else Lengths(model, dynamic_lengths, _prover())
    compiler = planner if pipeline is None else StagePlanner(planner, pipeline, messages.rank if messages else None)
    sharded = ShardedModule(
        *(model, engine, compiler),
        max_programs=max_programs,
        lengths=lengths,
        check=Check(check),
        outputs=handed_out,
        staged=None if messages is None else StagedForward(messages),
    )
    if optimizer is not None:
        rebind_optimizer(optimizer, sharded.parameters())
    step = sharded
    if optimizer is not None:
        step = TrainStep(
            sharded,
            optimizer,
            max_grad_norm=max_grad_norm,
            micro_batches=micro_batches,
            traced=update is not None,
            messages=messages,
            graphs=graphs,
        )
        if verify:
            _check_order(step)
    if example_inputs is not None:
        args, kwargs = split_inputs(example_inputs)
        with torch.enable_grad():
            step.compile_for(*args, **kwargs)
    return step


@seldom_collecting
def plan(
    model: nn.Module,
    mesh_or_cluster: DeviceMesh | Mesh | Cluster,
    *,
    example_inputs: ExampleInputs,
    mesh: Mesh | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    loss_fn: LossFunction | None = None,
    global_batch: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    memory_budget: int | None = None,
    precision: str | None = "bf16",
    recipe: Recipe | None = None,
    previous: Plan | None = None,
    backend: str = "auto",
    strict: bool = False,
    runtime: str | Runtime = AUTOSHARD,
    time_budget_s: float = 60.0,
    progress: bool | None = None,
    outputs: str = "all",
    gather_outputs: bool = False,
    micro_batches: int | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
) -> Plan:
    """How a model would run, and what it would cost; nothing is run, and the model may be on meta.

    Args:
        model, example_inputs, loss_fn, strict, time_budget_s: see `compile`.
        constraints: see `compile`; with `global_batch`, fields of `Recipe` to the value that they must have, or to
            several: {"tensor": 8, "pipeline": (1, 2, 4), "recompute": "none"}.
        memory_budget: see `compile`; of a `recipe`, what it must fit in.
        mesh_or_cluster: a mesh, priced for this machine; or a cluster, and the planner picks the axes.
        mesh: with a cluster: the axes, instead of the planner's choice.
        optimizer: a name in torch.optim ("adamw"), or an optimizer over the model's parameters. The update of SGD,
            Adam and AdamW is planned with the step (ZeRO); of others only the state counts, as memory.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        global_batch: sequences of a step: the fastest plan for so many on the whole cluster, pipelines, context and
            expert parallelism, micro-batches and recomputation included, see docs/plans.md. How large the batch of
            `example_inputs` is does not matter then. Without, specs are searched on meshes, for that batch.
            Where `compile` cannot run the plan, as searching its specs takes too long, say, `forecast` says why.
        recipe: plan within this `Recipe`; fields that are None are searched. On a mesh its axes are "data", "context"
            and "model" (tensor); "pipeline", "replica" (with `zero_group`) and "expert" too where it has such fields.
            `compile(plan=)` runs the plan.
            `global_batch` is cut into micro-batches of `micro_batch` sequences on each replica. See docs/plans.md.
        runtime: what executes a recipe. "autoshard": `compile` does. "megatron", "fsdp2", "deepspeed", or a `Runtime`:
            the plan is a price of the recipe there, or of the fastest one for `global_batch`; see `price`.
        previous: a plan of this model for another cluster, batch or budget, where the search begins: what is found is
            no slower than it would be here, where it fits. With `global_batch`, one of a recipe, or else the best that
            cuts a micro-batch as it does; without, one of specs: for another mesh, without what it recomputes.
        backend: what the prediction is of; see `compile`. "triton": of the program with its kernels, which are in
            `predicted.kernels`; on a mesh of this machine, where it has a GPU. "inductor": the same, what it fuses
            taken to be what is generated here. Of others: of operators; of recipes, of what the usual libraries fuse.
        precision: see `compile`, which takes it from the plan. A model whose parameters are in this type already, or
            that has none, computes in its own types.
        outputs, gather_outputs: see `compile`; with an optimizer, the plan is of a step, which needs the loss alone.
        progress: show how the search goes, its best plan and its bound, on standard error; None: if that is a terminal.
        micro_batches: with an optimizer: how many parts of the batch of `example_inputs` a step has. None: of a mesh
            with an axis "pipeline", the fastest number that fits; else 1.
        schedule, virtual_stages: of a mesh with an axis "pipeline"; see `compile`.

    Raises:
        AutoshardError: as `compile`.
        KeyboardInterrupt: by Ctrl-C, if no plan that fits was found yet. Else the plan is the best until then
            (`was_interrupted`), with the bound proven by then. A second Ctrl-C always raises.
    """
    from passes.counting.formulas import PlanFormulas

    check_model(model, _COMPILED)
    check_backend(backend)
    check_loss(loss_fn)
    check_flags(strict=strict, gather_outputs=gather_outputs)
    handed_out = checked_outputs(outputs, gather_outputs=gather_outputs)
    memory_budget = checked_budget(memory_budget)
    check_limits(time_budget_s=time_budget_s, global_batch=global_batch)
    profile = runtime_named(runtime)
    stages = {"micro_batches": micro_batches, "schedule": schedule, "virtual_stages": virtual_stages}
    check_recipes(recipe, profile and profile.name, global_batch, **stages)
    is_priced = recipe is not None and profile is not None
    check_previous(previous, model, of_recipes=recipe is None and global_batch is not None, is_priced=is_priced)
    args, kwargs = split_inputs(example_inputs)
    if recipe is not None and profile is not None:
        cluster = checked_cluster(mesh_or_cluster, mesh)
        check_beside_recipe(
            recipe,
            constraints=constraints,
            optimizer=None if optimizer is None else optimizer_name(optimizer),
            global_batch=global_batch,
        )
        if isinstance(recipe, Recipe) and has_kernels(backend, device_of_plans(cluster)):
            recipe = replace(recipe, kernels=TRITON)
        priced = price(model, cluster, recipe, example_inputs=example_inputs, loss_fn=loss_fn, runtime=profile)
        return _within(priced, memory_budget)
    search = None
    if recipe is None and global_batch is not None:
        cluster = checked_cluster(mesh_or_cluster, mesh)
        search = recipe_search(
            model,
            cluster,
            example_inputs=example_inputs,
            optimizer=optimizer,
            global_batch=global_batch,
            loss_fn=loss_fn,
            constraints=constraints,
            memory_budget=memory_budget,
            precision=precision,
            with_kernels=has_kernels(backend, device_of_plans(cluster)),
            runtime=profile,
            previous=previous,
            time_budget_s=time_budget_s,
            progress=progress,
        )
        if profile is not None or search.forecast:
            search, found, kinds = search.run()
            return search.price(found, kinds)
        constraints = previous = None
    check_target(mesh_or_cluster, mesh)
    if recipe is not None:
        optimizer, precision = asked_by(recipe, optimizer, precision)
    check_trains(model, optimizer)
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer, model.parameters())
    check_optimizer(optimizer, micro_batches=micro_batches, max_grad_norm=max_grad_norm)
    update = update_of(optimizer, model, max_grad_norm, strict=strict)
    planner = Planner(
        cluster=mesh_or_cluster if isinstance(mesh_or_cluster, Cluster) else None,
        loss_fn=loss_fn,
        precision=effective_precision(model, precision),
        constraints=checked_constraints(constraints),
        memory_budget=memory_budget,
        before=previous,
        state_ratio=0.0 if optimizer is None else state_bytes_per_parameter_byte(optimizer),
        strict=strict,
        time_budget_s=time_budget_s,
        with_kernels=has_kernels(backend, device_of_plans(mesh_or_cluster)),
        gather_outputs=gather_outputs,
        progress=progress,
        micro_batches=micro_batches or 1,
    )
    grad = any(parameter.requires_grad for parameter in model.parameters())
    handed_out = handed_out if optimizer is None else Outputs.LOSS
    update = update if grad else None

    def request_of(parts: int) -> Request:
        part_args, part_kwargs = parts_of(args, kwargs, parts)[0]
        return Request(model, tuple(part_args), part_kwargs, grad, update=update, outputs=handed_out)

    request = request_of(micro_batches or 1)
    check_stages = partial(check_pipeline, update, optimizer, planner, backend, None)
    if search is not None:
        planned = plan_searched(planner, request, search, check_stages)
    elif recipe is None:
        meshes, asked = meshes_of(mesh_or_cluster, mesh), Asked(micro_batches, schedule, virtual_stages or 1)
        if pipeline_of(meshes[0], schedule, asked.virtual_stages, micro_batches) is not None:
            check_stages()
            return search_stages(planner, meshes[0], asked, batch_size(args, kwargs), request_of)
        planned = Planned(planner, request, *planner.plan_call(request, meshes))
    else:
        if recipe.pipeline > 1:
            check_stages()
        batch, meshes = batch_of(recipe, global_batch, args, kwargs), meshes_for(recipe, mesh_or_cluster, mesh)
        planned = plan_recipe(planner, request, meshes, recipe, batch)
    planner, request, program, found = planned.planner, planned.request, planned.program, planned.plan
    if program is None:
        return found
    check_traced(program, planner.constraints, optimizer)
    formulas = PlanFormulas(planner.trace, request, planner.cluster_for, planner.state_ratio)
    cluster = planner.cluster_for(found.mesh)
    forecast = RecipeForecast(
        *(model, cluster, example_inputs, loss_fn, optimizer),
        constrained=bool(planner.constraints),
        with_kernels=planner.with_kernels,
        time_budget_s=time_budget_s,
    )
    return replace(found, formulas=formulas, alternatives=planner.alternatives(program, found.mesh, forecast))


def _within(priced: Plan, memory_budget: int | None) -> Plan:
    """The plan of a recipe, which must fit in so many bytes."""
    needed = priced.predicted.peak_memory_bytes
    if memory_budget is not None and needed > memory_budget:
        raise DoesNotFitError(
            f"The recipe needs {format_bytes(needed)} per device, more than memory_budget={memory_budget}. Price it "
            "without memory_budget=, or search for one that fits with global_batch=.",
            smallest_bytes=needed,
        )
    return replace(priced, memory_budget=memory_budget)


_COMPILED = (ShardedModule, TrainStep)


def _prover() -> Prove:
    """What looks for proofs that padding changes nothing."""
    from passes.padding.prove_padding import prove_padding

    return prove_padding


def _check_order(step: TrainStep) -> None:
    """The step takes each of its micro-batches once, in order."""
    from passes.verification.verify_order import verify_order

    verify_order(step.order, step.micro_batches)


def _device_of(model: nn.Module, mesh: DeviceMesh | Mesh | Cluster) -> torch.device:
    """Where the model is, or will be if it is on the meta device: with the mesh, or where torch makes tensors."""
    tensors = (*model.parameters(), *model.buffers())
    found = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    if found is not None:
        return found
    if isinstance(mesh, DeviceMesh):
        return torch.device(mesh.device_type)
    if world_size() > 1 and (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        return accelerator
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default
