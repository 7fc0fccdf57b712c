"""What `limits` searches: the problem of a plan with more memory, or on hardware of which one part is faster.

On a joined cluster the part is one island's: what limits a pipeline is the island that it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from cost_models.hardware import Cluster
from cost_models.joined import JoinedCluster
from passes.questions.what_if import (
    FASTER,
    FASTER_NETWORK,
    MORE,
    MORE_MEMORY,
    TWICE,
    UNLIMITED,
    faster_link,
    with_faster_network,
)
from passes.recipe_search.joined_problem import JoinedProblem
from passes.recipe_search.recipe_problem import RecipeProblem

_TIMES = {MORE_MEMORY: MORE, TWICE: 2.0, UNLIMITED: math.inf}
"""How much more memory is tried."""


def richer_problems(problem: RecipeProblem | JoinedProblem) -> Iterator[tuple[str, RecipeProblem | JoinedProblem]]:
    """Each change in words, and the problem under it; one after the other, as each holds what it has priced."""
    if isinstance(problem, JoinedProblem):
        yield from _of_islands(problem)
        return
    for name, times in _TIMES.items():
        yield name, problem.within(times * problem.memory_limit)
    for name, change in FASTER.items():
        faster = change(problem.cluster)
        if faster is not None:
            yield name, replace(problem, cluster=faster)


def even_limit(problem: RecipeProblem | JoinedProblem) -> float | None:
    """The memory limit of every device; None where islands have different ones."""
    if isinstance(problem, RecipeProblem):
        return problem.memory_limit
    first, *others = problem.memory_limits
    return first if all(limit == first for limit in others) else None


def _of_islands(problem: JoinedProblem) -> Iterator[tuple[str, JoinedProblem]]:
    limits, cluster = problem.memory_limits, problem.cluster
    for name, times in _TIMES.items():
        yield name, problem.within(tuple(times * limit for limit in limits))
    for place, island in enumerate(cluster.islands):
        where = f"on island {place} ({island.name})"
        more = (*limits[:place], MORE * limits[place], *limits[place + 1 :])
        yield f"{MORE_MEMORY} {where}", problem.within(more)
        for name, faster in _faster(island, joins=cluster.network is None):
            islands = (*cluster.islands[:place], faster, *cluster.islands[place + 1 :])
            yield f"{name} {where}", replace(problem, cluster=JoinedCluster(islands, network=cluster.network))
    if cluster.network is not None:
        joined = JoinedCluster(cluster.islands, network=faster_link(cluster.network))
        yield f"{FASTER_NETWORK} between islands", replace(problem, cluster=joined)


def _faster(island: Cluster, *, joins: bool) -> Iterator[tuple[str, Cluster]]:
    """An island of which one part is faster; `joins`: its network is also what joins it to others."""
    for name, change in FASTER.items():
        faster = with_faster_network(island) if joins and name == FASTER_NETWORK else change(island)
        if faster is not None:
            yield name, faster
