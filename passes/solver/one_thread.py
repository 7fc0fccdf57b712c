"""Run NumPy's linear algebra on one thread.

A search's matrices are small, and threads that share cores wait for each other. The search over recipes for Llama 405B
took 2.5 CPU seconds on one thread. It took 9 to 36 CPU seconds on two threads of two busy cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np  # noqa: F401  # its library is one of those that are found
from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread within this context or the decorated function.

    Afterwards, restore the number of threads.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    """Return a controller of the loaded BLAS libraries. It is cached, because finding the libraries is slow."""
    return ThreadpoolController()
