"""Any legal plan of any drawn program computes the outputs and gradients of one device."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Mesh
from autoshard.testing import DrawnProgram, check_plan, meshes, plans, programs
from autoshard.testing.blocks import SourceWriter, pointwise, random_numbers, scale_and_shift
from autoshard.testing.programs import run_source
from tests.end_to_end.drawn_pairs import any_pipeline, any_plan, any_plan_of_a_whole_step


@given(st.data())
def test_any_legal_plan_equals_one_device(data: st.DataObject) -> None:
    """Any legal strategies of the nodes, on any mesh, compute the numbers of one device."""
    any_plan(data)


@given(st.data())
@settings(max_examples=4)
def test_any_legal_plan_of_a_whole_step_equals_one_device(data: st.DataObject) -> None:
    """Loss, parameters, buffers and optimizer state equal one device after two steps with micro-batches."""
    any_plan_of_a_whole_step(data)


@given(st.data())
@settings(max_examples=3)
def test_any_pipeline_equals_one_device(data: st.DataObject) -> None:
    """Drawn stages, schedules and micro-batches compute the numbers of one device, on meshes of up to three axes."""
    any_pipeline(data)


@given(programs(), st.sampled_from([Mesh({"data": 4}), Mesh({"data": 2, "model": 2})]))
def test_the_chosen_plan_equals_one_device(program: DrawnProgram, mesh: Mesh) -> None:
    """The plan that the planner picks computes the numbers of one device over two steps."""
    check_plan(program.model, mesh, program.inputs, steps=2, precise=torch.float64).raise_if_different()


@given(st.data())
@settings(max_examples=4)
def test_any_legal_plan_of_a_model_that_draws_equals_one_device(data: st.DataObject) -> None:
    """In two steps, any plan of a model with random numbers draws the same numbers as one device."""
    mesh, writer = data.draw(meshes(max_ranks=4, max_axes=2)), SourceWriter(batch=4, length=3, width=6, rows=4)
    x = writer.input("x", "torch.randn(4, 3, 6)")
    writer.line(f"h = {x}")
    for block in (scale_and_shift, random_numbers, pointwise, random_numbers):
        block(data.draw, writer)
    writer.line("return h.square().mean()")
    program = run_source(writer.source(data.draw(st.integers(0, 3))))
    plan = data.draw(plans(program, mesh))
    check_plan(program.model, mesh, program.inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()
