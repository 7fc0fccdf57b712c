"""Problems that `limits` searches: that of a plan with more memory, or on hardware of which one part is faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from passes.questions.what_if import FASTER, MORE, MORE_MEMORY, TWICE, UNLIMITED
from passes.recipe_search.recipe_problem import RecipeProblem

_TIMES = {MORE_MEMORY: MORE, TWICE: 2.0, UNLIMITED: math.inf}
"""How much more memory is tried."""


def richer_problems(problem: RecipeProblem) -> Iterator[tuple[str, RecipeProblem]]:
    """Each change in words, and the problem under it; one after the other, as each holds what it has priced."""
    for name, times in _TIMES.items():
        yield name, problem.within(times * problem.memory_limit)
    for name, change in FASTER.items():
        faster = change(problem.cluster)
        if faster is not None:
            yield name, replace(problem, cluster=faster)
