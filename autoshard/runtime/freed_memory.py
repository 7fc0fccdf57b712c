"""Keep the memory that a step frees on a CPU with the process, for the next step.

glibc returns the free end of its heap to the system above a threshold. So each step takes a page fault for every 4 KiB.
They took 5 to 25 % of a step of 300 ms of a small BERT. This module raises this threshold, and the size from
which glibc allocates blocks outside of the heap. Variables of glibc that the user has set take precedence.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (malloc.h)."""

_KEPT_BYTES = (1 << 31) - 1
"""The largest value that `mallopt` takes."""

_LARGEST_IN_HEAP_BYTES = 32 << 20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: allocations of at least this size are returned when they are freed."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory; return False if the user has set its variables, or it has no `mallopt`."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in tunables:
        return False
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))


def give_freed_memory_back() -> None:
    """Return freed memory to the system, before other code allocates memory of other sizes."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Any:
    """Find a function of the C library; None if there is none of this name, or the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
