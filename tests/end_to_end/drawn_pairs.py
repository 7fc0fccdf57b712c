"""Properties that plans of drawn programs must have; each function checks some plans and returns their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from hypothesis import reject
from hypothesis import strategies as st

import autoshard
from autoshard import LossScaling, Mesh, NotAvailableError, Plan, Recipe
from autoshard.testing import DrawnProgram, check_plan, meshes, plans, programs, traced_call
from autoshard.testing.training import options_of
from autoshard.tracing.precision import run_in_precision
from cost_models.schedule_orders import SCHEDULES, admits


def any_plan(data: st.DataObject, most_plans: int = 1) -> int:
    """Check that drawn plans compute the outputs and gradients of one device; return the number of plans."""
    mesh, program = data.draw(meshes(max_ranks=4, max_axes=2)), data.draw(programs(draws=True))
    pairs = 0
    for plan in _some_plans(data, program, mesh, most_plans):
        options = {"plan": plan, "traced": traced_call(program, plan.precision), "precise": torch.float64}
        check_plan(program.model, mesh, program.inputs, **options).raise_if_different()
        pairs += 1
    return pairs


def any_plan_of_a_whole_step(data: st.DataObject, most_plans: int = 1) -> int:
    """Check that two steps with clipping and micro-batches leave the parameters and state of one device."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs(max_blocks=3, whole_steps=True, draws=True))
    pairs = 0
    for plan in _some_plans(data, program, mesh, most_plans):
        whole = {"whole_step": program.whole_step, "steps": 2}
        options = {"plan": plan, "traced": traced_call(program, plan.precision), "precise": torch.float64, **whole}
        check_plan(program.model, mesh, program.inputs, **options).raise_if_different()
        pairs += 1
    return pairs


def any_plan_in_bf16(data: st.DataObject, most_plans: int = 1) -> int:
    """Check that drawn plans in bfloat16, whose programs contain casts, equal one device with the same casts."""
    mesh, program = (
        data.draw(meshes(max_ranks=4, max_axes=2)),
        data.draw(programs().filter(partial(runs_in, torch.bfloat16))),
    )
    pairs = 0
    for plan in _some_plans(data, program, mesh, most_plans, precision="bf16"):
        traced = traced_call(program, plan.precision)
        check_plan(program.model, mesh, program.inputs, plan=plan, traced=traced).raise_if_different()
        pairs += 1
    return pairs


def any_plan_of_a_step_in_f16(data: st.DataObject, most_plans: int = 1) -> int:
    """Check that two float16 steps with loss scaling equal one device with torch's `GradScaler`."""
    mesh = data.draw(meshes(max_ranks=4, max_axes=2))
    program = data.draw(programs(max_blocks=2, whole_steps=True).filter(partial(runs_in, torch.float16)))
    assert program.whole_step is not None, "it is a whole step"
    whole_step = replace(program.whole_step, loss_scaling=LossScaling(init_scale=64.0))
    pairs = 0
    for plan in _some_plans(data, program, mesh, most_plans, precision="f16"):
        options = {"plan": plan, "traced": traced_call(program, plan.precision), "whole_step": whole_step, "steps": 2}
        check_plan(program.model, mesh, program.inputs, **options).raise_if_different()
        pairs += 1
    return pairs


def chosen_plan(data: st.DataObject, most_plans: int = 1) -> int:
    """Check that the plan that the planner picks equals one device over two steps; return 1."""
    mesh, program = data.draw(meshes(max_ranks=4, max_axes=2)), data.draw(programs(draws=True))
    check_plan(program.model, mesh, program.inputs, steps=2, precise=torch.float64).raise_if_different()
    return 1


def any_pipeline(data: st.DataObject, most_plans: int = 1) -> int:
    """Check that two steps on two or three pipeline ranks, under drawn schedules and other axes, equal one device."""
    program = data.draw(programs(whole_steps=True).filter(_has_parts))
    assert program.whole_step is not None, "it is a whole step"
    rest = data.draw(st.sampled_from(({}, {"x": 2}, {"x": 2, "y": 2})))
    mesh = Mesh({"pipeline": data.draw(st.integers(2, 3)), **rest})
    counts = [count for count in (2, 4, 6) if len(program.inputs[0]) % count == 0]
    whole_step = replace(program.whole_step, micro_batches=data.draw(st.sampled_from(counts)))
    ranks, count = mesh.axis_size("pipeline"), whole_step.micro_batches
    pairs = 0
    for _ in range(data.draw(st.integers(1, most_plans))):
        schedule, virtual_stages = data.draw(st.sampled_from(_admitted(ranks, count)))
        size = len(program.inputs[0]) // count
        recipe = Recipe(schedule=schedule, virtual_stages=virtual_stages, micro_batch=size)
        asked = options_of(whole_step, program.model)
        del asked["micro_batches"]
        try:
            plan = autoshard.plan(
                program.model, mesh, example_inputs=program.inputs, recipe=recipe, time_budget_s=2.0, precision=None,
                **asked,
            )  # fmt: skip
            options = {"plan": plan, "precise": torch.float64, "whole_step": whole_step, "steps": 2}
            check = check_plan(program.model, mesh, program.inputs, **options)
        except NotAvailableError:  # fewer calls than stages, or so many parts of the batch do not make its loss
            continue
        check.raise_if_different()
        pairs += 1
    if not pairs:
        reject()
    return pairs


def _has_parts(program: DrawnProgram) -> bool:
    """Return whether the batch may be cut into micro-batches, which holds if no block mixes samples."""
    return program.whole_step is not None and program.whole_step.micro_batches > 1


def _admitted(ranks: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return pairs of a schedule and its virtual stages that can run the number of micro-batches."""
    pairs = product(SCHEDULES, (1, 2))
    return [(name, stages) for name, stages in pairs if admits(name, ranks, micro_batches, stages)]


def runs_in(dtype: torch.dtype, program: DrawnProgram) -> bool:
    """Return whether one device runs the program in a type; an operator may refuse operands of different types."""
    try:
        run_in_precision(program.model, dtype, *program.inputs)
    except (RuntimeError, ValueError) as error:
        return "dtype" not in str(error)
    return True


def _some_plans(
    data: st.DataObject, program: DrawnProgram, mesh: Mesh, most: int, precision: str | None = None
) -> Iterator[Plan]:
    """Yield one to `most` drawn plans of a program; Hypothesis shrinks a failing example to a single plan."""
    drawn = plans(program, mesh, precision=precision)
    for _ in range(data.draw(st.integers(1, most))):
        yield data.draw(drawn)


PROPERTIES: Mapping[str, Callable[[st.DataObject, int], int]] = {
    "any plan": any_plan,
    "any plan of a whole step": any_plan_of_a_whole_step,
    "any plan in bf16": any_plan_in_bf16,
    "any plan of a step in f16": any_plan_of_a_step_in_f16,
    "chosen plan": chosen_plan,
    "pipeline": any_pipeline,
}
