"""Properties of a drawn program under a drawn plan: it computes what one device does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hypothesis import strategies as st

from autoshard.testing import check_plan, meshes, plans, programs


def any_plan(data: st.DataObject) -> None:
    """Every strategy of every node, on any mesh; half of the plans recompute."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs())
    plan = data.draw(plans(program, mesh))
    check_plan(program.model, mesh, program.inputs, plan=plan, precise=torch.float64).raise_if_different()


def any_plan_of_a_whole_step(data: st.DataObject) -> None:
    """Loss, parameters, buffers and optimizer state after two steps, with clipping and micro-batches."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs(max_blocks=3, whole_steps=True))
    plan = data.draw(plans(program, mesh))
    options = {"plan": plan, "whole_step": program.whole_step, "steps": 2, "precise": torch.float64}
    check_plan(program.model, mesh, program.inputs, **options).raise_if_different()


def any_plan_in_bf16(data: st.DataObject) -> None:
    """Casts among the nodes."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs())
    plan = data.draw(plans(program, mesh, precision="bf16"))
    check_plan(program.model, mesh, program.inputs, plan=plan).raise_if_different()


def chosen_plan(data: st.DataObject) -> None:
    """The plan that the planner picks, over two steps."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs())
    check_plan(program.model, mesh, program.inputs, steps=2, precise=torch.float64).raise_if_different()


PROPERTIES: Mapping[str, Callable[[st.DataObject], None]] = {
    "any plan": any_plan,
    "any plan of a whole step": any_plan_of_a_whole_step,
    "any plan in bf16": any_plan_in_bf16,
    "chosen plan": chosen_plan,
}
