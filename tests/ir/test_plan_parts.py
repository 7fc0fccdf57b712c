"""The layout of parameters in a plan as JSON data."""

from __future__ import annotations

from autoshard import P
from autoshard.ir.plan_parts import ParameterPlan

WHOLE, SPLIT = P(), P("data")


def test_a_parameters_layout_is_text_that_says_all_of_it() -> None:
    """The JSON of a parameter's layout has its spec, shape and bytes and, with an update, its gradient's and
    state's specs."""
    plan = ParameterPlan(WHOLE, (4, 2), 32, SPLIT, {"exp_avg": SPLIT}, "ZeRO-2 over data")
    assert plan.to_json() == {
        "spec": "P()", "shape": [4, 2], "local_bytes": 32,
        "gradient": "P('data')", "state": {"exp_avg": "P('data')"}, "layout": "ZeRO-2 over data",
    }  # fmt: skip
    assert ParameterPlan(WHOLE, (4, 2), 32, layout="whole").to_json()["gradient"] is None


def test_without_an_update_there_is_only_where_it_lies() -> None:
    """A parameter of a plan without an update has no fields for gradients and optimizer state."""
    assert ParameterPlan(SPLIT, (4,), 8).to_json() == {"spec": "P('data')", "shape": [4], "local_bytes": 8}
