"""Guards on Python values: what counts as a change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.ir.python_guards import PythonUse, are_alike, is_record

NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "value", "alike"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (NAN, float("nan"), True),
        ([1, (2, "a")], [1, (2, "a")], True),
        ({"a": 1}, {"a": True}, False),
        (torch.float32, torch.float16, False),
        (object(), object(), False),
        (torch.ones(1), torch.ones(1), False),
        ("".join(["a", "b"]).__len__, "ab".__len__, False),
    ],
)
def test_values_are_compared_by_type_and_value(found: Any, value: Any, alike: bool) -> None:
    """Plain ones and containers of them; others by identity."""
    assert are_alike(found, value) is alike


def test_what_a_record_holds_is_guarded_in_depth() -> None:
    """Lists in settings within settings; not what an object with more than settings holds."""
    settings = SimpleNamespace(inner=SimpleNamespace(sizes=[1, {"a": 2}]))
    other = SimpleNamespace(data=object(), count=0)
    holder = SimpleNamespace(settings=settings, other=other, table=torch.ones(2), weight=torch.ones(2), hooks={})
    guards = PythonUse((("model", holder, ("settings", "other", "table", "weight", "hooks", "none")),)).guards(
        [holder.weight]
    )
    other.count = 1
    holder.weight.mul_(2)
    assert guards.hold()
    settings.inner.sizes[1]["a"] = 3
    assert not guards.hold()
    assert guards.changes() == ("model.settings.inner.sizes",)
    settings.inner.sizes[1]["a"] = 2
    assert guards.hold()
    holder.table.mul_(2)
    holder.hooks["new"] = print
    holder.none = None
    assert guards.changes() == ("model.none", "model.hooks", "model.table")


class Settings:
    """Holds what it is given; one of its own is a setting."""

    kind = "settings"

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def _with_attributes() -> None:
    """A function that holds a setting."""


_with_attributes.size = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "holds_settings"),
    [
        (Settings(size=1, inner=Settings(names=["a"])), True),
        (Settings(size=1, data=object()), False),
        (Settings(), False),
        (Settings(inner=Settings()), False),
        (Settings, False),
        (torch.nn.Identity(), False),
        (_with_attributes, False),
        (3, False),
    ],
)
def test_records_hold_settings_alone(value: Any, holds_settings: bool) -> None:
    """Types, functions and modules hold other things too, and an object that holds nothing may be anything."""
    assert is_record(value) is holds_settings
