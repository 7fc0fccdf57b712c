"""What else a value could be, and what the best plan with it would cost: `plan.explain`.

Each spec that the value may have is forced in turn and the search is run again, within the same limits: all else may
change with it. So a figure here is that of `autoshard.plan` with the spec as a constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from autoshard.errors import InvalidSpecError
from autoshard.ir.answers import Alternative, Explanation, Limits, Outcome, WhyNot
from autoshard.ir.kernels import Kernels
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from passes.driver.kernels_on_one_device import kernels_of
from passes.driver.plan_and_lower import allowed_by, planning_problem
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import prepare_for
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import constrainable, own_specs
from passes.questions.feature_names import feature_named
from passes.questions.what_if import cheapest_first, is_answered, limits, outcome, outcome_of, why_not


@dataclass(frozen=True, slots=True)
class PlanAlternatives:
    """Answers questions about the plans of one program on one mesh; the search space is built when first needed.

    Args:
        program: as traced.
        mesh, cluster, options: what the plan was made with.
        forecast: answers `why_not` of what searching specs does not.
    """

    program: Program
    mesh: Mesh
    cluster: Cluster
    options: PlanOptions
    forecast: Callable[[Plan, str], WhyNot]
    _planning: list[PlanningProblem] = field(default_factory=list, repr=False)
    _kernels_of: list[tuple[Plan, Kernels]] = field(default_factory=list, repr=False)

    def explain(self, plan: Plan, name: str) -> Explanation:
        """See `Plan.explain`."""
        planning = self.problem()
        site_name = _site_named(planning, name)
        specs = own_specs(planning.space.sites[site_name])
        chosen = _chosen(plan, planning, site_name)
        allowed = allowed_by(planning, self.options)
        variable = planning.classes[site_name]
        found = {
            spec: outcome(planning, self.options, {**allowed, variable: mask & allowed.get(variable, mask)})
            for spec in dict.fromkeys(specs)
            if spec != chosen
            for mask in [np.array([own == spec for own in specs])]
        }
        return Explanation(
            name=name,
            shape=_shape(planning, site_name),
            alike=tuple(other for other in _names_of(planning, variable) if other != name),
            chosen=_alternative(chosen, outcome_of(plan)),
            others=tuple(
                _alternative(spec, found[spec]) for spec in sorted(found, key=lambda spec: cheapest_first(found[spec]))
            ),
            memory_budget=plan.memory_budget,
            kernels=tuple(map(str, self._kernels(plan).of(site_name))),
        )

    def _kernels(self, plan: Plan) -> Kernels:
        """The kernels that the plan is priced with, or would run with `backend="triton"`; of one plan found once."""
        known = plan.predicted.kernels
        if known.uses:
            return known
        if not self._kernels_of or self._kernels_of[0][0] is not plan:
            program = prepare_for(self.program, plan)
            found = kernels_of(plan, program, self.cluster, self.problem().elided.site_counts())
            self._kernels_of[:] = [(plan, found)]
        return self._kernels_of[0][1]

    def why_not(self, plan: Plan, feature: str) -> WhyNot:
        """See `Plan.why_not`."""
        feature = feature_named(feature)
        if is_answered(plan, feature):
            return why_not(self.problem(), self.options, plan, feature)
        return self.forecast(plan, feature)

    def limits(self, plan: Plan) -> Limits:
        """See `Plan.limits`."""
        return limits(self.program, self.problem(), self.options, plan)

    def problem(self) -> PlanningProblem:
        """What the plans are solutions of."""
        if not self._planning:
            self._planning.append(planning_problem(self.program, self.mesh, self.cluster, self.options))
        return self._planning[0]


def _alternative(spec: PartitionSpec, found: Outcome) -> Alternative:
    return Alternative(spec, **{item.name: getattr(found, item.name) for item in fields(found)})


def _site_named(planning: PlanningProblem, name: str) -> str:
    """The site of a qualified name, or of a node of the program."""
    sites = {**{site: site for site in planning.space.sites}, **constrainable(planning.space)}
    if name not in sites:
        known = list(constrainable(planning.space))
        raise InvalidSpecError(
            f"explain({name!r}): the plan has no parameter, buffer, input, output or node of that name; there are "
            f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}, and the nodes of plan.nodes."
        )
    return sites[name]


def _chosen(plan: Plan, planning: PlanningProblem, site_name: str) -> PartitionSpec:
    site = planning.space.sites[site_name]
    if site.node is None:
        return plan.outputs[f"output {site_name}"]
    node: NodePlan = plan.nodes[site_name]
    return node.outputs[0] if node.outputs else node.inputs[0]


def _shape(planning: PlanningProblem, site_name: str) -> tuple[int, ...]:
    site = planning.space.sites[site_name]
    return tuple(site.results[0].shape) if site.results else ()


def _names_of(planning: PlanningProblem, variable: int) -> Sequence[str]:
    """The qualified names of what a variable decides, nodes by their own."""
    names = {site: name for name, site in constrainable(planning.space).items()}
    return [names.get(site, site) for site in planning.members[variable]]
