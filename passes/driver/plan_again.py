"""Plan a call again with one change, to answer questions such as `plan.why_not` about plans that `compile` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autoshard.call import Call
from autoshard.errors import NotAvailableError, RecipeError
from autoshard.ir.kernels import Kernels
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.runtime.micro_batches import batch_size
from cost_models.hardware import Cluster
from passes.driver.candidates import candidates_found, with_batch
from passes.driver.plan_candidates import Planned, plan_candidates
from passes.driver.plan_of_choice import kernels_of
from passes.driver.price_again import error_of_no_recipe
from passes.driver.pricing import narrow_dtype
from passes.driver.recipe_search import RecipeSearch, recipe_search
from passes.lowering.lower_program import prepare_for
from passes.planning.build_assignment import PlanningProblem
from passes.questions.change import Change
from passes.search.recipe_problem import NO_BLOCKS, NO_HOST_LINK
from passes.solver.search_control import Ceiling

_WITHIN = {"recompute", "offload"}
"""Fields of a recipe that do not change the mesh."""

_NO_BACKWARD = "the program has no backward, for which values could be computed again or lie on the host"


def _within(recipe: Recipe | None, change: Change) -> Recipe:
    """Return a recipe with the values of `change.fields`. Raises `RecipeError` if no program runs the recipe."""
    free = recipe or Recipe()
    given = {name: next(iter(values)) for name, values in change.fields.items()}
    if "offload" in given and free.recompute is None:
        given["recompute"] = "none"  # an offloaded value is not recomputed
    found = replace(free, **given)
    if said := found.without_program:
        raise RecipeError(f"{said} has no program.")
    return found


def _freed(recipe: Recipe | None, without: str) -> Recipe | None:
    """Return a recipe that does not ask for `without`, which is "recompute", "offload" or "" (for neither).

    If `recipe` asks for it, the field becomes "none". Otherwise the result is `recipe` itself, which may be None.
    """
    if recipe is None or not without or getattr(recipe, without) in (None, "none"):
        return recipe
    return replace(recipe, **{without: "none"})


@dataclass(frozen=True, slots=True)
class PlanAgain:
    """Plans a call again with one change. A plan without stages counts as one stage.

    Args:
        call: the arguments of `autoshard.plan`.
        check_stages: raises `NotAvailableError` if the user's options exclude stages.
        searched: the outer search that proposed the plan's mesh; None for a given mesh.
    """

    call: Call
    planned: Planned
    check_stages: Callable[[], None]
    searched: RecipeSearch | None = None
    _problems: list[PlanningProblem] = field(default_factory=list, repr=False)
    _kernels: list[tuple[Plan, Kernels]] = field(default_factory=list, repr=False)
    _search: list[RecipeSearch] = field(default_factory=list, repr=False)

    @property
    def cluster(self) -> Cluster:
        """The hardware that the plan is priced for."""
        return self.planned.planner.cluster_for(self.planned.plan.mesh)

    def problems(self) -> Sequence[PlanningProblem]:
        """Return the planning problem of each stage. The problems are built at the first call."""
        made = self.planned
        if made.stage_plans is not None:
            numbers = range(len(made.stages))
            return [made.stage_plans.problem(made.program, made.request, made.plan, number) for number in numbers]
        if not self._problems:
            self._problems.append(made.planner.problem(made.program, made.plan.mesh, {}))
        return self._problems

    def missing(self, feature: str) -> str:
        """Return the reason why no plan of the model can have a feature, or "" if a plan may have it.

        `feature` is a name of `why_not`, such as "pipeline" or "offload".
        """
        if feature not in _WITHIN:
            return self._recipes(feature).problem.missing(feature)
        return NO_HOST_LINK if feature == "offload" and self.cluster.device.host_link is None else ""

    def kernels(self, plan: Plan) -> Kernels:
        """Return the Triton kernels that a plan runs with. They are found at the first call.

        A plan with stages has no Triton kernels.
        """
        known = plan.predicted.kernels
        if known.uses or plan.stages:
            return known
        if not self._kernels or self._kernels[0][0] is not plan:
            self._kernels[:] = [(plan, kernels_of(plan, prepare_for(self.planned.program, plan), self.cluster))]
        return self._kernels[0][1]

    def __call__(self, plan: Plan, change: Change) -> Plan:
        """Return a new plan of the call with a change, on the same mesh unless `change.fields` needs another mesh.

        Raises:
            NotAvailableError: `change.fields` asks for recomputation or offload, and the new plan has none.
        """
        found = self._plan(plan, change)
        wanted = [name for name, values in change.fields.items() if name in _WITHIN and "none" not in values]
        if not all(any(getattr(each, name).nodes for each in found.stages or (found,)) for name in wanted):
            raise NotAvailableError(NO_BLOCKS if self.planned.program.trains else _NO_BACKWARD)
        return found

    def _plan(self, plan: Plan, change: Change) -> Plan:
        made = self.planned
        recipe = _freed(made.planner.recipe, change.without)
        planner = replace(made.planner, change=change, ceiling=None, progress=False, recipe=recipe)
        if change.fields:
            if not change.fields.keys() <= _WITHIN:
                return self._on_another_mesh(change)
            planner = replace(planner, recipe=_within(planner.recipe, change))
        has_other_problems = bool(change.faster) or planner.recipe != made.planner.recipe
        if made.stage_plans is None:
            planning = None if has_other_problems else self.problems()[0]
            before = plan if change.faster is not None or change.memory > 1 else None
            return planner.search_and_lower(made.program, plan.mesh, {}, before, planning).plan
        kept = {number: stage for number, stage in enumerate(made.stages) if number != change.stage}
        stage_plans = replace(made.stage_plans, planner=planner.begun()[0])
        if has_other_problems:
            stage_plans = replace(stage_plans, problems={})
        return stage_plans.plan(made.program, made.request, before=plan, kept=kept if change.specs else None)[0]

    def _on_another_mesh(self, change: Change) -> Plan:
        """Return the fastest plan on any mesh, within recipes that have the values of `change.fields`.

        The outer search proposes these recipes.
        """
        search = self._recipes(", ".join(change.fields))
        problem = search.problem
        found = problem.proposals(change.fields, Ceiling.within(search.time_budget_s))
        if found[0].recipe is None:
            raise error_of_no_recipe(search, found[0], change.fields)
        planner = replace(self.planned.planner, ceiling=None, progress=False, before=None)
        request, batch, fixed = self.planned.request, problem.base.batch, {**problem.pinned, **change.fields}
        candidates = candidates_found(found, fixed, problem)
        made = plan_candidates(
            planner, candidates, lambda parts: with_batch(request, batch // parts), self.check_stages
        )
        return made.plan

    def _recipes(self, feature: str) -> RecipeSearch:
        """Return the outer search over recipes on the devices of the plan, made at the first call.

        Raises:
            NotAvailableError: recipes do not support the call. The message names the asked `feature`.
        """
        if self.searched is not None:
            return self.searched
        if not self._search:
            self._search.append(self._new_search(feature))
        return self._search[0]

    def _new_search(self, feature: str) -> RecipeSearch:
        call, plan = self.call, self.planned.plan
        asked = f"why_not({feature!r}) plans on another mesh of the same devices,"
        if call.optimizer is None:
            raise NotAvailableError(
                f"{asked} which takes whole training steps: plan with optimizer='adamw', say, and ask that plan."
            )
        if self.planned.planner.constraints:
            raise NotAvailableError(
                f"{asked} which keeps no constraints on specs: plan without constraints= and ask that plan."
            )
        batch = batch_size(*call.inputs) if call.global_batch is None else call.global_batch
        if batch is None:
            raise NotAvailableError(
                f"{asked} which takes the first dim of every input for the batch; those of these inputs differ. Plan "
                "with inputs that have it in common."
            )
        precision = None if narrow_dtype(call.model, plan.precision) is None else plan.precision
        free = replace(call, target=self.cluster, memory_budget=plan.memory_budget, precision=precision)
        return recipe_search(free, batch)
