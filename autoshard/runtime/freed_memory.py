"""Make the C library of a CPU process keep the memory that a step frees, for the next step.

glibc returns the free end of its heap to the system above a threshold. So each step takes a page fault for every 4 KiB.
These faults took 5 to 25 % of a step of 300 ms of a small BERT. This module raises this threshold, and the size from
which glibc allocates blocks outside of the heap. Variables of glibc that the user has set take precedence.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of two parameters of `mallopt`, from malloc.h."""

_KEPT_BYTES = (1 << 31) - 1
"""The largest value that `mallopt` takes."""

_LARGEST_IN_HEAP_BYTES = 32 << 20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: blocks of at least this size go back to the system when they are freed."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Make the C library keep freed host memory. Return whether it does.

    Nothing changes if the library has no `mallopt`, or if the user has set an environment variable of glibc's malloc.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in tunables:
        return False
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))


def give_freed_memory_back() -> None:
    """Trim the C library's heap: its free host memory goes back to the system (`malloc_trim`).

    Call this before other code allocates blocks of other sizes, such as an export of weights. Without `malloc_trim`,
    the call does nothing.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Any:
    """Return a function of the C library; None if it has no such function, or the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
