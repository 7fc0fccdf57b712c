"""Known recipes as restrictions of the search space, priced like any plan.

* data parallel: the batch is split over all axes, parameters and optimizer state are copied;
* ZeRO-1, where the plan is of a whole training step with state: the same, but state that divides is split over all
  axes;
* fully sharded data parallel: the batch is split over all axes, and so is every parameter, and its state, that divides;
* HSDP, on a mesh of several axes: the same, but parameters are split over the last axis alone, copied over the others;
* Megatron TP+SP, likewise: the batch is split over all axes but the last, matrices over the last one, no parameter or
  state over others; what activations do over the last axis, Megatron-LM's sequence parallelism too, is searched;
* the plan before, where there is one: each node as in a plan of this mesh or another, where that is possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind
from autoshard.ir.spec import PartitionSpec
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.solver.assignment import Solution
from passes.strategies.enumerate_strategies import Site

Restriction = Callable[[PlanningProblem], dict[int, np.ndarray]]
_Keep = Callable[[Site, PartitionSpec], bool]


def solve_baselines(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    before: Plan | None = None,
    deadline: float = np.inf,
) -> dict[str, Solution | None]:
    """The best plan of each recipe, None where none fits.

    Recipes that no plan within the user's constraints is, and those not looked at before the search was stopped, or
    time was up, are left out.

    Args:
        planning, search, allowed: as of the search itself.
        before: a plan of the program, on this mesh or another.
        deadline: of `time.monotonic`.
    """
    masks = {name: _RECIPES[name](planning) for name in _names(planning)}
    if before is not None:
        masks[BEFORE] = options_as_in(before, planning)
    found: dict[str, Solution | None] = {}
    for name, mask in masks.items():
        both = {**mask, **{variable: wanted & mask.get(variable, wanted) for variable, wanted in allowed.items()}}
        if search.control.is_stopped or time.monotonic() >= deadline:
            break
        if not all(options.any() for options in both.values()):
            continue
        search.control.problem = name
        priced = _price(planning, search, both)
        if priced is not None or not search.control.is_stopped:
            found[name] = priced
    return found


def _names(planning: PlanningProblem) -> list[str]:
    """The recipes that a program and its mesh can tell apart."""
    has_state = bool(planning.space.program.inputs_of(InputKind.STATE))
    has_axes = len(planning.space.mesh.axis_names) > 1
    return [name for name in _RECIPES if (has_state or name != ZERO_1) and (has_axes or name not in _OF_SEVERAL_AXES)]


def _price(planning: PlanningProblem, search: Search, allowed: Mapping[int, np.ndarray]) -> Solution | None:
    limit = search.memory_limit_bytes
    if limit is not None and planning.least_bytes(allowed) > limit:
        return None
    try:
        return search(planning, allowed)
    except DoesNotFitError:
        return None


def _data_parallel(planning: PlanningProblem) -> dict[int, np.ndarray]:
    return _layout(planning, _splits(()), _splits(()))


def _zero_1(planning: PlanningProblem) -> dict[int, np.ndarray]:
    return _layout(planning, _splits(()), _splits(planning.space.mesh.axis_names))


def _fully_sharded(planning: PlanningProblem) -> dict[int, np.ndarray]:
    everywhere = _splits(planning.space.mesh.axis_names)
    return _layout(planning, everywhere, everywhere)


def _hybrid_sharded(planning: PlanningProblem) -> dict[int, np.ndarray]:
    inner = _splits(planning.space.mesh.axis_names[-1:])
    return _layout(planning, inner, inner)


def _megatron(planning: PlanningProblem) -> dict[int, np.ndarray]:
    *outer, inner = planning.space.mesh.axis_names

    def keep(site: Site, spec: PartitionSpec) -> bool:
        is_matrix = len(site.results[0].shape) > 1
        return _splits((inner,))(site, spec) if is_matrix else set(spec.axes) <= {inner}

    return _layout(planning, keep, keep, batch=outer)


def _layout(
    planning: PlanningProblem, parameters: _Keep, state: _Keep, batch: Collection[str] | None = None
) -> dict[int, np.ndarray]:
    """Parameters and optimizer state lie as said; the batch is split, over all axes or some."""
    axes = planning.space.mesh.axis_names if batch is None else batch
    masks = _masks(planning, InputKind.PARAMETER, parameters) | _masks(planning, InputKind.STATE, state)
    return masks | _masks(planning, InputKind.INPUT, _splits(axes, dims=1))


ZERO_1 = "ZeRO-1"
HSDP = "HSDP"
MEGATRON = "Megatron TP+SP"
BEFORE = "the plan before"

_RECIPES: Mapping[str, Restriction] = {
    "data parallel": _data_parallel,
    ZERO_1: _zero_1,
    "fully sharded data parallel": _fully_sharded,
    HSDP: _hybrid_sharded,
    MEGATRON: _megatron,
}
_OF_SEVERAL_AXES = (HSDP, MEGATRON)


def options_as_in(before: Plan, planning: PlanningProblem) -> dict[int, np.ndarray]:
    """The options whose results lie as in another plan, and, where there are such, whose operands do too."""
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


def _masks(planning: PlanningProblem, kind: InputKind, keep: _Keep) -> dict[int, np.ndarray]:
    masks = {}
    for slot in planning.space.program.inputs_of(kind):
        site = planning.space.sites[slot.node]
        mask = np.array([keep(site, strategy.outputs[0]) for strategy in site.strategies])
        if mask.any():
            masks[planning.classes[slot.node]] = mask
    return masks


def _splits(axes: Collection[str], dims: int | None = None) -> _Keep:
    """Whether a spec splits a value over as many of some axes as can be, and no other; `dims`: only its first dims."""

    def over(spec: PartitionSpec) -> int:
        """Over how many; -1 if it splits anything else."""
        first = [axis for dim in range(len(spec.dims[:dims])) for axis in spec.axes_of(dim)]
        return len(first) if len(first) == len(spec.axes) and set(first) <= set(axes) else -1

    def keep(site: Site, spec: PartitionSpec) -> bool:
        return over(spec) == max(over(strategy.outputs[0]) for strategy in site.strategies)

    return keep
