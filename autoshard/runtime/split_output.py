"""`SplitOutput`: an output that stays sharded on the ranks, or a result that a user computes from it.

A `SplitOutput` is a DTensor: each rank holds its part, `full_tensor()` gathers it, `to_local()` returns the part. It
differs from a DTensor in cases that would surprise a user who wrote for one device, or would give wrong values:

* Plain tensors in the same operation count as equal on every rank, as inputs do, so `cross_entropy(logits, targets)`
  works.
* Functions that read values (`item()`, `tolist()`, `numpy()`, `bool()`) read the whole tensor.
* `_ON_PARTS` lists the functions that run on parts. For any other function, and for unevenly split tensors, torch's own
  function runs on gathered plain tensors, and the results are replicated DTensors.
* Results are never partial: a sum over a split dim is reduced at once.
* The mean of cross-entropy is over the targets of all parts (`_mean_cross_entropy`), not a mean of ranks' means.

Functions that fail on parts raise one error, which says how to get a whole output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
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
"""Names of functions that return numbers instead of tensors."""

_OF_AUTOGRAD = frozenset({torch.autograd.grad, torch.autograd.backward})
"""Functions of autograd, which get their arguments unchanged."""

_LOOKS = frozenset(
    {
        *("__get__", "__set__", "__repr__", "__hash__", "__len__", "size", "dim", "ndimension", "stride", "numel"),
        *("nelement", "element_size", "is_contiguous", "is_floating_point", "is_complex", "get_device", "type"),
        *("data_ptr", "untyped_storage", "backward", "register_hook", "requires_grad_", "retain_grad", "detach"),
        *("detach_", "clone", "contiguous", "to", "cpu", "float", "double", "half", "bfloat16"),
    }
)
"""Names of functions that inspect a tensor, or copy a tensor with its sharding."""

_ON_PARTS = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
        *("__truediv__", "__rtruediv__", "__neg__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("eq", "ne", "lt", "le", "gt", "ge", "abs", "exp", "log", "sqrt", "square", "pow", "__pow__", "tanh"),
        *("sigmoid", "relu", "clamp", "sum", "mean", "argmax", "argmin", "max", "min", "topk"),
        *("softmax", "log_softmax", "logsumexp", "cross_entropy", "__getitem__", "transpose", "permute", "flatten"),
        *("unsqueeze", "squeeze", "narrow"),
    }
)
"""Names of functions for which DTensor gives the values and gradients of one device; each function is tested."""


class SplitOutput(DTensor):
    """An output that stays sharded, or a result computed from it: a DTensor that behaves as a tensor on one device."""

    __slots__ = ()

    @classmethod
    def of(cls, tensor: DTensor) -> SplitOutput:
        """Change the class of a DTensor object to `SplitOutput`, in place, and return the object."""
        tensor.__class__ = cls
        assert isinstance(tensor, SplitOutput), "its class was set above"
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function on each rank's part or on whole tensors, by the rules in the file's docstring."""
        name, given = getattr(func, "__name__", str(func)), (args, dict(kwargs or {}))
        if func in _OF_AUTOGRAD:
            return cls._as_outputs(super().__torch_function__(func, types, *given), given)
        if name in _READS:
            args, keywords = pytree.tree_map_only(DTensor, _value, given)
            return func(*args, **keywords)
        if _writes(name, given[1]):
            raise _not_on_parts(name, "the function changes a tensor in place")
        if name == "__iter__":
            return iter(args[0].unbind())
        if name in _LOOKS:
            return cls._on_parts(func, types, *given)
        mesh = next(leaf.device_mesh for leaf in pytree.tree_leaves(given) if isinstance(leaf, SplitOutput))
        if not _runs_on_parts(name, *given):
            args, keywords = pytree.tree_map_only(DTensor, DTensor.full_tensor, given)
            return pytree.tree_map_only(
                torch.Tensor, lambda made: cls.of(_on_every_rank(made, mesh)), func(*args, **keywords)
            )
        if name == "cross_entropy" and (mean := _arguments_of_mean(*given)) is not None:
            return _mean_cross_entropy(mean)
        return cls._on_parts(func, types, *pytree.tree_map_only(torch.Tensor, lambda item: _operand(item, mesh), given))

    @classmethod
    def _on_parts(cls, func: Callable[..., Any], types: Iterable[type], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run a function as DTensor does, on each rank's part, and return its result."""
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
            raise _not_on_parts(getattr(func, "__name__", str(func)), _first_line(error)) from error
        return cls._as_outputs(result, (args, kwargs))

    @classmethod
    def _as_outputs(cls, result: Any, given: Any) -> Any:
        """Return a function's result with new DTensors in it as `SplitOutput`s, and partial sums reduced.

        `given` has the function's arguments.
        """
        known = {id(leaf) for leaf in pytree.tree_leaves(given)}
        return pytree.tree_map_only(
            DTensor, lambda made: made if id(made) in known else cls.of(_added_up(made)), result
        )


def _value(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor()


def _runs_on_parts(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether DTensor computes this call correctly from each rank's part."""
    if name in ("max", "min"):
        return len(args) + len(kwargs) > 1  # the maximum of all elements has another gradient, and other NaNs, on parts
    if name == "__getitem__":
        return all(_is_place(index) for index in (args[1] if isinstance(args[1], tuple) else args[1:]))
    return name in _ON_PARTS


def _is_place(index: Any) -> bool:
    """Whether an index is an integer, a slice, None or an ellipsis. Lists and masks may read any position."""
    return index is None or index is Ellipsis or isinstance(index, slice) or type(index) is int


def _arguments_of_mean(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of `cross_entropy` by name if it computes a mean; None for a sum or no reduction."""
    call = signature(F.cross_entropy).bind(*args, **kwargs)
    call.apply_defaults()
    named = dict(call.arguments)
    is_averaged, is_reduced = named.pop("size_average"), named.pop("reduce")
    if is_averaged is not None or is_reduced is not None:  # torch's arguments from before "reduction"
        named["reduction"] = "none" if is_reduced is False else "sum" if is_averaged is False else "mean"
    return named if named["reduction"] == "mean" else None


def _mean_cross_entropy(call: Mapping[str, Any]) -> torch.Tensor:
    """Return the mean of cross-entropy: the sum of all losses, in float32 or wider, divided by the number of targets.

    Ignored targets do not count. With class weights, the divisor is the sum of the targets' weights.
    """
    target, weight = call["target"], call["weight"]
    losses = F.cross_entropy(**{**call, "reduction": "none"})
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    if target.is_floating_point():
        count: Any = losses.numel()
    else:
        target = _value(target) if isinstance(target, DTensor) else target
        read = target[target != call["ignore_index"]]
        weight = _value(weight) if isinstance(weight, DTensor) else weight
        count = read.numel() if weight is None else weight[read].sum(dtype=total.dtype)
    return (total / count).to(losses.dtype)


def _added_up(tensor: DTensor) -> DTensor:
    """Return a DTensor with its partial sums reduced, because DTensor does not combine partial sums with numbers."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    mesh, placements = tensor.device_mesh, [Replicate() if it.is_partial() else it for it in tensor.placements]
    local = tensor.redistribute(placements=placements).to_local()
    return DTensor.from_local(  # its gradient is reduced too: DTensor cannot turn addends of a sum into those of a mean
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _on_every_rank(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _operand(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return an operand as a DTensor on the call's mesh. An unevenly split operand is replicated."""
    if not isinstance(tensor, DTensor):
        return _on_every_rank(tensor, mesh)
    if tensor.device_mesh != mesh:
        return _on_every_rank(tensor.full_tensor(), mesh)
    return tensor.redistribute(placements=[Replicate()] * mesh.ndim) if _is_uneven(tensor) else tensor


def _is_uneven(tensor: DTensor) -> bool:
    pieces = [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            pieces[placement.dim] *= tensor.device_mesh.size(axis)
    return any(size % count for size, count in zip(tensor.shape, pieces, strict=True))


def _writes(name: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a function changes an operand in place. The change would be lost if the operand is a copy."""
    is_in_place = name == "__setitem__" or (
        name.startswith("__i") and name not in ("__int__", "__index__", "__invert__", "__iter__")
    )
    return is_in_place or (name.endswith("_") and not name.startswith("__") and name not in _LOOKS) or "out" in keywords


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _not_on_parts(name: str, reason: str) -> NotAvailableError:
    return NotAvailableError(
        f"{name} failed on an output of the model that is sharded over the ranks (a DTensor): {reason.rstrip('.')}. "
        "Get whole outputs with autoshard.Options(gather_outputs=True), or gather this one with "
        "output.full_tensor()."
    )
