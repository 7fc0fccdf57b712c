"""Samples of kernels whose times a calibration measures."""

import pytest
import torch

import autoshard.kernels  # noqa: F401  (registers the operators)
from cost_models.compute import work_time
from cost_models.hardware import Device, MatmulCurve
from cost_models.kernel_samples import KernelSample, aten_samples, cycled
from cost_models.throughput import curve_of

UNIT = Device("one", {"f32": 1e11}, 2**30, 1e10, 1.0, 1e-6, MatmulCurve(1, 1, 1, 0.0, 0.0, {"f32": 1.0}), 1.0)


def test_samples_have_the_work_of_their_calls_and_run():
    """Samples of 4 rows of 768 numbers count the bytes of their operands and results, and all samples run."""
    samples = {sample.name: sample for sample in aten_samples(rows=(4,))}
    assert samples["aten.tanh.default"].bytes_moved == 2 * 4 * 768 * 4
    assert samples["aten.tanh_backward.default"].bytes_moved == 3 * 4 * 768 * 4
    assert all(sample.bytes_moved > 0 for sample in samples.values())
    for sample in samples.values():
        sample.prepare()()


def test_a_point_priced_again_takes_what_was_measured():
    """A sample priced on a device with its measured time has that time, also attention and experts."""
    q = torch.randn(1, 2, 32, 8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    operands = (torch.randn(4, 8), torch.randint(2, (4, 1)), torch.rand(4, 1), torch.randn(2, 2, 8, 8), None)
    experts = (*operands, torch.randn(2, 8, 8), 2, "silu", False, False, 1.0, 0.0)
    samples = (
        KernelSample.of(attention, q, q, q),
        KernelSample.of(torch.ops.aten.exp.default, q),
        KernelSample.of(torch.ops.autoshard.experts.default, *experts),
    )
    for sample in samples:
        point = sample.point(3e-3, UNIT)
        measured = Device(**{**_fields(UNIT), "throughput": {sample.name: curve_of([point])}})
        assert work_time(sample.work, measured, sample.name) == pytest.approx(3e-3)


def test_cycled_calls_take_operands_of_their_own_with_the_same_strides():
    """Calls in a cycle get copies of the operand with its strides, in different memory each time."""
    seen = []
    x = torch.randn(64, 128).t()
    run = cycled(lambda operand: seen.append(operand) or operand + 1, x)
    seen.clear()
    run()
    run()
    first, second = seen
    assert first.stride() == x.stride()
    assert torch.equal(first, x)
    assert len({first.data_ptr(), second.data_ptr(), x.data_ptr()}) == 3


def _fields(unit: Device) -> dict:
    return {name: getattr(unit, name) for name in Device.__slots__}
