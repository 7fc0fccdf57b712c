"""`check_plan`: run a plan on the simulator beside one device, and compare everything a user can see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import api
from autoshard.errors import VerificationError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.tracing.precision import run_in_precision

ABSOLUTE_FLOOR = 1e-6
"""Differences below this are rounding, whatever the scale of the values."""

TOLERANCE = 1e-5
"""Differences relative to the largest element of a value that are rounding in float32."""

ROUNDING_FACTOR = 4.0
"""A mesh sums in another order than one device; its rounding error may be this much larger."""

Inputs = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One value on the mesh beside the same on one device.

    Args:
        name: "output:0", "gradient layers.0.weight", "parameter layers.0.weight".
        difference: largest absolute difference of an element; infinite where one of the two is missing.
        scale: largest absolute value of an element on one device.
        rounding: largest error of one device itself, beside a more precise run of it; 0 where there was none.
    """

    name: str
    difference: float
    scale: float
    rounding: float = 0.0

    def is_close(self, tolerance: float) -> bool:
        """Whether the difference is within `tolerance` of the scale, below the floor, or of the size of rounding."""
        return self.difference <= max(ABSOLUTE_FLOOR, tolerance * self.scale, ROUNDING_FACTOR * self.rounding)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check_plan` compared, and the plan that ran."""

    plan: Plan
    comparisons: tuple[Comparison, ...]
    tolerance: float

    @property
    def differing(self) -> tuple[Comparison, ...]:
        """The values that differ by more than rounding."""
        return tuple(item for item in self.comparisons if not item.is_close(self.tolerance))

    @property
    def is_equal(self) -> bool:
        """Whether the mesh computed what one device computes."""
        return not self.differing

    def raise_if_different(self) -> None:
        """Raise `VerificationError` naming every value that differs."""
        if not self.is_equal:
            raise VerificationError(str(self))

    def __str__(self) -> str:
        if self.is_equal:
            return f"{len(self.comparisons)} values on {self.plan.mesh} equal one device."
        lines = [f"  {item.name}: off by {item.difference:.2e} at scale {item.scale:.2e}" for item in self.differing]
        return "\n".join([f"values on {self.plan.mesh} that differ from one device:", *lines])


def check_plan(
    model: nn.Module,
    mesh: Mesh,
    inputs: Inputs,
    *,
    plan: Plan | None = None,
    steps: int = 1,
    tolerance: float | None = None,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    precise: torch.dtype | None = None,
    precision: str | None = None,
) -> CheckReport:
    """Train a copy of a model for some steps on simulated ranks and another on one device, and compare.

    Compared are the outputs and gradients of the last step, and parameters and buffers after it.

    Args:
        model: any module without randomness (put it in `eval()` if it has dropout); left as it is.
        mesh: the mesh to simulate.
        inputs: positional arguments, or keyword arguments as a mapping.
        plan: the plan to run; None plans.
        steps: optimizer steps, at least 1.
        tolerance: largest difference relative to the largest element of each value; default: 1e-5, or the spacing of
            numbers at 1 in the type that is computed in, if it is narrower than float32: one rounding on either side.
        make_optimizer: from parameters to an optimizer; gradient descent at 0.01 if None.
        precise: run one device in this type as well, e.g. `torch.float64`, to learn how much it rounds: ill-conditioned
            values (gradients of nearly uniform attention) may then differ by that much. None: do not, or, where a
            precision is computed in, the model's own types.
        precision: see `autoshard.compile`. One device then runs the same casts.

    Returns:
        A report; nothing is raised for values that differ (see `CheckReport.raise_if_different`).
    """
    make_optimizer = make_optimizer or _gradient_descent
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    alone, original = copy.deepcopy(model), copy.deepcopy(model)
    sharded = api.compile(original, mesh, example_inputs=inputs, plan=plan, precision=precision)
    if not isinstance(sharded, ShardedModule) or sharded.plan is None:
        raise AssertionError("without an optimizer, compile gives a module, and with example inputs a plan")
    rest = (args, kwargs, steps, make_optimizer)
    name = sharded.plan.precision
    if name is None:
        exact = {} if precise is None else _train_precisely(model, precise, *rest)
        expected = _train(alone, *rest)
    else:
        exact = _train(copy.deepcopy(model), *rest) if precise is None else _train_precisely(model, precise, *rest)
        expected = _train(alone, *rest, call=partial(run_in_precision, alone, PRECISIONS[name]))
    actual = _train(sharded, *rest)
    names = dict.fromkeys((*expected, *actual))
    compared = tuple(_compare(item, actual.get(item), expected.get(item), exact.get(item)) for item in names)
    return CheckReport(sharded.plan, compared, _tolerance(name) if tolerance is None else tolerance)


def _tolerance(precision: str | None) -> float:
    """What rounding alone may do to a value, relative to its largest element."""
    return TOLERANCE if precision is None else max(TOLERANCE, torch.finfo(PRECISIONS[precision]).eps)


def _gradient_descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _train(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    steps: int,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    call: Callable[..., Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Train, and give what a user can see afterwards, by name; `call` runs the network, if not as it is."""
    call = network if call is None else call
    has_gradients = any(parameter.requires_grad for parameter in network.parameters())
    optimizer = make_optimizer(network.parameters()) if has_gradients else None
    seen: dict[str, torch.Tensor] = {}
    for _ in range(steps):
        outputs = [leaf for leaf in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        seen = {f"output:{index}": output.detach().clone() for index, output in enumerate(outputs)}
        if optimizer is not None:
            optimizer.zero_grad()
            _loss(outputs).backward()
            seen |= _gradients(network)
            optimizer.step()
    seen |= {f"parameter {name}": parameter.detach() for name, parameter in network.named_parameters()}
    return seen | {f"buffer {name}": buffer for name, buffer in network.named_buffers()}


def _train_precisely(
    model: nn.Module, dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any], *rest: Any
) -> dict[str, torch.Tensor]:
    """`_train` of a copy of the model, it and its inputs in another floating type."""

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(convert, (args, dict(kwargs)))
    return _train(copy.deepcopy(model).to(dtype), args, kwargs, *rest)


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """The first scalar that has a gradient, or a sum of all outputs whose weights differ by element."""
    differentiable = [output for output in outputs if output.requires_grad]
    for output in differentiable:
        if output.ndim == 0:
            return output
    weighted = [(output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum() for output in differentiable]
    return torch.stack(weighted).sum()


def _gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    parameters = network.named_parameters()
    return {f"gradient {name}": parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


def _compare(
    name: str, actual: torch.Tensor | None, expected: torch.Tensor | None, exact: torch.Tensor | None
) -> Comparison:
    if actual is None or expected is None or actual.shape != expected.shape:
        return Comparison(name, float("inf"), 0.0)
    if not expected.numel():
        return Comparison(name, 0.0, 0.0)
    rounding = 0.0 if exact is None else _distance(expected, exact)
    return Comparison(name, _distance(actual, expected), float(expected.detach().double().abs().max()), rounding)


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference of an element; infinite where one is not a number."""
    difference = (first.detach().double() - second.detach().double()).abs().max()
    return float(difference.nan_to_num(float("inf")))
