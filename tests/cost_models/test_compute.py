"""Times of operators: bounds, monotony, and agreement with published products and attention."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute import (
    matmul_time,
    memory_time,
    operator_time,
    work_time,
)
from cost_models.errors import CostArgumentError, UnknownHardwareError
from cost_models.hardware import device
from cost_models.work import AttentionShape, Kind, MatmulShape, Work
from tests.benchmarks.attention_times import attention_time, unfused_attention_time
from tests.benchmarks.compute_accuracy import attention_errors, matmul_errors, mean_error, median_error

DEVICES = st.sampled_from(["a100_sxm_80gb", "h100_sxm", "b200", "mi300x", "l4", "cpu_laptop"]).map(device)
DIMS = st.integers(1, 1024).map(lambda extent: 16 * extent)
H100 = device("h100_sxm")


@given(DEVICES, DIMS, DIMS, DIMS, st.integers(1, 64), st.integers(0, 3), st.integers(0, 256))
def test_a_larger_product_never_takes_less_time(unit, m, n, k, batch, which, more):
    """A product with a larger m, n, k or batch takes at least as long, for rows of aligned lengths."""
    sizes = [m, n, k, batch]
    larger = [size + 16 * more * (index == which) for index, size in enumerate(sizes)]
    assert matmul_time(*sizes, "bf16", unit) <= matmul_time(*larger, "bf16", unit)


@given(DEVICES, DIMS, DIMS, DIMS)
def test_a_product_is_never_faster_than_peak(unit, m, n, k):
    """A product takes at least 2mnk FLOPs at peak, and at least its launch."""
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
    """Products of 1024 to 8192 on an A100 are within 20 % of measured rates."""
    m, n, k = sizes
    rate = 2 * m * n * k / matmul_time(m, n, k, 1, "f16", device("a100_sxm_80gb"))
    assert rate == pytest.approx(tflops * 1e12, rel=0.2)


def test_rows_off_sixteen_bytes_are_slow():
    """In bf16 on an H100, a product of 50257 columns is slower than one of 50304. In float32, or on a
    CPU, it is not."""
    odd, padded = (matmul_time(4096, n, 4096, 1, "bf16", H100) for n in (50257, 50304))
    assert odd == pytest.approx(H100.matmul.misaligned_slowdown * padded, rel=0.05)
    odd, padded = (matmul_time(4096, n, 4096, 1, "f32", H100) for n in (50257, 50304))
    assert odd <= padded
    laptop = device("cpu_laptop")
    assert matmul_time(64, 63, 64, 1, "bf16", laptop) < matmul_time(64, 64, 64, 1, "bf16", laptop)


def test_one_tile_more_starts_a_new_wave():
    """With 120 tiles at once, one row more than 12 tiles of rows takes twice the time."""
    curve = dataclasses.replace(H100.matmul, units=120, tile_m=32, tile_n=32)
    unit = dataclasses.replace(H100, matmul=curve, memory_bandwidth_bytes_per_s=1e18)
    full, over = (matmul_time(m, 320, 65536, 1, "bf16", unit) - unit.launch_latency_s for m in (384, 385))
    assert over == pytest.approx(2 * full)


@given(DEVICES, st.floats(0, 1e15), st.floats(0, 1e12), st.floats(0, 1e15), st.sampled_from(list(Kind)))
def test_operator_time_is_monotone_in_flops_and_bytes(unit, flops, moved, more, kind):
    """An operator with more FLOPs or more bytes takes at least as long."""
    base = operator_time(flops, moved, "bf16", unit, kind)
    assert base <= operator_time(flops + more, moved, "bf16", unit, kind)
    assert base <= operator_time(flops, moved + more, "bf16", unit, kind)


def test_views_are_free_and_pointwise_ignores_the_dtype():
    """A view takes no time, and an addition of integers takes a launch and the time of its bytes."""
    assert operator_time(0, 0, "bf16", H100, Kind.VIEW) == 0.0
    assert operator_time(100, 1e9, "i64", H100, Kind.POINTWISE) == H100.launch_latency_s + memory_time(1e9, H100)


def test_an_unknown_dtype_raises_for_products():
    """A product in a dtype without a peak is refused."""
    with pytest.raises(UnknownHardwareError, match=r"peak_flops\.i8"):
        matmul_time(64, 64, 64, 1, "i8", H100)


def test_negative_work_is_refused():
    """Negative FLOPs and negative bytes are refused."""
    with pytest.raises(CostArgumentError, match="flops=-1"):
        operator_time(-1, 0, "bf16", H100, Kind.MATMUL)
    with pytest.raises(CostArgumentError, match="bytes_moved=-1"):
        memory_time(-1, H100)


def test_work_with_products_equals_matmul_time():
    """`work_time` of a product equals `matmul_time` of its sizes."""
    m, n, k = 512, 768, 1024
    shape = MatmulShape(m, n, k)
    work = Work(shape.flops, 2 * (m * k + k * n), 2 * m * n, Kind.MATMUL, "bf16", (shape,))
    assert work_time(work, H100) == pytest.approx(matmul_time(m, n, k, 1, "bf16", H100))


@pytest.mark.parametrize(
    ("group", "mean"),
    [
        (("a100_sxm_80gb", "f16"), 0.08),
        (("h100_sxm", "bf16"), 0.09),
        (("h100_sxm", "tf32"), 0.32),
        (("h100_sxm", "f8"), 0.09),
        (("h200", "f8"), 0.08),
        (("v100_sxm2_16gb", "f16"), 0.08),
        (("l4", "bf16"), 0.20),
        (("mi300x", "bf16"), 0.10),
    ],
)
def test_published_products_are_met(group, mean):
    """The mean error of published products on each device is below a limit (tests/data/matmuls.jsonl)."""
    assert mean_error(matmul_errors()[group]) < mean


@pytest.mark.parametrize("kernel", ["flash2", "flash3", "cudnn"])
def test_published_attention_is_met(kernel):
    """The median error of published attention on an H100 is below 8 % for each kernel."""
    found = attention_errors()[kernel]
    assert len(found) >= 36
    assert median_error(found) < 0.08


def test_attention_through_memory_is_met_where_memory_decides():
    """The median error of published attention without a fused kernel is below 15 %."""
    assert median_error(attention_errors()["unfused"]) < 0.15


ATTENTION = st.builds(
    AttentionShape,
    heads=st.integers(1, 512),
    queries=st.integers(1, 16384),
    keys=st.integers(1, 16384),
    depth=st.sampled_from([64, 128]),
    value_depth=st.sampled_from([64, 128]),
    causal=st.booleans(),
    backward=st.booleans(),
)


@given(ATTENTION, DEVICES, st.sampled_from(["heads", "queries", "keys", "depth"]), st.integers(0, 4096))
def test_more_attention_never_takes_less_time(shape, unit, field, more):
    """Attention with more heads, queries, keys or depth takes at least as long."""
    larger = shape._replace(**{field: getattr(shape, field) + more})
    dtype = "f32" if unit.name == "cpu_laptop" else "bf16"
    assert attention_time(shape, dtype, unit) <= attention_time(larger, dtype, unit) * (1 + 1e-9)


@given(ATTENTION)
def test_a_causal_mask_never_takes_more_time(shape):
    """A causal mask halves the FLOPs. From 1024 keys on it takes no longer, and a backward takes at least as long
    as a forward."""
    full, half = shape._replace(causal=False), shape._replace(causal=True)
    assert half.flops == full.flops / 2
    if shape.keys >= 1024:
        assert attention_time(half, "bf16", H100) <= attention_time(full, "bf16", H100)
    forward, backward = (attention_time(shape._replace(backward=each), "bf16", H100) for each in (False, True))
    assert forward <= backward


def test_long_causal_attention_takes_half():
    """Causal attention takes half the time within 5 % at 64k keys."""
    full = AttentionShape(16, 65536, 65536, 128, 128)
    ratio = attention_time(full._replace(causal=True), "bf16", H100) / attention_time(full, "bf16", H100)
    assert ratio == pytest.approx(0.5, rel=0.05)


@given(ATTENTION)
def test_fused_attention_is_never_slower_than_through_memory(shape):
    """Fused attention is at least as fast as unfused attention, for sequences that fill the device."""
    filled = shape._replace(heads=max(64, shape.heads), queries=4096, keys=4096, depth=128, value_depth=128)
    assert attention_time(filled, "bf16", H100) <= unfused_attention_time(filled, "bf16", H100)


def test_steps_that_wait_launch_each():
    """A work of ten steps takes nine launches more than a work of one step."""
    work = Work(0, 1e6, 1e6, Kind.REDUCTION, "f32")
    assert work_time(work._replace(steps=10), H100) == pytest.approx(work_time(work, H100) + 9 * H100.launch_latency_s)
