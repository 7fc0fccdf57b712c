"""`check_plan`: run a plan on the simulator beside one device, and compare everything a user can see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import api
from autoshard.arguments import split_inputs
from autoshard.errors import NotAvailableError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.traced_step import find_loss
from autoshard.runtime.train_step import TrainStep
from autoshard.testing.report import TOLERANCE, CheckReport, compare
from autoshard.testing.rounding import nudge
from autoshard.testing.shrink import find_small_failure
from autoshard.testing.whole_step import MakeOptimizer, WholeStep
from autoshard.tracing.precision import run_in_precision

Inputs = tuple[Any, ...] | Mapping[str, Any]


def check_plan(
    model: nn.Module,
    mesh: Mesh,
    inputs: Inputs,
    *,
    plan: Plan | None = None,
    steps: int = 1,
    tolerance: float | None = None,
    make_optimizer: MakeOptimizer | None = None,
    whole_step: WholeStep | None = None,
    precise: torch.dtype | None = None,
    precision: str | None = None,
) -> CheckReport:
    """Train a copy of a model for some steps on simulated ranks and another on one device, and compare.

    Compared are the outputs and gradients of the last step, and parameters and buffers after it; of whole steps the
    loss, and parameters, buffers and optimizer state. Where something differs, the program is shrunk to a few calls
    that differ too (`CheckReport.small_failure`).

    Args:
        model: any module without randomness (put it in `eval()` if it has dropout); left as it is.
        mesh: the mesh to simulate.
        inputs: positional arguments, or keyword arguments as a mapping.
        plan: the plan to run; None plans.
        steps: optimizer steps, at least 1.
        tolerance: largest difference relative to the largest element of each value; default: 1e-5, or the spacing of
            numbers at 1 in the type that is computed in, if it is narrower than float32: one rounding on either side.
        make_optimizer: from parameters to an optimizer; gradient descent at 0.01 if None.
        whole_step: train by `autoshard.compile(..., optimizer=...)`, the update being part of the program; the model
            returns its loss first. A plan is then one of a whole step, of one micro-batch.
        precise: run one device in this type as well, e.g. `torch.float64`, to learn how much it rounds: ill-conditioned
            values (gradients of nearly uniform attention) may then differ by that much. The error of one run may be
            small by chance: before a value counts as different, one device also runs on parameters and inputs that are
            each moved by one rounding. None: do not, or, where a precision is computed in, the model's own types.
        precision: see `autoshard.compile`. One device then runs the same casts.

    Returns:
        A report; nothing is raised for values that differ (see `CheckReport.raise_if_different`).

    Raises:
        NotAvailableError: both `make_optimizer` and `whole_step` name an optimizer, or no step is asked for.
    """
    if not isinstance(steps, int) or steps < 1:
        raise NotAvailableError(f"steps={steps!r} compares nothing; run at least one.")
    if make_optimizer is not None and whole_step is not None:
        raise NotAvailableError("make_optimizer= and whole_step= both name an optimizer; leave one of them out.")
    args, kwargs = split_inputs(inputs)
    training = _Training(args, kwargs, steps, make_optimizer or _gradient_descent, whole_step)
    alone, original = copy.deepcopy(model), copy.deepcopy(model)
    optimized = {} if whole_step is None else _options_of(whole_step, original)
    sharded = api.compile(original, mesh, example_inputs=inputs, plan=plan, precision=precision, **optimized)
    if sharded.plan is None:
        raise AssertionError("with example inputs there is a plan")
    name = sharded.plan.precision
    exact = _train_precisely(model, precise, training) if precise is not None or name is not None else {}
    expected = _train_alone(alone, name, training)
    actual = _run_steps(sharded, training) if isinstance(sharded, TrainStep) else _train(sharded, sharded, training)
    names = dict.fromkeys((*expected, *actual))
    compared = tuple(compare(item, actual.get(item), expected.get(item), exact.get(item)) for item in names)
    report = CheckReport(sharded.plan, compared, _tolerance(name) if tolerance is None else tolerance)
    if exact:
        report = report.sampled(partial(_train_nearby, model, name, training), exact)
    return report if report.is_equal else replace(report, small_failure=_small_failure(model, sharded, training))


def _small_failure(model: nn.Module, compiled: ShardedModule | TrainStep, training: _Training) -> str:
    """Code that fails as the program of a call that differs; of several micro-batches, on the first."""
    sharded = compiled.sharded if isinstance(compiled, TrainStep) else compiled
    program = sharded.program
    if program is None or program.plan is None:
        raise AssertionError("what differs has been compiled, by a plan")
    whole, called = training.whole_step, (training.args, training.kwargs)
    leaves = enumerate(pytree.tree_leaves(called if whole is None else whole.cut(*called)[0]))
    given = {("input", f"input:{index}"): leaf for index, leaf in leaves if isinstance(leaf, torch.Tensor)}
    given |= {("parameter", name): parameter.detach() for name, parameter in model.named_parameters()}
    given |= {("buffer", name): buffer for name, buffer in model.named_buffers()}
    return find_small_failure(program.phased.lowered.traced, program.plan, given)


@dataclass(frozen=True, slots=True)
class _Training:
    """What to train on, for how long and by what."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    steps: int
    make_optimizer: MakeOptimizer
    whole_step: WholeStep | None


def _tolerance(precision: str | None) -> float:
    """What rounding alone may do to a value, relative to its largest element."""
    return TOLERANCE if precision is None else max(TOLERANCE, torch.finfo(PRECISIONS[precision]).eps)


def _gradient_descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _options_of(whole_step: WholeStep, model: nn.Module) -> dict[str, Any]:
    """What `compile` is told of a whole step."""
    return {
        "optimizer": whole_step.make_optimizer(model.parameters()),
        "max_grad_norm": whole_step.max_grad_norm,
        "micro_batches": whole_step.micro_batches,
    }


def _train(network: nn.Module, call: Callable[..., Any], training: _Training) -> dict[str, torch.Tensor]:
    """Train, and give what a user can see afterwards, by name; `call` runs the network."""
    if training.whole_step is not None:
        return _train_whole(network, call, training, training.whole_step)
    has_gradients = any(parameter.requires_grad for parameter in network.parameters())
    optimizer = training.make_optimizer(network.parameters()) if has_gradients else None
    seen: dict[str, torch.Tensor] = {}
    for _ in range(training.steps):
        outputs = _tensors(call(*training.args, **training.kwargs))
        seen = {f"output:{index}": output.detach().clone() for index, output in enumerate(outputs)}
        if optimizer is not None:
            optimizer.zero_grad()
            _loss(outputs).backward()
            seen |= _gradients(network)
            optimizer.step()
    return seen | _held_by(network)


def _train_whole(
    network: nn.Module, call: Callable[..., Any], training: _Training, whole_step: WholeStep
) -> dict[str, torch.Tensor]:
    """Train on one device as a whole step does: the mean over micro-batches, clipping, the update."""
    optimizer = whole_step.make_optimizer(network.parameters())
    seen: dict[str, torch.Tensor] = {}
    for _ in range(training.steps):
        losses = []
        for args, kwargs in whole_step.cut(training.args, training.kwargs):
            losses.append(find_loss(call(*args, **kwargs)) / whole_step.micro_batches)
            losses[-1].backward()
        seen["loss"] = torch.stack(losses).sum().detach()
        if whole_step.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), whole_step.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return seen | _held_by(network) | _state_of(optimizer, network)


def _run_steps(step: TrainStep, training: _Training) -> dict[str, torch.Tensor]:
    """Train on the mesh by whole steps."""
    seen: dict[str, torch.Tensor] = {}
    for _ in range(training.steps):
        seen["loss"] = step(*training.args, **training.kwargs)
    return seen | _held_by(step.sharded) | _state_of(step.optimizer, step.sharded)


def _held_by(network: nn.Module) -> dict[str, torch.Tensor]:
    seen = {f"parameter {name}": parameter.detach() for name, parameter in network.named_parameters()}
    return seen | {f"buffer {name}": buffer for name, buffer in network.named_buffers()}


def _state_of(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"state {kind} {name}": torch.as_tensor(value)
        for name, parameter in network.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _train_alone(model: nn.Module, precision: str | None, training: _Training) -> dict[str, torch.Tensor]:
    """Train a model on one device, by the casts of a precision."""
    narrow = None if precision is None else PRECISIONS[precision]
    return _train(model, model if narrow is None else partial(run_in_precision, model, narrow), training)


def _train_nearby(model: nn.Module, precision: str | None, training: _Training, number: int) -> dict[str, torch.Tensor]:
    """`_train_alone` of a copy of the model, each of its parameters and inputs one rounding away."""
    eps = 0.0 if precision is None else torch.finfo(PRECISIONS[precision]).eps
    moved = copy.deepcopy(model)
    with torch.no_grad():
        held = dict(moved.named_parameters())
        for name, value in nudge(held, number, eps).items():
            held[name].copy_(value)
    args, kwargs = nudge((training.args, dict(training.kwargs)), number, eps)
    return _train_alone(moved, precision, replace(training, args=args, kwargs=kwargs))


def _train_precisely(model: nn.Module, dtype: torch.dtype | None, training: _Training) -> dict[str, torch.Tensor]:
    """`_train` of a copy of the model, it and its inputs in another floating type, or in their own."""
    if dtype is None:
        same = copy.deepcopy(model)
        return _train(same, same, training)

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(convert, (training.args, dict(training.kwargs)))
    precise = copy.deepcopy(model).to(dtype)
    return _train(precise, precise, replace(training, args=args, kwargs=kwargs))


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


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
