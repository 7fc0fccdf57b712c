"""Tracing leaves no tensor in the model: attributes of modules that hold some are afterwards what they were before.

Models keep tensors between calls in plain attributes: a table of biases, the last mask. A traced call computes on fake
tensors, and runs more than once; what it keeps must reach neither its next run nor the user's model. Parameters,
buffers, submodules and hooks are not touched here, nor what holds no tensor: flags, counters, patched methods.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_OWN = frozenset(nn.Module().__dict__)
"""The attributes that every module has."""


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards, no attribute of a module of `model`, nor a dict, list or set there, holds a tensor that is new.

    What these hold in turn is not looked into.
    """
    before = [(module, _own_attributes(module)) for module in model.modules()]
    held = [[(value, copy.copy(value)) for value in found.values() if _is_container(value)] for _, found in before]
    try:
        yield
    finally:
        for (module, attributes), containers in zip(before, held, strict=True):
            _restore(module, attributes)
            for value, content in containers:
                _refill(value, content)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OWN}


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, set))


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in _own_attributes(module).items():
        if not _holds_tensors(value) or value is attributes.get(name):
            continue
        if name in attributes:
            module.__dict__[name] = attributes[name]
        else:
            del module.__dict__[name]


def _refill(value: Any, content: Any) -> None:
    if not _holds_tensors(value):
        return
    if isinstance(value, list):
        value[:] = content
        return
    value.clear()
    value.update(content)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set, tuple)) else ()
    return any(isinstance(item, Tensor) for item in items)
