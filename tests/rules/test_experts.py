"""Layers of experts split tokens, experts, intermediate values, or tokens together with experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given

import autoshard.kernels as kernels
from autoshard import P
from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule
from tests.kernels.experts import Layer, layers
from tests.rules.recording import MESH_PAIRS, check_splits
from tests.rules.run_strategy import results_of

ops = torch.ops.autoshard


@given(layer=layers(), pair=MESH_PAIRS)
def test_all_strategies_equal_one_device(layer: Layer, pair: Sequence[Mesh]) -> None:
    """Under every strategy, a drawn layer's results and gradients equal one device's."""
    check_splits(ops.experts.default, *layer.arguments, meshes=pair)
    check_splits(ops.experts_backward.default, torch.randn_like(layer.x), *layer.arguments, meshes=pair)


def strategies_of(operator: Any, *arguments: Any, mesh: Mesh) -> list[tuple[Any, Any]]:
    """Return the specs of operands and results of every strategy."""
    rule = bound_rule(operator, arguments, {}, results_of(operator, arguments, {}))
    assert rule is not None
    return [(item.inputs, item.outputs) for item in enumerate_strategies(rule, mesh)]


def test_tokens_and_experts_are_split_by_one_axis() -> None:
    """If one axis splits tokens and experts, the result is split by tokens, and gradients of experts as experts.

    If the axis splits experts alone, the result is a pending sum.
    """
    layer, one = Layer.drawn(torch.Generator().manual_seed(0)), Mesh({"a": 2})
    tokens, expert = P("a"), P("a")
    operands = (tokens, tokens, tokens, expert, expert)
    assert (operands, (tokens,)) in strategies_of(ops.experts.default, *layer.arguments, mesh=one)
    backward = strategies_of(ops.experts_backward.default, layer.x, *layer.arguments, mesh=one)
    assert ((tokens, *operands), (tokens, tokens, expert, expert)) in backward
    whole = (P(), P(), P(), expert, expert)
    assert (whole, (P(partial={"a": "sum"}),)) in strategies_of(ops.experts.default, *layer.arguments, mesh=one)


def test_experts_are_split_in_one_way_at_a_time() -> None:
    """If two axes split tokens, each axis may split experts too.

    No axis splits experts alone beside an axis of both.
    """
    layer, mesh = Layer.drawn(torch.Generator().manual_seed(0), tokens=8), Mesh({"a": 2, "b": 2})
    found = strategies_of(ops.experts.default, *layer.arguments, mesh=mesh)
    shared = [inputs for inputs, _ in found if inputs[0] == P(("a", "b"))]
    assert {inputs[3] for inputs in shared} == {P(), P("a"), P("b"), P(("a", "b"))}
    assert not [inputs for inputs, _ in found if inputs[0] == P("a") and inputs[3] == P(("a", "b"))]


@pytest.mark.parametrize("to", [0, 3])
def test_all_tokens_may_go_to_one_rank(to: int) -> None:
    """If all tokens choose one expert, every strategy has one device's results, without a dropped token."""
    layer = Layer.drawn(torch.Generator().manual_seed(0), chosen=1)
    layer.index.fill_(to)
    assert kernels.experts is ops.experts.default
    check_splits(ops.experts.default, *layer.arguments)
    check_splits(ops.experts_backward.default, torch.randn_like(layer.x), *layer.arguments)
