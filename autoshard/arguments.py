"""Checks of the arguments of `compile`, `plan` and `prove`.

A wrong argument raises an error that names the argument, before anything is traced or searched.
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
from autoshard.ir.loss_scaling import LossScaling
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.update import checked_norm
from autoshard.joined_optimizer import parts_of_optimizer
from cost_models.hardware import Cluster

ExampleInputs = Sequence[Any] | Mapping[str, Any]

BACKENDS = ("auto", "inductor", "reference", "triton")


def check_model(model: Any, compiled: type | tuple[type, ...] = ()) -> None:
    """Raise `TraceError` unless `model` is a plain module.

    Neither the module nor a submodule may be distributed, scripted, or of a type in `compiled`.
    """
    if isinstance(model, compiled):
        raise TraceError(f"model is a {type(model).__name__}, compiled already; pass the module from before compile.")
    if not isinstance(model, nn.Module):
        raise TraceError(f"model={model!r} is a {type(model).__name__}; pass a torch.nn.Module.")
    for name, module in model.named_modules():
        title = f"model.{name}" if name else "model"
        if isinstance(module, compiled):
            raise TraceError(
                f"{title} is a {type(module).__name__}, compiled already, and a program cannot call another "
                "program. Compile the whole model once, with the module from before compile in this place."
            )
        if isinstance(module, _DISTRIBUTED):
            raise TraceError(
                f"{title} is a {type(module).__name__}, which adds up gradients of the ranks and places "
                "parameters; compile does both. Pass the module from before DistributedDataParallel or fully_shard."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{title} is a {type(module).__name__}, compiled by torch.jit, and its members cannot be replaced. "
                "Pass the module from before torch.jit.script or torch.jit.trace."
            )


_DISTRIBUTED = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)


def check_backend(name: Any) -> None:
    """Raise `NotAvailableError` for an unknown backend."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise NotAvailableError(f"backend={name!r} is unknown; use 'auto', 'inductor', 'reference' or 'triton'.")


def check_flags(**flags: Any) -> None:
    """Raise `NotAvailableError` for a flag that is not a bool: the string "no" would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise NotAvailableError(f"{name}={value!r} is a {type(value).__name__}; pass True or False.")


def check_loss(loss_fn: Any) -> None:
    """Raise `TraceError` unless `loss_fn` can be called or is None."""
    if loss_fn is not None and not callable(loss_fn):
        raise TraceError(f"loss_fn={loss_fn!r} is a {type(loss_fn).__name__}; pass a function (outputs, *targets).")


def checked_plan(plan: Any) -> Plan | None:
    """Return the plan for `compile`, read from its file if `plan` is a path; None for None.

    Raises `PlanMismatchError` if the argument is no plan, or prices a recipe in another framework.
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
    """Raise `NotAvailableError` if the search for a plan cannot start from `previous`; do nothing for None.

    Args:
        model: the model to plan. A search over specs raises `PlanMismatchError` if `previous` is for another model.
        of_recipes: whether the search is over recipes; otherwise over specs.
        is_priced: whether a recipe is priced in another framework, so that there is no search.
    """
    if previous is None:
        return
    if is_priced:
        raise NotAvailableError("previous= starts a search, and recipe= is priced without one: leave one out.")
    if not isinstance(previous, Plan):
        raise NotAvailableError(
            f"previous={previous!r} is a {type(previous).__name__}; pass a plan, such as Plan.load(path)."
        )
    if of_recipes and previous.recipe is None:
        raise NotAvailableError("previous= has no recipe; with global_batch=, pass a plan made with global_batch=.")
    if not of_recipes and not previous.runs:
        raise NotAvailableError("previous= prices a recipe; pass global_batch= to search recipes, or a plan of specs.")
    if not of_recipes:
        _check_parameters(previous, model)


def _check_parameters(plan: Plan, model: nn.Module) -> None:
    shapes = {name: tuple(item.shape) for name, item in model.named_parameters(remove_duplicate=False)}
    for name, item in plan.parameters.items():
        if shapes.get(name) != tuple(item.shape):
            raise PlanMismatchError(
                f"previous= is of another model: its parameter {name!r} has shape={tuple(item.shape)}, and the model's "
                f"has shape={shapes.get(name)}."
            )


def check_recipe(recipe: Any) -> None:
    """Raise `RecipeError` unless `recipe` is a `Recipe` or None."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe={recipe!r} is a {type(recipe).__name__}; pass an autoshard.Recipe.")


def check_runtime(recipe: Recipe | None, runtime: str | None, global_batch: int | None) -> None:
    """Raise `NotAvailableError` if `runtime` is not None, and neither `recipe` nor `global_batch` is given."""
    if runtime is not None and recipe is None and global_batch is None:
        raise NotAvailableError(
            f"runtime={runtime!r} is a framework that runs a recipe. Pass recipe=Recipe(...) too, or global_batch= "
            "to search a recipe; or leave runtime= out."
        )


def checked_budget(memory_budget: Any) -> int | None:
    """Return a device's memory limit in bytes; None for None.

    Raises `NotAvailableError` unless `memory_budget` is None or a whole number above 0.
    """
    if memory_budget is None:
        return None
    if not (_is_number(memory_budget) and 0 < memory_budget < math.inf):
        raise NotAvailableError(f"memory_budget={memory_budget!r} must be a number of bytes above 0.")
    if memory_budget != int(memory_budget):
        raise NotAvailableError(
            f"memory_budget={memory_budget!r} is no whole number of bytes. Write 80 * 10**9 for 80 GB, or "
            "int(0.8 * cluster.device.memory_bytes) for a part of the device's memory."
        )
    return int(memory_budget)


def check_limits(*, time_budget_s: Any, global_batch: Any = None) -> None:
    """Raise `NotAvailableError` unless `time_budget_s` is at least 0, and `global_batch` is None or at least 1."""
    if not (_is_number(time_budget_s) and time_budget_s >= 0):
        raise NotAvailableError(f"time_budget_s={time_budget_s!r} must be a number of seconds, at least 0.")
    if global_batch is not None and not (_is_whole(global_batch) and global_batch >= 1):
        raise NotAvailableError(f"global_batch={global_batch!r} must be a whole number of sequences, at least 1.")


def check_agreement(*, check: Any, timeout_s: Any) -> None:
    """Raise `NotAvailableError` for an unknown `check`, or unless `timeout_s` is a finite number above 0."""
    if check not in _CHECKS:
        raise NotAvailableError(f"check={check!r} must be one of {', '.join(map(repr, _CHECKS))}.")
    if not (_is_number(timeout_s) and 0 < timeout_s < math.inf):
        raise NotAvailableError(f"timeout_s={timeout_s!r} must be a finite number of seconds, above 0.")


_CHECKS = ("always", "first", "off")


def checked_outputs(outputs: Any, *, gather_outputs: bool) -> Outputs:
    """Return the choice of outputs for the option `outputs`.

    "loss" gives `Outputs.LOSS`. "all" gives `Outputs.WHOLE` with `gather_outputs`, otherwise `Outputs.AS_PLANNED`.
    Raises `NotAvailableError` for any other text.
    """
    if outputs not in ("all", "loss"):
        raise NotAvailableError(
            f"outputs={outputs!r} must be 'all' or 'loss'; pass gather_outputs=True for whole outputs."
        )
    if outputs == "loss":
        return Outputs.LOSS
    return Outputs.WHOLE if gather_outputs else Outputs.AS_PLANNED


def check_programs(*, dynamic_lengths: Any, max_programs: Any) -> None:
    """Raise `NotAvailableError` if an option on programs is out of range.

    `max_programs` must be a whole number of at least 1. `dynamic_lengths` must be None, or a dict from names to numbers
    that is not empty.
    """
    if not (_is_whole(max_programs) and max_programs >= 1):
        raise NotAvailableError(f"max_programs={max_programs!r} must be a whole number, at least 1.")
    if dynamic_lengths is None:
        return
    pairs = dynamic_lengths.items() if isinstance(dynamic_lengths, Mapping) else [(None, None)]
    if not pairs or not all(isinstance(name, str) and _is_number(value) for name, value in pairs):
        raise NotAvailableError(
            f"dynamic_lengths={dynamic_lengths!r} must say for each argument what its padding holds: "
            '{"input_ids": 0, "labels": -100}.'
        )


def checked_reduce_dtype(model: nn.Module, reduce_dtype: Any) -> torch.dtype | None:
    """Return the dtype in which ranks send gradients: bfloat16 for "bf16"; None for None.

    Raises `NotAvailableError` for any other text, or if no trained parameter is float32.
    """
    if reduce_dtype is None:
        return None
    if reduce_dtype != "bf16":
        raise NotAvailableError(
            f"reduce_dtype={reduce_dtype!r} is unknown; gradients travel between ranks in their own type (None), or in "
            "'bf16'. In 'f16' small gradients would vanish, and large gradients overflow."
        )
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if torch.float32 not in trained:
        found = ", ".join(sorted(map(str, trained))) or "no parameter that requires grad"
        raise NotAvailableError(
            f"reduce_dtype='bf16' is for gradients of float32 parameters, and this model trains {found}. "
            "Leave reduce_dtype= out: gradients travel in the type of their parameters."
        )
    return torch.bfloat16


def check_optimizer(optimizer: Any, *, micro_batches: Any = None, max_grad_norm: Any = None) -> None:
    """Raise unless a compiled step can call `optimizer`.

    Raises:
        TraceError: the argument is no torch optimizer, or has no groups of parameters.
        NotAvailableError: the optimizer's step needs a closure or sparse gradients; or `micro_batches` or
            `max_grad_norm` comes without an optimizer, or is out of range.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TraceError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}; pass a torch.optim optimizer over "
            "model.parameters()."
        )
    check_of_step(optimizer, micro_batches=micro_batches, max_grad_norm=max_grad_norm)
    if micro_batches is not None and not (_is_whole(micro_batches) and micro_batches >= 1):
        raise NotAvailableError(f"micro_batches={micro_batches!r} must be a whole number, at least 1.")
    checked_norm(max_grad_norm)
    for item in () if optimizer is None else parts_of_optimizer(optimizer):
        _check_steps(item)


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise `TraceError` if the optimizer has no groups of parameters.

    Raises `NotAvailableError` if its step needs a closure or sparse gradients.
    """
    if not optimizer.param_groups:
        raise TraceError(f"optimizer={type(optimizer).__name__} holds no parameters. Make it with model.parameters().")
    if _needs_closure(optimizer):
        raise NotAvailableError(
            f"optimizer={type(optimizer).__name__} calls the model itself: its step() needs a closure. A "
            "compiled step runs forward and backward once. Use an optimizer whose step() needs no closure."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise NotAvailableError(
            "optimizer=SparseAdam takes sparse gradients only, and compiled programs have dense gradients. Use Adam, "
            "AdamW, Adagrad or SGD."
        )


def check_of_step(optimizer: Any, **settings: Any) -> None:
    """Raise `NotAvailableError` if there is no optimizer, but one of the `settings` of training steps is not None."""
    for name, value in settings.items():
        if value is not None and optimizer is None:
            raise NotAvailableError(f"{name}={value!r} belongs to a training step: pass optimizer= too.")


def check_on_nonfinite(on_nonfinite: Any) -> None:
    """Raise `NotAvailableError` unless the argument is "raise", "skip" or None."""
    if on_nonfinite not in ("raise", "skip", None):
        raise NotAvailableError(
            f"on_nonfinite={on_nonfinite!r} is unknown; a step whose loss or gradients are not finite ends with an "
            "error ('raise'), leaves its update out ('skip'), or is not checked (None)."
        )


def checked_constraints(constraints: Any) -> dict[str, PartitionSpec]:
    """Return the constraints as a dict from a value's name, or a glob of names, to its spec; empty for None.

    Raises `InvalidSpecError` unless the argument maps strings to specs.
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
    """Return the positional and the keyword arguments of an example call; raise `TraceError` for other types."""
    if isinstance(example_inputs, Mapping):
        if strange := [name for name in example_inputs if not isinstance(name, str)]:
            raise TraceError(f"example_inputs has the key {strange[0]!r}; a dict has keyword arguments by their names.")
        return (), dict(sorted(example_inputs.items()))
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tuple of positional arguments, "
        "(tokens, targets), or a dict of keyword arguments."
    )


def checked_inputs(example_inputs: Any) -> ExampleInputs:
    """Return the argument if it is a tuple, list or dict of example inputs; raise `TraceError` otherwise."""
    split_inputs(example_inputs)
    return example_inputs


def check_options(options: Any, kind: type) -> None:
    """Raise `NotAvailableError` unless `options` is of type `kind`."""
    if not isinstance(options, kind):
        raise NotAvailableError(
            f"options={options!r} is a {type(options).__name__}; pass autoshard.Options(timeout_s=30), say."
        )


def check_scaling(loss_scaling: Any) -> None:
    """Raise `NotAvailableError` unless `loss_scaling` is a `LossScaling` or None."""
    if loss_scaling is not None and not isinstance(loss_scaling, LossScaling):
        raise NotAvailableError(
            f"loss_scaling={loss_scaling!r} is a {type(loss_scaling).__name__}; pass an autoshard.LossScaling, such as "
            "LossScaling(init_scale=1024)."
        )


def check_trains(model: nn.Module, optimizer: object) -> None:
    """Raise `TraceError` if there is an optimizer, but no parameter of the model requires a gradient."""
    if optimizer is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError(
            "A training step needs something to train, but no parameter of the model requires grad. Plan without an "
            "optimizer and without a recipe."
        )


def check_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `TraceError` if a tensor in the arguments of a call is sparse, nested or empty."""
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
    """Raise `TraceError` if a traced training step has no loss, or a loss that trains no parameter."""
    if not program.trains:
        raise TraceError(
            "A training step needs a loss, but nothing that the model or loss_fn= returns depends on a parameter that "
            "requires grad. Return the loss as a tensor with its gradient, not detached, or pass loss_fn=."
        )
    nodes = program.nodes_by_name()
    kept = {f"output:{index}" for index in program.kept}
    slots = [slot for slot in program.outputs_of(OutputKind.OUTPUT) if slot.name not in kept]
    values = {slot.name: nodes[slot.node].meta["val"] for slot in slots}
    outputs = [Output(name, tuple(value.shape), value.dtype) for name, value in values.items()]
    loss_among(outputs, {slot.name for slot in program.inputs_of(InputKind.TANGENT)})


def check_traced(program: Program, constraints: Mapping[str, PartitionSpec], optimizer: object) -> None:
    """Raise if a traced program lacks an output that `constraints` name, or the loss that an optimizer needs.

    Raises:
        InvalidSpecError: a constraint names an output that the program does not have.
        TraceError: a training step has no loss, or a loss that trains no parameter.
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
    """Return the mesh or cluster to plan for, and the cluster whose hardware is priced; None stands for this machine.

    Raises `MeshError` if the argument is neither a mesh nor a cluster.
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
    """Return the mesh or cluster for `compile`, and the cluster whose hardware is priced; None stands for this machine.

    Raises:
        MeshError: `cluster` is no cluster, comes without a mesh, or has another number of devices than the mesh.
    """
    if cluster is None:
        return checked_target(mesh) if isinstance(mesh, ClusterMesh | Cluster) else (mesh, None)
    if not isinstance(cluster, Cluster):
        raise MeshError(f"cluster={cluster!r} is a {type(cluster).__name__}; pass a Cluster, Cluster('h100_sxm').")
    if not isinstance(mesh, DeviceMesh | Mesh):
        raise MeshError(
            f"cluster={cluster.name} goes with a mesh, and mesh={mesh!r} is no mesh; pass a Mesh, or a DeviceMesh."
        )
    ranks = Mesh.from_device_mesh(mesh).size if isinstance(mesh, DeviceMesh) else mesh.size
    if ranks != cluster.size:
        raise MeshError(
            f"{mesh} has {ranks} ranks, and cluster={cluster.name} has {cluster.size} devices. Pass a mesh of "
            f"{cluster.size} ranks, or a cluster of {ranks} devices."
        )
    return mesh, cluster


def checked_cluster(target: Any) -> Cluster:
    """Return the cluster for which recipes are priced; raise `NotAvailableError` if the argument is no cluster."""
    if not isinstance(target, Cluster):
        raise NotAvailableError(
            f"A search for another runtime chooses the axes, but was given {target!r}: pass a Cluster, "
            "Cluster('h100_sxm', nodes=8), or plan on the mesh with runtime='autoshard'."
        )
    return target


def _is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or NumPy, but neither NaN nor a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the `step` of the optimizer's class needs an argument, as LBFGS's does.

    The object's own `step` says nothing, because learning rate schedules replace it.
    """
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(item.default is inspect.Parameter.empty and item.kind in kinds for item in parameters)
