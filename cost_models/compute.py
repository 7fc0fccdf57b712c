"""Time of one operator on one device: the roofline (Williams, Waterman, Patterson 2009) with tiles and waves.

    time = launch + max(arithmetic time, bytes / (memory bandwidth * efficiency))

Matrix products (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantisation): the output is
cut into tile_m x tile_n tiles, `units` processors compute one tile each at a time, and the last wave may be part empty.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from cost_models.errors import CostArgumentError
from cost_models.hardware import Device
from cost_models.units import ceil_div
from cost_models.work import Kind, MatmulShape, Work

_MEMORY_BOUND = frozenset({Kind.POINTWISE, Kind.REDUCTION, Kind.GATHER})
ITEMSIZE = {"f64": 8, "f32": 4, "tf32": 4, "bf16": 2, "f16": 2, "f8": 1}


def memory_time(bytes_moved: float, device: Device) -> float:
    """Seconds to move bytes: bytes / (memory_bandwidth * memory_efficiency)."""
    if bytes_moved < 0:
        raise CostArgumentError(f"bytes_moved={bytes_moved!r} is negative.")
    return bytes_moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def operator_time(flops: float, bytes_moved: float, dtype: str, device: Device, kind: Kind) -> float:
    """Seconds of one operator, by the roofline.

        launch + max(flops / (peak[dtype] * efficiency(kind)), bytes_moved / (bandwidth * efficiency))

    Memory-bound kinds (pointwise, reduction, gather) are bounded by bytes alone; a view is free.

    Raises:
        UnknownHardwareError: the device has no peak for `dtype`.
        CostArgumentError: negative FLOPs or bytes.
    """
    if kind is Kind.VIEW:
        return 0.0
    return device.launch_latency_s + max(_arithmetic_time(flops, dtype, device, kind), memory_time(bytes_moved, device))


def matmul_time(m: int, n: int, k: int, batch: int, dtype: str, device: Device) -> float:
    """Seconds of `batch` products [m, k] @ [k, n], launch included.

        waves = ceil(batch * ceil(m / tile_m) * ceil(n / tile_n) / units)
        time = launch + max(waves * units * 2 * tile_m * tile_n * (k + fill) / rate, bytes / bandwidth)

    over the tiles that a library offers (the device's own, and smaller ones down to 32 on a side) the fastest; `rate`
    is peak * efficiency, less for a smaller tile; `fill` is tile_overhead_bytes / itemsize (see `MatmulCurve`).
    """
    shape = MatmulShape(m, n, k, batch)
    device.peak(dtype)
    moved = ITEMSIZE[dtype] * batch * (m * k + k * n + m * n)
    return device.launch_latency_s + max(_product_time(shape, dtype, device), memory_time(moved, device))


def work_time(work: Work, device: Device) -> float:
    """Seconds of one operator from its `Work`: matrix products by tiles, the rest by `operator_time`."""
    if not work.products:
        return operator_time(work.flops, work.bytes_read + work.bytes_written, work.dtype, device, work.kind)
    arithmetic = sum(_product_time(shape, work.dtype, device) for shape in work.products)
    return device.launch_latency_s + max(arithmetic, memory_time(work.bytes_read + work.bytes_written, device))


def _arithmetic_time(flops: float, dtype: str, device: Device, kind: Kind) -> float:
    if flops < 0:
        raise CostArgumentError(f"flops={flops!r} is negative.")
    if kind in _MEMORY_BOUND or flops == 0:
        return 0.0
    if kind is Kind.ATTENTION:
        return flops / (device.peak(dtype) * device.attention_efficiency)
    return flops / device.matmul_rate(dtype)


def _product_time(shape: MatmulShape, dtype: str, device: Device) -> float:
    """The fastest tile's time: waves of tiles at the device's rate, without launch and memory."""
    m, n, k, batch = shape
    curve = device.matmul
    rate = device.matmul_rate(dtype)
    if curve.units == 1 and curve.tile_m == curve.tile_n == 1:
        return 2 * batch * m * n * k / rate
    depth = k + curve.tile_overhead_bytes / ITEMSIZE[dtype]
    best = inf
    for tile_m, tile_n, cost in _tiles(curve.tile_m, curve.tile_n, curve.tile_load_share):
        waves = ceil_div(batch * ceil_div(m, tile_m) * ceil_div(n, tile_n), curve.units)
        best = min(best, waves * cost)
    return best * curve.units * depth / rate


@lru_cache(maxsize=256)
def _tiles(tile_m: int, tile_n: int, load_share: float) -> tuple[tuple[int, int, float], ...]:
    """(tile_m, tile_n, FLOPs per unit of k, slowdown included) of every tile that a library offers."""
    sizes = {(max(32, tile_m >> i), max(32, tile_n >> j)) for i in range(3) for j in range(3)}
    least = 1 / tile_m + 1 / tile_n
    slowdown = {(a, b): 1 + load_share * max(0.0, (1 / a + 1 / b) / least - 1) for a, b in sizes}
    return tuple(sorted((a, b, 2 * a * b * slowdown[a, b]) for a, b in sizes))
