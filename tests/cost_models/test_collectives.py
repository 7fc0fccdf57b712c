"""tests cost_models/collectives.py."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import (
    all_gather_time,
    all_reduce_time,
    all_to_all_time,
    broadcast_time,
    point_to_point_time,
    reduce_scatter_time,
)
from cost_models.errors import CostArgumentError
from cost_models.hardware import node_type
from cost_models.topology import GroupLinks, Link
from tests.benchmarks.collective_accuracy import errors, median_error, read_rows

TIMES = [all_reduce_time, all_gather_time, reduce_scatter_time, all_to_all_time, broadcast_time]
LINKS = st.builds(
    Link,
    bandwidth_bytes_per_s=st.floats(1e8, 1e12),
    efficiency=st.floats(0.3, 1.0),
    in_network_efficiency=st.sampled_from([0.0, 0.5, 0.8]),
    latency_s=st.floats(0, 1e-4),
    start_s=st.floats(0, 1e-4),
    ramp_bytes=st.floats(0, 1e7),
    reduce_scatter_phases=st.just(1.0),
)
SIZES = st.floats(0, 1e11)


def group(per_node: int, nodes: int, intra: Link, inter: Link) -> GroupLinks:
    return GroupLinks(per_node * nodes, per_node, nodes, intra if per_node > 1 else None, inter if nodes > 1 else None)


GROUPS = st.builds(group, st.integers(1, 16), st.integers(1, 64), LINKS, LINKS)


@pytest.mark.parametrize("time", TIMES)
@given(size=SIZES, intra=LINKS, inter=LINKS)
def test_a_group_of_one_costs_nothing(time, size, intra, inter):
    """One rank has nobody to talk to."""
    assert time(size, group(1, 1, intra, inter)) == 0.0


@pytest.mark.parametrize("time", TIMES)
@given(links=GROUPS, small=SIZES, more=SIZES)
def test_more_bytes_never_take_less_time(time, links, small, more):
    """Time is monotone in bytes."""
    assert time(small, links) <= time(small + more, links) * (1 + 1e-12)


@pytest.mark.parametrize("time", [all_gather_time, reduce_scatter_time, all_to_all_time])
@given(size=SIZES, n=st.integers(1, 63), link=LINKS)
def test_a_larger_ring_never_takes_less_time(time, size, n, link):
    """On one level, time is monotone in the group's size for the same full bytes."""
    assert time(size, group(n, 1, link, link)) <= time(size, group(n + 1, 1, link, link)) * (1 + 1e-12)


@given(size=SIZES, n=st.integers(2, 64), link=LINKS)
def test_ring_all_reduce_is_reduce_scatter_plus_all_gather(size, n, link):
    """Without reduction in the switch, on one level."""
    links = group(n, 1, dataclasses.replace(link, in_network_efficiency=0.0), link)
    parts = reduce_scatter_time(size, links) + all_gather_time(size, links)
    assert all_reduce_time(size, links) == pytest.approx(parts, rel=1e-12)


@given(size=SIZES, links=GROUPS)
def test_all_reduce_never_exceeds_reduce_scatter_plus_all_gather(size, links):
    """Other algorithms are used only where they are faster."""
    parts = reduce_scatter_time(size, links) + all_gather_time(size, links)
    assert all_reduce_time(size, links) <= parts * (1 + 1e-12)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("level", ["intra", "inter"])
@given(size=SIZES, links=GROUPS, factor=st.floats(1, 10))
def test_a_faster_link_never_slows(time, level, size, links, factor):
    """More bandwidth or less latency on either level never costs time."""
    link = getattr(links, level)
    if link is None:
        return
    faster = dataclasses.replace(
        link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, latency_s=link.latency_s / factor
    )
    assert time(size, dataclasses.replace(links, **{level: faster})) <= time(size, links) * (1 + 1e-12)


def test_a_long_ring_all_gather_reaches_the_link_bandwidth():
    """8 GiB on 8 H100 move at 7/8 of the bytes over the reached bandwidth, within 5 %."""
    link = node_type("h100_sxm").intra
    ideal = 7 / 8 * 2**33 / link.reached_bytes_per_s
    assert ideal < all_gather_time(2**33, group(8, 1, link, link)) < 1.05 * ideal


def test_point_to_point_counts_start_latency_and_bytes():
    """1 MB over 1 GB/s takes a millisecond, plus start and latency."""
    link = Link(1e9, 1.0, 0.0, 2e-6, 3e-6, 0.0, 1.0)
    assert point_to_point_time(1e6, link) == pytest.approx(1e-3 + 5e-6)


def test_negative_bytes_are_refused():
    """A negative size is an error, not a negative time."""
    link = node_type("h100_sxm").intra
    with pytest.raises(CostArgumentError, match="negative"):
        all_reduce_time(-1, group(8, 1, link, link))


def test_measured_collectives_are_within_ten_percent_in_the_median():
    """Published measurements above 1 MB, all node types that have a file."""
    every = [value for values in errors(read_rows()).values() for value in values]
    assert len(every) > 100
    assert median_error(every) < 0.10
