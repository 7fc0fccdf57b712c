"""Read a known plan as a solution of a planning problem, with the plan's recomputed and offloaded values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoshard.errors import PlanMismatchError
from autoshard.ir.plan import Plan
from passes.planning.baselines import options_as_in
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.recomputation.fitting import JointSolution
from passes.recomputation.recompute import InsertRecompute
from passes.recomputation.recompute_problem import Restored
from passes.recomputation.with_restored import host_bytes, with_restored
from passes.solver.assignment import Solution


def solution_of(before: Plan, planning: PlanningProblem, allowed: Mapping[int, np.ndarray]) -> JointSolution | None:
    """Return the plan `before` as a solution of a problem of the same program, at the prices of this problem.

    `allowed` has boolean masks of the allowed options by variable. The result is None if the plan is for another mesh
    or program, or uses an option that is not allowed. The lower bound of the solution is 0.
    """
    if before.mesh != planning.space.mesh or not _is_of(before, planning):
        return None
    masks = options_as_in(before, planning)
    masks |= {variable: mask & masks.get(variable, mask) for variable, mask in allowed.items()}
    if not all(mask.any() for mask in masks.values()):
        return None
    choice = Search()(planning, masks).choice
    restored = Restored(before.recompute.nodes, before.offload.nodes)
    running = with_restored(planning, restored)
    return JointSolution(
        running,
        Solution(choice, running.assignment.cost_of(choice), 0.0),
        restored,
        before.recompute.candidates,
        before.offload.candidates,
        host_bytes(running, choice),
    )


def _is_of(before: Plan, planning: PlanningProblem) -> bool:
    try:
        program = InsertRecompute(before.recompute.nodes, before.offload.nodes)(planning.space.program)
    except PlanMismatchError:
        return False
    return program.digest() == before.program_digest
