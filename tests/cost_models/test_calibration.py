"""Calibration of a cluster: measurements, and the constants that are fitted to them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import calibration
from cost_models.calibration import COLLECTIVES, Calibration, _fit_link, calibrate, pooled
from cost_models.hardware import Cluster
from cost_models.topology import GroupLinks, Link, MeasuredCollective


def test_calibration_of_one_rank_gives_a_cluster_that_survives_saving(tmp_path):
    """Calibration without a process group measures one rank. All numbers are positive, and the saved cluster is
    loaded equal."""
    found = calibrate(name="here", memory_bytes=2**30, budget_s=0.2)
    unit = found.cluster.device
    assert (found.cluster.size, unit.memory_bytes) == (1, 2**30)
    assert min(*unit.peak_flops.values(), unit.memory_bandwidth_bytes_per_s, unit.launch_latency_s) > 0
    found.save(tmp_path / "here.toml")
    assert Cluster.load(tmp_path / "here.toml") == found.cluster


def test_an_action_runs_until_its_share_of_the_time_is_over(monkeypatch):
    """A measurement repeats its action, at least twice, until its share of the time is over."""
    clock, runs = itertools.count(), []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(clock))
    calibration._mean_time(lambda: runs.append(1), 9.0)
    assert len(runs) > 5
    runs.clear()
    calibration._mean_time(lambda: runs.append(1), 0.0)
    assert len(runs) == 1 + 2


@given(
    bandwidth=st.floats(1e9, 1e11),
    latency=st.floats(0, 1e-3),
    start=st.floats(1e-5, 1e-3),
    phases=st.floats(1, 3),
)
def test_fitting_predicted_collectives_gives_the_link_back(bandwidth, latency, start, phases):
    """Collectives that the model predicts for a link, for groups of two and four, are fitted with the
    link's constants."""
    link = Link(bandwidth, 1.0, 0.0, latency, start, 0.0, phases)
    measured = {
        f"{name}.{n}.{size}": time(size, GroupLinks(n, n, 1, link, None))
        for name, time in COLLECTIVES.items()
        for n in (2, 4)
        for size in (4, 2**34)
    }
    found = _fit_link(measured, 4)
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    assert found.start_s + found.latency_s == pytest.approx(start + latency, rel=1e-2)
    assert found.reduce_scatter_phases == pytest.approx(phases, rel=1e-2)


@given(
    start=st.floats(1e-5, 1e-2),
    latency=st.floats(0, 1e-3),
    bandwidth=st.floats(1e8, 1e11),
)
def test_fitting_measured_collectives_gives_them_back(start, latency, bandwidth):
    """Fitted curves of each collective give its measured seconds, also with one size of groups."""
    curves = [MeasuredCollective(name, start * (i + 1), latency, bandwidth) for i, name in enumerate(COLLECTIVES)]
    for groups in ((2, 4), (2,)):
        measured = {
            f"{curve.name}.{n}.{size}": curve.seconds(size, n)
            for curve in curves
            for n in groups
            for size in (4096, 2**21, 2**23, 2**40)
        }
        found = _fit_link(measured, max(groups))
        for curve in curves:
            for n in groups:
                for size in (2**16, 2**22, 2**30):
                    links = GroupLinks(n, n, 1, found, None)
                    assert COLLECTIVES[curve.name](size, links) == pytest.approx(curve.seconds(size, n), rel=1e-3)


def test_collectives_get_no_negative_numbers():
    """Times that fall with size are fitted with a positive start, and with no negative constant."""
    measured = {f"{name}.2.{size}": 1e-3 - size * 1e-11 for name in COLLECTIVES for size in (4096, 2**21, 2**23)}
    for curve in _fit_link(measured, 2).measured:
        assert curve.start_s > 0
        assert min(curve.latency_s, curve.bandwidth_bytes_per_s) >= 0


def test_a_bandwidth_that_hides_in_noise_stays_finite():
    """Large collectives that take as long as small ones are fitted with a finite bandwidth."""
    measured = {f"{name}.2.{size}": 1e-3 for name in COLLECTIVES for size in (4096, 2**23)}
    assert _fit_link(measured, 2).bandwidth_bytes_per_s < 1e12


@pytest.mark.slow
def test_pooled_calibrations_are_the_fit_of_their_mean():
    """Two pooled calibrations, of which one is twice as slow, have the constants of their mean times."""
    fast = calibrate(name="here", memory_bytes=2**30, budget_s=0.2)
    slow = Calibration(fast.cluster, {key: 2 * value for key, value in fast.measured_s.items()}, {}, fast.date)
    found = pooled([fast, slow]).cluster
    assert found.device.launch_latency_s == pytest.approx(1.5 * fast.cluster.device.launch_latency_s)
    assert found.device.peak("f32") == pytest.approx(fast.cluster.device.peak("f32") / 1.5)
    assert (found.node.name, found.size, found.device.memory_bytes) == ("here", 1, 2**30)
    assert pooled([fast]).cluster == fast.cluster
