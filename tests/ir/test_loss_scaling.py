"""Settings of the scale of the loss are checked, and have the defaults of torch's scaler."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.loss_scaling import LossScaling, scales_loss


def test_the_defaults_are_those_of_torch() -> None:
    """Each field has the name and the default of torch's `GradScaler`."""
    state = torch.amp.GradScaler("cpu").state_dict()
    expected = {"init_scale": state["scale"], **{name: state[name] for name in state if "_f" in name or "_i" in name}}
    assert dataclasses.asdict(LossScaling()) == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("init_scale", 0.0, r"LossScaling\(init_scale=0\.0\): pass a number between 1\.17549e-38 and 3\.40282e\+38\."),
        ("init_scale", 1e39, r"LossScaling\(init_scale=1e\+39\): pass a number between"),
        ("init_scale", "big", r"LossScaling\(init_scale='big'\): pass a number between"),
        ("growth_factor", 1.0, r"LossScaling\(growth_factor=1\.0\): pass a number above 1\."),
        ("backoff_factor", 1.0, r"LossScaling\(backoff_factor=1\.0\): pass a number between 0 and 1\."),
        ("backoff_factor", math.nan, r"LossScaling\(backoff_factor=nan\): pass a number between 0 and 1\."),
        ("growth_interval", 0, r"LossScaling\(growth_interval=0\): pass a whole number of at least 1\."),
        ("growth_interval", 1.5, r"LossScaling\(growth_interval=1\.5\): pass a whole number of at least 1\."),
        ("growth_interval", True, r"LossScaling\(growth_interval=True\): pass a whole number of at least 1\."),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: Any, message: str) -> None:
    """A value out of range is refused with its field and the range."""
    with pytest.raises(NotAvailableError, match=message):
        LossScaling(**{name: value})


def test_only_training_steps_in_float16_scale_the_loss() -> None:
    """The loss is scaled in float16 with an optimizer, and otherwise never."""
    assert scales_loss("f16", "adamw")
    assert not any(scales_loss(*asked) for asked in (("bf16", "adamw"), (None, "adamw"), ("f16", None)))
