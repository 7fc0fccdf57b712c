"""What a user calls: `compile` runs a model on a mesh, `plan` only says how it would run.

Here the parts meet that must not know each other: tracing, planning (the package `passes`, imported when
first needed) and the runtime.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import tracing
from autoshard.cluster import candidate_meshes, local_cluster
from autoshard.errors import (
    AutoshardError,
    InvalidSpecError,
    MeshError,
    NotAvailableError,
    PlanMismatchError,
    TraceError,
)
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind, Program, describe
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.engine import Engine, SimulatorEngine
from autoshard.runtime.executable import CompiledProgram
from autoshard.runtime.launch import make_engine, share_among_processes, world_size
from autoshard.runtime.optimizer_state import named_optimizer, rebind_optimizer, state_bytes_per_parameter_byte
from autoshard.runtime.sharded_module import Request, ShardedModule
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import Cluster

if TYPE_CHECKING:
    from passes.verify_program import VerificationReport

_LOGGER = logging.getLogger(__name__)

ExampleInputs = Sequence[Any] | Mapping[str, Any]
LossFunction = Callable[..., torch.Tensor]


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
    micro_batches: int | None = None,
    max_grad_norm: float | None = None,
    strict: bool = False,
    backend: str = "auto",
    verify: bool = True,
    time_budget_s: float = 60.0,
) -> ShardedModule | TrainStep:
    """The model, made to run on all ranks of a mesh; it computes what it computes on one device.

    With as many processes as the mesh has ranks (`torchrun`), each is a rank, and the model's parameters
    become DTensors; without, all ranks are simulated in this process, and parameters stay as they are.

    Args:
        model: any module, in memory (not on meta), the same on all ranks.
        mesh: a torch `DeviceMesh`, an abstract `Mesh`, or a `Cluster`, for which the planner picks the axes
            (needs `example_inputs`).
        example_inputs: positional (a tuple) or keyword (a dict) arguments to plan for now; default: at the
            first call. Any later call of another kind is planned when it comes.
        optimizer: makes the result a `TrainStep`; over the model's parameters, and fresh.
        loss_fn: `loss_fn(outputs, *targets)` for a model that returns no loss; targets are the last
            positional arguments of a call.
        plan: a plan, or a path to a saved one, for calls that train: no search.
        constraints: glob of qualified names, "input:0" or "output:0" to the spec it must have. A constrained
            output is handed out as a DTensor, where there are processes.
        memory_budget: bytes per device; default: the device's own memory.
        precision: None: the model's own types. Nothing else is available yet.
        micro_batches: with an optimizer: cut each batch in so many parts; see `TrainStep`.
        max_grad_norm: with an optimizer: clip gradients to this norm.
        strict: refuse operators without a sharding rule, instead of running them on every rank.
        backend: "eager"; "inductor" (with processes); "triton" for fused kernels, which on a CPU stand back for their
            references unless Triton's interpreter is asked for (TRITON_INTERPRET=1); "auto" is "eager".
        verify: check that the program to run equals the traced one.
        time_budget_s: seconds that the search for a plan may take.

    Raises:
        AutoshardError: each kind of mistake has its own class; see `autoshard.errors`.

    Example:
        >>> sharded = compile(nn.Linear(4, 2), Mesh({"data": 2}))
        >>> sharded(torch.ones(6, 4)).shape
        torch.Size([6, 2])
    """
    _check_model(model)
    _check_precision(model, precision)
    _check_optimizer_arguments(optimizer, micro_batches=micro_batches, max_grad_norm=max_grad_norm)
    planner = _Planner(
        cluster=mesh if isinstance(mesh, Cluster) else None,
        fixed=_read_plan(plan),
        loss_fn=loss_fn,
        constraints=_checked_constraints(constraints),
        memory_budget=memory_budget,
        state_ratio=0.0 if optimizer is None else state_bytes_per_parameter_byte(optimizer),
        strict=strict,
        verify=verify,
        time_budget_s=time_budget_s,
    )
    if isinstance(mesh, Cluster):
        planner, mesh = _choose_mesh(model, mesh, planner, example_inputs)
    before = dict(model.named_parameters())
    device = _device_of(model)
    engine = make_engine(mesh, device, *_backend(backend, device))
    if backend == "inductor" and isinstance(engine, SimulatorEngine):
        raise NotAvailableError("backend='inductor' needs a process per rank; the simulator runs eagerly.")
    sharded = ShardedModule(model, engine, planner)
    if optimizer is not None:
        rebind_optimizer(optimizer, before, dict(sharded.named_parameters()))
    if example_inputs is not None:
        args, kwargs = _split_inputs(example_inputs)
        with torch.enable_grad():
            sharded.compile_for(*args, **kwargs)
    if optimizer is None:
        return sharded
    return TrainStep(sharded, optimizer, max_grad_norm=max_grad_norm, micro_batches=micro_batches or 1)


def plan(
    model: nn.Module,
    mesh_or_cluster: DeviceMesh | Mesh | Cluster,
    *,
    example_inputs: ExampleInputs,
    mesh: Mesh | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    global_batch: int | None = None,
    constraints: Mapping[str, PartitionSpec] | None = None,
    memory_budget: int | None = None,
    precision: str | None = None,
    recipe: Any = None,
    strict: bool = False,
    time_budget_s: float = 60.0,
) -> Plan:
    """How a model would run, and what it would cost; nothing is run, and the model may be on meta.

    Args:
        model, example_inputs, loss_fn, constraints, memory_budget, strict, time_budget_s: see `compile`.
        mesh_or_cluster: a mesh, priced for this machine; or a cluster, and the planner picks the axes.
        mesh: with a cluster: the axes, instead of the planner's choice.
        optimizer: whose state counts as memory: a name in torch.optim ("adamw"), or an optimizer.
        global_batch, recipe: not available yet.
        precision: None: the model's own types.

    Raises:
        AutoshardError: as `compile`.
    """
    _check_precision(model, precision)
    _refuse("global_batch", global_batch, "the batch is the one of example_inputs")
    _refuse("recipe", recipe, "recipes cannot be priced yet; use constraints")
    if isinstance(optimizer, str):
        optimizer = named_optimizer(optimizer)
    planner = _Planner(
        cluster=mesh_or_cluster if isinstance(mesh_or_cluster, Cluster) else None,
        loss_fn=loss_fn,
        constraints=_checked_constraints(constraints),
        memory_budget=memory_budget,
        state_ratio=0.0 if optimizer is None else state_bytes_per_parameter_byte(optimizer),
        strict=strict,
        time_budget_s=time_budget_s,
    )
    args, kwargs = _split_inputs(example_inputs)
    request = Request(model, args, kwargs, grad=any(parameter.requires_grad for parameter in model.parameters()))
    program = planner.trace(request)
    if isinstance(mesh_or_cluster, DeviceMesh):
        mesh_or_cluster = Mesh.from_device_mesh(mesh_or_cluster)
    if isinstance(mesh_or_cluster, Mesh):
        return planner.search(program, mesh_or_cluster, {})
    meshes = [mesh] if mesh is not None else candidate_meshes(mesh_or_cluster)
    return planner.search_meshes(program, meshes)


def verify(compiled: ShardedModule | TrainStep) -> VerificationReport:
    """Prove again that every program compiled so far computes what its traced program does.

    Args:
        compiled: what `compile` gave.

    Returns:
        The report on the program that ran last (or was compiled last).

    Raises:
        VerificationError: a program could not be shown equal; names the node, and the line it comes from.
        TraceError: nothing has been compiled yet.
    """
    from passes.verify_phases import verify_phases
    from passes.verify_program import verify_program

    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    last = sharded.program
    if last is None:
        raise TraceError("verify(...): nothing has been compiled yet; call the model once, or pass example_inputs=.")
    for program in sharded.programs:
        verify_phases(program.phased)
    lowered = [program.phased.lowered for program in sharded.programs]
    reports = [verify_program(item.traced, item) for item in lowered]
    return reports[lowered.index(last.phased.lowered)]


@dataclass(frozen=True, slots=True)
class _Planner:
    """The runtime's `Compiler`: traces a call, plans it and lowers it, with what the user asked of `compile`.

    Args:
        cluster: what to price for; None: this machine.
        fixed: the plan that calls which train must use.
        made: a plan that is made already, for calls of its program on its mesh.
        state_ratio: bytes of optimizer state per byte of parameters.
        others: see `compile`.
    """

    cluster: Cluster | None = None
    fixed: Plan | None = None
    made: Plan | None = None
    loss_fn: LossFunction | None = None
    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)
    memory_budget: int | None = None
    state_ratio: float = 0.0
    strict: bool = False
    verify: bool = True
    time_budget_s: float = 60.0

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """See `Compiler`. The first rank plans for all."""
        start = time.perf_counter()
        program = self._trace_together(request, engine)
        chosen = engine.share(lambda: self._plan_for(program, request, engine.mesh))
        phased = self._lower(program, chosen)
        engine.agree(lambda: {"compiled program": _digest(phased), "traced program": program.digest()})
        _LOGGER.info(
            "compiled %s for %s in %.1f s, predicted step time %.3g s",
            request.signature,
            engine.mesh,
            time.perf_counter() - start,
            chosen.predicted.step_time_s,
        )
        return CompiledProgram(phased, chosen, self._constrained_outputs(program))

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """See `Compiler`."""
        return tracing.check_guards(program, inputs, state)

    def trace(self, request: Request) -> Program:
        """The program of a call."""
        return tracing.trace(
            request.model,
            request.args,
            dict(request.kwargs),
            loss_fn=self.loss_fn,
            grad=request.grad,
            all_tangents=request.all_tangents,
        )

    def search(self, program: Program, mesh: Mesh, placed: Mapping[str, PartitionSpec]) -> Plan:
        """The plan of a program on a mesh, with parameters where they already are."""
        from passes.pipeline import PlanOptions, plan_program

        cluster = self.cluster_for(mesh)
        budget = self.memory_budget if self.memory_budget is not None else cluster.device.memory_bytes
        options = PlanOptions(
            constraints={**self._constraints_of(program), **placed},
            memory_budget=budget,
            time_budget_s=self.time_budget_s,
            state_bytes_per_parameter_byte=self.state_ratio,
            strict=self.strict,
        )
        return plan_program(program, mesh, cluster, options)

    def search_meshes(self, program: Program, meshes: Sequence[Mesh]) -> Plan:
        """The fastest plan on any of some meshes; the error of the last one if none has a plan."""
        part = replace(self, time_budget_s=self.time_budget_s / len(meshes))
        plans, failure = [], None
        for mesh in meshes:
            try:
                plans.append(part.search(program, mesh, {}))
            except AutoshardError as error:
                failure = error
        if not plans and failure is not None:
            raise failure
        return min(plans, key=lambda plan: plan.predicted.step_time_s)

    def cluster_for(self, mesh: Mesh) -> Cluster:
        """What to price for."""
        return self.cluster if self.cluster is not None else local_cluster(mesh)

    def _trace_together(self, request: Request, engine: Engine) -> Program:
        """Trace on each rank; if one cannot, all raise."""
        program: Program | None = None
        failure: AutoshardError | None = None
        try:
            program = self.trace(request)
        except AutoshardError as error:
            failure = error
        engine.agree(lambda: {"tracing": "succeeded" if failure is None else f"failed ({failure})"})
        if program is None:
            assert failure is not None
            raise failure
        return program

    def _plan_for(self, program: Program, request: Request, mesh: Mesh) -> Plan:
        if self.fixed is None:
            return self._made_for(program, request, mesh) or self.search(program, mesh, request.placed)
        _check_plan_fits(self.fixed, program, mesh, compare_inputs=request.grad)
        if request.grad and not request.all_tangents:
            return self.fixed
        return self.search(program, mesh, {name: item.spec for name, item in self.fixed.parameters.items()})

    def _made_for(self, program: Program, request: Request, mesh: Mesh) -> Plan | None:
        from passes.pipeline import prepare

        if self.made is None or self.made.mesh != mesh or request.placed:
            return None
        return self.made if self.made.program_digest == prepare(program).digest() else None

    def _lower(self, program: Program, chosen: Plan) -> PhasedProgram:
        from passes.pipeline import lower_program
        from passes.verify_phases import verify_phases
        from passes.verify_preparation import verify_preparation
        from passes.verify_program import verify_program

        phased = lower_program(program, chosen, self.cluster_for(chosen.mesh))
        if self.verify:
            prepared = phased.lowered.traced
            verify_preparation(program, prepared)
            _LOGGER.debug("%s", verify_program(prepared, phased.lowered))
            verify_phases(phased)
        return phased

    def _constraints_of(self, program: Program) -> dict[str, PartitionSpec]:
        """The constraints, without those on outputs that this program (an evaluation, say) does not have."""
        outputs = [slot.name for slot in program.outputs_of(OutputKind.OUTPUT)]
        return {
            pattern: spec
            for pattern, spec in self.constraints.items()
            if not pattern.startswith("output:") or any(fnmatchcase(name, pattern) for name in outputs)
        }

    def _constrained_outputs(self, program: Program) -> frozenset[str]:
        names = [slot.name for slot in program.outputs_of(OutputKind.OUTPUT)]
        return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in self.constraints))


def _choose_mesh(
    model: nn.Module, cluster: Cluster, planner: _Planner, example_inputs: ExampleInputs | None
) -> tuple[_Planner, Mesh]:
    """The mesh that suits a model on a cluster, and a planner that keeps the plan made for it."""
    if planner.fixed is not None:
        return planner, planner.fixed.mesh
    if example_inputs is None:
        raise MeshError(
            "compile(model, Cluster(...)) must plan to pick the axes of the mesh: pass example_inputs=, or a mesh."
        )
    processes = world_size()
    if 1 < processes != cluster.size:
        raise MeshError(f"{cluster} has {cluster.size} devices, but this run has {processes} processes.")
    args, kwargs = _split_inputs(example_inputs)
    request = Request(model, args, kwargs, grad=any(parameter.requires_grad for parameter in model.parameters()))
    chosen = share_among_processes(lambda: planner.search_meshes(planner.trace(request), candidate_meshes(cluster)))
    return replace(planner, made=chosen), chosen.mesh


def _check_plan_fits(plan: Plan, program: Program, mesh: Mesh, *, compare_inputs: bool) -> None:
    """Raise `PlanMismatchError` naming the first thing in which a program is not the one that a plan is for."""
    if plan.mesh != mesh:
        raise PlanMismatchError(f"The plan is for {plan.mesh}, the model runs on {mesh}. Plan again for this mesh.")
    nodes = program.nodes
    shapes = {slot.name: tuple(nodes[slot.node].meta["val"].shape) for slot in program.inputs_of(InputKind.PARAMETER)}
    planned = {name: tuple(item.shape) for name, item in plan.parameters.items()}
    for name in dict.fromkeys([*shapes, *planned]):
        if shapes.get(name) != planned.get(name):
            raise PlanMismatchError(
                f"The plan is of another model: parameter {name!r} has shape={planned.get(name)} in the plan and "
                f"shape={shapes.get(name)} in the model. Plan again for this model."
            )
    inputs = {slot.name: describe(nodes[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)}
    if compare_inputs and inputs != dict(plan.inputs):
        raise PlanMismatchError(
            f"The plan is for inputs {dict(plan.inputs)}, the call has {inputs}. Call with those shapes, or plan "
            "again for these (leave plan= out, and each kind of call is planned when it comes)."
        )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"model={model!r} is a {type(model).__name__}; pass a torch.nn.Module.")
    on_meta = next((name for name, item in model.named_parameters() if item.is_meta), None)
    if on_meta is not None:
        raise TraceError(
            f"Parameter {on_meta!r} is on the meta device and has no value to train. Materialise the model "
            "(model.to_empty, then initialise or load), or only plan it with autoshard.plan."
        )


_PRECISIONS = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


def _check_precision(model: nn.Module, precision: str | None) -> None:
    """Only the model's own type is available: mixed precision needs casts in the program."""
    if precision is None:
        return
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if precision not in _PRECISIONS or types - {_PRECISIONS[precision]}:
        raise NotAvailableError(
            f"precision={precision!r} is not available yet for a model with parameters of "
            f"{sorted(map(str, types))}: autoshard runs a model in its own types. Cast it with model.to(dtype), and "
            "leave precision out."
        )


def _check_optimizer_arguments(optimizer: Any, **arguments: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TraceError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass a torch.optim optimizer over "
            "model.parameters()."
        )
    for name, value in arguments.items():
        if value is not None and optimizer is None:
            raise NotAvailableError(f"{name}={value!r} belongs to a training step: pass optimizer= too.")
        if value is not None and value <= 0:
            raise NotAvailableError(f"{name}={value!r} must be positive.")


def _checked_constraints(constraints: Mapping[str, PartitionSpec] | None) -> dict[str, PartitionSpec]:
    for pattern, spec in (constraints or {}).items():
        if not isinstance(spec, PartitionSpec):
            raise InvalidSpecError(
                f"constraints[{pattern!r}]={spec!r} is a {type(spec).__name__}; write it as P('data', None)."
            )
    return dict(constraints or {})


def _refuse(name: str, value: Any, why: str) -> None:
    if value is not None:
        raise NotAvailableError(f"{name}={value!r} is not available yet: {why}.")


_Wrap = Callable[[fx.GraphModule], Callable[..., Any]]
_Rewrite = Callable[[fx.GraphModule], fx.GraphModule]


def _backend(name: str, device: torch.device) -> tuple[_Wrap | None, _Rewrite | None]:
    """What is applied to each rank's graph before it runs: by processes, and in the simulator."""
    if name in ("auto", "eager"):
        return None, None
    if name == "inductor":
        return lambda graph: torch.compile(graph, backend="inductor", fullgraph=True, dynamic=False), None
    if name != "triton":
        raise NotAvailableError(f"backend={name!r} is unknown; use 'auto', 'eager', 'inductor' or 'triton'.")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return None, None
    from passes.fuse_kernels import FuseKernels

    return FuseKernels(), FuseKernels()


def _read_plan(plan: Plan | str | Path | None) -> Plan | None:
    return Plan.load(plan) if isinstance(plan, (str, Path)) else plan


def _split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(sorted(example_inputs.items()))
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tuple of positional arguments, "
        "(tokens, targets), or a dict of keyword arguments."
    )


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(iter([*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _digest(phased: PhasedProgram) -> str:
    return hashlib.sha256(f"{phased.forward.graph}\n{phased.backward.graph}".encode()).hexdigest()[:16]
