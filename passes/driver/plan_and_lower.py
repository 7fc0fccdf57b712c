"""How a plan is made: the problem, its search, and which of the choices found is fastest as it is lowered."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import Prediction
from autoshard.ir.program import Program
from autoshard.ir.recompute import Recompute
from cost_models.hardware import Cluster
from passes.driver.kernels_on_one_device import fusion_of
from passes.driver.plan_of_choice import LoweredPlan, lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.lower_program import prepare
from passes.memory.elided_lifetimes import with_elided
from passes.memory.liveness import find_lifetimes
from passes.planning.baselines import solve_baselines
from passes.planning.bucket_prices import hidden_part, in_buckets, solve_in_buckets
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.constraints import allowed_options
from passes.planning.kernel_prices import NOTHING_FUSED
from passes.planning.restrictions import restricted
from passes.planning.search import Search, first_bound
from passes.planning.tie_axes import space_in_time, tied_levels
from passes.recomputation.fitting import JointSolution
from passes.recomputation.plan_before import solution_of
from passes.recomputation.recompute_search import solve_jointly
from passes.recomputation.savings import savings_of
from passes.recomputation.whole_blocks import joint_with_blocks, with_whole_blocks
from passes.solver.assignment import Assignment, Solution
from passes.solver.one_thread import one_blas_thread
from passes.solver.search_control import ALL_PLANS
from passes.strategies.elided import find_elided
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices

logger = logging.getLogger(__name__)

_NEAR = 0.1
"""A choice that costs this part more than the search's own is not faster by hiding its communication."""

_SURE = 0.01
"""Part of a step by which a choice at the prices of buckets must be faster than the search's, and known recipes."""

_ALIKE = 0.02
"""Part of a step within which plans on CPUs are as fast: prices are off by more (`tests.benchmarks.local_plans`)."""

_BASELINE_ROUNDS = 6
"""Rounds of the search for the best plan within a known recipe."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a search decided.

    Args:
        planning: the planning problem of the program as it will run, with what is recomputed.
        solution: one option per variable of `planning`.
        recompute: what is recomputed.
        offload: what is offloaded.
        baselines: the best solutions of the known recipes, without recomputation; None where none fits.
        bucketed: the best solution with what is sent of parameters and gradients priced in buckets, less what hides.
        in_buckets: those prices; None where no known recipes are asked for, nothing that keeps all is known to fit, or
            time was up.
        own_s: what the solution itself costs at those prices, with what it recomputes and offloads.
    """

    planning: PlanningProblem
    solution: Solution
    recompute: Recompute
    offload: Offload
    baselines: Mapping[str, Solution | None]
    bucketed: Solution | None = None
    in_buckets: Assignment | None = None
    own_s: float = math.inf

    def may_be_faster(self, other: Solution, elsewhere: Sequence[Plan]) -> bool:
        """Whether a choice is cheaper in buckets, or else was not searched for that and is nearly as cheap.

        Args:
            other: the choice.
            elsewhere: plans on other meshes.
        """
        if self.in_buckets is not None:
            if self.in_buckets.cost_of(other.choice) < (1 - _SURE) * self.own_s:
                return True
            if other is self.bucketed:
                return False
        return other.cost <= (1 + _NEAR) * min([self.solution.cost, *(plan.objective for plan in elsewhere)])


class DearMeshError(Exception):
    """No plan on a mesh is as cheap as one on another is; `baselines`: what its known recipes cost."""

    def __init__(self, baselines: Mapping[str, float | None]) -> None:
        super().__init__("a plan on another mesh is cheaper than any on this one")
        self.baselines = baselines


def bounded_problem(
    program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions
) -> tuple[float, PlanningProblem]:
    """The problem of `plan_program`, behind seconds that every plan of it costs."""
    with options.control.building(), one_blas_thread():
        planning = planning_problem(program, mesh, cluster, options)
        return first_bound(planning, allowed_by(planning, options)), planning


def plan_program(
    program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions, planning: PlanningProblem | None = None
) -> Plan:
    """The plan of least predicted step time that fits; `planning`: its problem, if it is built already.

    Raises:
        DoesNotFitError, NoShardingRuleError, InvalidSpecError: see `PlanOptions`.
        SearchStopped: `options.control` was stopped before the search began.
        DearMeshError: a plan elsewhere is cheaper than any here.
    """
    return plan_and_lower(program, mesh, cluster, options, planning).plan


def plan_and_lower(
    program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions, planning: PlanningProblem | None = None
) -> LoweredPlan:
    """`plan_program`, with the lowered program that the plan was predicted from."""
    start = time.monotonic()
    if planning is None:
        with options.control.building():
            planning = planning_problem(program, mesh, cluster, options)
    built = time.monotonic()
    found = solve(planning, options, allowed_by(planning, options))
    logger.debug("search took %.3f s", time.monotonic() - built)
    best = fastest(planning, found, cluster, options)
    control, took_s = options.control, time.monotonic() - start
    ended = {"was_interrupted": control.is_stopped, "was_cut": control.ceiling.has_cut}
    return replace(best, plan=replace(best.plan, baselines=_costs(found.baselines), search_time_s=took_s, **ended))


def fastest(planning: PlanningProblem, found: Decision, cluster: Cluster, options: PlanOptions) -> LoweredPlan:
    """The plan of the search, of a known recipe, or with prices of buckets, where it may be faster.

    Their lowered programs say which is fastest. The search adds up what a step does; what runs puts collectives into
    buckets and hides them, in some plans more than in others, and never what is recomputed. The bound is the search's.
    Once the search is over no others are lowered.
    """
    solution = found.solution
    best = lowered_plan(found.planning, solution.choice, solution.cost, solution.lower_bound, cluster, options)
    best = replace(best, plan=replace(best.plan, recompute=found.recompute, offload=found.offload))
    if options.with_kernels:
        return best
    seen = {solution.choice} if found.planning is planning else set()
    for each in (*found.baselines.values(), found.bucketed):
        if each is None or each.choice in seen or not found.may_be_faster(each, options.elsewhere):
            continue
        if options.control.is_over():
            break
        seen.add(each.choice)
        other = lowered_plan(planning, each.choice, each.cost, solution.lower_bound, cluster, options)
        predicted = other.plan.predicted
        fits = options.memory_budget is None or predicted.peak_memory_bytes <= options.memory_budget
        gain = _SURE if each is found.bucketed else 0.0
        if fits and _is_faster(predicted, best.plan.predicted, gain, cluster):
            recompute, offload = savings_of(*joint_with_blocks(JointSolution(planning, each)))
            best = replace(other, plan=replace(other.plan, recompute=recompute, offload=offload))
    return best


def _costs(baselines: Mapping[str, Solution | None]) -> dict[str, float | None]:
    return {name: None if priced is None else priced.cost for name, priced in baselines.items()}


def _is_faster(plan: Prediction, other: Prediction, gain: float, cluster: Cluster) -> bool:
    """Whether a step is faster by a part of it; on CPUs, of two as fast, whether it launches less."""
    if not cluster.device.dispatch_s and abs(plan.step_time_s - other.step_time_s) <= _ALIKE * other.step_time_s:
        return plan.launches < other.launches
    return plan.step_time_s < (1 - gain) * other.step_time_s


@one_blas_thread()
def solve(planning: PlanningProblem, options: PlanOptions, allowed: Mapping[int, np.ndarray]) -> Decision:
    """The cheapest choice within the options that are `allowed`, and others that are nearly as cheap.

    Raises:
        DoesNotFitError, NotAlikeError: no choice fits; blocks left out and those beside them do not recompute alike.
        DearMeshError: a plan elsewhere is cheaper than any here.
    """
    search = Search(options.memory_budget, control=options.control)
    quick = replace(search, tolerance=1e-2, max_rounds=_BASELINE_ROUNDS, is_thorough=False, says_smallest=False)
    baselines: Mapping[str, Solution | None] = {}
    if options.with_baselines:
        baselines = solve_baselines(planning, quick, allowed, options.before, options.elsewhere)
    if options.elsewhere and first_bound(planning, allowed) > min(plan.objective for plan in options.elsewhere):
        raise DearMeshError(_costs(baselines))
    options.control.problem = ALL_PLANS
    start = [found for found in baselines.values() if found is not None]
    recompute = options.recompute and (options.recipe is None or options.recipe.recompute is None)
    offload = options.offload and (options.recipe is None or options.recipe.offload is None)
    before = None if options.before is None else solution_of(options.before, planning, allowed)
    found = solve_jointly(planning, search, allowed, start, recompute=recompute, offload=offload, before=before)
    without, found = joint_with_blocks(found) if found.planning is planning else (planning, found)
    decision = Decision(found.planning, found.solution, *savings_of(without, found), baselines)
    keeping_all = [*start, found.solution] if found.planning is planning else start
    if not options.with_baselines or not keeping_all or options.control.is_over():
        return decision
    choice = found.solution.choice
    priced = in_buckets(planning, BucketCollectives().least_bytes, hidden_part(planning, choice))
    own_s = found.solution.cost + priced.cost_of(choice) - planning.assignment.cost_of(choice)
    bucketed = solve_in_buckets(planning, priced, quick, allowed, keeping_all)
    return replace(decision, bucketed=bucketed, in_buckets=priced, own_s=own_s)


def allowed_by(planning: PlanningProblem, options: PlanOptions) -> dict[int, np.ndarray]:
    """The options that a user's constraints and recipe leave.

    Raises:
        InvalidSpecError: see `allowed_options`.
        RecipeError: see `restricted`; or the two leave nothing together.
    """
    allowed = allowed_options(planning, options.constraints)
    if options.recipe is None:
        return allowed
    masks = restricted(planning, options.recipe)
    both = {**masks, **{variable: mask & masks.get(variable, mask) for variable, mask in allowed.items()}}
    for variable, mask in both.items():
        if not mask.any():
            raise RecipeError(
                f"constraints= and recipe= ({options.recipe.words}) leave no spec for "
                f"{planning.members[variable][0]!r} together. Leave one of the two out."
            )
    return both


def planning_problem(program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions) -> PlanningProblem:
    """The assignment problem whose solutions are the plans of a program.

    Raises:
        NotAlikeError: the program leaves out blocks, and those beside them are not alike, or do not recompute alike.
    """
    start = time.monotonic()
    strategies = EnumerateStrategies(mesh, options.strict, prune=True, wide_gradients=True)
    levels = tied_levels(mesh, options.constraints.values(), options.before, options.recipe)
    space = space_in_time(strategies, prepare(program), levels, options.time_budget_s)
    elided, prices = find_elided(space), Prices(cluster, mesh)
    ratio = options.state_bytes_per_parameter_byte
    liveness = with_elided(find_lifetimes(space, ratio, options.micro_batches), elided, space)
    fusion = fusion_of(space, prices) if options.with_kernels else NOTHING_FUSED
    planning = build_problem(space, prices, liveness, fold_blocks(space), elided, fusion)
    logger.debug("enumeration took %.3f s", time.monotonic() - start)
    return planning if options.recipe is None else with_whole_blocks(planning, options.recipe)
