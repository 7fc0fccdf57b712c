"""Bytes per second of kernels by size: measured curves of a device, such as a CPU core.

Small operands are in caches, large operands in memory, and large new results are mapped page by page. For example, a
core adds vectors of 1 MiB at 88 GB/s, and vectors of 64 MiB at 5 GB/s. Kernels that compute much for each element
(`tanh`), and composite kernels (attention on a CPU), have curves of their own, by the operator's name.

    seconds = bytes / rate(bytes)

Between the measured sizes, log(rate) is linear in log(bytes). Beyond them, the rate is constant. `bytes` are those of
the operator's `Work`. Curves of experts leave out the matrix products, whose time is added at the rate of matrix
products. Curves of attention contain its products, and are read at `cost_models.compute.attended_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import exp, log

from cost_models.errors import HardwareFileError

Curve = tuple[tuple[float, float], ...]
"""Points (bytes moved, bytes per second), in the order of bytes."""

MEMORY = "memory"
"""Name of the curve of plain copies, and of kernels without a curve of their own."""

_KERNELS = {
    "autoshard.attention.default": "attention",
    "autoshard.attention_backward.default": "attention_backward",
    "autoshard.ring_attention.default": "attention",
    "autoshard.ring_attention_backward.default": "attention_backward",
    "autoshard.experts.default": "experts",
    "autoshard.experts_backward.default": "experts_backward",
    "autoshard.exchanged_experts.default": "experts",
    "autoshard.exchanged_experts_backward.default": "experts_backward",
    "autoshard.exchanged_experts_keeping.default": "experts",
    "autoshard.exchanged_experts_kept_backward.default": "experts_backward",
}


def kernel_of(operator: str) -> str:
    """Return the name of an operator's curve. Similar operators share a curve; most operators have their own.

    Example:
        >>> kernel_of("autoshard.ring_attention.default"), kernel_of("aten.tanh.default")
        ('attention', 'aten.tanh.default')
    """
    return _KERNELS.get(operator, operator)


def curve_of(times: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve through measured (bytes, seconds). A larger size takes at least the time of a smaller size."""
    curve: list[tuple[float, float]] = []
    longest = 0.0
    for size, seconds in sorted(times):
        longest = max(longest, seconds)
        curve.append((size, size / longest))
    return tuple(curve)


def time_on(curve: Curve, bytes_moved: float) -> float:
    """Return the seconds to move bytes at the rates of a curve.

    Example:
        >>> time_on(((1e6, 1e9), (1e8, 1e8)), 2e8)
        2.0
    """
    sizes = [size for size, _ in curve]
    place = bisect_left(sizes, bytes_moved)
    if place in (0, len(curve)):
        return bytes_moved / curve[min(place, len(curve) - 1)][1]
    (low, slow), (high, fast) = curve[place - 1], curve[place]
    share = log(bytes_moved / low) / log(high / low)
    return bytes_moved / exp((1 - share) * log(slow) + share * log(fast))


def numbers_of(curves: Mapping[str, Curve]) -> dict[str, tuple[float, str]]:
    """Return curves as constants of a device's file: "throughput.<operator>.<bytes>" to (bytes/s, unit "B/s")."""
    return {f"throughput.{name}.{round(size)}": (rate, "B/s") for name, curve in curves.items() for size, rate in curve}


def curves_of(constants: Mapping[str, float], origin: str = "") -> dict[str, Curve]:
    """Return the curves in a device's file, given its constants by the path after "throughput.".

    Raises HardwareFileError, which names the file `origin`, if a path does not end in a number of bytes.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for path, rate in constants.items():
        name, _, size = path.rpartition(".")
        if not (name and size.isdecimal() and int(size)):
            raise HardwareFileError(
                f"{origin}: the table [throughput.{path}] must read [throughput.KERNEL.BYTES], e.g. "
                f"[throughput.{MEMORY}.4096]."
            )
        found.setdefault(name, []).append((float(size), rate))
    return {name: tuple(sorted(points)) for name, points in found.items()}
