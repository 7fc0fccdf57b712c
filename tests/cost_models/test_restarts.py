"""The best interval between checkpoints, and the expected time of a run with failures."""

from __future__ import annotations

import math
import random

import pytest

from cost_models.errors import CostArgumentError
from cost_models.restarts import checkpoint_interval, expected_time, restart_figures

MINUTE_S = 60.0


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_interval_is_that_of_the_paper(mtbf_min: float, published_min: float) -> None:
    """The best interval for a save of five minutes is that of figures 3 to 5 of Daly 2006, within 1 %."""
    found = checkpoint_interval(5 * MINUTE_S, mtbf_min * MINUTE_S) / MINUTE_S
    assert found == pytest.approx(published_min, rel=0.01)


def test_the_interval_is_that_of_young_where_failures_are_rare() -> None:
    """With rare failures the interval is the square root of twice the save times the mean time between failures."""
    assert checkpoint_interval(1.0, 1e12) == pytest.approx(math.sqrt(2e12), rel=1e-5)
    assert checkpoint_interval(1.0, math.inf) == math.inf


@pytest.mark.parametrize("mtbf_s", [900.0, 3600.0, 86400.0])
def test_no_other_interval_is_much_shorter(mtbf_s: float) -> None:
    """No interval makes the expected time shorter by a thousandth than the best interval does."""

    def run_s(interval_s: float) -> float:
        return expected_time(1e6, interval_s=interval_s, save_s=60.0, restart_s=300.0, mtbf_s=mtbf_s)

    best = checkpoint_interval(60.0, mtbf_s)
    assert run_s(best) <= 1.001 * min(run_s(best * 1.02**power) for power in range(-200, 200))


def test_the_expected_time_is_the_mean_of_drawn_runs() -> None:
    """The expected time is the mean of 4000 runs with drawn failures."""
    draw, mtbf_s, interval_s, save_s, restart_s = random.Random(0), 500.0, 100.0, 20.0, 30.0

    def drawn_run_s() -> float:
        passed_s, segments, needed_s = 0.0, 10, interval_s + save_s
        while segments:
            failure_s = draw.expovariate(1 / mtbf_s)
            passed_s += min(failure_s, needed_s)
            is_done = failure_s >= needed_s
            segments -= is_done
            needed_s = interval_s + save_s + (0.0 if is_done else restart_s)
        return passed_s

    mean_s = sum(drawn_run_s() for _ in range(4000)) / 4000
    expected_s = expected_time(1000.0, interval_s=interval_s, save_s=save_s, restart_s=restart_s, mtbf_s=mtbf_s)
    assert mean_s == pytest.approx(expected_s, rel=0.02)


def test_a_run_that_never_ends() -> None:
    """If failures leave no time for a save, the expected time is infinite and the interval is the time between
    failures."""
    assert expected_time(10.0, interval_s=1.0, save_s=1e4, restart_s=0.0, mtbf_s=1.0) == math.inf
    assert checkpoint_interval(1e4, 1.0) == 1.0


def test_impossible_arguments() -> None:
    """Times that are not above 0, or below 0 for a restart, are refused by name."""
    with pytest.raises(CostArgumentError, match=r"save_s=0 must be a number of seconds above 0\."):
        checkpoint_interval(0, 1.0)
    with pytest.raises(CostArgumentError, match=r"restart_s=-1\.0 must be a number of seconds, at least 0\."):
        expected_time(1.0, interval_s=1.0, save_s=1.0, restart_s=-1.0, mtbf_s=1.0)


def test_the_figures_have_their_units() -> None:
    """The data file's figures are plausible in bytes per second of a device, and in seconds."""
    figures = restart_figures()
    assert 1e7 < figures.write_bytes_per_s < 1e10
    assert 0 < figures.restart_s < 3600
