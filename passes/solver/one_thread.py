"""NumPy's linear algebra on one thread: a search's matrices are small, and where threads share cores they wait.

The 405B Llama's recipes took 2.5 CPU seconds so, and 9 to 36 with two threads on two busy cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np  # noqa: F401  # its library is one of those that are found
from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread in a context or a decorated function; afterwards the process has its old number."""
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    """The libraries of the process that have threads."""
    return ThreadpoolController()
