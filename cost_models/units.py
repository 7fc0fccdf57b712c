"""Units: everything is seconds, bytes, FLOP/s and bytes/s.

Link and memory bandwidths are decimal (1 GB/s = 1e9 B/s), memory sizes are binary (1 GiB = 2**30 B).
"""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30


def ceil_div(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) of integers, exact."""
    return -(-numerator // denominator)
