"""The numbers of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import all_reduce_time
from cost_models.compute import matmul_time, memory_time
from cost_models.hardware import Cluster, node_type
from cost_models.step import ALONE, InStep, in_step
from cost_models.streams import concurrent_time

SECONDS = st.floats(0, 1e3)


@given(SECONDS, SECONDS)
def test_side_by_side_lies_between_the_longer_and_the_sum(compute_s: float, sent_s: float) -> None:
    """Overlapped computation and communication take between the longer time and the sum."""
    assert max(compute_s, sent_s) <= concurrent_time(compute_s, sent_s) <= compute_s + sent_s + 1e-9


def test_nothing_to_hide_costs_nothing() -> None:
    """Computation alone takes its own time."""
    assert concurrent_time(2.0, 0.0) == 2.0


def test_the_data_file_is_physical() -> None:
    """Kernels and collectives in a step are as fast as alone, or slower, but for the ramp."""
    factors = in_step()
    assert 1 <= factors.kernels <= 1.5
    assert 1 <= factors.network <= 2
    assert 0 <= factors.ramp <= 1


@pytest.mark.parametrize("unit", ["a100_sxm_80gb", "h100_sxm"])
def test_kernels_of_groups_take_longer(unit: str) -> None:
    """Products and copies alike; the peak, by which MFU goes, is the device's own."""
    alone, group = Cluster(unit, 1, 1), Cluster(unit, 1, 8)
    assert (alone.in_step, alone.device) == (ALONE, node_type(unit).device)
    assert group.in_step == in_step()
    assert group.device.peak("bf16") == alone.device.peak("bf16")
    factor = in_step().kernels
    assert memory_time(1e9, group.device) == pytest.approx(factor * memory_time(1e9, alone.device))
    products = [matmul_time(8192, 8192, 8192, 1, "bf16", each.device) for each in (alone, group)]
    assert products[1] / products[0] == pytest.approx(factor, rel=1e-2)


def test_collectives_between_nodes_take_longer() -> None:
    """Collectives within a node take no longer than alone."""
    alone, group = (Cluster("h100_sxm", 2, 8, factors) for factors in (ALONE, InStep(network=1.5, ramp=0.0)))

    def seconds(cluster: Cluster, axis: str) -> float:
        return all_reduce_time(2**28, cluster.group_links({"outer": 2, "inner": 8}, (axis,)))

    assert seconds(group, "outer") == pytest.approx(1.5 * seconds(alone, "outer"), rel=0.1)
    assert seconds(group, "inner") < seconds(alone, "inner")


def test_cpus_are_as_fast_in_a_group() -> None:
    """Their kernels are measured while all ranks run."""
    assert Cluster("cpu_laptop", 1, 2).in_step == ALONE
