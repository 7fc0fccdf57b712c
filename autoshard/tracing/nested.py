"""Raises `TraceError` if a model makes a nested tensor, because tensors of a program have rectangular shapes."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.nested._internal import nested_tensor as jagged

from autoshard.errors import TraceError
from autoshard.tracing.provenance import user_line
from autoshard.tracing.replaced import replaced

_MAKERS = (
    *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")),
    *((jagged, name) for name in ("jagged_from_list", "nested_view_from_values_offsets_lengths")),
)


def refusing_nested_tensors() -> contextlib.AbstractContextManager[None]:
    """Return a context in which functions that create nested tensors raise `TraceError`."""

    def refuse(*_: Any, **__: Any) -> None:
        where = user_line(sys._getframe(1))
        raise TraceError(
            f"The model makes a nested tensor in forward{f' at {where}' if where else ''}; shapes of programs are "
            "rectangles. Pad the rows and pass a mask, or keep the rows of all sequences in one tensor with their "
            "positions (cu_seqlens, position_ids)."
        )

    return replaced(dict.fromkeys(_MAKERS, refuse))
