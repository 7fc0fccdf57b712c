"""Devices: their files, their peaks, attention kernels, and links to the host."""

import pytest

from cost_models import constants
from cost_models.device import device
from cost_models.errors import HardwareFileError, UnknownHardwareError
from cost_models.hardware import Cluster
from cost_models.work import AttentionShape
from tests.benchmarks.attention_times import attention_time

DEVICES = constants.names("devices")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_complete(name):
    """Every device has an efficiency for each peak, and every accelerator has a fused attention."""
    unit = device(name)
    assert set(unit.matmul.efficiency) == set(unit.peak_flops)
    assert all(0 < share <= 1 for share in (*unit.matmul.efficiency.values(), unit.memory_efficiency))
    for kernel in unit.attention.values():
        assert 0 < kernel.backward.efficiency <= kernel.forward.efficiency <= 1
    assert unit.attention or name.startswith("cpu")


@pytest.mark.parametrize("name", [name for name in DEVICES if not name.startswith("cpu")])
def test_peaks_follow_the_precision(name):
    """A dtype of fewer bits has at least the peak of a wider one, and both 16-bit floats have the same peak."""
    peaks = device(name).peak_flops
    ladder = [peaks[dtype] for dtype in ("f64", "f32", "tf32", "f16", "f8") if dtype in peaks]
    assert ladder == sorted(ladder)
    assert peaks.get("bf16", peaks["f16"]) == peaks["f16"]


def test_what_is_not_confirmed_carries_an_interval():
    """Each constant with an interval lies in it, and each constant whose source says "not measured" has an interval."""
    for folder in ("devices", "nodes", "architectures", "fabrics", "networks", "software"):
        for name in constants.names(folder):
            for path, constant in constants.load(folder, name).constants.items():
                unsure = "not measured" in constant.source or "no measurement" in constant.source
                if constant.interval is not None:
                    assert constant.interval[0] <= constant.value <= constant.interval[1], (name, path)
                else:
                    assert not unsure, (name, path)


def test_an_interval_around_another_value_is_refused():
    """An interval that does not contain its value is refused, with both in the error."""
    table = {"value": 1.0, "unit": "B", "source": "a source", "date": "2026-01-01", "interval": [2, 3]}
    with pytest.raises(HardwareFileError, match=r"interval=\[2, 3\].*value=1\.0"):
        constants.parse({"memory_bytes": table}, "mine.toml")


def test_another_attention_kernel_can_be_used():
    """FlashAttention-3 is faster than the default on an H100, and is refused on an A100, which lacks it."""
    shape = AttentionShape(16, 8192, 8192, 128, 128, causal=True)
    h100 = device("h100_sxm")
    assert attention_time(shape, "bf16", h100.with_attention("flash3")) < attention_time(shape, "bf16", h100)
    with pytest.raises(UnknownHardwareError, match=r"'flash3'.*flash2.*attention\.flash3"):
        device("a100_sxm_80gb").with_attention("flash3")


def test_dispatch_is_named():
    """On an H100, blocking dispatch takes longer than eager, and eager longer than a graph. A CPU takes none."""
    h100 = device("h100_sxm")
    assert h100.dispatch("blocking") > h100.dispatch("eager") > h100.dispatch("graph") > 0
    assert device("cpu_laptop").dispatch("eager") == 0
    with pytest.raises(UnknownHardwareError, match=r"dispatch\.lazy"):
        h100.dispatch("lazy")


@pytest.mark.parametrize("name", [name for name in DEVICES if not name.startswith("cpu")])
def test_copies_to_and_from_the_host(name):
    """Every accelerator has a host link slower than its memory, and larger copies take longer."""
    unit = device(name)
    assert unit.host_link is not None
    rates = (unit.host_link.to_host_bytes_per_s, unit.host_link.from_host_bytes_per_s)
    assert max(rates) < unit.memory_bandwidth_bytes_per_s
    for time in (unit.to_host_time, unit.from_host_time):
        assert time(0) == unit.launch_latency_s
        assert time(1e9) > time(1e6) > time(0)


def test_a_cpu_has_no_host_link():
    """A copy to the host of a CPU is refused, and the error names the missing table."""
    with pytest.raises(UnknownHardwareError, match=r"'cpu_laptop' has no host_link.*\[host_link\.to_host\]"):
        device("cpu_laptop").to_host_time(1.0)


def test_host_memory_is_shared_by_the_devices_in_use():
    """A device's share of host memory is the node's memory divided by its devices in use, and None if the file
    does not say."""
    assert Cluster("h100_sxm").host_bytes_per_device == 250e9
    assert Cluster("h100_sxm", devices_per_node=4).host_bytes_per_device == 500e9
    assert Cluster("l4").host_bytes_per_device is None
