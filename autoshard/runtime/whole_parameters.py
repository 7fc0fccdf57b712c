"""Updates that need whole parameters: constraints that keep the parameters whole, and the step on plain tensors.

Matrix roots (Shampoo) and factored moments (Adafactor) need all elements of a matrix. The plan then keeps these
parameters whole on every rank, and each rank takes the same step on its own tensors, without DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autoshard.errors import NotAvailableError
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.replaced_parameter import successor_of
from autoshard.runtime.tried_optimizer import parameters_needed_whole


def with_whole_parameters(
    constraints: Mapping[str, PartitionSpec],
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    recipe: Recipe | None,
    fixed: Plan | None,
) -> dict[str, PartitionSpec]:
    """Return `constraints` with a replicated spec for each parameter that an untraced optimizer needs whole.

    Args:
        constraints: the user's constraints, by pattern.
        optimizer: an optimizer over parameters of `model`.
        recipe, fixed: the user's recipe, and the user's plan.

    Raises:
        NotAvailableError: a constraint, the recipe or the plan splits one of these parameters.
    """
    needed = {id(successor_of(parameter)) for parameter in parameters_needed_whole(optimizer)}
    names = [name for name, parameter in model.named_parameters() if id(successor_of(parameter)) in needed]
    given = "; ".join(_splits(names, constraints, recipe, fixed))
    if given:
        raise NotAvailableError(
            f"optimizer={type(optimizer).__name__} needs each parameter whole, because its update does not run on "
            f"shards, and {given}. Leave that out, or use AdamW, Adam, SGD or Muon."
        )
    return {**constraints, **dict.fromkeys(names, PartitionSpec())}


def _splits(
    names: list[str], constraints: Mapping[str, PartitionSpec], recipe: Recipe | None, fixed: Plan | None
) -> Iterator[str]:
    """Yield the arguments that split one of the parameters `names`, in words."""
    for pattern, spec in constraints.items():
        split = next((name for name in names if fnmatchcase(name, pattern)), None)
        if split is not None and spec.sharded_axes:
            yield f"constraints[{pattern!r}] splits {split!r}"
    if names and recipe is not None:
        fields = {"tensor": recipe.tensor, "expert": recipe.expert}
        asked = {name: size for name, size in fields.items() if size is not None and size > 1}
        asked |= {"zero": 3} if recipe.zero == 3 else {}
        yield from (f"Recipe({name}={size}) splits parameters" for name, size in asked.items())
    planned = {} if fixed is None else fixed.parameters
    split = next((name for name in names if name in planned and planned[name].spec.sharded_axes), None)
    if split is not None:
        yield f"plan= splits {split!r}"


@contextmanager
def plain_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context, replace replicated DTensors in the optimizer's groups and state by plain tensors.

    The plain parameters share memory with the DTensors. A group with any other parameter, or with sharded state
    (ZeRO-1), stays as it is.
    """
    state = optimizer.state
    groups = [
        group for group in optimizer.param_groups if all(_has_whole_state(item, state) for item in group["params"])
    ]
    held = [group["params"] for group in groups]
    plain = {parameter: _plain(parameter) for parameters in held for parameter in parameters}
    for group in groups:
        group["params"] = [plain[parameter] for parameter in group["params"]]
    for parameter, lent in plain.items():
        if parameter in state:
            state[lent] = {name: _local(value) for name, value in state.pop(parameter).items()}
    try:
        yield
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters
        for parameter, lent in plain.items():
            if lent in state:
                state[parameter] = {name: _like(value, parameter) for name, value in state.pop(lent).items()}


def _has_whole_state(parameter: torch.Tensor, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
    """Whether a parameter is a replicated DTensor, and so is each DTensor in its optimizer state."""
    values = state[parameter].values() if parameter in state else ()
    return _is_whole(parameter) and all(_is_whole(value) for value in values if isinstance(value, DTensor))


def _is_whole(value: torch.Tensor) -> bool:
    return isinstance(value, DTensor) and all(isinstance(item, Replicate) for item in value.placements)


def _plain(parameter: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(_local(parameter.detach()), requires_grad=parameter.requires_grad)
    made.grad = None if parameter.grad is None else _local(parameter.grad)
    return made


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) and _is_whole(value) else value


def _like(value: Any, owner: torch.Tensor) -> Any:
    """Return `value`, state of the parameter `owner`, as a DTensor if it has the parameter's shape; else as it is."""
    assert isinstance(owner, DTensor), "only DTensors are lent as plain parameters"
    if type(value) is not torch.Tensor or not value.dim() or value.shape != owner.shape:
        return value
    return DTensor.from_local(value, owner.device_mesh, owner.placements, run_check=False)
