"""Replaces attributes and operators of torch and of other libraries within a context, such as during a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

COMPOSITE = DispatchKey.CompositeImplicitAutograd
_ABSENT = object()


@contextlib.contextmanager
def replaced(values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Within the context, attributes have other values. `values` maps (holder, name of the attribute) to the value."""
    saved = {(holder, name): vars(holder).get(name, _ABSENT) for holder, name in values}
    try:
        for (holder, name), value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for (holder, name), value in saved.items():
            if value is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, value)


@contextlib.contextmanager
def replaced_operators(replacements: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Within the context, each of these composite operators runs its function in `replacements`."""
    saved = {op: dict(op.py_kernels) for op in replacements}
    try:
        for op, replacement in replacements.items():
            op.py_kernels.pop(COMPOSITE, None)
            op.py_impl(COMPOSITE)(replacement)
            op._dispatch_cache.clear()
        with torch._C._EnablePythonDispatcher():
            yield
    finally:
        for op, kernels in saved.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
