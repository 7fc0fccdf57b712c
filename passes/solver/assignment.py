r"""The problem that planning solves: pick one option per variable at least cost, within memory.

For variables \(v\) with options \(o\), choose \(x_v\) to

.. math::  \min \sum_v c_v[x_v] + \sum_{(u,v)} C_{uv}[x_u, x_v]
           \quad\text{s.t.}\quad
           m_t + \sum_v M_{tv}[x_v] + \sum_{(u,v)} M_{tuv}[x_u, x_v] \le L \quad\text{for every row } t.

Costs are seconds, an infinite one forbids a pair; memory is in bytes. Without memory rows this is the partitioned
boolean quadratic problem (Scholz and Eckstein, 2002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edge:
    """Costs of pairs: `cost[i, j]` for option `i` of variable `tail` and `j` of variable `head` (seconds)."""

    tail: int
    head: int
    cost: Floats


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes in use at one point of the program.

    Args:
        constant: bytes in use under every choice.
        variables: variable to bytes per option.
        edges: index of an edge to bytes per pair.
    """

    constant: float
    variables: Mapping[int, Floats]
    edges: Mapping[int, Floats]

    def bytes_of(self, choice: Sequence[int], edges: Sequence[Edge]) -> float:
        """Bytes in use under `choice`."""
        total = self.constant + sum(array[choice[variable]] for variable, array in self.variables.items())
        for index, array in self.edges.items():
            edge = edges[index]
            total += array[choice[edge.tail], choice[edge.head]]
        return float(total)


def row_against(choice: Sequence[int], costs: Sequence[Floats], limit: float) -> MemoryRow:
    """Return a row that one choice breaks and all other choices hold.

    It is for a choice that exceeds the limit by less than a solver can tell.
    """
    flags = (np.arange(len(cost)) == option for cost, option in zip(costs, choice, strict=True))
    variables = {variable: np.where(flag, limit, 0.0) for variable, flag in enumerate(flags)}
    return MemoryRow((2.0 - len(choice)) * limit, variables, {})


@dataclass(frozen=True, slots=True)
class Assignment:
    """One instance of the problem; see the module's docstring. Edges join distinct variables."""

    costs: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    rows: tuple[MemoryRow, ...] = ()
    limit: float = np.inf

    def cost_of(self, choice: Sequence[int]) -> float:
        """The objective under `choice`, seconds."""
        total = sum(float(cost[option]) for cost, option in zip(self.costs, choice, strict=True))
        return total + sum(float(edge.cost[choice[edge.tail], choice[edge.head]]) for edge in self.edges)

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether every memory row holds under `choice`."""
        return all(row.bytes_of(choice, self.edges) <= self.limit for row in self.rows)


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of one option per variable, its cost, and a proven lower bound of the cost of all choices (seconds)."""

    choice: tuple[int, ...]
    cost: float
    lower_bound: float
