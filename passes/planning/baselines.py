"""Plan known recipes, such as FSDP and Megatron's, to compare them with the plan of the free search.

Each mesh axis gets a role (`passes.planning.restrictions`), and the search finds the best plan that keeps the roles.

* data parallel: every axis has the role "data";
* ZeRO-1, if the plan is for a whole training step with optimizer state: every axis has the role "zero-1";
* fully sharded data parallel: every axis has the role "fsdp";
* HSDP, on a mesh of several axes: the last axis has the role "fsdp", the other axes "data";
* Megatron TP+SP, on a mesh of several axes: the last axis has the role `MEGATRON`, the other axes "data";
* expert parallel, for a model with layers of experts: all axes split the batch. Each rank along the last axis has some
  of the experts. The search decides all other specs. The rough prices of the search rank this split too low
  beside whole experts, so its plan is lowered too;
* the plan before, if the caller has a plan already: each node has its specs of that plan, where this is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.plan import BEFORE, Plan
from passes.planning.build_assignment import PlanningProblem
from passes.planning.restrictions import MEGATRON as MEGATRON_ROLE
from passes.planning.restrictions import ROLES, Experts, Role, Roles, matrices_of_experts, restrict_all
from passes.planning.search import Search
from passes.solver.assignment import Solution


def solve_baselines(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    before: Plan | None = None,
    elsewhere: Sequence[Plan] = (),
) -> dict[str, Solution | None]:
    """Return the best solution of each known recipe (`known_recipes`) by name, or None if no plan of the recipe fits.

    A recipe is absent if the user's constraints leave it no plan, or if the search is stopped before its turn.

    Args:
        allowed: index of a variable → a boolean mask of the options that the user's constraints allow.
        before: a plan of the program, on this mesh or another mesh.
        elsewhere: plans on other meshes of as many devices. A recipe with one role for all axes is left out if it fits
            on another mesh with at most as many axes. Its plan on this mesh would hardly differ.
    """
    axes = len(planning.space.mesh.shape)
    others = [plan.baselines for plan in elsewhere if len(plan.mesh.shape) <= axes]
    priced = {name for steps in others for name in _EVERY_AXIS if may_fit(steps, name)}
    recipes = {name: roles for name, roles in known_recipes(planning).items() if name not in priced}
    masks = {name: restrict_all(planning, roles) for name, roles in recipes.items()}
    if before is not None:
        masks[BEFORE] = options_as_in(before, planning)
    found: dict[str, Solution | None] = {}
    for name, mask in masks.items():
        if mask is None:
            continue
        both = {**mask, **{variable: wanted & mask.get(variable, wanted) for variable, wanted in allowed.items()}}
        if not all(options.any() for options in both.values()):
            continue
        if search.control.is_over():
            break
        search.control.problem = name
        priced = _price(planning, search, both)
        if priced is not None or not search.control.is_stopped:
            found[name] = priced
    return found


def _price(planning: PlanningProblem, search: Search, allowed: Mapping[int, np.ndarray]) -> Solution | None:
    limit = search.memory_limit_bytes
    if limit is not None and planning.least_bytes(allowed) > limit:
        return None
    try:
        return search(planning, allowed)
    except DoesNotFitError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class BaselineSteps(Mapping[str, float | None]):
    """The predicted step of each known recipe in seconds, by the recipe's name; None if the recipe does not fit.

    A step is predicted when it is first read. A pickle has only the steps that are predicted already.

    Args:
        known: the steps that are predicted already.
        predict: name of a recipe → the function that predicts its step.
    """

    names: Sequence[str]
    known: dict[str, float | None] = field(default_factory=dict)
    predict: Mapping[str, Callable[[], float | None]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> float | None:
        if name not in self.known:
            self.known[name] = self.predict[name]()
        return self.known[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ([(name, self.known[name]) for name in self.names if name in self.known],)


def may_fit(baselines: Mapping[str, float | None], name: str) -> bool:
    """Whether `baselines` has recipe `name`, and does not know that the recipe does not fit. Nothing is predicted."""
    known = baselines.known if isinstance(baselines, BaselineSteps) else baselines
    return name in baselines and known.get(name, 0.0) is not None


def least_baselines(baselines: Sequence[Mapping[str, float | None]]) -> Mapping[str, float | None]:
    """Return each recipe's predicted step in seconds on the mesh where it is fastest, or None if it fits on no mesh."""
    if len(baselines) == 1:
        return baselines[0]
    names = list(dict.fromkeys(name for each in baselines for name in each))
    every = {name: [each for each in baselines if name in each] for name in names}
    return BaselineSteps(names, predict={name: partial(_least, found, name) for name, found in every.items()})


def _least(baselines: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    steps = [each[name] for each in baselines]
    return min((step for step in steps if step is not None), default=None)


ZERO_1 = "ZeRO-1"
HSDP = "HSDP"
EXPERT_PARALLEL = "expert parallel"
MEGATRON = "Megatron TP+SP"

_EVERY_AXIS: Mapping[str, Role] = {
    "data parallel": ROLES["data"],
    ZERO_1: ROLES["zero-1"],
    "fully sharded data parallel": ROLES["fsdp"],
}
_OUTER_AND_INNER: Mapping[str, tuple[Role, Role]] = {
    HSDP: (ROLES["data"], ROLES["fsdp"]),
    MEGATRON: (ROLES["data"], MEGATRON_ROLE),
}


_BATCH = Role(uses=False)


def known_recipes(planning: PlanningProblem) -> dict[str, Roles]:
    """Return the role of each mesh axis under each known recipe, by the recipe's name."""
    axes = planning.space.mesh.axis_names
    *outer, inner = axes
    found: dict[str, Roles] = {name: dict.fromkeys(axes, role) for name, role in _EVERY_AXIS.items()}
    if outer:
        pairs = _OUTER_AND_INNER.items()
        found |= {name: {**dict.fromkeys(outer, first), inner: last} for name, (first, last) in pairs}
    if matrices_of_experts(planning):
        others = dict.fromkeys(outer, replace(_BATCH, experts=Experts.FREE))
        found[EXPERT_PARALLEL] = {**others, inner: replace(_BATCH, experts=Experts.SHARED_OUT)}
    return found


def options_as_in(before: Plan, planning: PlanningProblem) -> dict[int, np.ndarray]:
    """Return masks of the options that lay out each node as the plan `before` does, by variable.

    Options whose results have the plan's specs are kept, if there are any. Then options whose operands have the plan's
    specs are kept, if there are any. So a node always keeps an option.
    """
    masks: dict[int, np.ndarray] = {}
    for name, site in planning.space.sites.items():
        node = before.nodes.get(name)
        if node is None:
            continue
        variable = planning.classes[name]
        both = masks.get(variable, np.ones(len(site.strategies), dtype=bool))
        for is_same in (
            [strategy.outputs == node.outputs for strategy in site.strategies],
            [strategy.inputs == node.inputs for strategy in site.strategies],
        ):
            if (both & is_same).any():
                both = both & is_same
        masks[variable] = both
    return masks
