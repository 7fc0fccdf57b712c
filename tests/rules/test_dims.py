"""Rules that many operators share."""

from __future__ import annotations

import pytest

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P, Reduction
from autoshard.rules.dims import moves
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.notation import bind


@pytest.mark.parametrize("reduction", Reduction)
def test_what_only_moves_elements_passes_any_partial_value(reduction: Reduction) -> None:
    """The transpose of a pending maximum is the pending maximum of transposes."""
    transpose = bind(moves((("a",), ("b",)), (("b",), ("a",))), [(4, 2)], [(2, 4)])
    pending = P(partial={"x": reduction})
    assert any(
        strategy.inputs == (pending,) and strategy.outputs == (pending,)
        for strategy in enumerate_strategies(transpose, Mesh({"x": 2}))
    )
