"""Run NumPy's linear algebra on one thread.

A search's matrices are small, and threads that share cores wait for each other. The recipes of the 405B Llama took 2.5
CPU seconds on one thread, and 9 to 36 on two threads of two busy cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np  # noqa: F401  # its library is one of those that are found
from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Use one thread while this is open, or while the decorated function runs; restore the number of threads after
    it.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    """The libraries of the process that use threads."""
    return ThreadpoolController()
