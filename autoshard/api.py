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
from autoshard.ir.cost_errors import errors_of_ours
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
@errors_of_ours()
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

    Under `torchrun` each process is one rank, and all ranks must call this with equal arguments. The model's parameters
    then become DTensors. Without `torchrun`, this process simulates all ranks, and the parameters stay ordinary
    tensors.

    Args:
        model: any module, with equal parameters on all ranks. If it is on the meta device, each rank allocates its
            shards when the first program is compiled. Then call `init_weights` or `load_weights` of the result.
        mesh: the ranks, as a torch `DeviceMesh`, an `autoshard.Mesh` or `cluster.mesh(...)`. For a `Cluster`, the
            planner chooses the axes, and `example_inputs` or `plan` is required.
        example_inputs: the positional arguments (a tuple) or keyword arguments (a dict) of one call, with global
            shapes. Its program is compiled at once. None: the first call compiles it. A call of other shapes is
            compiled when it is made.
        optimizer: a fresh torch optimizer over the model's parameters; the result is then a `TrainStep`. The update of
            SGD, Adam, AdamW and Muon is part of the program, and the planner shards gradients and state (ZeRO). Any
            other optimizer runs its own `step`. If its update is not elementwise, parameters stay whole. LBFGS and
            SparseAdam are refused; see docs/how_to/optimizers.md. `JoinedOptimizer` joins several optimizers.
        loss_fn: `loss_fn(outputs, *targets)` for a model that does not return its loss. The targets are the last
            positional arguments of a call. A call of `step.sharded` without targets returns the outputs.
        plan: a plan, or the path of a saved plan, for calls with gradients, which must have its input shapes. Nothing
            is searched for them. Other calls keep the plan's specs of parameters, and search the rest. If the plan is
            for another mesh, a search on this mesh starts from it, and its result is at least as fast.
        recipe: restricts the search to this `Recipe`; fields that are None are searched. On a mesh with an axis
            "pipeline", `schedule` and `virtual_stages` say how stages run. With `plan`, a field that differs from the
            plan's raises `PlanMismatchError`.
        constraints: specs that values must have, by name: {"*.weight": P("data", None)}. `P` is short for
            `autoshard.PartitionSpec`. A name is the qualified name of a parameter, "input:0", "output:0", or a glob.
        memory_budget: limit in bytes for the values on each device. None: the device's memory. On a GPU, the share of
            the CUDA context, NCCL, cuBLAS and the allocator's fragmentation is subtracted.
        precision: type of computation, "bf16", "f16" or "f32". The program casts wider parameters and inputs to this
            type. Parameters, gradients and optimizer state keep the model's types (master weights). Training in "f16"
            needs `optimizer`, and uses a loss scale (`Options(loss_scaling=)`). None, the default: the precision of
            `plan`, or the model's own types.
        micro_batches: with an optimizer, the number of equal parts of each global batch along dim 0. The parts run one
            after another, and share one update. Data parallelism splits each part over ranks. None: the number in
            `plan`, or the planner's choice for a `Cluster`. With `recipe.micro_batch`, it is the batch / (`micro_batch`
            x data-parallel ranks); otherwise 1.
        max_grad_norm: with an optimizer, gradients are clipped to this norm over all parameters. None: no clipping.
        strict: raise `NoShardingRuleError` for an operator without a sharding rule, and `NotAvailableError` for an
            optimizer whose update is not traced. By default, such an operator runs whole on every rank, and such an
            optimizer runs its own step.
        backend: the kernels. "auto": torch's kernels, and on a GPU a kernel of autoshard for cross-entropy. "inductor":
            Inductor compiles forward and backward; only under `torchrun`. "triton": fused Triton kernels of autoshard.
            On a CPU their references in torch run, unless TRITON_INTERPRET=1. "reference": attention and similar
            operators by their definitions in plain PyTorch, for tests.
        verify: prove each program equal to the traced program before it runs; `VerificationError` if the proof fails.
            Without the proof, a bug in autoshard or a wrong custom rule may change results silently.
        time_budget_s: most seconds that the search for a plan may take. A search usually ends earlier, after a fixed
            amount of work, so that a plan does not depend on the machine. If the time ends the search first,
            `plan.was_cut` is true. Ctrl-C ends a search too.
        cluster: with a mesh, the hardware to plan for, such as `autoshard.calibrate().cluster`. It has one device for
            each rank. None: this machine. Hosts without GPUs then count as joined by gigabit Ethernet.
        options: settings of calls, see `autoshard.Options`.

    Returns:
        A `TrainStep` with `optimizer`, otherwise a `ShardedModule`.

    Raises:
        DoesNotFitError: no plan fits in `memory_budget`.
        MeshError: the mesh does not match the processes or `cluster`, or a `Cluster` comes without `example_inputs`.
        TraceError: the model cannot be traced.
        AutoshardError: any other mistake. Each kind has its own subclass in `autoshard.errors`.

    Example:
        >>> import autoshard
        >>> sharded = autoshard.compile(nn.Linear(4, 2), autoshard.Mesh({"data": 2}))
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
@errors_of_ours()
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

    `compile(plan=)` runs the plan. The model may be on the meta device, and the hardware need not be there.

    Args:
        model, example_inputs, loss_fn, strict, time_budget_s: the same as for `compile`.
        target: the hardware. For a `Cluster`, the planner chooses the axes. With `cluster.mesh({"data": 8, "model":
            8})` they are given. An `autoshard.Mesh` or a torch `DeviceMesh` stands for this machine.
        optimizer: a name in torch.optim ("adamw"), or an optimizer over the model's parameters. The update of SGD,
            Adam, AdamW and Muon is planned with the step (ZeRO). Other optimizers only add the memory of their state.
            None: no update is planned, but with a `recipe` None means "adamw".
        max_grad_norm: with an optimizer, gradients are clipped to this norm. None: no clipping.
        global_batch: samples of a step over all ranks; `example_inputs` may then have any batch size. The planner cuts
            the step into micro-batches, and on a `Cluster` also searches axes and pipeline stages. None: a step is the
            batch of `example_inputs`.
        recipe: plan within this `Recipe`: `Recipe(tensor=8)` fixes the size of tensor parallelism, and the other fields
            are searched. A recipe with `micro_batch` fixes the number of micro-batches, because each data-parallel rank
            runs `micro_batch` samples at once.
        constraints: specs that values must have, by name: {"*.weight": P("data", None)}. With `global_batch` on a
            `Cluster`, fields of `Recipe` instead: {"tensor": 8, "pipeline": (1, 2, 4)}. A tuple lists the allowed
            values.
        memory_budget: limit in bytes for the values on each device. None: the default of `compile`.
        precision: type of computation, "bf16" (default), "f16" or "f32"; `compile` takes it from the plan. Another
            `runtime` also takes "f8". None: the model's own types. They are also used if the model has no parameters,
            or parameters of this type.
        previous: an earlier plan of this model, for another cluster, batch or budget, where the search starts. The
            result is at least as fast as the earlier plan would be here, if that plan fits. With `global_batch`, only
            the earlier plan's recipe is used. Otherwise its specs are used, and on the same mesh also its
            recomputation. A plan of another model raises `PlanMismatchError`.
        backend: the kernels that the prediction assumes, by the names of `compile`. "triton" needs a mesh of this
            machine's GPUs, and lists its kernels in `predicted.kernels`. "inductor" assumes that Inductor fuses the
            operators that autoshard's generated kernels fuse. Other backends are predicted operator by operator.
        runtime: "autoshard" plans for `compile`. "megatron", "fsdp2", "deepspeed" or a `Runtime` predicts the step of
            that framework, and the plan is only for reading. It predicts `recipe`, or the framework's fastest recipe
            for `global_batch`; one of the two is required, and `target` must be a `Cluster`.
        progress: show the best plan and the lower bound during the search, on standard error. None: only on a terminal.

    Returns:
        The plan, with `predicted` filled in. It prints as a table.

    Raises:
        DoesNotFitError: no plan fits in `memory_budget`.
        NotAvailableError: two arguments do not go together, or no recipe was priced within `time_budget_s`.
        AutoshardError: any other mistake. Each kind has its own subclass in `autoshard.errors`.
        KeyboardInterrupt: Ctrl-C, before any plan that fits was found, or Ctrl-C twice. Otherwise Ctrl-C returns the
            best plan so far, with `was_interrupted` set.

    Example:
        >>> import autoshard
        >>> inputs, total = (torch.zeros(8, 64),), lambda y: y.sum()
        >>> cluster = autoshard.Cluster("h100_sxm", nodes=1, devices_per_node=2)
        >>> found = autoshard.plan(nn.Linear(64, 64), cluster, example_inputs=inputs, loss_fn=total)
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
@errors_of_ours()
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
    """Predict the time and memory of a training step under a recipe in another framework; run nothing.

    The recipe fixes the specs of parameters, inputs and values between blocks; the other specs follow by propagation. A
    model is traced once for given shapes. Later calls with other recipes trace nothing.

    Args:
        model: any module, also on the meta device. A float32 model is priced in `precision`. The blocks are the entries
            of the model's module lists.
        cluster: the hardware, with exactly the devices that the recipe needs.
        recipe: the layout. None stands for 1 in sizes, 0 in `zero`, and "none" in `recompute` and `offload`. In `data`
            it stands for the devices that are left.
        example_inputs: positional (a tuple) or keyword (a dict) arguments. The first dim of every input is the batch;
            its size does not matter.
        loss_fn: `loss_fn(outputs, *targets)` for a model that does not return its loss. The targets are the last
            positional arguments of a call.
        runtime: "megatron", "fsdp2", "deepspeed", or a `Runtime` of your own. None: the defaults of `Runtime`, which
            fit most frameworks. "autoshard" raises `NotAvailableError`; use `autoshard.plan(recipe=)`.
        optimizer: "sgd", "sgd_momentum", "adam" or "adamw" (default). Its state takes memory and bandwidth.
        precision: type of matrix products inside blocks, "bf16" (default), "f16", "f8" or "f32". With "f8", all other
            values have 16 bits.
        global_batch: samples of a step, over all replicas; a multiple of `micro_batch` x `data`. None: one micro-batch
            for each replica.

    Returns:
        A plan on the recipe's mesh, with `predicted` filled in. It lists the values of one block of each kind. It is
        for reading and comparing; `compile` refuses it.

    Raises:
        RecipeError: the recipe does not fit the model or the cluster, or offloads more bytes than the hosts hold.
        NotAvailableError: `offload` is "optimizer" or "parameters", or an argument is invalid.
        TraceError: the model cannot be traced, or runs other operators for other batch sizes.
        UnknownHardwareError: the recipe offloads activations, and the device has no known host link.

    Example:
        >>> import autoshard
        >>> block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> inputs, total = (torch.zeros(1, 64),), lambda y: y.sum()
        >>> cluster, recipe = autoshard.Cluster("h100_sxm", nodes=1, devices_per_node=2), autoshard.Recipe(tensor=2)
        >>> plan = autoshard.price(block, cluster, recipe, example_inputs=inputs, loss_fn=total)
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
    """Prove again that every compiled program of a model computes the same as its traced program.

    Args:
        compiled: the result of `compile`.

    Returns:
        The report on the program that ran or was compiled last. It prints as text.

    Raises:
        VerificationError: a proof fails; the message names the node and its line in your source.
        TraceError: nothing is compiled yet, or the argument is not a result of `compile`.
    """
    return _driver().verify_compiled(compiled)


@seldom_collecting
@errors_of_ours()
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
    """Plan a call, lower the plan to the program of each rank, and prove it equal to the traced program; run nothing.

    The arguments have the same meaning as for `plan`, except `target`. The model may be on the meta device.

    Args:
        target: a cluster or mesh to plan for; or a `Plan`, which is proven without a search, in its own precision.

    Returns:
        The report of the proof: counts of proven nodes and values, and the assumptions. It prints as text.

    Raises:
        VerificationError: the proof fails.
        PlanMismatchError: the plan is for another model, other inputs or another optimizer.
        AutoshardError: any other mistake. Each kind has its own subclass in `autoshard.errors`.
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
