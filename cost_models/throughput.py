"""Bytes per second of kernels by size: measured curves of a device, such as a CPU core.

Small operands are in caches, large ones in memory, and fresh large results are mapped page by page. A core that adds
vectors of 1 MiB at 88 GB/s adds those of 64 MiB at 5. Kernels that compute per element (`tanh`), and composite kernels
(attention on a CPU), have curves of their own, by the operator's name.

    seconds = bytes / rate(bytes),   log(rate) linear in log(bytes) between the measured sizes, constant beyond them

`bytes` are those of the operator's `Work`. In addition, the products of experts run at the rate of products.
Attention's products are part of its curve, which is read by `cost_models.compute.attended_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import exp, log

Curve = tuple[tuple[float, float], ...]
"""(bytes moved, bytes per second), by bytes."""

MEMORY = "memory"
"""The curve of plain copies, and of kernels without a curve of their own."""

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
    """The name of an operator's curve, shared by similar operators; most operators have their own.

    Example:
        >>> kernel_of("autoshard.ring_attention.default"), kernel_of("aten.tanh.default")
        ('attention', 'aten.tanh.default')
    """
    return _KERNELS.get(operator, operator)


def curve_of(times: Sequence[tuple[float, float]]) -> Curve:
    """The curve of measured (bytes, seconds): a larger size is taken to need at least the time of a smaller one."""
    curve: list[tuple[float, float]] = []
    longest = 0.0
    for size, seconds in sorted(times):
        longest = max(longest, seconds)
        curve.append((size, size / longest))
    return tuple(curve)


def time_on(curve: Curve, bytes_moved: float) -> float:
    """Seconds to move bytes by a curve.

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
    """The constants of a device's file: "throughput.<operator>.<bytes>" to (value, unit)."""
    return {f"throughput.{name}.{round(size)}": (rate, "B/s") for name, curve in curves.items() for size, rate in curve}


def curves_of(constants: Mapping[str, float]) -> dict[str, Curve]:
    """The curves of a file's constants, by the path after "throughput.", the inverse of `numbers_of`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path, rate in constants.items():
        name, _, size = path.rpartition(".")
        found.setdefault(name, []).append((float(size), rate))
    return {name: tuple(sorted(points)) for name, points in found.items()}
