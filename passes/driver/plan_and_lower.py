"""Make a plan: build the planning problem, search it, and lower the best choices to find the fastest."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autoshard.errors import RecipeError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from cost_models.hardware import Cluster
from passes.driver.fastest_choice import Decision, fastest, nearest_recipe, steps_when_read
from passes.driver.plan_of_choice import LoweredPlan, peak_under
from passes.driver.plan_options import PlanOptions
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.lower_program import prepare
from passes.memory.liveness import find_lifetimes
from passes.memory.repeated_lifetimes import with_repeated
from passes.planning.baselines import solve_baselines
from passes.planning.bucket_prices import hidden_part, in_buckets, solve_in_buckets
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.constraints import allowed_options, own_specs
from passes.planning.restrictions import is_stage, restrict_all, restricted
from passes.planning.search import Search, first_bound
from passes.planning.tie_axes import space_in_time, tied_levels
from passes.recomputation.fitting import JointSolution
from passes.recomputation.plan_before import solution_of
from passes.recomputation.recompute_search import forget_problems, solve_jointly, solve_with_room
from passes.recomputation.whole_blocks import with_whole_blocks
from passes.solver.assignment import Solution
from passes.solver.one_thread import one_blas_thread
from passes.solver.search_control import ALL_PLANS
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices
from passes.strategies.repeated import find_repeated

logger = logging.getLogger(__name__)

_BASELINE_ROUNDS = 6
"""Rounds of the solver's search for the best plan within a known recipe."""


class DearMeshError(Exception):
    """Each plan on this mesh is slower than the best plan on another mesh.

    `baselines` has the seconds of each known recipe's step on this mesh, by the recipe's name.
    """

    def __init__(self, baselines: Mapping[str, float | None]) -> None:
        super().__init__("a plan on another mesh is cheaper than any on this one")
        self.baselines = baselines


def bounded_problem(
    program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions
) -> tuple[float, PlanningProblem]:
    """Return a lower bound on the price of any plan on this mesh, in seconds, and the program's planning problem."""
    with options.control.building(), one_blas_thread():
        planning = planning_problem(program, mesh, cluster, options)
        return first_bound(planning, allowed_by(planning, options)), planning


def plan_program(
    program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions, planning: PlanningProblem | None = None
) -> Plan:
    """Return the plan with the least predicted step time that fits in memory.

    `planning` is the problem from `bounded_problem`, if it is built already.

    Raises:
        DoesNotFitError: no plan fits in the memory budget.
        NoShardingRuleError: with `options.strict`, an operator has no sharding rule.
        InvalidSpecError: a constraint names no value, or gives a spec that the value cannot have.
        SearchStopped: `options.control` was stopped before the search began.
        DearMeshError: each plan on this mesh is slower than a plan on another mesh.
    """
    return plan_and_lower(program, mesh, cluster, options, planning).plan


def plan_and_lower(
    program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions, planning: PlanningProblem | None = None
) -> LoweredPlan:
    """Return the plan of `plan_program`, and the lowered program that its step time was predicted from."""
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
    return replace(best, plan=replace(best.plan, search_time_s=took_s, **ended))


@one_blas_thread()
def solve(planning: PlanningProblem, options: PlanOptions, allowed: Mapping[int, np.ndarray]) -> Decision:
    """Return the best solution of a planning problem, and further solutions to compare after lowering.

    Args:
        allowed: for the index of a variable, a boolean mask of the options that it may take. A missing variable may
            take all its options.

    Raises:
        DoesNotFitError: no solution fits in memory.
        NotAlikeError: left-out blocks and the blocks beside them do not recompute alike.
        DearMeshError: each solution is slower than a plan on another mesh, and each known recipe on this mesh is much
            slower.
    """
    search = Search(options.memory_budget, is_given=options.is_budget_given, control=options.control)
    peak_of = peak_under(options)
    quick = replace(search, tolerance=1e-2, max_rounds=_BASELINE_ROUNDS, is_thorough=False, says_smallest=False)
    baselines: Mapping[str, Solution | None] = {}
    if options.with_baselines:
        baselines = solve_baselines(planning, quick, allowed, options.before, options.elsewhere)
    bound = first_bound(planning, allowed) if options.elsewhere else 0.0
    if bound > min((plan.objective for plan in options.elsewhere), default=math.inf):
        cluster = planning.prices.cluster
        near = nearest_recipe(planning, baselines, cluster, options)
        if near is None:
            raise DearMeshError(steps_when_read(planning, baselines, cluster, options))
        return Decision((JointSolution(planning, replace(near, lower_bound=bound)),), baselines)
    options.control.problem = ALL_PLANS
    start = [found for found in baselines.values() if found is not None]
    recompute = options.recompute and (options.recipe is None or options.recipe.recompute is None)
    offload = options.offload and (options.recipe is None or options.recipe.offload is None)
    before = None if options.before is None else solution_of(options.before, planning, allowed)
    terms = (allowed, start, peak_of)
    found = solve_jointly(planning, search, *terms, recompute=recompute, offload=offload, before=before)
    roomy = solve_with_room(found, planning, search, *terms, recompute=recompute, offload=offload)
    forget_problems(planning)
    shown = before if options.with_baselines else None
    decision = Decision((found,) if roomy is None else (found, roomy), baselines, before=shown)
    keeping_all = [*start, found.solution] if found.planning is planning else start
    if not options.with_baselines or not keeping_all or options.control.is_over():
        return decision
    priced = in_buckets(planning, BucketCollectives().least_bytes, hidden_part(planning, found.solution.choice))
    return replace(decision, bucketed=solve_in_buckets(planning, priced, quick, allowed, keeping_all))


def allowed_by(planning: PlanningProblem, options: PlanOptions) -> dict[int, np.ndarray]:
    """Return a boolean mask of allowed options for each restricted variable, by the variable's index.

    Constraints, the recipe, and the specs and roles of a question restrict variables.

    Raises:
        InvalidSpecError: a constraint names no value, or gives a spec that the value cannot have.
        RecipeError: the recipe does not suit the program, or no option of a variable remains.
    """
    allowed = allowed_options(planning, options.constraints)
    for site, spec in options.specs.items():
        variable, mask = (
            planning.classes[site],
            np.array([own == spec for own in own_specs(planning.space.sites[site])]),
        )
        allowed[variable] = mask & allowed.get(variable, mask)
    masks = {} if options.recipe is None else restricted(planning, options.recipe)
    roles = restrict_all(planning, options.roles, masks, of_stage=is_stage(planning.space.program))
    if roles is None:
        raise RecipeError(
            f"Nothing in the model can be split over {', '.join(options.roles)} as the recipe says. Leave these fields "
            "free (None)."
        )
    both = {**roles, **{variable: mask & roles.get(variable, mask) for variable, mask in allowed.items()}}
    for variable, mask in both.items():
        if not mask.any():
            words = "" if options.recipe is None else f" ({options.recipe.words})"
            names = {slot.node: slot.name for slot in planning.space.program.inputs}
            member = planning.members[variable][0]
            raise RecipeError(
                f"constraints= and recipe={words} leave no spec for {names.get(member, member)!r} together. Leave one "
                "of the two out."
            )
    return both


def planning_problem(program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions) -> PlanningProblem:
    """Return the planning problem of a program, in which each group of equal nodes is one variable.

    Raises:
        NotAlikeError: the program leaves out blocks, and the blocks beside them are not alike, or do not recompute
            alike.
    """
    start = time.monotonic()
    strategies = EnumerateStrategies(
        mesh, options.strict, wide_gradients=True, sums_gradients=options.micro_batches > 1
    )
    levels = tied_levels(mesh, options.constraints.values(), options.before, options.recipe)
    space = space_in_time(strategies, prepare(program), levels, options.time_budget_s)
    repeated, prices = find_repeated(space), Prices(cluster, mesh)
    ratio = options.state_bytes_per_parameter_byte
    liveness = with_repeated(find_lifetimes(space, ratio, options.micro_batches, options.load), repeated, space)
    planning = build_problem(space, prices, liveness, fold_blocks(space), repeated)
    logger.debug("enumeration took %.3f s", time.monotonic() - start)
    return planning if options.recipe is None else with_whole_blocks(planning, options.recipe)
