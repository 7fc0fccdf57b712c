"""The public functions: `compile` runs a model on a mesh, `plan` predicts how the model would run.

Each function hands its arguments to `passes.driver`, which is imported at the first call of a public function.
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
from autoshard.call import Call, LossFunction, Options, as_int
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
    """Make a model run on all ranks of a mesh, with the results of one device.

    Under `torchrun` each process is one rank, and the model's parameters become DTensors. Without `torchrun`, this
    process simulates all ranks, and the parameters stay ordinary tensors.

    Args:
        model: any module, the same on all ranks. A module on the meta device takes memory for each rank's shards only,
            once the first program is compiled; then call `init_weights`, or load weights.
        mesh: a torch `DeviceMesh`, an abstract `Mesh`, `cluster.mesh(...)`, or a `Cluster`. With a `Cluster` pass
            `example_inputs` too: the planner then chooses the axes.
        example_inputs: positional arguments (a tuple) or keyword arguments (a dict) to plan for now. Default: plan at
            the first call. A later call of other shapes is planned when the call comes.
        optimizer: makes the result a `TrainStep`. Pass a fresh optimizer over the model's parameters. The program
            contains the update of SGD, Adam, AdamW and Muon, and the planner places gradients and state (ZeRO).
            Other optimizers run their own step, on whole parameters if it is not elementwise. `JoinedOptimizer` makes
            one optimizer of several; see docs/how_to/optimizers.md.
        loss_fn: `loss_fn(outputs, *targets)` for a model that returns no loss; targets are the last
            positional arguments of a call.
        plan: a plan for calls that train, or the path of a saved plan; compile then searches nothing. If the plan is
            for another mesh, a search starts from this plan. The found plan is at least as fast as the given plan would
            be on this mesh.
        recipe: search within this `Recipe`; fields that are None are searched. On a mesh with an axis "pipeline",
            `schedule` and `virtual_stages` say how stages run. A `plan` contains these fields already.
        constraints: specs that values must have, by name: {"*.weight": P("data", None)}. A name is a qualified name,
            "input:0", "output:0", or a glob.
        memory_budget: limit in bytes for the values on each device. None: the device's memory; on a GPU, the share of
            the CUDA context, NCCL, cuBLAS and the allocator's fragmentation is subtracted
            (`cost_models.memory.room_bytes`).
        precision: type of computation, "bf16", "f16" or "f32". The program casts wider parameters and inputs to this
            type. Parameters, gradients and optimizer state keep the model's types (master weights). Training in "f16"
            needs `optimizer`, and scales the loss (`Options(loss_scaling=)`). None: the model's own types, or the
            precision of `plan`.
        micro_batches: with an optimizer: number of equal parts of each batch, which run one after another and share one
            update. None: the number in `plan`, or the batch of `example_inputs` divided by `recipe.micro_batch`.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        strict: raise an error for an operator without a sharding rule, and for an optimizer whose update is not traced.
            By default, such an operator runs whole on every rank, and such an optimizer runs its own step.
        backend: "auto": torch's kernel for each operator; on a GPU cross-entropy runs on our kernel, because torch has
            no fused one. "inductor" (with processes): Inductor compiles forward and backward. "triton": our fused
            kernels, hand-written and generated; on a CPU their references run, unless TRITON_INTERPRET=1.
            "reference": attention and other semantic operators by their definitions in plain PyTorch, for tests.
        verify: prove that the program to run equals the traced program.
        time_budget_s: most seconds that the search for a plan may take. A search usually ends after a fixed amount of
            work, so that a plan does not depend on the machine. If the time ends the search first, `plan.was_cut` is
            true. Ctrl-C ends a search too.
        cluster: with a mesh: the hardware to plan for, such as the `cluster` that `calibrate` measured. Default: this
            machine, where gigabit Ethernet is assumed between hosts of `torchrun`.
        options: settings of calls, see `Options`.

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
        micro_batches=as_int(micro_batches),
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
    """Find the fastest way to run a model on some hardware, and predict its time and memory; run nothing.

    The model may be on the meta device. `compile(plan=)` runs the plan.

    Args:
        model, example_inputs, loss_fn, strict, time_budget_s: the same as for `compile`.
        target: a `Cluster`, and the planner chooses the axes; or `cluster.mesh({"data": 8, "model": 8})`. An
            `autoshard.Mesh` is priced for this machine.
        optimizer: a name in torch.optim ("adamw"), or an optimizer over the model's parameters. The update of SGD,
            Adam, AdamW and Muon is planned with the step (ZeRO). Other optimizers only add the memory of their state.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        global_batch: sequences of a step over all ranks. The planner cuts a step into micro-batches; on a cluster the
            planner also searches axes and stages. The batch of `example_inputs` may then have any size. None: a
            step is the batch of `example_inputs`.
        recipe: plan within this `Recipe`: `Recipe(tensor=8)` fixes the tensor axis and leaves the other fields to the
            search. A recipe with `micro_batch` cuts `global_batch` into micro-batches of this size on each replica.
        constraints: specs that values must have, by name: {"*.weight": P("data", None)}. With `global_batch` on a
            cluster, also values of fields of `Recipe`: {"tensor": 8, "pipeline": (1, 2, 4), "recompute": "none"}.
        memory_budget: limit in bytes for the values on each device, also under a `recipe`. None: the default of
            `compile`.
        precision: type of computation, "bf16", "f16" or "f32", which `compile` takes from the plan. If the parameters
            already have this type, or the model has no parameters, the model computes in its own types.
        previous: an earlier plan of this model, for another cluster, batch or budget. The search starts from this plan.
            The result is at least as fast as the earlier plan here, if the earlier plan fits. With `global_batch`, the
            search starts at the plan's recipe. If this recipe does not fit, the search starts at the best recipe that
            splits a micro-batch in the same way. Without `global_batch`, the search starts at the plan's specs; on the
            same mesh, also at its recomputation.
        backend: the kernels that the prediction assumes, by the names of `compile`. "triton": our kernels, listed in
            `predicted.kernels`; needs a mesh of this machine's GPUs. "inductor": predicted as if Inductor fused the
            operators that our generated kernels fuse. Other backends: predicted operator by operator.
        runtime: the framework that runs the plan. "autoshard": `compile` runs it. "megatron", "fsdp2", "deepspeed" or a
            `Runtime`: the price of a recipe in this framework, or of the framework's fastest recipe for
            `global_batch`; see `price`. Another runtime needs backend="auto".
        progress: show the best plan and the bound of the search on standard error. None: show both on a terminal.

    Raises:
        AutoshardError: each kind of mistake has its own class; see `autoshard.errors`.
        KeyboardInterrupt: by Ctrl-C, if no plan that fits was found yet. Otherwise Ctrl-C returns the best plan
            (`was_interrupted`) with its proven bound. A second Ctrl-C always raises.

    Example:
        >>> from autoshard import Cluster
        >>> inputs, total = (torch.zeros(8, 64),), lambda y: y.sum()
        >>> found = plan(nn.Linear(64, 64), Cluster("h100_sxm", 1, 2), example_inputs=inputs, loss_fn=total)
        >>> found.mesh.size
        2
    """
    target, cluster = checked_target(target)
    call = Call(
        model=model,
        target=target,
        example_inputs=checked_inputs(example_inputs),
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        loss_fn=loss_fn,
        global_batch=as_int(global_batch),
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
    """Price a training step under a recipe in another framework; run nothing.

    The model is traced once for given shapes; later calls with other recipes trace nothing. The recipe fixes the specs
    of parameters, inputs and values between blocks, and the other specs follow by propagation.

    Args:
        model: any module, also on the meta device. A float32 model is priced in `precision`, as in `plan`. The blocks
            are the entries of the model's module lists.
        cluster: the hardware, with the number of devices that the recipe needs.
        recipe: the expert's layout. A field that is None has its plain value: sizes 1, `zero` 0, no recomputation, no
            offload; `data` is the number of devices left.
        example_inputs: positional (a tuple) or keyword (a dict) arguments. The first dim of every input is the batch;
            its size does not matter.
        loss_fn: `loss_fn(outputs, *targets)` for a model that returns no loss; targets are the last arguments of a
            call.
        runtime: the framework: "megatron", "fsdp2", "deepspeed", or a `Runtime` of your own. None: the defaults of
            `Runtime`, which fit most frameworks. `autoshard.plan(recipe=)` prices our own runtime.
        optimizer: "sgd", "sgd_momentum", "adam" or "adamw": its state takes memory and bandwidth.
        precision: type of matrix products inside blocks: "bf16", "f16", "f8" or "f32".
        global_batch: sequences of a step, over all replicas; None: one micro-batch for each replica.

    Returns:
        A plan on the recipe's mesh, with `predicted` filled in. The plan lists the values of one block of each kind.
        The plan is for reading and comparing; `compile` does not run it.

    Raises:
        RecipeError: the recipe does not fit the model or the cluster, or offloads more bytes than the hosts hold.
        NotAvailableError: the recipe offloads optimizer state or parameters.
        UnknownHardwareError: the recipe offloads activations, and the device's data have no host link.
        TraceError: the model cannot be traced, or runs other operators for other batch sizes.

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
        global_batch=as_int(global_batch),
    )


@seldom_collecting
def verify(compiled: ShardedModule | TrainStep) -> VerificationReport:
    """Prove again that each compiled program computes the same as its traced program.

    Args:
        compiled: the result of `compile`.

    Returns:
        The report on one program: the program that ran or was compiled last.

    Raises:
        VerificationError: the proof fails; the message names the node and its line in your source.
        TraceError: nothing is compiled yet, or the argument is not a result of `compile`.
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
    """Plan a call, lower the plan to the program of each rank, and prove the program; run nothing.

    The arguments have the same meaning as for `plan`, except `target`. The model may be on the meta device.

    Args:
        target: a cluster or a mesh to plan for; or a `Plan`, which is proven without a search, in its own precision.

    Raises:
        VerificationError: the proof fails.
        PlanMismatchError: the plan is for another model, other inputs or another optimizer.
        AutoshardError: each other kind of mistake has its own class; see `autoshard.errors`.
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
    """Import the driver at the first call, because `passes` imports autoshard. Only this function imports `passes`."""
    from passes.driver import entry

    return entry
