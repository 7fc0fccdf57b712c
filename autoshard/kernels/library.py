"""The torch library "autoshard", and the definition of its operators.

An operator is a schema, an implementation in plain PyTorch that runs on every backend, and a shape function for fake
tensors. It is opaque to tracing (`CompositeExplicitAutograd`) and functional, and no output aliases an input.

Its derivative is another opaque operator, which has no derivative. A second derivative uses the *composite* of the
operator: the same results by small operators, which torch can differentiate any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from autoshard.errors import NotAvailableError

NAMESPACE = "autoshard"

Composite = Callable[..., tuple[Tensor, ...]]
"""Computes an operator's differentiable results, which are its first ones, by operators that torch differentiates."""

# Operators live as long as the library object that defines them.
_LIBRARY = Library(NAMESPACE, "FRAGMENT")
_IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable[..., object]] = {}
_COMPOSITES: dict[torch._ops.OpOverload, Composite] = {}


def define(
    name: str, schema: str, implementation: Callable[..., object], fake: Callable[..., object]
) -> torch._ops.OpOverload:
    """Define `autoshard::name` and return its default overload.

    Args:
        name: the operator's name, without the namespace.
        schema: arguments and returns, such as `"(Tensor x) -> Tensor"`.
        implementation: plain PyTorch, on any device; outputs alias no input.
        fake: takes the same arguments, and returns empty tensors of the right shape, dtype and device.

    Returns:
        `torch.ops.autoshard.<name>.default`.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _IMPLEMENTATIONS[overload] = implementation
    return overload


def implementation_of(overload: torch._ops.OpOverload) -> Callable[..., object]:
    """The plain PyTorch function of an operator of this library."""
    return _IMPLEMENTATIONS[overload]


def differentiate(
    overload: torch._ops.OpOverload,
    setup_context: Callable[..., None],
    backward: Callable[..., object],
    composite: Composite | None = None,
) -> None:
    """Set the derivative of an operator: `setup_context` saves the tensors that `backward` needs.

    With `composite`, derivatives that are differentiated again (`create_graph=True`) are derivatives of the composite.
    """
    if composite is None:
        torch.library.register_autograd(overload, backward, setup_context=setup_context, lib=_LIBRARY)
        return
    _COMPOSITES[overload] = composite

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.operands = inputs

    def backward_or_graph(ctx: Any, *grads: Tensor | None) -> object:
        if torch.is_grad_enabled():
            return gradients_with_graph(ctx, composite, ctx.operands, grads)
        return backward(ctx, *grads)

    torch.library.register_autograd(overload, backward_or_graph, setup_context=setup, lib=_LIBRARY)


def gradients_with_graph(
    ctx: Any, composite: Composite, operands: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradient of each operand, computed by small operators that are differentiable themselves.

    Args:
        ctx: the context of the forward's `torch.autograd.Function`.
        composite: called with the operands.
        operands: the forward's arguments.
        grads: the gradients of the forward's results; None stands for zero.
    """
    _ = ctx.saved_tensors  # raises if a saved tensor was changed in place since the forward
    needed = ctx.needs_input_grad
    if all(grad is None for grad in grads):
        return (None,) * len(needed)
    with torch.enable_grad():
        views = [
            operand.view_as(operand) if wanted else operand for operand, wanted in zip(operands, needed, strict=True)
        ]
        pairs = [pair for pair in zip(composite(*views), grads, strict=False) if pair[1] is not None]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [view for view, wanted in zip(views, needed, strict=True) if wanted],
            [grad for _, grad in pairs],
            create_graph=True,
            allow_unused=True,
        )
    rest = iter(found)
    return tuple(next(rest) if wanted else None for wanted in needed)


def refuse_derivative(overload: torch._ops.OpOverload, of: str) -> None:
    """Let the derivative of an operator without a composite raise an error when a gradient reaches it."""

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise NotAvailableError(
            f"{of} has no second derivative, because torch does not differentiate its gradient either "
            f"(autoshard::{overload._opname}). Leave it out of the value whose gradient is differentiated."
        )

    torch.library.register_autograd(overload, refuse, lib=_LIBRARY)


def composite_of(overload: torch._ops.OpOverload) -> Composite:
    """The composite of a semantic operator of this library."""
    return _COMPOSITES[overload]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float64 for float64, float32 for all narrower floats."""
    return torch.float64 if dtype == torch.float64 else torch.float32
