"""Small joined clusters for the tests of recipes."""

from __future__ import annotations

from dataclasses import replace

from autoshard import Cluster
from cost_models.hardware import node_type


def slower(times: float, memory_bytes: int | None = None) -> Cluster:
    """A device like an L4 that is so many times as slow, and may have less memory."""
    unit = node_type("l4").device
    slow = replace(
        unit,
        name="slow",
        peak_flops={name: peak / times for name, peak in unit.peak_flops.items()},
        memory_bandwidth_bytes_per_s=unit.memory_bandwidth_bytes_per_s / times,
        dispatch_s={name: times * seconds for name, seconds in unit.dispatch_s.items()},
        memory_bytes=unit.memory_bytes if memory_bytes is None else memory_bytes,
    )
    return Cluster(replace(node_type("l4").with_device(slow), name=f"slow {times:g}"), 1, 1)


JOINED = Cluster.join(Cluster("l4", 1, 1), slower(2.0))
"""Two devices, one half as fast as the other."""

THREE = Cluster.join(Cluster("l4", 1, 1), slower(2.0), slower(3.0))
"""Three."""
