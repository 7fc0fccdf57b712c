"""Rules that many operators share."""

from __future__ import annotations

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.rules.dims import moves
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.notation import bind


def test_what_only_moves_elements_passes_a_partial_sum() -> None:
    """A transpose has a strategy with a pending sum as its operand and its result."""
    transpose = bind(moves((("a",), ("b",)), (("b",), ("a",))), [(4, 2)], [(2, 4)])
    pending = P(partial={"x": "sum"})
    assert any(
        strategy.inputs == (pending,) and strategy.outputs == (pending,)
        for strategy in enumerate_strategies(transpose, Mesh({"x": 2}))
    )
