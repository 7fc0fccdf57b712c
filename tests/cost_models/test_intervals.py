"""Intervals of step times from past errors."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import constants
from cost_models.errors import CostArgumentError
from cost_models.intervals import Uncertainty, step_time_uncertainty
from tests.benchmarks.uncertainty import conformal, keep_step_time_uncertainty

ERRORS = st.lists(st.floats(-1, 1), min_size=9, max_size=60)


@given(ERRORS, st.sampled_from([0.5, 0.8, 0.9]))
def test_the_interval_holds_its_share_of_the_past(errors, coverage):
    """An interval covers at least the stated share of the past errors, and a narrower one would not."""
    width = conformal(errors, coverage).log_half_width
    assert sum(abs(error) <= width for error in errors) >= coverage * (len(errors) + 1) - 1e-9
    assert sum(abs(error) < width for error in errors) < coverage * (len(errors) + 1)


def test_the_next_error_is_held_as_often_as_stated():
    """Intervals from 19 drawn errors cover the next error in 90 % of 4000 draws, within sampling error."""
    draw = random.Random(0)
    held = 0
    for _ in range(4000):
        *past, following = (draw.expovariate(1.0) - 0.3 for _ in range(20))
        held += abs(following) <= conformal(past, 0.9).log_half_width
    assert held / 4000 == pytest.approx(0.9, abs=0.02)


@given(st.floats(0, 2), st.floats(1e-6, 1e3))
def test_the_interval_is_about_the_prediction(width, predicted):
    """The predicted time is the geometric mean of the interval's ends."""
    low, high = Uncertainty(width, 0.9).interval(predicted)
    assert low <= predicted <= high
    assert low * high == pytest.approx(predicted**2)


@pytest.mark.parametrize(
    ("errors", "coverage", "message"),
    [
        ([0.1] * 8, 0.9, "8 errors bear out no interval of coverage 0.9; 9 do"),
        ([0.1] * 9, 1.0, "coverage=1.0 is no probability"),
        ([0.1] * 8 + [float("inf")], 0.9, "not finite"),
    ],
)
def test_too_little_bears_out_nothing(errors, coverage, message):
    """Too few errors, a coverage of 1, and an infinite error are refused."""
    with pytest.raises(CostArgumentError, match=message):
        conformal(errors, coverage)


def test_kinds_of_hardware_without_measurements_have_no_interval(tmp_path, monkeypatch):
    """A kind of hardware in the data file has its interval, and any other kind has None."""
    monkeypatch.setattr(constants, "DATA", tmp_path)
    assert step_time_uncertainty("gpu") is None
    (tmp_path / "runtime").mkdir()
    numbers = {
        "gpu.log_half_width": constants.Constant(0.2, "1", "a test", "2026-11-20"),
        "gpu.coverage": constants.Constant(0.9, "1", "a test", "2026-11-20"),
    }
    (tmp_path / "runtime" / "step_time.toml").write_text(constants.dump({"name": "step_time"}, numbers))
    assert step_time_uncertainty("gpu") == Uncertainty(0.2, 0.9)
    assert step_time_uncertainty("cpu") is None


def test_kinds_are_kept_beside_each_other(tmp_path, monkeypatch):
    """Writing the interval of one kind of hardware replaces its old interval and keeps the other kinds."""
    monkeypatch.setattr(constants, "DATA", tmp_path)
    (tmp_path / "runtime").mkdir()
    keep_step_time_uncertainty("gpu", Uncertainty(0.2, 0.9), "a test", "2026-11-20")
    keep_step_time_uncertainty("cpu", Uncertainty(0.3, 0.8), "a test", "2026-11-20")
    keep_step_time_uncertainty("gpu", Uncertainty(0.1, 0.9), "a later test", "2026-11-21")
    assert step_time_uncertainty("gpu") == Uncertainty(0.1, 0.9)
    assert step_time_uncertainty("cpu") == Uncertainty(0.3, 0.8)
