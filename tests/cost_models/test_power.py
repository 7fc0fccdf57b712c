"""The clock follows the power that a step leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.power import PowerLimit, power_limit

LIMITS = st.builds(PowerLimit, st.floats(1, 1.5), st.floats(0, 1), st.floats(1, 3))


@given(LIMITS, st.floats(0, 1), st.floats(0, 1))
def test_more_products_never_run_faster(limit: PowerLimit, one: float, two: float) -> None:
    """The speed falls with the duty, from the headroom to 1."""
    few, many = sorted((one, two))
    assert limit.headroom >= limit.speed(few) >= limit.speed(many) - 1e-12
    assert limit.speed(1.0) == 1.0


@given(LIMITS, st.floats(0.01, 1))
def test_the_limit_is_kept(limit: PowerLimit, duty: float) -> None:
    """Mean power is the limit, or below it where the clock is at its highest."""
    speed = limit.speed(duty)
    mean = duty * speed**limit.exponent + (1 - duty) * limit.other_share
    assert mean <= 1 + 1e-9
    if speed < limit.headroom:
        assert mean == pytest.approx(1.0)


def test_duty_is_a_share() -> None:
    """Anything else is refused."""
    with pytest.raises(CostArgumentError, match=r"duty=1\.2"):
        power_limit().speed(1.2)
