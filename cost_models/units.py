"""Units: everything is seconds, bytes, FLOP/s and bytes/s inside; these convert at the edges.

Link and memory bandwidths are decimal (1 GB/s = 1e9 B/s), memory sizes are binary (1 GiB = 2**30 B).
"""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30


def bytes_from_gib(gib: float) -> int:
    """GiB to bytes (1 GiB = 2**30 B)."""
    return round(gib * GIB)


def bytes_per_s_from_gbit(gbit_per_s: float) -> float:
    """Decimal Gbit/s to B/s: 400 Gbit/s is 50e9 B/s."""
    return gbit_per_s * 1e9 / 8


def ceil_div(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) of integers, exact."""
    return -(-numerator // denominator)
