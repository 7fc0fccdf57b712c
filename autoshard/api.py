"""The public functions: `compile` runs a model on a mesh, `plan` says how it would run.

Each checks its arguments and hands them, as a `Call`, to `passes.driver`, which is imported when it is first needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.arguments import (
    ExampleInputs,
    checked_budget,
    checked_constraints,
    checked_hardware,
    checked_inputs,
    checked_plan,
    checked_target,
)
from autoshard.call import Call, LossFunction, Options
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.garbage import seldom_collecting
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.runtime import AUTOSHARD, Runtime, runtime_named
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.verification_report import VerificationReport
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster


@seldom_collecting
def compile(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | ClusterMesh | Cluster,
    *,
    example_inputs: ExampleInputs | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | str | Path | None = None,
    recipe: Recipe | None = None,
    constraints: Mapping[str, PartitionSpec] | None = None,
    memory_budget: int | None = None,
    precision: str | None = None,
    micro_batches: int | None = None,
    max_grad_norm: float | None = None,
    strict: bool = False,
    backend: str = "auto",
    verify: bool = True,
    time_budget_s: float = 60.0,
    cluster: Cluster | None = None,
    options: Options = Options(),  # noqa: B008  (frozen)
) -> ShardedModule | TrainStep:
    """The model, made to run on all ranks of a mesh; it computes what it computes on one device.

    With as many processes as the mesh has ranks (`torchrun`), each is a rank, and the model's parameters
    become DTensors; without, all ranks are simulated in this process, and parameters stay as they are.

    Args:
        model: any module, the same on all ranks. Where it is on the meta device (all of it, or a part), each rank gets
            memory for its shards alone when the first program is compiled; then call `init_weights`, or load weights.
        mesh: a torch `DeviceMesh`, an abstract `Mesh`, `cluster.mesh(...)`, or a `Cluster`, for which the planner picks
            the axes (needs `example_inputs`).
        example_inputs: positional (a tuple) or keyword (a dict) arguments to plan for now; default: at the
            first call. Any later call of another kind is planned when it comes.
        optimizer: makes the result a `TrainStep`; over the model's parameters, and fresh. The update of SGD, Adam
            and AdamW is part of the program: where gradients and state lie is the planner's choice (ZeRO). Others
            take their own step, on parameters and gradients as they lie.
        loss_fn: `loss_fn(outputs, *targets)` for a model that returns no loss; targets are the last
            positional arguments of a call.
        plan: a plan, or a path to a saved one, for calls that train: no search. If it is for another mesh, the search
            starts from it, and finds nothing that is slower than it would be here.
        recipe: search within this `Recipe`; fields that are None are searched. Its `schedule` and `virtual_stages` say
            how stages run on a mesh with an axis "pipeline"; see docs/pipelines.md. A plan says these itself.
        constraints: glob of qualified names, "input:0" or "output:0" to the spec it must have.
        memory_budget: bytes of values per device. None: the device's memory; of a GPU, less what the CUDA context, NCCL
            and cuBLAS take, and what the allocator loses to fragmentation (`cost_models.memory.room_bytes`).
        precision: "bf16", "f16" (without gradients) or "f32": compute in this type where parameters and inputs are
            wider. Parameters, gradients and optimizer state keep the model's types (master weights); see
            docs/precision.md. None: the model's own types, or the precision of `plan`.
        micro_batches: with an optimizer: cut each batch in so many parts, see `TrainStep`; None: as `plan` says, or
            `recipe.micro_batch` of the batch of `example_inputs`.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        strict: refuse operators without a sharding rule, instead of running them on every rank, and optimizers whose
            update is not traced.
        backend: "auto": every operator on the kernel that torch has for the device, cross-entropy on a GPU on ours, as
            torch has none that is fused; "reference": semantic operators
            (attention) by their definitions in plain PyTorch, for tests; "triton": fused kernels, hand-written and
            generated, which on a CPU stand back for their references unless Triton's interpreter is asked for
            (TRITON_INTERPRET=1); "inductor" (with processes): Inductor compiles forward and backward.
        verify: check that the program to run equals the traced one.
        time_budget_s: seconds that the search for a plan may take. It ends by itself, after counted work, so that a
            plan does not hang on the machine; where time ends it, the plan says so (`was_cut`). Ctrl-C ends it too.
        options: how calls run, see `Options`.
        cluster: with a mesh: the hardware that plans are for, such as what `calibrate` measured; default: this machine,
            and other hosts of `torchrun` as gigabit Ethernet joins them.

    Raises:
        AutoshardError: each kind of mistake has its own class; see `autoshard.errors`.

    Example:
        >>> sharded = compile(nn.Linear(4, 2), Mesh({"data": 2}))
        >>> sharded(torch.ones(6, 4)).shape
        torch.Size([6, 2])
    """
    target, cluster = checked_hardware(cluster, mesh)
    call = Call(
        model=model,
        target=target,
        example_inputs=example_inputs,
        optimizer=optimizer,
        loss_fn=loss_fn,
        fixed=checked_plan(plan),
        recipe=recipe,
        constraints=checked_constraints(constraints),
        memory_budget=checked_budget(memory_budget),
        precision=precision,
        micro_batches=micro_batches,
        max_grad_norm=max_grad_norm,
        strict=strict,
        backend=backend,
        verify=verify,
        time_budget_s=time_budget_s,
        cluster=cluster,
        options=options,
    )
    return _driver().compile_model(call)


@seldom_collecting
def plan(
    model: nn.Module,
    target: DeviceMesh | Mesh | ClusterMesh | Cluster,
    *,
    example_inputs: ExampleInputs,
    optimizer: str | torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    loss_fn: LossFunction | None = None,
    global_batch: int | None = None,
    recipe: Recipe | None = None,
    constraints: Mapping[str, Any] | None = None,
    memory_budget: int | None = None,
    precision: str | None = "bf16",
    previous: Plan | None = None,
    backend: str = "auto",
    strict: bool = False,
    runtime: str | Runtime = AUTOSHARD,
    time_budget_s: float = 60.0,
    progress: bool | None = None,
) -> Plan:
    """How a model would run, and what it would cost; nothing is run, and the model may be on meta.

    Args:
        model, example_inputs, loss_fn, strict, time_budget_s: see `compile`.
        constraints: see `compile`; on a cluster with `global_batch`, fields of `Recipe` to the value that they must
            have, or to several: {"tensor": 8, "pipeline": (1, 2, 4), "recompute": "none"}.
        memory_budget: see `compile`; of a `recipe`, what it must fit in.
        target: a cluster, and the planner picks the axes; or a mesh, `cluster.mesh({"data": 8, "model": 8})`. An
            `autoshard.Mesh` is priced for this machine.
        optimizer: a name in torch.optim ("adamw"), or an optimizer over the model's parameters. The update of SGD,
            Adam and AdamW is planned with the step (ZeRO); of others only the state counts, as memory.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        global_batch: sequences of a step, cut into micro-batches as the plan says. The batch of `example_inputs` may
            then be of any size; None: it is that batch. On a cluster meshes, stages and micro-batches are searched for
            the step, see docs/plans.md.
        recipe: plan within this `Recipe`; fields that are None are searched. The fields that are given restrict the
            axes of the mesh: "data", "context", "model" (tensor), "pipeline", "replica" (with `zero_group`), "expert".
            `compile(plan=)` runs the plan.
            `global_batch` is cut into micro-batches of `micro_batch` sequences on each replica. See docs/plans.md.
        runtime: what executes a recipe. "autoshard": `compile` does. "megatron", "fsdp2", "deepspeed", or a `Runtime`:
            the plan is a price of the recipe there, or of the fastest one for `global_batch`; see `price`.
        previous: a plan of this model for another cluster, batch or budget, where the search begins: what is found is
            no slower than it would be here, where it fits. With `global_batch`, one of a recipe, or else the best that
            cuts a micro-batch as it does; without, one of specs: for another mesh, without what it recomputes.
        backend: the kernels that the prediction counts; see `compile`. "triton": our kernels, listed in
            `predicted.kernels`; on a mesh of this machine, where it has a GPU. "inductor": predicted as if Inductor
            fused what our generated kernels fuse. Other backends: predicted operator by operator. With another
            `runtime`, "auto" alone.
        precision: see `compile`, which takes it from the plan. A model whose parameters are in this type already, or
            that has none, computes in its own types.
        progress: show how the search goes, its best plan and its bound, on standard error; None: if that is a terminal.

    Raises:
        AutoshardError: as `compile`.
        KeyboardInterrupt: by Ctrl-C, if no plan that fits was found yet. Else the plan is the best until then
            (`was_interrupted`), with the bound proven by then. A second Ctrl-C always raises.
    """
    target, cluster = checked_target(target)
    call = Call(
        model=model,
        target=target,
        example_inputs=checked_inputs(example_inputs),
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        loss_fn=loss_fn,
        global_batch=global_batch,
        recipe=recipe,
        constraints=constraints,
        memory_budget=checked_budget(memory_budget),
        precision=precision,
        previous=previous,
        backend=backend,
        strict=strict,
        runtime=runtime_named(runtime),
        time_budget_s=time_budget_s,
        cluster=cluster,
        progress=progress,
    )
    return _driver().plan_model(call)


@seldom_collecting
def price(
    model: nn.Module,
    cluster: Cluster,
    recipe: Recipe,
    *,
    example_inputs: ExampleInputs,
    loss_fn: LossFunction | None = None,
    runtime: str | Runtime | None = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
    global_batch: int | None = None,
) -> Plan:
    """Price a training step under a recipe, and say where everything lies; nothing is run.

    The model is traced once for given shapes, blocks that are alike once; further recipes are arithmetic.
    The recipe fixes specs of parameters, inputs and what passes between blocks; all others follow by propagation.

    Args:
        model: any module; it may be on meta. One in float32 is priced in the dtype of its products, as `plan` plans
            it. Its blocks are the entries of its module lists.
        cluster: as many devices as the recipe needs.
        recipe: the expert's plan. Fields that are None are plain: sizes 1, `zero` 0, nothing computed again or
            offloaded; `data` is the devices that are left.
        example_inputs: positional (a tuple) or keyword (a dict) arguments. The first dim of every input is the batch;
            how large it is does not matter.
        loss_fn: for a model that returns no loss, see `compile`.
        runtime: what executes it: "megatron", "fsdp2", "deepspeed", or a `Runtime` made by hand; None: the defaults
            of `Runtime`, what most frameworks do. Our own runtime is priced by `autoshard.plan(recipe=)`.
        optimizer: "sgd", "sgd_momentum", "adam" or "adamw": whose state takes memory and bandwidth.
        precision: of matrix products inside blocks: "bf16", "f16", "f8" or "f32".
        global_batch: sequences of a step, over all replicas; None: one micro-batch for each.

    Returns:
        A plan on the recipe's mesh, with `predicted` filled in. It says where the program's values lie, for one block
        of each kind; it is for reading and comparing, not for `compile`.

    Raises:
        RecipeError: the recipe does not fit the model or the cluster, or offloads more than its hosts hold.
        NotAvailableError: the recipe offloads optimizer state or parameters.
        UnknownHardwareError: it offloads activations, and the device's data have no host link.
        TraceError: the model cannot be traced, or does other things for three sequences than for two, and for two than
            for one.

    Example:
        >>> from autoshard import Cluster
        >>> block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> inputs, total = (torch.zeros(1, 64),), lambda y: y.sum()
        >>> plan = price(block, Cluster("h100_sxm", 1, 2), Recipe(tensor=2), example_inputs=inputs, loss_fn=total)
        >>> plan.parameters["0.weight"].spec
        P('tensor')
    """
    return _driver().price(
        model,
        cluster,
        recipe,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        runtime=runtime,
        optimizer=optimizer,
        precision=precision,
        global_batch=global_batch,
    )


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
    return _driver().verify_compiled(compiled)


@seldom_collecting
def prove(
    model: nn.Module,
    target: DeviceMesh | Mesh | ClusterMesh | Cluster | Plan,
    *,
    example_inputs: ExampleInputs,
    optimizer: str | torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    loss_fn: LossFunction | None = None,
    memory_budget: int | None = None,
    precision: str | None = "bf16",
    time_budget_s: float = 60.0,
) -> VerificationReport:
    """Plan a call, lower it to the program of each rank, and prove that; nothing is run, and the model may be on meta.

    Args:
        target: where to plan for, as `plan` takes it; or a plan, which is proven as it is, in its own precision.
        others: see `plan`.

    Raises:
        VerificationError: it could not be shown that the program computes what the model does.
        AutoshardError: as `plan`, and `PlanMismatchError` for a plan of another model, inputs or optimizer.
    """
    place, cluster = checked_target(target.mesh if isinstance(target, Plan) else target)
    call = Call(
        model=model,
        target=place,
        example_inputs=checked_inputs(example_inputs),
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        loss_fn=loss_fn,
        fixed=checked_plan(target) if isinstance(target, Plan) else None,
        memory_budget=checked_budget(memory_budget),
        precision=precision,
        time_budget_s=time_budget_s,
        cluster=cluster,
    )
    return _driver().prove_model(call)


def _driver() -> ModuleType:
    """The one place where autoshard reaches passes, which import autoshard."""
    from passes.driver import entry

    return entry
