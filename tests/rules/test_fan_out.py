"""A fan-out has a strategy for each spec of its value: whole, split, or pending."""

from __future__ import annotations

import pytest
import torch

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.fan_out import fan_out
from autoshard.rules.registry import bound_rule


def _specs(shape: tuple[int, ...], mesh: Mesh) -> set[PartitionSpec]:
    """Return the specs of a fan-out; check that each is equal at input and output, and listed once."""
    x = torch.zeros(shape)
    rule = bound_rule(fan_out, (x,), {}, [x])
    assert rule is not None
    found = enumerate_strategies(rule, mesh)
    assert all(strategy.inputs == strategy.outputs for strategy in found)
    specs = [strategy.inputs[0] for strategy in found]
    assert len(specs) == len(set(specs)), "each once"
    return set(specs)


def test_over_one_axis() -> None:
    assert _specs((4, 6), Mesh({"a": 2})) == {P(), P("a"), P(None, "a"), P(partial={"a": "sum"})}


@pytest.mark.parametrize("mesh", [Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 3})], ids=str)
def test_over_two_axes(mesh: Mesh) -> None:
    """Two axes split two dims or one dim, one axis splits beside a pending sum, or both axes have a pending sum."""
    found = _specs((12, 12), mesh)
    assert {P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("a", "b")), P("a"), P("b"), P()} <= found
    assert {P("a", partial={"b": "sum"}), P(partial={"a": "sum", "b": "sum"})} <= found
