"""Units: all quantities are in seconds, bytes, FLOP/s and bytes/s.

Bandwidths of links and memory are decimal (1 GB/s = 1e9 B/s). Sizes of memory are binary (1 GiB = 2**30 B).
"""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ceil(numerator / denominator) of two integers, computed exactly."""
    return -(-numerator // denominator)
