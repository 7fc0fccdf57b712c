"""Why no recipe fits, and what would help: less asked for, or more nodes. Each remedy is one that was searched for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.errors import DoesNotFitError
from autoshard.ir.execution import Execution
from autoshard.ir.text import format_bytes
from cost_models.hardware import Cluster
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipes.recipe_plan import predict_recipe
from passes.solver.search_control import Ceiling

_MORE_NODES = (2, 4, 8)
"""How many times as many nodes are tried."""


def shortage(problem: RecipeProblem, ceiling: Ceiling) -> DoesNotFitError:
    """The error that says what the least memory is, of what, and what would help.

    Args:
        problem: that nothing fits in.
        ceiling: of all searches for it together; what was not found by then is not said.
    """
    least = problem.smallest(ceiling=ceiling)
    if least.recipe is None:
        return DoesNotFitError(_no_recipe(problem), smallest_bytes=0)
    parts = predict_recipe(problem.counted, least.recipe, problem.cluster, problem.model).memory_breakdown
    remedies = _without_constraints(problem, ceiling), _with_more_nodes(problem, ceiling)
    return DoesNotFitError(
        f"No recipe{_constraints(problem)} fits in {format_bytes(problem.memory_limit)} per device: the smallest needs "
        f"{format_bytes(least.objective)}, {_words(parts)} ({least.recipe.words}). "
        f"{' '.join(filter(None, remedies)) or 'Use more devices, or devices with more memory.'}",
        smallest_bytes=int(least.objective),
    )


def _no_recipe(problem: RecipeProblem) -> str:
    """Why there is no recipe at all."""
    batch, devices = problem.base.batch, problem.cluster.size
    if not problem.pinned or not _has_recipes(replace(problem, pinned={})):
        return (
            f"global_batch={batch} on {devices} devices: no recipe runs whole micro-batches on each of them. Change "
            "the batch, or the number of devices."
        )
    others = ({name: item for name, item in problem.pinned.items() if name != dropped} for dropped in problem.pinned)
    pairs = zip(problem.pinned, others, strict=True)
    culprits = [name for name, pinned in pairs if _has_recipes(replace(problem, pinned=pinned))]
    blamed = " or ".join(f"{name!r}" for name in culprits)
    return (
        f"No recipe for global_batch={batch} on {devices} devices{_constraints(problem)}. "
        + (f"Without the constraint on {blamed} there is one." if blamed else "Leave out more than one of them.")
    )  # fmt: skip


def _has_recipes(problem: RecipeProblem) -> bool:
    return next(problem.space().recipes(), None) is not None


def _constraints(problem: RecipeProblem) -> str:
    return f" with constraints={dict(problem.pinned)!r}" if problem.pinned else ""


def _words(parts: Mapping[str, int]) -> str:
    """What takes most of the memory."""
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{format_bytes(size)} of {name}" for name, size in largest)


def _without_constraints(problem: RecipeProblem, ceiling: Ceiling) -> str:
    found = _that_fits(replace(problem, pinned={}), ceiling) if problem.pinned else None
    if found is None:
        return ""
    return f"Without constraints {format_bytes(found.needed_bytes)} would do ({found.recipe.words})."


def _with_more_nodes(problem: RecipeProblem, ceiling: Ceiling) -> str:
    for factor in _MORE_NODES:
        larger, words = _larger(problem, factor)
        found = None if larger is None else _that_fits(larger, ceiling)
        if found is not None:
            return f"{words} would do: there the smallest needs {format_bytes(found.needed_bytes)}."
    return ""


def _larger(problem: RecipeProblem, factor: int) -> tuple[RecipeProblem | None, str]:
    """The problem on so many times as many nodes, in words; None where nodes have no network."""
    cluster = problem.cluster
    if cluster.node.inter is None:
        return None, ""
    more = Cluster(cluster.node, factor * cluster.nodes, cluster.devices_per_node)
    return replace(problem, cluster=more), f"{more.nodes} nodes in place of {cluster.nodes}"


@dataclass(frozen=True, slots=True)
class _Fitting:
    recipe: Execution
    needed_bytes: float


def _that_fits(problem: RecipeProblem, ceiling: Ceiling) -> _Fitting | None:
    """The recipe with the least memory that was found in time, if it fits."""
    found = problem.smallest(ceiling=ceiling)
    if found.recipe is None or found.objective > problem.memory_limit:
        return None
    return _Fitting(found.recipe, found.objective)
