r"""The problem that planning solves: pick one option per variable at least cost, within memory.

For variables \(v\) with options \(o\), choose \(x_v\) to

.. math::  \min \sum_v c_v[x_v] + \sum_{(u,v)} C_{uv}[x_u, x_v]
           \quad\text{s.t.}\quad
           m_t + \sum_v M_{tv}[x_v] + \sum_{(u,v)} M_{tuv}[x_u, x_v] \le L \quad\text{for every row } t.

Costs are in seconds, memory is in bytes. An infinite cost forbids an option or a pair of options. Without memory rows
this is the partitioned boolean quadratic problem (Scholz and Eckstein, 2002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edge:
    """Costs of all pairs of options of two variables, in seconds, [options of `tail`, options of `head`]."""

    tail: int
    head: int
    cost: Floats


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes in use at a program point: `constant`, plus bytes of the chosen options, plus bytes of the chosen pairs.

    `variables` maps the index of a variable to bytes, [options]. `edges` maps the index of an edge to bytes, [options
    of `tail`, options of `head`].
    """

    constant: float
    variables: Mapping[int, Floats]
    edges: Mapping[int, Floats]

    def bytes_of(self, choice: Sequence[int], edges: Sequence[Edge]) -> float:
        """Return the bytes in use at this row's program point if variable `v` takes its option `choice[v]`."""
        total = self.constant + sum(array[choice[variable]] for variable, array in self.variables.items())
        for index, array in self.edges.items():
            edge = edges[index]
            total += array[choice[edge.tail], choice[edge.head]]
        return float(total)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One instance of the problem in the module's docstring.

    Args:
        costs: seconds, [options] for each variable.
        edges: costs of pairs; each edge joins two distinct variables.
        rows: memory rows, one for each point at which memory may bind.
        limit: the most bytes that each memory row allows.
    """

    costs: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    rows: tuple[MemoryRow, ...] = ()
    limit: float = np.inf

    def cost_of(self, choice: Sequence[int]) -> float:
        """Return the seconds of a choice: the costs of its options plus the costs of their pairs.

        Memory is not checked.
        """
        total = sum(float(cost[option]) for cost, option in zip(self.costs, choice, strict=True))
        return total + sum(float(edge.cost[choice[edge.tail], choice[edge.head]]) for edge in self.edges)

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the bytes of every memory row are within the limit under `choice`."""
        return all(row.bytes_of(choice, self.edges) <= self.limit for row in self.rows)


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for an `Assignment`: the index of each variable's option, and its cost in seconds.

    `lower_bound` is proven: no choice that fits costs fewer seconds.
    """

    choice: tuple[int, ...]
    cost: float
    lower_bound: float
