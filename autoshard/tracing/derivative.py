"""A call that returns gradients of a model's outputs. A trace of this call contains gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import NotAvailableError
from autoshard.ir.derivative import Derivative
from autoshard.tracing.precision import Casts

ModelCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A call of a model that returns gradients of its outputs, in place of the outputs that `call` would return.

    `derivative` names the outputs to differentiate, and the parameters and inputs whose gradients are returned.
    """

    call: ModelCall
    derivative: Derivative

    @classmethod
    def of(cls, call: ModelCall, derivatives: Sequence[Derivative]) -> GradientCall:
        """Return the call for nested derivatives, the innermost first.

        The first derivative is of the model's outputs. Each later derivative is of the result of the derivative before
        it.
        """
        first, *rest = derivatives
        return cls.of(cls(call, first), rest) if rest else cls(call, first)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        own_args, own_kwargs, tangents = args
        inputs = pytree.tree_leaves((own_args, own_kwargs))
        outputs = pytree.tree_leaves(self.call(model, own_args, own_kwargs))
        wanted = [_tensor_of(name, model, inputs) for name in self.derivative.wanted]
        differentiated = [outputs[index] for index in self.derivative.outputs]
        return torch.autograd.grad(
            differentiated, wanted, tangents, create_graph=True, allow_unused=True, materialize_grads=True
        )


def innermost_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], derivatives: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's own (args, kwargs) from the arguments of a call of `derivatives` nested `GradientCall`s."""
    own = (args, dict(kwargs))
    for _ in range(derivatives):
        own = own[0][:2]
    return own


def refuse_casts(casts: Casts | None) -> None:
    """Raise `NotAvailableError` if a precision is given (`casts`), for a call with gradients of gradients."""
    if casts is not None:
        raise NotAvailableError(
            "Gradients of gradients (create_graph=True) are not available with precision=. Leave precision out, or "
            "compute them inside the model's forward, or in loss_fn, by torch.autograd.grad(..., create_graph=True)."
        )


def _tensor_of(name: str, model: nn.Module, inputs: Sequence[Any]) -> torch.Tensor:
    if name.startswith("input:"):
        return inputs[int(name.removeprefix("input:"))]
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)
