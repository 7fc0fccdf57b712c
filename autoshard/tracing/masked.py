"""Assignment through a mask, `x[mask] = value`, in forms whose gradients have static shapes.

In torch, the gradient of `value` has as many rows as the mask has ones, and no trace knows this number. Two other forms
replace the assignment:

1. A value that is equal for all ones of the mask is selected by `torch.where`. The mask is not read, and its dims
   stay parallel.
2. A value with a row for each one of the mask is written by index, `x[mask.nonzero()] = value`. The number of ones is
   read (`counted`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Masked:
    """The part of a tensor that `x[.., mask, ..]` selects.

    Args:
        view: the tensor, indexed by all entries but the mask.
        mask: a bool mask.
        start: the first dim of `view` that the mask covers.
    """

    view: Tensor
    mask: Tensor
    start: int

    @property
    def behind(self) -> int:
        """Number of dims of the view behind the dims that the mask covers."""
        return self.view.dim() - self.start - self.mask.dim()

    def spread_mask(self) -> Tensor:
        """Return the mask with dims of size one at its end, so that it broadcasts to the view."""
        return self.mask[(..., *[None] * self.behind)]

    def spread_value(self, value: Tensor) -> Tensor | None:
        """Return `value` reshaped to broadcast to the view; None if it differs between the ones of the mask."""
        while value.dim() > self.behind and value.shape[0] == 1:
            value = value[0]
        of_places = value.dim() - self.behind - 1
        if of_places < 0:
            return value
        if value.shape[of_places] != 1:
            return None
        return value.reshape(*value.shape[:of_places], *[1] * self.mask.dim(), *value.shape[of_places + 1 :])


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    """Assign `x[index] = value`.

    If `index` has a mask, the module's first form runs where it applies. Otherwise the second form runs if `value`
    requires grad, and torch's own assignment if not.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if not any(map(_is_mask, entries)):
        x[index] = value
        return
    masked = _find_masked(x, entries)
    if masked is not None and _assign_one_value(masked, value):
        return
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        index = tuple(_places(entries))
    x[index] = value


def _find_masked(x: Tensor, entries: Sequence[Any]) -> _Masked | None:
    """Return the part of `x` that index entries with at least one mask select.

    Return None for several masks, and for entries other than a mask, numbers, slices, None and an ellipsis.

    Raises:
        IndexError: the mask does not fit the shape of `x`.
    """
    (place, *others) = (place for place, entry in enumerate(entries) if _is_mask(entry))
    before, mask, after = entries[:place], entries[place], entries[place + 1 :]
    if others or not all(_is_basic(entry) for entry in (*before, *after)):
        return None
    view = x[(*before, *[slice(None)] * mask.dim(), *after)]
    start = view.dim() - mask.dim() - _dims_made(after) if Ellipsis in before else _dims_made(before)
    if start < 0 or view.shape[start : start + mask.dim()] != mask.shape:
        raise IndexError(
            f"A mask of shape {list(mask.shape)} does not fit a tensor of shape {list(view.shape)} from dim {start} on"
        )
    return _Masked(view, mask.bool(), start)


def _is_basic(entry: Any) -> bool:
    return entry is None or (isinstance(entry, (int, slice, EllipsisType)) and not isinstance(entry, bool))


def _dims_made(entries: Sequence[Any]) -> int:
    return sum(entry is None or isinstance(entry, slice) for entry in entries)


def _assign_one_value(masked: _Masked, value: Any) -> bool:
    """Assign a value that is equal for all ones of the mask. Return False, and do nothing, for any other value."""
    view = masked.view
    if isinstance(value, (bool, int, float)) and (view.is_floating_point() or not isinstance(value, float)):
        view.masked_fill_(masked.spread_mask(), value)
        return True
    spread = masked.spread_value(value) if isinstance(value, Tensor) else None
    if spread is None or spread.device != view.device:
        return False
    view.copy_(torch.where(masked.spread_mask(), spread.to(view.dtype), view))
    return True


def _index_put_(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    if accumulate or values.dtype != x.dtype:
        return x.index_put_(tuple(_places(indices) if values.requires_grad else indices), values, accumulate)
    _set_item(x, tuple(slice(None) if index is None else index for index in indices), values)
    return x


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    return _index_put_(x.clone(), indices, values, accumulate)


def _places(entries: Sequence[Any]) -> list[Any]:
    """Return the entries of an index, with each mask replaced by the indices of its ones."""
    found: list[Any] = []
    for entry in entries:
        found += entry.nonzero(as_tuple=True) if _is_mask(entry) else [entry]
    return found


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) and entry.dim() > 0


ASSIGNMENTS: Mapping[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _set_item,
    Tensor.index_put: _index_put,
    Tensor.index_put_: _index_put_,
    torch.index_put: _index_put,
    torch.index_put_: _index_put_,
}
"""Function of torch → the function that replaces it during a trace."""
