"""Times of computation and communication that run side by side, and the factors of kernels in a step."""

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
    """Computation without communication takes its own time."""
    assert concurrent_time(2.0, 0.0) == 2.0


def test_the_data_file_is_physical() -> None:
    """The factors of kernels and collectives in a step lie in plausible ranges."""
    factors = in_step()
    assert 1 <= factors.kernels <= 1.5
    assert 1 <= factors.network <= 2
    assert 0 <= factors.ramp <= 1


@pytest.mark.parametrize("unit", ["a100_sxm_80gb", "h100_sxm"])
def test_kernels_of_groups_take_longer(unit: str) -> None:
    """On eight devices, products and copies take longer than alone by the factor of kernels, and the peak stays."""
    alone, group = Cluster(unit, 1, 1), Cluster(unit, 1, 8)
    assert (alone.in_step, alone.device) == (ALONE, node_type(unit).device)
    assert group.in_step == in_step()
    assert group.device.peak("bf16") == alone.device.peak("bf16")
    factor = in_step().kernels
    assert memory_time(1e9, group.device) == pytest.approx(factor * memory_time(1e9, alone.device))
    products = [matmul_time(8192, 8192, 8192, 1, "bf16", each.device) for each in (alone, group)]
    assert products[1] / products[0] == pytest.approx(factor, rel=1e-2)


def test_collectives_between_nodes_take_longer() -> None:
    """A collective between nodes takes longer in a step by the network's factor, and one within a node does not."""
    alone, group = (Cluster("h100_sxm", 2, 8, factors) for factors in (ALONE, InStep(network=1.5, ramp=0.0)))

    def seconds(cluster: Cluster, axis: str) -> float:
        return all_reduce_time(2**28, cluster.group_links({"outer": 2, "inner": 8}, (axis,)))

    assert seconds(group, "outer") == pytest.approx(1.5 * seconds(alone, "outer"), rel=0.1)
    assert seconds(group, "inner") < seconds(alone, "inner")


def test_cpus_are_as_fast_in_a_group() -> None:
    """CPUs have no factors for a step, because their kernels are measured while all ranks run."""
    assert Cluster("cpu_laptop", 1, 2).in_step == ALONE
