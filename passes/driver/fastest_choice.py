"""Lower the best choices of strategies that a search found, and take the choice with the shortest predicted step.

The search adds up the prices of all operators and collectives. Lowering puts collectives into buckets and hides buckets
behind computation, in some plans more than in others. So the lowered programs decide:

1. The search's own choice is lowered.
2. Each other choice gets a rough step time: the sum of its prices, scaled. The scale makes the rough step of the
   search's own choice equal to its predicted step.
3. Choices whose rough step is near the fastest predicted step are lowered, the shortest rough step first.
4. The plan is the lowered program with the shortest predicted step.

The other choices are the best plans within known recipes, such as FSDP and Megatron TP+SP
(`passes.planning.baselines`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cost_models.hardware import Cluster
from cost_models.streams import overlap_of
from passes.driver.plan_of_choice import LoweredPlan, lowered_plan, peak_under
from passes.driver.plan_options import PlanOptions
from passes.lowering.bucket_collectives import BucketCollectives
from passes.planning.baselines import BEFORE, BaselineSteps
from passes.planning.bucket_prices import rough_step_s
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.fitting import JointSolution
from passes.recomputation.savings import savings_of
from passes.recomputation.whole_blocks import joint_with_blocks
from passes.solver.assignment import Solution

_NEAR, _VERY_NEAR = 0.2, 0.05
"""The largest share by which a choice's rough step may exceed the fastest predicted step, for the choice to be lowered.

`_VERY_NEAR` is for programs without inner blocks, and for the CPUs of one machine. Measured on 110 choices of some
fifteen models (2026-11-29): rough steps were at most 1.16 times the predicted step on L4s and H100s. The ratio was at
most 1.03 in programs without inner blocks, and on CPUs.
"""

_ALIKE = 0.02
"""Relative difference of step times up to which plans on CPUs count as equally fast, because prices are less exact
there (`tests.benchmarks.local_plans`).
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a search over specs, before lowering.

    Args:
        searched: the best solution, and perhaps a second solution that leaves memory to collectives beside computation.
            The problem of each solution is of the program as it will run, with recomputed nodes.
        baselines: for each known recipe, its best solution without recomputation; None if no solution fits.
        bucketed: the best solution by other prices: collectives of parameters and gradients are in buckets, and the
            time that computation hides does not count.
        before: the plan that the search began with, as it was: with its recomputation and offload. None without such a
            plan, and if the plan is for another program or mesh, or violates a constraint or the recipe.
    """

    searched: tuple[JointSolution, ...]
    baselines: Mapping[str, Solution | None]
    bucketed: Solution | None = None
    before: JointSolution | None = None


def fastest(planning: PlanningProblem, found: Decision, cluster: Cluster, options: PlanOptions) -> LoweredPlan:
    """Lower the choices of a search, and return the lowered plan with the shortest predicted step.

    `plan.baselines` of the result has the predicted steps of known recipes. No choice is lowered after the time budget.
    A known recipe that was not lowered for this reason, and may be faster than the plan, is left out of `baselines`.

    Args:
        planning: the planning problem without recomputed nodes.
        found: the choices.
    """
    lowering = _ChoiceLowering(planning, found.searched[0].solution.lower_bound, cluster, options)
    tried = found.searched if found.before is None else (*found.searched, found.before)
    searched = [(lowering(each.solution, each.planning), each) for each in tried]
    steps_before = {} if found.before is None else {BEFORE: lowering.step_s(searched[-1][0])}
    fit = searched if all(step is not None for step in steps_before.values()) else searched[:-1]
    own, joint = min(fit, key=lambda pair: pair[0].plan.predicted.step_time_s)
    known = {name: each for name, each in found.baselines.items() if each is not None}
    more = (JointSolution(planning, each) for each in (*known.values(), found.bucketed) if each is not None)
    whole = {each.solution.choice: each for each in (*more, *tried) if each.planning is planning}
    lowered = {each.solution.choice: made for made, each in searched if each.planning is planning}
    rough_s = _rough_steps(joint, own, [whole[choice].solution for choice in whole if choice not in lowered], lowering)
    least_s, late = min(plan.predicted.step_time_s for plan in (own.plan, *options.elsewhere)), set[_Choice]()
    for choice in sorted(rough_s, key=rough_s.__getitem__):
        if rough_s[choice] > lowering.near * least_s:
            break
        if options.control.is_over():
            late.add(choice)
            continue
        lowered[choice] = lowering(whole[choice].solution)
        least_s = min(least_s, lowering.step_s(lowered[choice]) or math.inf)
    steps = {choice: lowering.step_s(made) for choice, made in lowered.items()}
    fitting = [own, *(made for choice, made in lowered.items() if made is not own and steps[choice] is not None)]
    done = {name: steps[each.choice] for name, each in known.items() if each.choice in steps} | steps_before
    best = _fastest_of(fitting, [step for step in done.values() if step is not None], cluster)
    if best is not own:
        joint = next(whole[choice] for choice, made in lowered.items() if made is best)
    without, joint = joint_with_blocks(joint) if joint.planning is planning else (planning, joint)
    recompute, offload = savings_of(without, joint, peak_under(options))
    best = replace(best, plan=replace(best.plan, recompute=recompute, offload=offload))
    names = [name for name in found.baselines if name not in known or known[name].choice not in late]
    names += [name for name in steps_before if name not in names]
    left = {name: partial(lowering.step_of, each) for name, each in known.items() if name not in done}
    baselines = BaselineSteps(names, {**dict.fromkeys(names - known.keys()), **done}, left)
    return replace(best, plan=replace(best.plan, baselines=baselines))


def nearest_recipe(
    planning: PlanningProblem, baselines: Mapping[str, Solution | None], cluster: Cluster, options: PlanOptions
) -> Solution | None:
    """Return the known recipe with the shortest rough step on this mesh.

    None is returned if the rough step is much longer than the step of the best plan on another mesh.
    """
    lowering = _ChoiceLowering(planning, 0.0, cluster, options)
    rough = [(lowering.rough_step_s(each), each) for each in baselines.values() if each is not None]
    rough_s, nearest = min(rough, key=lambda pair: pair[0], default=(math.inf, None))
    return nearest if rough_s <= lowering.near * min(plan.predicted.step_time_s for plan in options.elsewhere) else None


def steps_when_read(
    planning: PlanningProblem, baselines: Mapping[str, Solution | None], cluster: Cluster, options: PlanOptions
) -> BaselineSteps:
    """Return the predicted steps of known recipes in seconds, by name.

    A recipe is lowered when its step is first read.
    """
    lowering = _ChoiceLowering(planning, 0.0, cluster, options)
    left = {name: partial(lowering.step_of, each) for name, each in baselines.items() if each is not None}
    return BaselineSteps(list(baselines), dict.fromkeys(baselines.keys() - left.keys()), left)


_Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ChoiceLowering:
    """Lowers choices of a planning problem to plans for a cluster.

    `lower_bound` is written into the plans: no choice has a shorter step by the prices of the search, in seconds.
    """

    planning: PlanningProblem
    lower_bound: float
    cluster: Cluster
    options: PlanOptions

    @property
    def near(self) -> float:
        """The largest ratio of rough step to fastest predicted step for which a choice is lowered, such as 1.1."""
        is_exact = bool(self.planning.repeated.sites) or overlap_of(self.cluster) is None
        return 1 + (_VERY_NEAR if is_exact else _NEAR)

    def __call__(self, found: Solution, planning: PlanningProblem | None = None) -> LoweredPlan:
        return lowered_plan(
            planning or self.planning, found.choice, found.cost, self.lower_bound, self.cluster, self.options
        )

    def step_s(self, made: LoweredPlan) -> float | None:
        """Return the predicted step of a plan in seconds, or None if the plan exceeds the memory budget."""
        predicted, budget = made.plan.predicted, self.options.memory_budget
        return predicted.step_time_s if budget is None or predicted.peak_memory_bytes <= budget else None

    def step_of(self, found: Solution) -> float | None:
        """Lower a choice, and return its predicted step in seconds; None if its plan exceeds the memory budget."""
        return self.step_s(self(found))

    def rough_step_s(self, found: Solution, planning: PlanningProblem | None = None) -> float:
        """Return the sum of a choice's prices in seconds, not yet scaled to predicted steps.

        The choice is of the problem `planning`, by default the problem of this object.
        """
        return rough_step_s(planning or self.planning, found.choice, BucketCollectives().least_bytes)


def _rough_steps(
    found: JointSolution, own: LoweredPlan, others: Sequence[Solution], lowering: _ChoiceLowering
) -> dict[_Choice, float]:
    """Return the scaled rough step of each choice in `others`, in seconds.

    Rough steps are scaled so that the rough step of the search's own choice `found` equals the predicted step of its
    plan `own`.
    """
    if not others:
        return {}
    rough_s = lowering.rough_step_s(found.solution, found.planning)
    scale = own.plan.predicted.step_time_s / rough_s if rough_s else 1.0
    return {each.choice: scale * lowering.rough_step_s(each) for each in others}


def _fastest_of(made: Sequence[LoweredPlan], known_s: Sequence[float], cluster: Cluster) -> LoweredPlan:
    """Return the fastest of the lowered plans `made`.

    On CPUs, the plan with the fewest launches wins among about equal plans. `known_s` has the steps of known recipes in
    seconds. The result is never slower than any of these recipes.
    """
    fastest = min(made, key=lambda each: each.plan.predicted.step_time_s)
    if cluster.device.dispatch_s:
        return fastest
    most_s = min([*known_s, (1 + _ALIKE) * fastest.plan.predicted.step_time_s])
    alike = [each for each in made if each.plan.predicted.step_time_s <= most_s]
    return min(alike, key=lambda each: each.plan.predicted.launches)
