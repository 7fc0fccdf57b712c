"""Empties caches after a trace: each `functools.lru_cache` in a model's code that the trace filled.

Otherwise a cache would return fake tensors of one run to the trace's next run, and to later calls of the user's model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from autoshard.tracing.namespaces import places_of

_Cached = functools._lru_cache_wrapper


@contextlib.contextmanager
def emptying_caches(model: nn.Module) -> Iterator[None]:
    """At exit, empty the caches in a model's code that gained an entry within the context."""
    before = [(cache, cache.cache_info().misses) for cache in _caches(model)]
    try:
        yield
    finally:
        for cache, misses in before:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches(model: nn.Module) -> Iterator[_Cached[Any]]:
    """Yield the caches in the classes of a model's modules, and in the Python modules that define these classes."""
    for place in places_of(model):
        for value in list(vars(place).values()):
            yield from _caches_of(value)


def _caches_of(value: Any) -> Iterator[_Cached[Any]]:
    """Yield `value` if it is a cached function, or the cached functions that a function or method wraps."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, _Cached):
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell without content yet
                if isinstance(cell.cell_contents, _Cached):
                    yield cell.cell_contents
