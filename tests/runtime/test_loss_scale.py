"""The loss scale changes as that of torch's `GradScaler`."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoshard.ir.loss_scaling import SMALLEST_SCALE, LossScaling
from autoshard.runtime.loss_scale import LossScale

SETTINGS = st.builds(
    LossScaling,
    init_scale=st.floats(2.0**-10, 2.0**100, width=32),
    growth_factor=st.sampled_from([2.0, 1.3, 1e6]),
    backoff_factor=st.sampled_from([0.5, 0.7, 1e-6]),
    growth_interval=st.integers(1, 3),
)


@given(SETTINGS, st.lists(st.booleans(), max_size=20))
def test_it_rises_and_falls_as_torch_does(settings: LossScaling, skipped: list[bool]) -> None:
    """After each step, the scale equals torch's to the last bit, down to the smallest scale; so does a loaded copy."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **dataclasses.asdict(settings))
    scale, loaded = LossScale(settings), LossScale(settings)
    scaler.scale(parameter.sum())  # the scaler makes its scale at the first call
    for is_skipped in skipped:
        parameter.grad = torch.full((1,), math.inf if is_skipped else 0.0)
        scaler.step(optimizer)
        scaler.update()
        loaded.load_state_dict(copy.deepcopy(scale.state_dict()))
        for each in (scale, loaded):
            each.update(was_skipped=is_skipped)
        if scaler.get_scale() < SMALLEST_SCALE:
            assert scale.value == loaded.value == SMALLEST_SCALE
            return
        assert scale.value == loaded.value == scaler.get_scale()
        assert scale.state_dict() == loaded.state_dict() == scaler.state_dict()


def test_the_scale_stays_above_zero() -> None:
    """After 300 skipped steps, the inverse is finite in float32, also after a zero scale was loaded."""
    scale = LossScale(LossScaling())
    for _ in range(300):
        scale.update(was_skipped=True)
    assert torch.tensor(scale.inverse, dtype=torch.float32).isfinite()
    scale.load_state_dict({**scale.state_dict(), "scale": 0.0})
    assert scale.inverse == 2.0**126


def test_it_rises_after_a_longer_interval_was_loaded() -> None:
    """If a loaded state has more good steps than the growth interval, the next good step raises the scale."""
    long, short = LossScale(LossScaling(growth_interval=9)), LossScale(LossScaling(growth_interval=4))
    for _ in range(6):
        long.update(was_skipped=False)
    short.load_state_dict(long.state_dict())
    short.update(was_skipped=False)
    assert short.value == 2 * long.value


def test_the_inverse_removes_the_scale() -> None:
    """The inverse times the default scale is exactly 1."""
    scale = LossScale(LossScaling())
    assert scale.inverse * scale.value == 1.0
    assert scale.inverse == 2.0**-16
