"""Outputs that lie in parts on the ranks, and what a user computes with them.

A `SplitOutput` is a DTensor: each rank holds its part, `full_tensor()` gathers it, `to_local()` is the part. It differs
where a user who wrote for one device would be surprised, or DTensor would be wrong without a word:

* tensors beside it that are no DTensors are taken to be the same on every rank, as inputs are, so that
  `cross_entropy(logits, targets)` works;
* what reads its values (`item()`, `tolist()`, `numpy()`, `bool()`) reads those of the whole. DTensor's `item()` of a
  sum is this rank's addend;
* `_ON_PARTS` names what is computed on parts. For any other function the whole is gathered first, and so is what is cut
  unevenly: DTensor's gradient of `mse_loss` is too large by the number of parts, and it averages means of uneven ones.

What DTensor cannot do is one error that says how to have the output whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from autoshard.errors import NotAvailableError

_READS = frozenset(
    {
        *("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
        *("__format__", "__contains__", "equal", "allclose", "is_nonzero"),
    }
)
"""Functions that give numbers, not tensors, by name."""

_OF_AUTOGRAD = frozenset({torch.autograd.grad, torch.autograd.backward})
"""Functions that ask for tensors themselves, not for their values."""

_LOOKS = frozenset(
    {
        *("__get__", "__set__", "__repr__", "__hash__", "__len__", "size", "dim", "ndimension", "stride", "numel"),
        *("nelement", "element_size", "is_contiguous", "is_floating_point", "is_complex", "get_device", "type"),
        *("data_ptr", "untyped_storage", "backward", "register_hook", "requires_grad_", "retain_grad", "detach"),
        *("detach_", "clone", "contiguous", "to", "cpu", "float", "double", "half", "bfloat16"),
    }
)
"""Functions that look at what a tensor is, or copy it as it lies."""

_ON_PARTS = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
        *("__truediv__", "__rtruediv__", "__neg__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("eq", "ne", "lt", "le", "gt", "ge", "abs", "exp", "log", "sqrt", "square", "pow", "__pow__", "tanh"),
        *("sigmoid", "relu", "clamp", "sum", "mean", "amax", "amin", "argmax", "argmin", "max", "min", "topk"),
        *("softmax", "log_softmax", "logsumexp", "cross_entropy", "__getitem__", "transpose", "permute", "flatten"),
        *("unsqueeze", "squeeze", "narrow"),
    }
)
"""Functions of which DTensor gives what one device gives, values and gradients; each is tested."""


class SplitOutput(DTensor):
    """An output in parts, and what is computed from it; see the module's docstring."""

    __slots__ = ()

    @classmethod
    def of(cls, tensor: DTensor) -> SplitOutput:
        """The same tensor object, as an output."""
        tensor.__class__ = cls
        assert isinstance(tensor, SplitOutput), "it is of this class now"
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `torch.Tensor`."""
        name, given = getattr(func, "__name__", str(func)), (args, dict(kwargs or {}))
        if func in _OF_AUTOGRAD:
            return super().__torch_function__(func, types, *given)
        if name in _READS:
            args, keywords = pytree.tree_map_only(DTensor, _whole, given)
            return func(*args, **keywords)
        if _writes(name, given[1]):
            raise _not_on_parts(name, "it changes a tensor in place")
        if name not in _LOOKS:
            leaves = pytree.tree_leaves(given)
            mesh = next(leaf.device_mesh for leaf in leaves if isinstance(leaf, SplitOutput))
            is_on_parts = name in _ON_PARTS
            given = pytree.tree_map_only(
                torch.Tensor, lambda tensor: _operand(tensor, mesh, is_whole=not is_on_parts), given
            )
        try:
            result = super().__torch_function__(func, types, *given)
        except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
            raise _not_on_parts(name, _first_line(error)) from error
        known = {id(leaf) for leaf in pytree.tree_leaves(given)}
        return pytree.tree_map_only(DTensor, lambda made: made if id(made) in known else cls.of(made), result)


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor()


def _operand(tensor: torch.Tensor, mesh: DeviceMesh, *, is_whole: bool) -> torch.Tensor:
    """What is computed with: a DTensor, whole on every rank, or in even parts."""
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False) if tensor.dim() else tensor
    if is_whole or _is_uneven(tensor):
        return tensor.redistribute(placements=[Replicate()] * mesh.ndim)
    return tensor


def _is_uneven(tensor: DTensor) -> bool:
    pieces = [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            pieces[placement.dim] *= tensor.device_mesh.size(axis)
    return any(size % count for size, count in zip(tensor.shape, pieces, strict=True))


def _writes(name: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a function changes an operand, which may be a copy of the output."""
    is_in_place = name == "__setitem__" or (
        name.startswith("__i") and name not in ("__int__", "__index__", "__invert__", "__iter__")
    )
    return is_in_place or (name.endswith("_") and not name.startswith("__") and name not in _LOOKS) or "out" in keywords


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _not_on_parts(name: str, reason: str) -> NotAvailableError:
    return NotAvailableError(
        f"{name} failed on an output of the model that lies in parts on the ranks (a DTensor): {reason.rstrip('.')}. "
        "Have outputs whole with autoshard.compile(..., gather_outputs=True), or gather this one with "
        "output.full_tensor()."
    )
