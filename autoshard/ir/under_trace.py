"""A flag that is set while a model runs only to be traced, when its tensors have no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_TRACED: ContextVar[bool] = ContextVar("autoshard_is_traced", default=False)


@contextmanager
def under_trace() -> Iterator[None]:
    """Set the flag of `is_under_trace` within the context."""
    token = _IS_TRACED.set(True)
    try:
        yield
    finally:
        _IS_TRACED.reset(token)


def is_under_trace() -> bool:
    """Whether a model is running only to be traced, so that its tensors have no values."""
    return _IS_TRACED.get()
