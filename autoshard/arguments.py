"""What users pass to `compile`, `plan` and `prove`, checked where it comes in.

What cannot be meant is refused by name, before anything is traced or searched.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from autoshard.errors import (
    InvalidSpecError,
    MeshError,
    NotAvailableError,
    PlanMismatchError,
    RecipeError,
    TraceError,
)
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.loss import Output, loss_among
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.update import check_norm
from cost_models.hardware import Cluster

ExampleInputs = Sequence[Any] | Mapping[str, Any]

BACKENDS = ("auto", "inductor", "reference", "triton")


def check_model(model: Any, compiled: type | tuple[type, ...] = ()) -> None:
    """Raise `TraceError` for what is no module, or for modules that are compiled, distributed or scripted already.

    Args:
        model: the argument.
        compiled: the types of compiled modules.
    """
    if isinstance(model, compiled):
        raise TraceError(f"model is a {type(model).__name__}, compiled already; pass the module it was made of.")
    if not isinstance(model, nn.Module):
        raise TraceError(f"model={model!r} is a {type(model).__name__}; pass a torch.nn.Module.")
    for name, module in model.named_modules():
        title = f"model.{name}" if name else "model"
        if isinstance(module, compiled):
            raise TraceError(
                f"{title} is a {type(module).__name__}, compiled already, and a program cannot call another one. "
                "Compile the whole model alone, with the module that the part was made of."
            )
        if isinstance(module, _DISTRIBUTED):
            raise TraceError(
                f"{title} is a {type(module).__name__}, which adds up gradients of the ranks and lays out parameters "
                "by itself. compile does both: pass the module as it was before DistributedDataParallel or fully_shard."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{title} is a {type(module).__name__}, compiled by torch.jit, and its members cannot be replaced. "
                "Pass the module as it was before torch.jit.script or torch.jit.trace."
            )


_DISTRIBUTED = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)


def check_backend(name: Any) -> None:
    """Raise `NotAvailableError` for a backend that does not exist."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise NotAvailableError(f"backend={name!r} is unknown; use 'auto', 'inductor', 'reference' or 'triton'.")


def check_flags(**flags: Any) -> None:
    """Raise `NotAvailableError` for a switch that is neither on nor off; "no" would be taken for on."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise NotAvailableError(f"{name}={value!r} is a {type(value).__name__}; pass True or False.")


def check_loss(loss_fn: Any) -> None:
    """Raise `TraceError` for a loss that cannot be called."""
    if loss_fn is not None and not callable(loss_fn):
        raise TraceError(f"loss_fn={loss_fn!r} is a {type(loss_fn).__name__}; pass a function (outputs, *targets).")


def checked_plan(plan: Any) -> Plan | None:
    """A plan that `compile` runs, given itself or as the path of a saved one; None for none.

    Raises:
        PlanMismatchError: it is no plan, or a price: that of one block of each kind, of one sequence.
    """
    if plan is None:
        return None
    if not isinstance(plan, (Plan, str, Path)):
        raise PlanMismatchError(f"plan={plan!r} is a {type(plan).__name__}; pass a Plan, or the path of a saved one.")
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if found.runs:
        return found
    words = "" if found.recipe is None else f" ({found.recipe.words})"
    raise PlanMismatchError(
        f"The plan prices a recipe{words} under runtime={found.runtime!r}, and is for reading and comparing. "
        "Plan with autoshard.plan(model, cluster, recipe=...): that plan runs. Or leave plan= out: compile then "
        "searches the specs itself."
    )


def check_previous(previous: Any, model: nn.Module, *, of_recipes: bool, is_priced: bool) -> None:
    """Raise `NotAvailableError` for what a search, over recipes or specs, cannot begin with.

    Args:
        previous: the plan; None for none.
        model: what is planned; `PlanMismatchError` where a plan of specs is of another one.
        of_recipes: whether recipes are searched.
        is_priced: whether nothing is searched, as the recipe is given.
    """
    if previous is None:
        return
    if is_priced:
        raise NotAvailableError("previous= is where a search begins, and recipe= is priced as it is: leave one out.")
    if not isinstance(previous, Plan):
        raise NotAvailableError(f"previous= is a {type(previous).__name__}; pass a plan that autoshard.plan gave.")
    if of_recipes and previous.recipe is None:
        raise NotAvailableError("previous= has no recipe; with global_batch=, pass a plan that was made with it.")
    if not of_recipes and not previous.runs:
        raise NotAvailableError("previous= is of a recipe; pass global_batch= to search those, or a plan of specs.")
    if not of_recipes:
        _check_parameters(previous, model)


def _check_parameters(plan: Plan, model: nn.Module) -> None:
    shapes = {name: tuple(item.shape) for name, item in model.named_parameters(remove_duplicate=False)}
    for name, item in plan.parameters.items():
        if shapes.get(name) != tuple(item.shape):
            raise PlanMismatchError(
                f"previous= is of another model: parameter {name!r} has shape={tuple(item.shape)} in it and "
                f"shape={shapes.get(name)} in the model."
            )


def check_recipe(recipe: Any) -> None:
    """Raise `RecipeError` for what is no recipe."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe={recipe!r} is a {type(recipe).__name__}; pass an autoshard.Recipe.")


def check_runtime(recipe: Recipe | None, runtime: str | None, global_batch: int | None) -> None:
    """Raise `NotAvailableError` for another framework's runtime without a recipe that it executes."""
    if runtime is not None and recipe is None and global_batch is None:
        raise NotAvailableError(
            f"runtime={runtime!r} is what executes a recipe. Pass recipe=Recipe(...), or global_batch= to search one, "
            "too; or leave runtime= out."
        )


def checked_budget(memory_budget: Any) -> int | None:
    """Bytes of memory per device; `NotAvailableError` for what is no whole number of them."""
    if memory_budget is None:
        return None
    if not (_is_number(memory_budget) and 0 < memory_budget < math.inf):
        raise NotAvailableError(f"memory_budget={memory_budget!r} must be a number of bytes above 0.")
    if memory_budget != int(memory_budget):
        raise NotAvailableError(
            f"memory_budget={memory_budget!r} is no whole number of bytes. Of 80 GB write 80 * 10**9, of a part of the "
            "device's memory int(0.8 * cluster.device.memory_bytes)."
        )
    return int(memory_budget)


def check_limits(*, time_budget_s: Any, global_batch: Any = None) -> None:
    """Raise `NotAvailableError` for limits of the search that no plan can keep."""
    if not (_is_number(time_budget_s) and time_budget_s >= 0):
        raise NotAvailableError(f"time_budget_s={time_budget_s!r} must be a number of seconds, at least 0.")
    if global_batch is not None and not (_is_whole(global_batch) and global_batch >= 1):
        raise NotAvailableError(f"global_batch={global_batch!r} must be a whole number of sequences, at least 1.")


def check_agreement(*, check: Any, timeout_s: Any) -> None:
    """Raise `NotAvailableError` for a time, or a word for when ranks compare their calls, that is none."""
    if check not in _CHECKS:
        raise NotAvailableError(f"check={check!r} must be one of {', '.join(map(repr, _CHECKS))}.")
    if not (_is_number(timeout_s) and timeout_s > 0):
        raise NotAvailableError(f"timeout_s={timeout_s!r} must be a number of seconds, above 0.")


_CHECKS = ("always", "first", "off")


def checked_outputs(outputs: Any, *, gather_outputs: bool) -> Outputs:
    """What calls hand out; `NotAvailableError` for a word that says none of it."""
    if outputs not in ("all", "loss"):
        raise NotAvailableError(
            f"outputs={outputs!r} must be 'all' or 'loss'; pass gather_outputs=True for whole ones."
        )
    if outputs == "loss":
        return Outputs.LOSS
    return Outputs.WHOLE if gather_outputs else Outputs.AS_PLANNED


def check_programs(*, dynamic_lengths: Any, max_programs: Any) -> None:
    """Raise `NotAvailableError` for a number of programs, or lengths to pad, that no module can keep to."""
    if not (_is_whole(max_programs) and max_programs >= 1):
        raise NotAvailableError(f"max_programs={max_programs!r} must be a whole number, at least 1.")
    if dynamic_lengths is None:
        return
    pairs = dynamic_lengths.items() if isinstance(dynamic_lengths, Mapping) else [(None, None)]
    if not pairs or not all(isinstance(name, str) and _is_number(value) for name, value in pairs):
        raise NotAvailableError(
            f"dynamic_lengths={dynamic_lengths!r} must say for each argument that is padded what its padding holds: "
            '{"input_ids": 0, "labels": -100}.'
        )


def checked_reduce_dtype(model: nn.Module, reduce_dtype: Any) -> torch.dtype | None:
    """The type by name; `NotAvailableError` for one in which this model's gradients cannot travel between ranks."""
    if reduce_dtype is None:
        return None
    if reduce_dtype != "bf16":
        raise NotAvailableError(
            f"reduce_dtype={reduce_dtype!r} is unknown; gradients travel between ranks in their own type (None), or in "
            "'bf16'. In 'f16' small ones would vanish, and large ones overflow."
        )
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if torch.float32 not in trained:
        found = ", ".join(sorted(map(str, trained))) or "no parameter that requires grad"
        raise NotAvailableError(
            f"reduce_dtype='bf16' is for gradients of float32 parameters, and this model trains {found}. "
            "Leave it out: gradients travel in the type of their parameters."
        )
    return torch.bfloat16


def check_optimizer(optimizer: Any, *, micro_batches: Any = None, max_grad_norm: Any = None) -> None:
    """Raise unless `optimizer` is one that a step can call, or nothing asks for one.

    Raises:
        TraceError: it is no torch optimizer.
        NotAvailableError: its step calls the model itself, or takes no dense gradients; an argument of a training step
            without an optimizer, or one that is out of range.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TraceError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass a torch.optim optimizer over "
            "model.parameters()."
        )
    for name, value in (("micro_batches", micro_batches), ("max_grad_norm", max_grad_norm)):
        if value is not None and optimizer is None:
            raise NotAvailableError(f"{name}={value!r} belongs to a training step: pass optimizer= too.")
    if micro_batches is not None and not (_is_whole(micro_batches) and micro_batches >= 1):
        raise NotAvailableError(f"micro_batches={micro_batches!r} must be a whole number, at least 1.")
    check_norm(max_grad_norm)
    if optimizer is not None and _needs_closure(optimizer):
        raise NotAvailableError(
            f"optimizer={type(optimizer).__name__} calls the model itself, by the closure that its step() demands; a "
            "compiled step runs forward and backward once. Use an optimizer whose step() needs no closure."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise NotAvailableError(
            "optimizer=SparseAdam takes sparse gradients only, and those of a program are dense. Use Adam, "
            "AdamW, Adagrad or SGD."
        )


def checked_constraints(constraints: Any) -> dict[str, PartitionSpec]:
    """The constraints on specs of values.

    Raises:
        InvalidSpecError: they are no mapping to specs.
    """
    if constraints is not None and not isinstance(constraints, Mapping):
        raise InvalidSpecError(
            f"constraints={constraints!r} is a {type(constraints).__name__}; pass a dict of names or globs to specs, "
            "{'*.weight': P('data', None)}."
        )
    for pattern, spec in (constraints or {}).items():
        if not isinstance(pattern, str):
            raise InvalidSpecError(
                f"constraints has the key {pattern!r}, which is a {type(pattern).__name__}; name a value or a glob, "
                "'*.weight'."
            )
        if not isinstance(spec, PartitionSpec):
            raise InvalidSpecError(
                f"constraints[{pattern!r}]={spec!r} is a {type(spec).__name__}; write it as P('data', None). Fields "
                "of a recipe are constrained where recipes are searched, with plan(global_batch=)."
            )
    return dict(constraints or {})


def split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example call; `TraceError` for what is neither."""
    if isinstance(example_inputs, Mapping):
        return (), dict(sorted(example_inputs.items()))
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tuple of positional arguments, "
        "(tokens, targets), or a dict of keyword arguments."
    )


def checked_inputs(example_inputs: Any) -> ExampleInputs:
    """Arguments of an example call, which must be given; raises as `split_inputs`."""
    split_inputs(example_inputs)
    return example_inputs


def check_options(options: Any, kind: type) -> None:
    """Raise `NotAvailableError` for options that are none of `kind`."""
    if not isinstance(options, kind):
        raise NotAvailableError(
            f"options={options!r} is a {type(options).__name__}; pass autoshard.Options(timeout_s=30), say."
        )


def check_trains(model: nn.Module, optimizer: object) -> None:
    """Raise `TraceError` where there is an optimizer, and the model has no parameters to train."""
    if optimizer is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError(
            "A training step needs something to train, but no parameter of the model requires grad. Plan without an "
            "optimizer and without a recipe."
        )


def check_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `TraceError` for a call with an input that is sparse or nested, or has no elements: an empty batch, say."""
    leaves = pytree.tree_leaves((tuple(args), dict(sorted(kwargs.items()))))
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.layout is not torch.strided or leaf.is_nested:
            dense = "torch.nested.to_padded_tensor(tensor, 0.0)" if leaf.is_nested else "tensor.to_dense()"
            raise TraceError(f"input:{number} is of layout={leaf.layout}; pass a dense tensor, {dense}.")
        if 0 in leaf.shape:
            raise TraceError(
                f"input:{number} has shape={tuple(leaf.shape)}, no elements: there is nothing to split over a mesh, or "
                "to time. Pass a batch of at least one, and leave such an input out."
            )


def check_has_loss(program: Program) -> None:
    """Raise `TraceError` for the program of a training step that trains nothing, or without a loss to train by."""
    if not program.trains:
        raise TraceError(
            "A training step needs a loss, but nothing that the model or loss_fn= returns depends on a parameter that "
            "requires grad. Return the loss as a tensor that is not detached, or pass loss_fn=."
        )
    nodes = program.nodes_by_name()
    kept = {f"output:{index}" for index in program.kept}
    slots = [slot for slot in program.outputs_of(OutputKind.OUTPUT) if slot.name not in kept]
    values = {slot.name: nodes[slot.node].meta["val"] for slot in slots}
    outputs = [Output(name, tuple(value.shape), value.dtype) for name, value in values.items()]
    loss_among(outputs, {slot.name for slot in program.inputs_of(InputKind.TANGENT)})


def check_traced(program: Program, constraints: Mapping[str, PartitionSpec], optimizer: object) -> None:
    """Raise for a program that is not what was asked for.

    Raises:
        InvalidSpecError: a constraint on an output that it does not have.
        TraceError: there is an optimizer, and nothing to train; see `check_has_loss`.
    """
    if optimizer is not None:
        check_has_loss(program)
    outputs = [slot.name for slot in program.outputs_of(OutputKind.OUTPUT)]
    for pattern in constraints:
        if pattern.startswith("output:") and not any(fnmatchcase(name, pattern) for name in outputs):
            raise InvalidSpecError(
                f"constraints[{pattern!r}] matches no output; there are: {', '.join(outputs) or 'none'}."
            )


def checked_target(target: Any) -> tuple[DeviceMesh | Mesh | Cluster, Cluster | None]:
    """The mesh or the cluster that plans are for, and the hardware that they are priced for; None: this machine.

    Raises:
        MeshError: it is neither.
    """
    if isinstance(target, ClusterMesh):
        return target.mesh, target.cluster
    if not isinstance(target, DeviceMesh | Mesh | Cluster):
        raise MeshError(
            f"target={target!r} is a {type(target).__name__}; pass an autoshard.Cluster('h100_sxm', nodes=8), "
            "an autoshard.Mesh({'data': 2}), or a torch DeviceMesh with names."
        )
    return target, target if isinstance(target, Cluster) else None


def checked_hardware(cluster: Any, mesh: Any) -> tuple[Any, Cluster | None]:
    """The mesh of `compile`, and the hardware that its plans are priced for; None: this machine.

    Raises:
        MeshError: the hardware is no cluster, goes with no mesh, or has not a device for each rank.
    """
    if cluster is None:
        return checked_target(mesh) if isinstance(mesh, ClusterMesh | Cluster) else (mesh, None)
    if not isinstance(cluster, Cluster):
        raise MeshError(f"cluster={cluster!r} is a {type(cluster).__name__}; pass a Cluster, Cluster('h100_sxm').")
    if not isinstance(mesh, DeviceMesh | Mesh):
        raise MeshError(
            f"cluster={cluster.name} goes with a mesh, and mesh={mesh!r} is none; pass a Mesh, or a DeviceMesh."
        )
    ranks = Mesh.from_device_mesh(mesh).size if isinstance(mesh, DeviceMesh) else mesh.size
    if ranks != cluster.size:
        raise MeshError(f"{mesh} has {ranks} ranks, and cluster={cluster.name} has {cluster.size} devices.")
    return mesh, cluster


def checked_cluster(target: Any) -> Cluster:
    """The cluster that recipes are priced for; they choose the axes.

    Raises:
        NotAvailableError: it is no cluster.
    """
    if not isinstance(target, Cluster):
        raise NotAvailableError(
            f"Prices under another runtime choose the axes themselves, but were given {target!r}: pass a Cluster, "
            "Cluster('h100_sxm', nodes=8), or plan on the mesh with runtime='autoshard'."
        )
    return target


def _is_number(value: Any) -> bool:
    """Whether it is a real number, of Python or NumPy; NaN is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without arguments, as that of LBFGS.

    A learning-rate schedule puts a wrapper in the place of an optimizer's `step`, so the class is asked.
    """
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(item.default is inspect.Parameter.empty and item.kind in kinds for item in parameters)
