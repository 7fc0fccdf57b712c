"""Time of one operator on one device: the roofline (Williams, Waterman, Patterson 2009) with tiles and waves.

    time = launch + max(arithmetic time, bytes / (memory bandwidth * efficiency))

Matrix products have tile and wave quantisation (NVIDIA, "Matrix Multiplication Background User's Guide"). The output is
cut into tile_m x tile_n tiles. `units` processors compute one tile each at a time, and the last wave may be incomplete.
A device's efficiency is that of long runs with random operands. There the power limit keeps the clock below nominal,
and an A100 reaches 257 of 312 TFLOP/s. The source is He 2024, "Strangely, matrix multiplications on GPUs run faster
when given predictable data".

Fused attention follows the formula of `device.AttentionCurve`.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, inf

from cost_models.device import Device
from cost_models.errors import CostArgumentError
from cost_models.throughput import MEMORY, kernel_of, time_on
from cost_models.units import ceil_div
from cost_models.work import AttentionShape, Kind, MatmulShape, Work

_MEMORY_BOUND = frozenset({Kind.POINTWISE, Kind.REDUCTION, Kind.GATHER})
_TENSOR_CORE_DTYPES = frozenset({"bf16", "f16", "f8"})
ALIGNED_BYTES = 16  # alignment of operand rows for tensor cores: NVIDIA, Matrix Multiplication Guide, section 3
ITEMSIZE = {"f64": 8, "f32": 4, "tf32": 4, "bf16": 2, "f16": 2, "f8": 1}


def memory_time(bytes_moved: float, device: Device, kernel: str = MEMORY) -> float:
    """Seconds to move bytes: bytes / (memory_bandwidth * memory_efficiency), or by a measured curve of the device.

    `kernel` names the curve. If a device with curves has none of this name, its curve `MEMORY` counts. Raises
    CostArgumentError for negative bytes.
    """
    if bytes_moved < 0:
        raise CostArgumentError(f"bytes_moved={bytes_moved!r} is negative.")
    if MEMORY in device.throughput:
        return time_on(device.throughput.get(kernel, device.throughput[MEMORY]), bytes_moved)
    return bytes_moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def accumulation_time(gradient_bytes: float, device: Device) -> float:
    """Seconds to add a gradient to its sum over micro-batches: two reads and a write of `gradient_bytes` each."""
    return memory_time(3 * gradient_bytes, device)


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

    The fastest of the library's tiles counts: the device's own, or a smaller tile down to 32 on a side. `rate` is
    peak * efficiency, and less for a smaller tile. `fill` is tile_overhead_bytes / itemsize (`MatmulCurve`).
    """
    shape = MatmulShape(m, n, k, batch)
    device.peak(dtype)
    moved = ITEMSIZE[dtype] * batch * (m * k + k * n + m * n)
    return device.launch_latency_s + max(_product_time(shape, dtype, device), memory_time(moved, device))


def work_time(work: Work, device: Device, operator: str = "") -> float:
    """Seconds of one operator from its `Work`: products by tiles, attention by its kernel, all else by roofline.

    If the device has a measured curve for the operator's name (`Device.throughput`), the seconds come from the curve.
    """
    moved, kernel = work.bytes_read + work.bytes_written, kernel_of(operator)
    if kernel in device.throughput:
        return known_time(work, device) + time_on(device.throughput[kernel], curve_bytes(work))
    if work.attention is not None:
        arithmetic = _attention_time(work.attention, work.dtype, device)
    elif work.products:
        arithmetic = sum(_product_time(shape, work.dtype, device) for shape in work.products)
    else:
        waits = (work.steps - 1) * device.launch_latency_s
        return waits + operator_time(work.flops, moved, work.dtype, device, work.kind)
    return work.steps * device.launch_latency_s + max(arithmetic, memory_time(moved, device))


def known_time(work: Work, device: Device) -> float:
    """Seconds of an operator's launches and matrix products, which its measured curve does not contain.

    Curves of attention contain attention's products.
    """
    products = sum(_product_time(product, work.dtype, device) for product in work.products)
    return work.steps * device.launch_latency_s + products


def curve_bytes(work: Work) -> float:
    """Bytes at which an operator's measured curve is read: bytes moved, or for attention `attended_bytes`."""
    if work.attention is None:
        return work.bytes_read + work.bytes_written
    return attended_bytes(work.attention, work.dtype)


def attended_bytes(shape: AttentionShape, dtype: str) -> float:
    """Bytes that torch's fused attention for CPUs would read from keys and values if it read them for each query.

    Causal attention continues to the end of a block of keys. The softmax of a score costs as much as `_SOFTMAX_COLUMNS`
    further columns. A core with AVX-512 took 1.2 and 2.0 ns for a score of 32 and 64 columns, and backward 2.7 and 5.0.
    """
    keys = min(shape.keys, (shape.keys + _KEY_BLOCK) / 2) if shape.causal else shape.keys
    columns = (shape.depth + shape.value_depth) / 2 + _SOFTMAX_COLUMNS[shape.backward]
    return ITEMSIZE[dtype] * shape.heads * shape.queries * keys * columns


_KEY_BLOCK = 512  # kvSplitSize in torch's FlashAttentionKernel.cpp
_SOFTMAX_COLUMNS = {False: 16, True: 5}


def _arithmetic_time(flops: float, dtype: str, device: Device, kind: Kind) -> float:
    if flops < 0:
        raise CostArgumentError(f"flops={flops!r} is negative.")
    if kind in _MEMORY_BOUND or flops == 0:
        return 0.0
    if kind is Kind.ATTENTION:
        return flops / (device.peak(dtype) * device.attention_efficiency)
    return flops / device.matmul_rate(dtype)


def _attention_time(shape: AttentionShape, dtype: str, device: Device) -> float:
    """Seconds of the products and the softmax of a fused attention, without launch and memory."""
    peak = device.peak(dtype)
    if not device.attention:
        return shape.flops / (peak * device.attention_efficiency)
    if 0 in (shape.heads, shape.queries, shape.keys):
        return 0.0
    kernel = next(iter(device.attention.values()))
    curve = kernel.backward if shape.backward else kernel.forward
    keys = shape.keys * (0.5 if shape.causal else 1.0)
    idle_keys = curve.overhead_keys + (curve.diagonal_keys if shape.causal else 0.0)
    depth = (shape.depth + shape.value_depth) / 2
    blocks = shape.heads * ceil(shape.queries / curve.block_queries)
    busy = min(1.0, blocks / device.matmul.units)
    padded = curve.block_queries * ceil(shape.queries / curve.block_queries) / shape.queries
    full = padded * shape.flops / (peak * curve.efficiency) / busy
    return full * (1 + curve.softmax_depth / depth) * (1 + idle_keys / keys)


def _product_time(shape: MatmulShape, dtype: str, device: Device) -> float:
    """Seconds of the arithmetic of matrix products by the fastest tile, without launch and memory traffic."""
    m, n, k, batch = shape
    curve = device.matmul
    rate = device.matmul_rate(dtype)
    if _is_misaligned(n, k, dtype):
        rate /= curve.misaligned_slowdown
    if curve.units == 1 and curve.tile_m == curve.tile_n == 1:
        return 2 * batch * m * n * k / rate
    depth = k + curve.tile_overhead_bytes / ITEMSIZE[dtype]
    best = inf
    for tile_m, tile_n, cost in _tiles(curve.tile_m, curve.tile_n, curve.tile_load_share):
        waves = ceil_div(batch * ceil_div(m, tile_m) * ceil_div(n, tile_n), curve.units)
        best = min(best, waves * cost)
    return best * curve.units * depth / rate


def _is_misaligned(n: int, k: int, dtype: str) -> bool:
    """Whether rows of n or of k elements do not all start at multiples of `ALIGNED_BYTES`, which tensor cores need.

    The answer is False for dtypes without tensor cores, and if n or k is one.
    """
    if dtype not in _TENSOR_CORE_DTYPES or 1 in (n, k):
        return False
    return any(extent * ITEMSIZE[dtype] % ALIGNED_BYTES for extent in (n, k))


@lru_cache(maxsize=256)
def _tiles(tile_m: int, tile_n: int, load_share: float) -> tuple[tuple[int, int, float], ...]:
    """Return (tile_m, tile_n, cost) of every tile that a library offers, given the device's own tile.

    The cost is the tile's FLOPs for each unit of k, multiplied by the slowdown of a smaller tile.
    """
    sizes = {(max(32, tile_m >> i), max(32, tile_n >> j)) for i in range(3) for j in range(3)}
    least = 1 / tile_m + 1 / tile_n
    slowdown = {(a, b): 1 + load_share * max(0.0, (1 / a + 1 / b) / least - 1) for a, b in sizes}
    return tuple(sorted((a, b, 2 * a * b * slowdown[a, b]) for a, b in sizes))
