"""Tie mesh axes to groups that make the same choice, if a search over single axes would take too long.

If one axis has c choices for a call, a mesh of n axes has up to c ** n strategies for it. A link has the square of this
number of pairs. On a mesh of 2x2x2x2, a transformer of two layers has 202,000 strategies. So on a mesh of three or more
axes, the outermost axes are tied, as few as the time allows. The axes of a group split the same factor, or none, in the
order of the mesh. At least two groups stay, and the innermost axis is one of them, because known recipes use it
differently. Every plan of the tied problem is also a plan of the single axes, at the same price.

Axes are not tied if constraints, the plan before, or a recipe use them differently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from passes.planning.recipe_meshes import names_axes_of
from passes.strategies.enumerate_strategies import EnumerateStrategies, SearchSpace

_LOGGER = logging.getLogger(__name__)

_STRATEGY_S, _PAIR_S = 2.5e-4, 1e-6
"""Seconds to build and search the problem, for each strategy of each site and for each pair of strategies of each link.

Twice the figures of an idle core. A transformer of two layers took 3 s on 2x2, 6 s on 2x2x2, 16 s on 4x2x2, and over
150 s on 2x2x2x2.
"""

_GROUPS = 2
"""The fewest groups into which axes are tied."""

Group = tuple[str, ...]
Groups = tuple[Group, ...]


def space_in_time(
    enumerate_strategies: EnumerateStrategies, program: Program, levels: Sequence[Groups], time_budget_s: float
) -> SearchSpace:
    """Return the search space of a program, with as few tied axes as the time allows. Tied axes make the same choice.

    Args:
        enumerate_strategies: the pass that builds the search space of single axes.
        levels: the possible groups of axes, from single axes to the fewest groups (`tied_levels`).
        time_budget_s: seconds for all of planning.
    """
    mesh = enumerate_strategies.mesh
    coarsest = enumerate_strategies.tied(levels[-1])(program)
    if len(levels) == 1:
        return coarsest
    for groups in levels:
        seconds = estimated_s(coarsest, len(groups) / len(levels[-1]))
        if seconds <= time_budget_s or groups == levels[-1]:
            if groups != levels[0]:
                _warn(mesh, groups, estimated_s(coarsest, len(levels[0]) / len(levels[-1])), time_budget_s)
            break
    return coarsest if groups == levels[-1] else enumerate_strategies.tied(groups)(program)


def _warn(mesh: Mesh, groups: Groups, seconds: float, time_budget_s: float) -> None:
    tied = " and ".join(", ".join(map(repr, group)) for group in groups if len(group) > 1)
    _LOGGER.warning(
        "a search over each axis of %s would take some %.0f s, and time_budget_s leaves %.0f s: axes %s split the same "
        "dims of all tensors. Raise time_budget_s, or give constraints that treat these axes differently",
        *(mesh, seconds, time_budget_s, tied),
    )


def tied_levels(
    mesh: Mesh, constraints: Iterable[PartitionSpec] = (), before: Plan | None = None, recipe: Recipe | None = None
) -> list[Groups]:
    """Return the possible ways to group the axes of a mesh, from single axes to the fewest groups.

    Each grouping joins two neighbouring groups of the grouping before: the two outermost groups that may be joined. On
    a mesh of one or two axes, the only grouping is single axes.

    Args:
        constraints: specs of the user. Axes that a spec uses differently are not joined.
        before: a plan whose specs are treated as constraints.
        recipe: no axes are joined if the recipe decides the use of some axis.
    """
    groups: Groups = tuple((axis,) for axis in mesh.axis_names)
    levels: list[Groups] = [groups]
    specs = [*constraints, *(() if before is None else _specs_of(before))]
    while not names_axes_of(recipe, [mesh]) and len(groups) > _GROUPS:
        first = next((i for i in range(len(groups) - 1) if _are_alike(groups[i] + groups[i + 1], specs)), None)
        if first is None:
            break
        groups = (*groups[:first], groups[first] + groups[first + 1], *groups[first + 2 :])
        levels.append(groups)
    return levels


def estimated_s(space: SearchSpace, power: float) -> float:
    """Return the estimated seconds of planning if the mesh had `power` times as many groups of axes as in `space`."""
    counts = {name: len(site.strategies) ** power for name, site in space.sites.items()}
    pairs = sum(counts[link.tail] * counts[link.head] for link in space.links)
    return _STRATEGY_S * sum(counts.values()) + _PAIR_S * pairs


def _specs_of(plan: Plan) -> Iterator[PartitionSpec]:
    for node in plan.nodes.values():
        yield from node.inputs
        yield from node.outputs


def _are_alike(group: Group, specs: Sequence[PartitionSpec]) -> bool:
    """Whether each spec uses all axes of a group in the same way, and lists them in the order of the group."""
    for spec in specs:
        uses = {(spec.dim_of(axis), spec.reduction_over(axis)) for axis in group}
        if len(uses) > 1:
            return False
        axes = tuple(axis for axis in spec.axes if axis in group)
        if axes and axes != group:
            return False
    return True
