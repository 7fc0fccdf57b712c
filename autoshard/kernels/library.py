"""The torch library "autoshard", and functions that define its operators.

An operator is opaque to tracing (`CompositeExplicitAutograd`) and functional: no result aliases an operand. Its
implementation in plain PyTorch runs on every backend.

The derivative of an operator is another opaque operator, without a derivative. A second derivative uses the
*composite*: the same results by small operators, which torch can differentiate any number of times.
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
"""A function that computes the differentiable results of an operator with operators that torch can differentiate.

The differentiable results are the operator's first results.
"""

# Operators live as long as the library object that defines them.
_LIBRARY = Library(NAMESPACE, "FRAGMENT")
_IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable[..., object]] = {}
_COMPOSITES: dict[torch._ops.OpOverload, Composite] = {}


def define(
    name: str, schema: str, implementation: Callable[..., object], fake: Callable[..., object]
) -> torch._ops.OpOverload:
    """Define `autoshard::name` and return its default overload.

    Args:
        schema: arguments and returns, such as `"(Tensor x) -> Tensor"`.
        implementation: the function in plain PyTorch, for any device. Its results alias no operand.
        fake: takes the same arguments, and returns empty tensors of the right shape, dtype and device.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _IMPLEMENTATIONS[overload] = implementation
    return overload


def implementation_of(overload: torch._ops.OpOverload) -> Callable[..., object]:
    """Return the plain PyTorch function with which an operator of this library was defined."""
    return _IMPLEMENTATIONS[overload]


def differentiate(
    overload: torch._ops.OpOverload,
    setup_context: Callable[..., None],
    backward: Callable[..., object],
    composite: Composite | None = None,
) -> None:
    """Set the derivative of an operator.

    Args:
        setup_context: saves the tensors that `backward` needs, as in `torch.library.register_autograd`.
        backward: returns the operands' gradients from the context and the results' gradients, as in
            `torch.library.register_autograd`.
        composite: if given, the backward with `create_graph=True` differentiates the composite, so that the gradients
            can be differentiated again.
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
    """Return the gradient of each operand, as results of operators that torch can differentiate again.

    `ctx` is the context of the forward's `torch.autograd.Function`. `grads` has the gradients of its results, with None
    for zero.
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


def refuse_derivative(overload: torch._ops.OpOverload, computation: str) -> None:
    """Make an operator raise `NotAvailableError` when a gradient reaches it.

    The operator is the backward of an operator without a composite, so its derivative would be a second derivative.
    `computation` names the operator in the message, such as "CTC loss".
    """

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise NotAvailableError(
            f"{computation} has no second derivative, because torch does not differentiate its gradient either "
            f"(autoshard::{overload._opname}). Leave it out of the value whose gradient is differentiated."
        )

    torch.library.register_autograd(overload, refuse, lib=_LIBRARY)


def composite_of(overload: torch._ops.OpOverload) -> Composite:
    """Return the composite that `differentiate` was given for an operator."""
    return _COMPOSITES[overload]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of `dtype`: float64 for float64, and float32 for all narrower floats."""
    return torch.float64 if dtype == torch.float64 else torch.float32
