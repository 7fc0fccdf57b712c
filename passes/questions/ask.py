"""Answer `explain`, `why_not` and `limits` about a plan: plan again with one thing changed, and compare the plans.

`explain` plans with each spec that a value may have. `why_not` plans with each mesh axis in the role of the feature,
e.g. "tensor". If no axis can have the role, `why_not` plans on another mesh of the same devices. `limits` plans for
more memory, or for hardware with one part a tenth faster. So each figure in an answer is the predicted step of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import permutations
from typing import Any

from autoshard.errors import DoesNotFitError, InvalidSpecError, NotAvailableError, RecipeError
from autoshard.ir.answers import Alternative, Explanation, Limits, Outcome, Variant, WhyNot
from autoshard.ir.plan import Plan
from autoshard.ir.spec import PartitionSpec
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import constrainable, own_specs
from passes.planning.restrictions import ROLES
from passes.questions.change import Change, Fields, Replan
from passes.questions.faster_hardware import FASTER, MORE, SHARE
from passes.questions.features import FEATURES, feature_named
from passes.questions.roles import SpecOf, has_role

MORE_MEMORY, TWICE, UNLIMITED = f"{SHARE} more memory", "twice the memory", "memory without limit"
_MEMORY = {MORE_MEMORY: MORE, TWICE: 2.0, UNLIMITED: 2.0**20}
"""The memory limits that `limits` tries: change in words → factor on the plan's limit."""

_SAVINGS = ("recompute", "offload")

_NEEDED = "no plan for these devices, this batch and these constraints is without it"
"""The reason to give if a plan uses a feature and no plan without the feature exists."""

Way = Mapping[str, str]
"""A way to have a feature: mesh axis → the role that the axis must have, e.g. {"model": "tensor"}."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Answers questions about the plans of one call. Nothing is planned before the first question."""

    replan: Replan

    def explain(self, plan: Plan, name: str) -> Explanation:
        """Answer `Plan.explain`: plan again with each other spec that a value may have.

        Args:
            name: qualified name of a parameter, buffer, input or output, or name of a node.

        Raises:
            NotAvailableError: the plan has no specs, because it prices a recipe under another framework's runtime.
            InvalidSpecError: the plan has no value of this name.
        """
        problems = self.replan.problems()
        if not problems:
            raise NotAvailableError(
                f"explain({name!r}) is about specs that are chosen one by one, and this plan is the price of a recipe "
                f"under runtime={plan.runtime!r}. Ask a plan that compile runs, or plan.parameters[name].spec."
            )
        stage, site_name = _site_named(problems, name)
        planning = problems[stage]
        own = (plan.stages or (plan,))[stage]
        chosen = _chosen(own, planning, site_name)
        specs = dict.fromkeys(spec for spec in own_specs(planning.space.sites[site_name]) if spec != chosen)
        tried = [_alternative(spec, self._outcome(plan, stage, site_name, spec)) for spec in specs]
        alike = _names_of(planning, planning.classes[site_name])
        return Explanation(
            name=name,
            shape=_shape(planning, site_name),
            alike=tuple(other for other in alike if other != name),
            chosen=_alternative(chosen, outcome_of(plan)),
            others=tuple(sorted(tried, key=fastest_first)),
            memory_budget=plan.memory_budget,
            kernels=tuple(map(str, self.replan.kernels(plan).of(site_name))),
        )

    def why_not(self, plan: Plan, feature: str) -> WhyNot:
        """Answer `Plan.why_not`: plan again with each way to have a feature, or without it if the plan uses it.

        Args:
            feature: name or synonym of a feature, e.g. "fsdp" (`features.NAMES`).

        Raises:
            InvalidSpecError: no feature has this name.
        """
        feature = feature_named(feature)
        if feature in _SAVINGS and (count := _saved(plan, feature)):
            without = self._variant(plan, f"without {feature}", Change(without=feature))
            return _answer(plan, feature, f"of {count} values", [without], _NEEDED)
        problems = self.replan.problems() if feature in (*ROLES, "hsdp") else ()
        if ways := list(_ways(problems, feature)):
            used, variants = self._on_axes(plan, problems, feature, ways)
            axis = "other axis" if used else "axis"
            return _answer(plan, feature, used, variants, f"no {axis} of the mesh can be used so")
        asked = FEATURES[feature]
        if used := _use(plan, feature):
            others, missing = self._tried(plan, [(f"without {feature}", fields) for fields in asked.without])
            best = min((item for item in others if item is not None), key=fastest_first, default=None)
            return _answer(plan, feature, used, [best], missing or _NEEDED)
        if missing := self.replan.missing(feature):
            return _answer(plan, feature, "", [], missing)
        variants, missing = self._tried(plan, list(asked.ways.items()))
        return _answer(plan, feature, "", variants, missing or "no plan for these devices and this batch has it")

    def limits(self, plan: Plan) -> Limits:
        """Answer `Plan.limits`: plan again with more memory, and with each part of the hardware a tenth faster."""
        changes = {name: Change(memory=factor) for name, factor in _MEMORY.items()} if plan.memory_budget else {}
        changes |= {name: Change(faster=faster) for name, faster in FASTER.items() if faster(self.replan.cluster)}
        chosen = outcome_of(plan)
        found = {name: self._variant(plan, name, change) for name, change in changes.items()}
        more, worth = found.get(MORE_MEMORY), None
        if more is not None and plan.memory_budget is not None:
            gain = (chosen.step_time_s or 0.0) - (more.step_time_s or float("inf"))
            worth = max(0.0, gain) / ((MORE - 1) * plan.memory_budget)
        return Limits(chosen, tuple(filter(None, found.values())), plan.memory_budget, worth)

    def _on_axes(
        self, plan: Plan, problems: Sequence[PlanningProblem], feature: str, ways: Sequence[Way]
    ) -> tuple[str, list[Variant | None]]:
        """Return the ways in which the plan has a feature, in words, and the best plan with each other way.

        A way says which mesh axis has which role. The list has None for each way that cannot apply to the model.
        """
        used = [_over(way) for way in ways if _has_roles(plan, problems, way)]
        found = [
            self._in_roles(plan, problems, f"{feature} {_over(way)}", way) for way in ways if _over(way) not in used
        ]
        return ", ".join(used), found

    def _in_roles(self, plan: Plan, problems: Sequence[PlanningProblem], name: str, way: Way) -> Variant | None:
        """Return the cost of the fastest plan whose axes have the roles of `way`, or None if there is none.

        A recipe or constraints may exclude a role. The search then returns a plan without the role.
        """
        change = Change(roles={axis: ROLES[role] for axis, role in way.items()})
        return self._variant(plan, name, change, lambda found: _has_roles(found, problems, way))

    def _tried(self, plan: Plan, ways: Sequence[tuple[str, Fields]]) -> tuple[list[Variant | None], str]:
        """Return the costs of the best plan under each entry of `ways`, and an error message or "".

        An entry has a name for the answer, and the allowed values of recipe fields. Its cost is None if no program runs
        these values. Entries with a `NotAvailableError` have no cost, and the message is that of the last of them.
        """
        found, missing = list[Variant | None](), ""
        for name, restricted in ways:
            try:
                found.append(self._variant(plan, name, Change(fields=restricted)))
            except NotAvailableError as error:
                missing = str(error)
        return found, missing

    def _variant(
        self, plan: Plan, name: str, change: Change, is_meant: Callable[[Plan], bool] = lambda found: True
    ) -> Variant | None:
        """Return the cost of the fastest plan with a change, under the name `name`.

        The result is None if the change cannot apply to the model, or if `is_meant` is false for the plan.
        """
        try:
            found = self._plan_again(plan, change, is_meant)
        except RecipeError:
            return None
        words = f"{name}: {found.recipe.words}" if change.fields and found.recipe is not None else name
        return Variant(words, **_figures(found))

    def _outcome(self, plan: Plan, stage: int, site_name: str, spec: PartitionSpec) -> Outcome:
        try:
            return self._plan_again(plan, Change(stage=stage, specs={site_name: spec}))
        except RecipeError:
            return Outcome(fits=False)

    def _plan_again(self, plan: Plan, change: Change, is_meant: Callable[[Plan], bool] = lambda found: True) -> Outcome:
        try:
            found = self.replan(plan, change)
        except DoesNotFitError as error:
            return Outcome(fits=False, smallest_bytes=error.smallest_bytes)
        if not is_meant(found):
            raise RecipeError(f"{change} has no plan.")
        return outcome_of(found)


def outcome_of(plan: Plan) -> Outcome:
    """Return the predicted cost of a plan, in the form in which answers show and compare costs."""
    return Outcome(
        fits=True,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        breakdown=plan.predicted.breakdown,
        hidden=plan.predicted.hidden,
        recipe=plan.recipe,
    )


def fastest_first(item: Outcome) -> tuple[bool, float]:
    """Return a key to sort outcomes by.

    Outcomes that fit in memory come first, in the order of their step times. The others follow, in the order of the
    memory that they need.
    """
    return not item.fits, item.step_time_s if item.step_time_s is not None else float(item.smallest_bytes or 0)


def _answer(
    plan: Plan,
    feature: str,
    used: str,
    variants: Sequence[Variant | None],
    missing: str,
) -> WhyNot:
    found = sorted((item for item in variants if item is not None), key=fastest_first)
    return WhyNot(feature, used, outcome_of(plan), tuple(found), plan.memory_budget, "" if found else missing)


def _use(plan: Plan, feature: str) -> str:
    """Return in words where a plan uses a feature, such as "of 4 stages", or "" if it does not use the feature."""
    if feature == "pipeline" and plan.stages:
        return f"of {len(plan.stages)} stages"
    if plan.recipe is not None and FEATURES[feature].is_used(plan.recipe):
        return f"in its recipe ({plan.recipe.words})"
    return ""


def _saved(plan: Plan, feature: str) -> int:
    """Return the number of values that all stages together recompute, or offload, as `feature` says."""
    return sum(map(len, (plan.recomputed if feature == "recompute" else plan.offloaded).values()))


def _ways(problems: Sequence[PlanningProblem], feature: str) -> Iterator[Way]:
    """Yield each way in which mesh axes may have a feature, as a dict from axis to role.

    HSDP takes two axes: FSDP over one axis, and copies over the other.
    """
    axes = [axis for axis, size in problems[0].space.mesh.axes if size > 1] if problems else []
    if feature == "hsdp":
        yield from ({first: "fsdp", second: "data"} for first, second in permutations(axes, 2))
    else:
        yield from ({axis: feature} for axis in axes)


def _over(way: Way) -> str:
    """Return a way in words: "over data", or for HSDP "over model, copied over data"."""
    first, *others = way
    return f"over {first}" + "".join(f", copied over {axis}" for axis in others)


def _figures(found: Outcome) -> dict[str, Any]:
    return {item.name: getattr(found, item.name) for item in fields(found)}


def _alternative(spec: PartitionSpec, found: Outcome) -> Alternative:
    return Alternative(spec, **_figures(found))


def _has_roles(plan: Plan, problems: Sequence[PlanningProblem], way: Way) -> bool:
    pairs = list(zip(problems, map(_specs_of, plan.stages or (plan,)), strict=True))
    return all(has_role(pairs, axis, role) for axis, role in way.items())


def _specs_of(plan: Plan) -> SpecOf:
    return lambda name: (plan.nodes[name].inputs, plan.nodes[name].outputs)


def _site_named(problems: Sequence[PlanningProblem], name: str) -> tuple[int, str]:
    """Return the number of the stage and the name of the site of a value.

    `name` is the qualified name of the value, or the name of its node.

    Raises:
        InvalidSpecError: no stage has a value of this name.
    """
    for stage, planning in enumerate(problems):
        sites = {**{site: site for site in planning.space.sites}, **constrainable(planning.space)}
        if isinstance(name, str) and name in sites:
            return stage, sites[name]
    known = [each for planning in problems for each in constrainable(planning.space)]
    raise InvalidSpecError(
        f"explain({name!r}): the plan has no parameter, buffer, input, output or node of that name; there are "
        f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}, and the nodes of plan.nodes."
    )


def _chosen(plan: Plan, planning: PlanningProblem, site_name: str) -> PartitionSpec:
    site = planning.space.sites[site_name]
    if site.node is None:
        return plan.outputs[f"output {site_name}"]
    node = plan.nodes[site_name]
    return node.outputs[0] if node.outputs else node.inputs[0]


def _shape(planning: PlanningProblem, site_name: str) -> tuple[int, ...]:
    site = planning.space.sites[site_name]
    return tuple(site.results[0].shape) if site.results else ()


def _names_of(planning: PlanningProblem, variable: int) -> Sequence[str]:
    """Return the names of all values whose sites share a variable, and so a spec.

    A name is the qualified name, or else the name of the value's node.
    """
    names = {site: name for name, site in constrainable(planning.space).items()}
    return [names.get(site, site) for site in planning.members[variable]]
