"""Plan each candidate layout, with stages or without, and keep the fastest plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from autoshard.arguments import check_has_loss
from autoshard.errors import AutoshardError, DoesNotFitError, NotAvailableError, RecipeError
from autoshard.ir.offload import LABEL
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recipe import Recipe, is_several, least_stages
from autoshard.ir.recompute import PHASE
from autoshard.ir.request import Request
from autoshard.ir.staged import StageProgram
from passes.driver.candidates import Candidate, resized
from passes.driver.pipelines import pipeline_of
from passes.driver.planner import Planner
from passes.driver.put_back_units import put_back_units
from passes.driver.stage_plans import StagePlans, check_stays
from passes.driver.traces import Traces
from passes.planning.baselines import least_baselines
from passes.prediction.predict import SLOWED
from passes.solver.search_control import Ceiling
from passes.strategies.repeated import NotAlikeError

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with the planner and the program that it comes from.

    Args:
        request: the call that was traced, with the inputs of one micro-batch.
        program: the traced program; with stages, the program before it is cut.
        stage_plans: the planner of stages; None without stages.
        stages: the lowered stages; empty without stages.
    """

    planner: Planner
    request: Request
    program: Program
    plan: Plan
    stage_plans: StagePlans | None = None
    stages: tuple[StageProgram, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a whole step."""
        return self.plan.predicted.step_time_s

    @property
    def is_plain(self) -> bool:
        """Whether the plan recomputes and offloads no values."""
        return not any(each.recompute.nodes or each.offload.nodes for each in (self.plan, *self.plan.stages))


def plan_candidates(
    planner: Planner,
    candidates: Iterable[Candidate],
    request_of: Callable[[int], Request],
    check_stages: Callable[[], None],
) -> Planned:
    """Return the fastest plan of all candidates.

    Args:
        planner: the planner with the user's options. Its time budget is for all candidates together.
        candidates: the candidates, in the order in which they are planned.
        request_of: takes the number of micro-batches of a step; returns the call of one micro-batch.
        check_stages: raises `NotAvailableError` if the user's options exclude stages.

    Raises:
        AutoshardError: no candidate has a plan. It is the error of the candidate that needs the least memory, or else
            the first error.
    """
    planner, ceiling = replace(planner, traces=Traces()).begun()
    attempts = _Attempts(planner, ceiling, request_of, check_stages)
    found = attempts.found
    for candidate in candidates:
        if found and (
            candidate.is_spare
            or candidate.proposal in attempts.tried
            or not _may_be_faster(candidate, found)
            or (candidate.is_for_memory and not _helps_memory(candidate, found))
            or found[-1].plan.was_interrupted
        ):
            continue
        if found and ceiling.cuts():
            break
        made = attempts.plan(candidate)
        if made is not None and not made.is_plain and made.step_time_s <= _SLOWER * _fastest(found).step_time_s:
            attempts.resize(candidate, made)
    if not found:
        raise _most_telling(attempts.failures)
    best = _fastest(found)
    known = [each.plan.baselines for each in found if each.plan.baselines]
    baselines = least_baselines(known) if known else best.plan.baselines
    was_cut = best.plan.was_cut or ceiling.has_cut
    return replace(best, plan=replace(best.plan, baselines=baselines, was_cut=was_cut))


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The plans of the candidates so far.

    Args:
        planner, ceiling: the planner with the user's options, and the time limit of all candidates together.
        request_of, check_stages: see `plan_candidates`.
        requests: the call of one micro-batch, by the number of micro-batches.
        found, failures: the plans, and the errors of candidates without a plan.
        tried: the proposals of all candidates so far.
        useless: changes of size that made one candidate no faster: True for larger micro-batches, False for smaller.
    """

    planner: Planner
    ceiling: Ceiling
    request_of: Callable[[int], Request]
    check_stages: Callable[[], None]
    requests: dict[int, Request] = field(default_factory=dict)
    found: list[Planned] = field(default_factory=list)
    failures: list[AutoshardError] = field(default_factory=list)
    tried: set[Recipe] = field(default_factory=set)
    useless: set[bool] = field(default_factory=set)

    def plan(self, candidate: Candidate) -> Planned | None:
        """Plan a candidate, and add the plan to `found`.

        If there is no plan, add the error to `failures` and return None.
        """
        each = replace(self.planner, recipe=candidate.recipe, micro_batches=candidate.micro_batches)
        if candidate.proposal is not None:
            self.tried.add(candidate.proposal)
        try:
            if candidate.has_stages:
                self.check_stages()
            parts = candidate.micro_batches
            self.requests[parts] = self.requests.get(parts) or self.request_of(parts)
            made = _plan_in_time(each, candidate, self.requests[parts], self.ceiling)
        except (DoesNotFitError, RecipeError, NotAvailableError) as error:
            _LOGGER.debug("%s: %s", candidate, error)
            self.failures.append(_with_advice(error, candidate))
            return None
        made = replace(made, plan=replace(made.plan, recipe=candidate.recipe or candidate.proposal))
        self.found.append(made)
        return made

    def resize(self, candidate: Candidate, made: Planned) -> None:
        """Plan the candidate with larger or smaller micro-batches, as long as that gains over `_LITTLE` of the step.

        Larger micro-batches recompute more, and smaller micro-batches communicate more. The plan's prediction says
        which of these two may gain more. A direction that made one candidate no faster is not tried for the next one.
        """
        larger = _gains_by_larger(made)
        if larger in self.useless:
            return
        while larger is not None and larger == _gains_by_larger(made) and not self.ceiling.cuts():
            other = resized(candidate, larger=larger)
            if other is None or other.proposal in self.tried or not (larger or _may_save_by_smaller(candidate)):
                return
            before, candidate = made, other
            made = self.plan(candidate) or before
            if made.step_time_s >= (1 - _LITTLE) * before.step_time_s:
                self.useless.add(larger)
                return


def _may_save_by_smaller(candidate: Candidate) -> bool:
    """Whether micro-batches of half the size may shorten a step, by the prices of recipes.

    Smaller micro-batches need less recomputation, but each of them gathers the parameters again.
    """
    price_of, proposal = candidate.price_of_size, candidate.proposal
    if price_of is None or proposal is None or proposal.micro_batch is None:
        return True
    return price_of(proposal.micro_batch // 2) < price_of(proposal.micro_batch)


def _gains_by_larger(made: Planned) -> bool | None:
    """Whether larger micro-batches may shorten a step more than smaller micro-batches.

    Twice the size may save half the exposed communication, and half the size may save all recomputation. The result is
    None if neither is over `_LITTLE` of the step.
    """
    parts = made.plan.predicted.breakdown.items()
    larger_s = sum(seconds for name, seconds in parts if name.startswith("communication") or name == SLOWED) / 2
    smaller_s = sum(seconds for name, seconds in parts if name in (PHASE, LABEL))
    return larger_s >= smaller_s if max(larger_s, smaller_s) > _LITTLE * made.step_time_s else None


def _fastest(found: Sequence[Planned]) -> Planned:
    return min(found, key=attrgetter("step_time_s"))


_GAIN, _SLOW = 0.95, 1.5
"""Ratios of step times. A candidate is planned if its price is at most `_GAIN` times the fastest step so far, see
`_may_be_faster`. If the time budget cut a search, its plan may take `_SLOW` times its price.

Measured on 12 models, clusters and batches (2026-11-30). Plans with stages, and plans that keep all values, took 1.01
to 1.19 times the prices of their recipes.
"""

_SLOWER, _LITTLE = 1.05, 0.02
"""Two limits. Candidates with more micro-batches are planned while the last step takes at most `_SLOWER` times the
fastest step. Other sizes of micro-batches are planned if they may gain over `_LITTLE` of the step.
"""


def _may_be_faster(candidate: Candidate, found: Sequence[Planned]) -> bool:
    """Whether a candidate is worth planning after the plans in `found`, by the price of its proposal.

    A price says too little about a plan without stages that recomputes or offloads single values, or splits experts.
    For example, on two CPUs a split of experts was priced at 0.498 s, and its plan took 0.439 s. Another recipe was
    priced at 0.493 s, and its plan took 0.495 s.
    """
    fastest, proposal = _fastest(found), candidate.proposal
    splits_experts = proposal is not None and is_several(proposal.expert)
    says_enough = candidate.has_stages or (candidate.keeps_all and fastest.is_plain and not splits_experts)
    return candidate.price_s is None or not says_enough or candidate.price_s <= _GAIN * fastest.step_time_s


def _helps_memory(candidate: Candidate, found: Sequence[Planned]) -> bool:
    """Whether a candidate that saves memory may be faster than the plans in `found`.

    The candidate cannot be faster if a plan in `found` keeps all values. A candidate without a proposed recipe only has
    more micro-batches than the candidate before it. It is skipped if the last plan takes over `_SLOWER` times as long
    as the fastest plan.
    """
    if any(each.is_plain for each in found):
        return False
    least_s = min(each.step_time_s for each in found)
    return candidate.proposal is not None or found[-1].step_time_s <= _SLOWER * least_s


def _plan_in_time(planner: Planner, candidate: Candidate, request: Request, ceiling: Ceiling) -> Planned:
    """Return the plan of a candidate.

    If `ceiling`, the time limit, cut the search, the plan may be missing or slow. The candidate is then planned again
    within its exact recipe, and the faster plan is returned.

    Raises:
        DoesNotFitError: neither search found a plan.
    """
    made, failure = None, None
    try:
        made = _plan_one(planner, candidate, request)
    except DoesNotFitError as error:
        failure = error
    price_s = math.inf if candidate.price_s is None else candidate.price_s
    is_good = made is not None and made.step_time_s <= _SLOW * price_s
    if candidate.exact is not None and ceiling.has_cut and not is_good:
        exact = replace(candidate, recipe=candidate.exact)
        try:
            other = _plan_one(replace(planner, recipe=candidate.exact), exact, request)
        except (DoesNotFitError, RecipeError) as error:
            _LOGGER.debug("%s: %s", exact, error)
        else:
            made = other if made is None else min(made, other, key=attrgetter("step_time_s"))
    if made is None:
        assert failure is not None, "there is a plan, or an error"
        raise failure
    return made


def _plan_one(planner: Planner, candidate: Candidate, request: Request) -> Planned:
    alone = replace(planner, traces=None)
    if not candidate.has_stages:
        return Planned(alone, request, *planner.plan_call(request, candidate.meshes))
    recipe = candidate.recipe or Recipe()
    pipeline = pipeline_of(candidate.meshes[0], recipe.schedule, least_stages(recipe), candidate.micro_batches)
    assert pipeline is not None, "an axis carries stages"
    program = _traced(planner, replace(request, update=None))
    check_has_loss(program)
    check_stays(program)
    stage_plans = StagePlans(alone, pipeline)
    plan, stages = stage_plans.plan(program, request)
    return Planned(alone, request, program, plan, stage_plans, tuple(stages))


def _traced(planner: Planner, request: Request) -> Program:
    """Return the traced program of a call. A deep model is traced without inner blocks, which are then put back."""
    short = planner.trace_with_gaps(request, planner.margins[0]) if planner.margins else None
    if short is not None:
        try:
            return put_back_units(short)
        except NotAlikeError as error:
            _LOGGER.debug("the model is traced with all its blocks: %s", error)
    return planner.trace(request)


def _with_advice(error: AutoshardError, candidate: Candidate) -> AutoshardError:
    """Return a candidate's error.

    If no plan fits in memory, and the recipe forbids recomputation, the message also advises to allow recomputation.
    """
    if not isinstance(error, DoesNotFitError) or candidate.recipe is None or candidate.recipe.recompute != "none":
        return error
    return DoesNotFitError(
        f"{error} The recipe recomputes nothing; recompute=None lets the search decide what to recompute.",
        smallest_bytes=error.smallest_bytes,
    )


def _most_telling(failures: list[AutoshardError]) -> AutoshardError:
    too_large = [error for error in failures if isinstance(error, DoesNotFitError)]
    return min(too_large, key=lambda error: error.smallest_bytes or math.inf) if too_large else failures[0]
