"""What a plan would cost if it did something else, or had more of something: `plan.why_not` and `plan.limits`.

Both search again. `why_not` gives each axis of the mesh the role that was asked for (`roles`), all else free; `limits`
plans for a tenth more memory, or for hardware of which one part is a tenth faster. So each figure is that of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import permutations

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.answers import Limits, Outcome, Variant, WhyNot
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster, NodeType
from cost_models.topology import Link
from passes.driver.fastest_choice import fastest
from passes.driver.plan_and_lower import allowed_by, planning_problem, solve
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from passes.planning.restrictions import ROLES, restrict_all
from passes.questions.roles import has_role
from passes.solver.search_control import SearchControl

MORE = 1.1
"""How much more of each resource `limits` tries."""

_MORE = f"{MORE - 1:.0%}".replace("%", " %")

MORE_MEMORY, TWICE, UNLIMITED = f"{_MORE} more memory", "twice the memory", "memory without limit"
FASTER_NETWORK = f"{_MORE} faster network"


def outcome(planning: PlanningProblem, options: PlanOptions, allowed: Mapping[int, np.ndarray]) -> Outcome:
    """What the best plan within some options costs."""
    if not all(mask.any() for mask in allowed.values()):
        return Outcome(fits=False)
    try:
        options = replace(options, control=SearchControl.within(options.time_budget_s))
        found = solve(planning, options, allowed)
    except DoesNotFitError as error:
        return Outcome(fits=False, smallest_bytes=error.smallest_bytes)
    return outcome_of(fastest(planning, found, planning.prices.cluster, options).plan)


def outcome_of(plan: Plan) -> Outcome:
    """What a plan costs itself."""
    return Outcome(
        fits=True,
        objective=plan.objective,
        lower_bound=plan.lower_bound,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        breakdown=plan.predicted.breakdown,
        hidden=plan.predicted.hidden,
        recipe=plan.recipe,
    )


def cheapest_first(item: Outcome) -> tuple[bool, float]:
    """A key to sort outcomes by: those that fit by their objective, then the others by the memory that they need."""
    return not item.fits, item.objective if item.objective is not None else float(item.smallest_bytes or 0)


_TWO_AXES = "it takes two axes of the mesh, of several ranks; plan with such a mesh="


def why_not(planning: PlanningProblem, options: PlanOptions, plan: Plan, feature: str) -> WhyNot:
    """See `Plan.why_not`; `feature` is one that `is_answered`."""
    if feature in KEEPINGS:
        return _why_not_keeping(planning, options, plan, feature)
    ways = _ways(planning, feature)
    specs = _specs_of(plan)
    used = [_over(way) for way in ways if all(has_role(planning, specs, axis, role) for axis, role in way.items())]
    allowed = allowed_by(planning, options)
    variants = []
    for way in ways:
        roles = {axis: ROLES[role] for axis, role in way.items()}
        masks = None if _over(way) in used else restrict_all(planning, roles)
        if masks is not None:
            both = {**allowed, **{key: mask & allowed.get(key, mask) for key, mask in masks.items()}}
            found = outcome(planning, replace(options, with_baselines=False), both)
            variants.append(_named(found, f"{feature} {_over(way)}"))
    return WhyNot(
        feature=feature,
        used=", ".join(used),
        chosen=outcome_of(plan),
        variants=tuple(sorted(variants, key=cheapest_first)),
        memory_budget=plan.memory_budget,
        missing="no axis of the mesh could be used so" if ways else _TWO_AXES,
    )


KEEPINGS = ("recompute", "offload")
"""What a search does where memory is short, and can be told to do without."""


def is_answered(plan: Plan, feature: str) -> bool:
    """Whether searching a mesh's specs again says what a feature costs: where axes have it, or the plan does it."""
    return feature in (*ROLES, "hsdp") or (feature in KEEPINGS and bool(getattr(plan, feature).nodes))


def _why_not_keeping(planning: PlanningProblem, options: PlanOptions, plan: Plan, feature: str) -> WhyNot:
    """A plan that recomputes or offloads beside the best that does not."""
    used = plan.recomputed if feature == "recompute" else plan.offloaded
    without = replace(options, **{feature: False}, with_baselines=False)
    found = outcome(planning, without, allowed_by(planning, options))
    return WhyNot(
        feature=feature,
        used=f"of {sum(map(len, used.values()))} values",
        chosen=outcome_of(plan),
        variants=(_named(found, f"without {feature}"),),
        memory_budget=plan.memory_budget,
    )


Way = Mapping[str, str]
"""Axes of the mesh to their roles."""


def _ways(planning: PlanningProblem, feature: str) -> list[Way]:
    """Each way in which axes of a mesh can do something; HSDP is FSDP over one axis, and copies over another."""
    axes = [axis for axis, size in planning.space.mesh.axes if size > 1]
    if feature == "hsdp":
        return [{first: "fsdp", second: "data"} for first, second in permutations(axes, 2)]
    return [{axis: feature} for axis in axes]


def _over(way: Way) -> str:
    """A way in words: "over data", "over model, copied over data"."""
    first, *others = way
    return f"over {first}" + "".join(f", copied over {axis}" for axis in others)


def limits(program: Program, planning: PlanningProblem, options: PlanOptions, plan: Plan) -> Limits:
    """See `Plan.limits`; `program` is as traced. With more of anything nothing is slower than the plan would be."""
    cluster = planning.prices.cluster
    options, allowed = replace(options, before=plan), allowed_by(planning, options)
    chosen, variants, worth = outcome_of(plan), [], None
    if options.memory_budget is not None:
        for name, budget in ((MORE_MEMORY, options.memory_budget * MORE), (UNLIMITED, None)):
            variants.append(_named(outcome(planning, replace(options, memory_budget=budget), allowed), name))
        worth = memory_worth(chosen, variants[0], options.memory_budget)
    for name, change in FASTER.items():
        faster = change(cluster)
        if faster is not None:
            other = planning_problem(program, planning.space.mesh, faster, options)
            variants.append(_named(outcome(other, options, allowed), name))
    return Limits(chosen, tuple(variants), plan.memory_budget, worth)


def memory_worth(chosen: Outcome, more: Outcome, memory_budget: float) -> float:
    """What a byte more is worth, seconds of a step, in the mean of a tenth `more` memory."""
    assert chosen.objective is not None, "a plan has an objective"
    assert more.objective is not None, "what fits in less fits in more"
    return max(0.0, chosen.objective - more.objective) / ((MORE - 1) * memory_budget)


def _named(found: Outcome, name: str) -> Variant:
    return Variant(name, **{item.name: getattr(found, item.name) for item in fields(found)})


def _specs_of(plan: Plan) -> Callable[[str], tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]]]:
    return lambda name: (plan.nodes[name].inputs, plan.nodes[name].outputs)


def _faster_products(cluster: Cluster) -> Cluster:
    peaks = {dtype: MORE * peak for dtype, peak in cluster.device.peak_flops.items()}
    return _with_node(cluster, cluster.node.with_device(replace(cluster.device, peak_flops=peaks)))


def _faster_memory(cluster: Cluster) -> Cluster:
    unit = cluster.device
    curves = {name: tuple((size, MORE * rate) for size, rate in curve) for name, curve in unit.throughput.items()}
    bandwidth = MORE * unit.memory_bandwidth_bytes_per_s
    faster = replace(unit, memory_bandwidth_bytes_per_s=bandwidth, throughput=curves)
    return _with_node(cluster, cluster.node.with_device(faster))


def _faster_fabric(cluster: Cluster) -> Cluster | None:
    if cluster.devices_per_node == 1:
        return None
    return _with_node(cluster, replace(cluster.node, intra=faster_link(cluster.node.intra)))


def _faster_network(cluster: Cluster) -> Cluster | None:
    return None if cluster.nodes == 1 else with_faster_network(cluster)


def with_faster_network(cluster: Cluster) -> Cluster | None:
    """A cluster whose network is faster, though one node alone may not use it; None where it has none."""
    if cluster.node.inter is None:
        return None
    return _with_node(cluster, replace(cluster.node, inter=faster_link(cluster.node.inter)))


def faster_link(link: Link) -> Link:
    """A link that is faster."""
    measured = tuple(replace(item, bandwidth_bytes_per_s=MORE * item.bandwidth_bytes_per_s) for item in link.measured)
    return replace(link.scaled(MORE), measured=measured)


def _with_node(cluster: Cluster, node: NodeType) -> Cluster:
    return Cluster(node, cluster.nodes, cluster.devices_per_node)


FASTER: Mapping[str, Callable[[Cluster], Cluster | None]] = {
    f"{_MORE} faster matrix products": _faster_products,
    f"{_MORE} faster device memory": _faster_memory,
    f"{_MORE} faster links in a node": _faster_fabric,
    FASTER_NETWORK: _faster_network,
}
"""Hardware of which one part is faster; None where it has no such part."""
