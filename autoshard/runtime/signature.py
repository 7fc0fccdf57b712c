"""Calls told apart: two calls with equal signatures can run the same program."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class FlatCall:
    """The arguments of a call as flat leaves; keyword arguments in the order of their names."""

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
        """Flatten `(args, kwargs)`."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        return cls(tuple(leaves), tree)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The leaves that are tensors, by the name of their input: "input:0"."""
        return {f"input:{i}": leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def flattened_again(self) -> FlatCall:
        """The same call, flattened with the types that are known now."""
        return FlatCall.of(*self.assemble(self.leaves))

    def assemble(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with other leaves."""
        return pytree.tree_unflatten(list(leaves), self.tree)


def signature_of(call: FlatCall, model: nn.Module, *, grad: bool) -> Hashable:
    """What a program depends on besides the values of tensors: shapes, types, other leaves, modes, frozen state."""
    return (
        grad,
        repr(call.tree),
        tuple(_leaf_signature(leaf, grad=grad) for leaf in call.leaves),
        tuple(module.training for module in model.modules()),
        tuple((parameter.dtype, grad and parameter.requires_grad) for parameter in model.parameters()),
        torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    )


def describe_call(call: FlatCall, *, grad: bool, training: bool) -> str:
    """A short text of a call for people: `int64[4, 16], int64[4, 16], training`."""
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in call.leaves
    ]
    mode = ("training" if training else "evaluation") + ("" if grad else ", no gradients")
    return f"({', '.join(parts)}), {mode}"


def _leaf_signature(leaf: Any, *, grad: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return ("tensor", tuple(leaf.shape), leaf.dtype, grad and leaf.requires_grad)
    return (type(leaf), repr(leaf))
