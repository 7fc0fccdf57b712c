"""tests cost_models/compute.py."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute import matmul_time, memory_time, operator_time, work_time
from cost_models.errors import CostArgumentError, UnknownHardwareError
from cost_models.hardware import device
from cost_models.work import Kind, MatmulShape, Work

DEVICES = st.sampled_from(["a100_sxm_80gb", "h100_sxm", "h200", "cpu_laptop"]).map(device)
DIMS = st.integers(1, 8192)
H100 = device("h100_sxm")


@given(DEVICES, DIMS, DIMS, DIMS, st.integers(1, 64), st.integers(0, 3), st.integers(0, 4096))
def test_a_larger_product_never_takes_less_time(unit, m, n, k, batch, which, more):
    """Monotone in m, n, k and batch, quantisation included."""
    sizes = [m, n, k, batch]
    larger = [size + more * (index == which) for index, size in enumerate(sizes)]
    assert matmul_time(*sizes, "bf16", unit) <= matmul_time(*larger, "bf16", unit)


@given(DEVICES, DIMS, DIMS, DIMS)
def test_a_product_is_never_faster_than_peak(unit, m, n, k):
    """2mnk FLOPs at peak bound it from below, and so does the launch."""
    time = matmul_time(m, n, k, 1, "bf16", unit)
    assert time >= max(2 * m * n * k / unit.peak("bf16"), unit.launch_latency_s)


def test_large_products_reach_the_measured_rate():
    """16384^3 in bf16 on an H100 is within 3 % of 794.5 TFLOP/s (maximum achievable matmul FLOPS, ml-engineering)."""
    rate = 2 * 16384**3 / matmul_time(16384, 16384, 16384, 1, "bf16", H100)
    assert rate == pytest.approx(794.5e12, rel=0.03)


# cuBLASLt f16 on A100, TFLOP/s: Azure/AI-benchmarking-guide, Azure_Results/ND_A100_v4_results.md @8fd0c6e1
@pytest.mark.parametrize(
    ("sizes", "tflops"),
    [
        ((1024,) * 3, 119.4),
        ((2048,) * 3, 221.8),
        ((4096,) * 3, 228.0),
        ((8192,) * 3, 253.7),
        ((6144, 12288, 12288), 250.8),
    ],
)
def test_measured_products_are_within_twenty_percent(sizes, tflops):
    """Tile and wave quantisation explain small and large products."""
    m, n, k = sizes
    rate = 2 * m * n * k / matmul_time(m, n, k, 1, "f16", device("a100_sxm_80gb"))
    assert rate == pytest.approx(tflops * 1e12, rel=0.2)


def test_one_tile_more_starts_a_new_wave():
    """Thirteen rows of ten tiles do not fit where twelve do: the step is visible."""
    curve = dataclasses.replace(H100.matmul, units=120, tile_m=32, tile_n=32)
    unit = dataclasses.replace(H100, matmul=curve, memory_bandwidth_bytes_per_s=1e18)
    full, over = (matmul_time(m, 320, 65536, 1, "bf16", unit) - unit.launch_latency_s for m in (384, 385))
    assert over == pytest.approx(2 * full)


@given(DEVICES, st.floats(0, 1e15), st.floats(0, 1e12), st.floats(0, 1e15), st.sampled_from(list(Kind)))
def test_operator_time_is_monotone_in_flops_and_bytes(unit, flops, moved, more, kind):
    """More of either never takes less time."""
    base = operator_time(flops, moved, "bf16", unit, kind)
    assert base <= operator_time(flops + more, moved, "bf16", unit, kind)
    assert base <= operator_time(flops, moved + more, "bf16", unit, kind)


def test_views_are_free_and_pointwise_ignores_the_dtype():
    """A view launches nothing; integer additions are bounded by bytes alone."""
    assert operator_time(0, 0, "bf16", H100, Kind.VIEW) == 0.0
    assert operator_time(100, 1e9, "i64", H100, Kind.POINTWISE) == H100.launch_latency_s + memory_time(1e9, H100)


def test_an_unknown_dtype_raises_for_products():
    """No peak is assumed."""
    with pytest.raises(UnknownHardwareError, match=r"peak_flops\.i8"):
        matmul_time(64, 64, 64, 1, "i8", H100)


def test_negative_work_is_refused():
    """Neither FLOPs nor bytes may be negative."""
    with pytest.raises(CostArgumentError, match="flops=-1"):
        operator_time(-1, 0, "bf16", H100, Kind.MATMUL)
    with pytest.raises(CostArgumentError, match="bytes_moved=-1"):
        memory_time(-1, H100)


def test_work_with_products_equals_matmul_time():
    """The planner's path and the direct one agree."""
    m, n, k = 512, 768, 1024
    shape = MatmulShape(m, n, k)
    work = Work(shape.flops, 2 * (m * k + k * n), 2 * m * n, Kind.MATMUL, "bf16", (shape,))
    assert work_time(work, H100) == pytest.approx(matmul_time(m, n, k, 1, "bf16", H100))
