"""Properties of a drawn program under drawn plans: it computes what one device does. Each counts the pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from hypothesis import strategies as st

from autoshard import Mesh, Plan
from autoshard.testing import DrawnProgram, check_plan, meshes, plans, programs, traced_call
from autoshard.tracing.precision import run_in_precision


def any_plan(data: st.DataObject, most_plans: int = 1) -> int:
    """Every strategy of every node, on any mesh; half of the plans recompute."""
    mesh, program = data.draw(meshes(max_ranks=4, max_axes=2)), data.draw(programs(draws=True))
    pairs = 0
    for plan in _some_plans(data, program, mesh, most_plans):
        options = {"plan": plan, "traced": traced_call(program, plan.precision), "precise": torch.float64}
        check_plan(program.model, mesh, program.inputs, **options).raise_if_different()
        pairs += 1
    return pairs


def any_plan_of_a_whole_step(data: st.DataObject, most_plans: int = 1) -> int:
    """Loss, parameters, buffers and optimizer state after two steps, with clipping and micro-batches."""
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
    """Casts among the nodes."""
    mesh, program = data.draw(meshes(max_ranks=4, max_axes=2)), data.draw(programs().filter(runs_in_bf16))
    pairs = 0
    for plan in _some_plans(data, program, mesh, most_plans, precision="bf16"):
        traced = traced_call(program, plan.precision)
        check_plan(program.model, mesh, program.inputs, plan=plan, traced=traced).raise_if_different()
        pairs += 1
    return pairs


def chosen_plan(data: st.DataObject, most_plans: int = 1) -> int:
    """The plan that the planner picks, over two steps."""
    mesh, program = data.draw(meshes(max_ranks=4, max_axes=2)), data.draw(programs(draws=True))
    check_plan(program.model, mesh, program.inputs, steps=2, precise=torch.float64).raise_if_different()
    return 1


def runs_in_bf16(program: DrawnProgram) -> bool:
    """Whether one device can: a float32 buffer widens what it is added to, and some operators want one type."""
    try:
        run_in_precision(program.model, torch.bfloat16, *program.inputs)
    except (RuntimeError, ValueError) as error:
        return "dtype" not in str(error)
    return True


def _some_plans(
    data: st.DataObject, program: DrawnProgram, mesh: Mesh, most: int, precision: str | None = None
) -> Iterator[Plan]:
    """Up to so many plans of a program, which is traced for them once; a smallest failure has one."""
    drawn = plans(program, mesh, precision=precision)
    for _ in range(data.draw(st.integers(1, most))):
        yield data.draw(drawn)


PROPERTIES: Mapping[str, Callable[[st.DataObject, int], int]] = {
    "any plan": any_plan,
    "any plan of a whole step": any_plan_of_a_whole_step,
    "any plan in bf16": any_plan_in_bf16,
    "chosen plan": chosen_plan,
}
