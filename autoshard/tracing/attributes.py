"""Tracing leaves no trace in the model: Python attributes of modules are afterwards what they were before.

Models keep things between calls in plain attributes: a table of biases, the last mask, a counter. A traced call
computes on fake tensors, and runs more than once; what it keeps must reach neither its next run nor the user's model.
Parameters, buffers, submodules and hooks are not touched here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

_OWN = frozenset(nn.Module().__dict__)
"""The attributes that every module has."""


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards, attributes of all modules of `model` are as before, and dicts, lists and sets there hold the same.

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
    for name in _own_attributes(module).keys() - attributes.keys():
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
        return
    value.clear()
    value.update(content)
