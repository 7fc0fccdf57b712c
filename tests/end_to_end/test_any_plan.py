"""Any legal plan of any drawn program computes what one device computes, gradients included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard import Mesh
from autoshard.testing import check_plan, meshes, plans, programs


@given(st.data())
def test_any_legal_plan_equals_one_device(data: st.DataObject) -> None:
    """Not only the chosen plan: every strategy of every node, on any mesh."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs())
    plan = data.draw(plans(program, mesh))
    check_plan(program.model, mesh, program.inputs, plan=plan, precise=torch.float64).raise_if_different()


@pytest.mark.parametrize("mesh", [Mesh({"data": 4}), Mesh({"data": 2, "model": 2})], ids=str)
@given(program=programs())
def test_the_chosen_plan_equals_one_device(mesh: Mesh, program) -> None:
    """The plan that the planner picks, over two steps."""
    check_plan(program.model, mesh, program.inputs, steps=2, precise=torch.float64).raise_if_different()
