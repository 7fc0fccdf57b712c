"""A value with several users gets an identity node, the single place to reshard the value."""

from __future__ import annotations

import torch

from autoshard.rules.hub import hub
from autoshard.tracing import trace
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_hubs import InsertHubs
from tests.passes.blocks import Perceptron

GOLDEN = """\
hub_1: f32[4, 16] = hub(input_0)
hub: f32[16, 32] = hub(p_second_weight)
hub_2: f32[4, 32] = hub(relu)
hub_4: f32[4, 16] = hub(sub)
hub_5: f32[4, 16] = hub(mul_1)
hub_3: f32[4, 32] = hub(hub_2)
hub_6: f32[4, 32] = hub(threshold_backward)"""


def test_values_with_several_users_get_hubs() -> None:
    """A node stands before the first forward user, and a second node before several backward users."""
    program = InsertHubs()(Canonicalize()(trace(Perceptron(), (torch.randn(4, 16), torch.randn(4, 16)), {})))
    lines = [line for line in program.text().splitlines() if "= hub(" in line]
    assert "\n".join(lines) == GOLDEN


def test_no_value_but_a_hub_has_two_users() -> None:
    """Only an inserted node has two users, so every other edge is private; scalars get no node."""
    program = InsertHubs()(Canonicalize()(trace(Perceptron(), (torch.randn(4, 16), torch.randn(4, 16)), {})))
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target is not hub and isinstance(value, torch.Tensor) and value.ndim > 0:
            assert len([user for user in node.users if user.op == "call_function"]) <= 1
