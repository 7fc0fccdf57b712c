"""A value with several users gets a fan-out, which is the only place to reshard the value."""

from __future__ import annotations

import torch

from autoshard.rules.fan_out import fan_out
from autoshard.tracing import trace
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_fan_outs import InsertFanOuts
from tests.passes.blocks import Perceptron

GOLDEN = """\
fan_out_1: f32[4, 16] = fan_out(input_0)
fan_out: f32[16, 32] = fan_out(p_second_weight)
fan_out_2: f32[4, 32] = fan_out(relu)
fan_out_4: f32[4, 16] = fan_out(sub)
fan_out_5: f32[4, 16] = fan_out(mul_1)
fan_out_3: f32[4, 32] = fan_out(fan_out_2)
fan_out_6: f32[4, 32] = fan_out(threshold_backward)"""


def test_values_with_several_users_get_fan_outs() -> None:
    """Each value with several users is read through a fan-out. Several backward users share a second fan-out."""
    program = InsertFanOuts()(Canonicalize()(trace(Perceptron(), (torch.randn(4, 16), torch.randn(4, 16)), {})))
    lines = [line for line in program.text().splitlines() if "= fan_out(" in line]
    assert "\n".join(lines) == GOLDEN


def test_only_a_fan_out_has_two_users() -> None:
    """A value that is no scalar has at most one user, unless it is a fan-out."""
    program = InsertFanOuts()(Canonicalize()(trace(Perceptron(), (torch.randn(4, 16), torch.randn(4, 16)), {})))
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target is not fan_out and isinstance(value, torch.Tensor) and value.ndim > 0:
            assert len([user for user in node.users if user.op == "call_function"]) <= 1
