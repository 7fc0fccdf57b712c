"""Recipes as plans."""

from __future__ import annotations

from autoshard import Mesh
from autoshard.ir.execution import Execution
from passes.search.recipe_plan import recipe_mesh


def test_the_expert_axis_is_the_fastest_part_of_data() -> None:
    """Where experts are shared out among more ranks than those, they take the tensor axis too."""
    within = Execution(data=4, tensor=2, expert=2, expert_tensor=1)
    beyond = Execution(data=2, tensor=2, expert=4, expert_tensor=1)
    assert recipe_mesh(within) == Mesh({"data": 2, "expert": 2, "tensor": 2})
    assert recipe_mesh(beyond) == Mesh({"expert": 4})
    assert recipe_mesh(Execution(data=4, pipeline=2)) == Mesh({"pipeline": 2, "data": 4})
