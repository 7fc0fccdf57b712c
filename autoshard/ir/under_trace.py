"""Whether a model runs under the tracer. Its tensors have no values then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_TRACED: ContextVar[bool] = ContextVar("autoshard_is_traced", default=False)


@contextmanager
def under_trace() -> Iterator[None]:
    """Within, models run to be traced."""
    token = _IS_TRACED.set(True)
    try:
        yield
    finally:
        _IS_TRACED.reset(token)


def is_under_trace() -> bool:
    """Whether models run to be traced."""
    return _IS_TRACED.get()
