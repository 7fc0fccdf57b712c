"""Takes traced tensors out of the globals, classes and functions of a model's code after a trace.

Models store tables there, such as rotary angles: in a dict of their Python module, or in an attribute of their class. A
traced call computes such tensors on fake tensors. They would reach the trace's next run, and later calls of the user's
model.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from autoshard.tracing.attributes import content_of, refill

_DEPTH, _MOST = 3, 1000
"""The greatest depth of nested containers that are searched, and the most items of a container that is searched."""

_ABSENT = object()


def places_of(model: nn.Module) -> Iterator[Any]:
    """Yield the classes of a model's modules, and the Python modules that define these classes, except torch's."""
    kinds = {base for module in model.modules() for base in type(module).__mro__ if not _is_of_torch(base)}
    yield from kinds
    yield from (sys.modules[name] for name in {kind.__module__ for kind in kinds} if name in sys.modules)


def _is_of_torch(kind: type) -> bool:
    return kind is object or kind.__module__.split(".")[0] == "torch"


@contextlib.contextmanager
def keeping_namespaces(model: nn.Module) -> Iterator[None]:
    """At exit, undo the storing of traced tensors in the namespaces of a model's code.

    The namespaces are those of `places_of`, and of the functions in them. A variable with a traced tensor gets its old
    value, and a container with a traced tensor gets its old content.
    """
    before = [(place, dict(vars(place))) for place in _with_functions(model)]
    contents = [(holder, content_of(holder)) for _, held in before for holder in _holders(held.values())]
    try:
        yield
    finally:
        for place, held in before:
            for name, value in list(vars(place).items()):
                old = held.get(name, _ABSENT)
                if value is not old and _is_traced(value):
                    delattr(place, name) if old is _ABSENT else setattr(place, name, old)
        for holder, content in contents:
            if _is_traced(holder):
                refill(holder, content)


def _with_functions(model: nn.Module) -> Iterator[Any]:
    for place in places_of(model):
        yield place
        yield from (value for value in list(vars(place).values()) if isinstance(value, FunctionType))


def _inside(value: Any, depth: int) -> Iterable[Any]:
    """Return the items of a container; () for other values, long containers, and containers that lie too deep."""
    if not isinstance(value, (dict, list, set, tuple, deque)) or depth == _DEPTH or len(value) > _MOST:
        return ()
    return value.values() if isinstance(value, dict) else value


def _holders(values: Iterable[Any], depth: int = 0) -> Iterator[Any]:
    """Yield the containers among `values`, and within them, that can get other content."""
    for value in values:
        if isinstance(value, (dict, list, set, deque)) and len(value) <= _MOST:
            yield value
        yield from _holders(_inside(value, depth), depth + 1)


def _is_traced(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (FunctionalTensor, FakeTensor)):
        return True
    return any(_is_traced(item, depth + 1) for item in _inside(value, depth))
