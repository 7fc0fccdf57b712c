"""A flag that is set while a model runs only to be traced. The model's tensors have no values then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_TRACED: ContextVar[bool] = ContextVar("autoshard_is_traced", default=False)


@contextmanager
def under_trace() -> Iterator[None]:
    """Set the flag that `is_under_trace` returns, within the context."""
    token = _IS_TRACED.set(True)
    try:
        yield
    finally:
        _IS_TRACED.reset(token)


def is_under_trace() -> bool:
    """Whether the flag is set, so that models run only to be traced."""
    return _IS_TRACED.get()
