"""Memory that a step frees on a CPU stays with the process, for the next step.

glibc gives the free end of its heap back to the system as soon as it is larger than a threshold, of a few MiB where
tensors are of a few MiB. A step frees nearly all that it took, and the next takes a page fault for every 4 KiB of it
again: 10,000 faults of a step of 300 ms on a small BERT, 5 to 25 % of its time. So the threshold is raised, and what is
kept apart from the heap stays as large as glibc's own adaption lets it become. Who sets glibc's variables keeps them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (malloc.h)."""

_KEPT_BYTES = (1 << 31) - 1
"""The largest that `mallopt` takes."""

_LARGEST_IN_HEAP_BYTES = 32 << 20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX: allocations from this size on are given back when they are freed."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed, unless the user says what it does; whether it does now."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in tunables:
        return False
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))


def give_freed_memory_back() -> None:
    """Let the C library give back what steps freed, before something else takes memory of other sizes."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Any:
    """A function of the C library, None where it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
