"""Runs Python's garbage collector rarely during tracing, planning and lowering.

The objects of a compile live until it ends, so collections free little. With Python's own thresholds, collections take
14 % of the time of `compile`; with `THRESHOLDS`, 8 % (GPT-2, Llama and BERT of two layers).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

THRESHOLDS = (100_000, 50, 100)
"""Arguments of `gc.set_threshold`. Six calls of `compile`, 20 s, spend 0.9 s in collections at these thresholds. At
(20_000, 20, 20) they spend 1.2 s, and at Python's own thresholds 2.8 s (by `gc.callbacks`).
"""


def seldom_collecting(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, changed to run with the rare garbage collections of `THRESHOLDS`.

    Higher thresholds of the user, or a disabled collector, stay as they are.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _RARE:
            return function(*args, **kwargs)

    return run


class _Rare:
    """A reentrant context, shared by threads: the first entry raises the thresholds, the last exit restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if self._running == 0:
                self._before = gc.get_threshold()
                if 0 < self._before[0] < THRESHOLDS[0]:
                    gc.set_threshold(*THRESHOLDS)
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                gc.set_threshold(*self._before)


_RARE = _Rare()
