"""Prices of parameters and gradients as they travel, in buckets; and the planning problem at these prices.

The search adds up collectives one by one, each with its latency. What runs gathers parameters, and reduces gradients,
in buckets (`passes/lowering/bucket_collectives.py`), whose members share a latency. A layout that gathers many small
parameters, where another sends few large activations, costs less than the search takes it to. A choice at these prices
is one more plan of which the lowered program says how fast it is. A program that leaves out blocks is not lowered into
buckets, as what it holds would not fill them; its step is predicted at these prices
(`passes.prediction.segment_step.folded_step`).

A collective of a link whose tail is computed from parameters alone, or whose head only updates or leaves the program,
takes its part, by bytes, of what the smallest bucket takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.program import InputKind
from autoshard.ir.reshard import ReshardKind, ReshardStep, reshard_costs
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.solver.assignment import Assignment, Floats, Solution
from passes.strategies.enumerate_strategies import Link, SearchSpace, needs_of, specs_of
from passes.strategies.price import StepPrice


@dataclass(frozen=True, slots=True)
class BucketPrice:
    """Seconds of one reshard step within a bucket of which each rank's piece has so many bytes."""

    alone: StepPrice
    piece_bytes: int

    def __call__(self, step: ReshardStep) -> float:
        return sum(self.parts(step))

    def parts(self, step: ReshardStep) -> tuple[float, float]:
        """Seconds of communication, and of copies."""
        sent_s, copied_s = self.alone.parts(step)
        piece = piece_bytes(step)
        if sent_s == 0.0 or not 0 < piece < self.piece_bytes:
            return sent_s, copied_s
        times = self.piece_bytes / piece
        bucket = replace(
            step, bytes_before=round(times * step.bytes_before), bytes_after=round(times * step.bytes_after)
        )
        return min(sent_s, self.alone.parts(bucket)[0] / times), copied_s


def piece_bytes(step: ReshardStep) -> int:
    """Bytes of one rank's piece of what a step sends."""
    return step.bytes_before if step.kind is ReshardKind.ALL_GATHER else step.bytes_before // step.axis_size


def solve_in_buckets(
    planning: PlanningProblem, priced: Assignment, search: Search, allowed: Mapping[int, np.ndarray]
) -> Solution | None:
    """The best choice at prices of buckets, with its cost at those of the problem; None where none fits.

    Args:
        planning: the problem.
        priced: what `in_buckets` gave for it.
        search, allowed: how it is searched, and among which options.
    """
    if search.control.is_stopped:
        return None
    with suppress(DoesNotFitError):
        choice = search(replace(planning, assignment=priced), allowed).choice
        return Solution(choice, planning.assignment.cost_of(choice), -math.inf)
    return None


def in_buckets(planning: PlanningProblem, piece_bytes: int) -> Assignment:
    """The assignment of a planning problem, what is sent of parameters and gradients priced within buckets.

    Args:
        planning: the problem, with everything priced alone.
        piece_bytes: one rank's piece of the smallest bucket.
    """
    price = BucketPrice(planning.prices.step_price, piece_bytes)
    costs, edges = list(planning.assignment.costs), list(planning.assignment.edges)
    runs = planning.link_runs()
    for index in bucketed_links(planning):
        link = planning.space.links[index]
        less = runs[index] * _saved(planning, link, price)
        tail, head = planning.classes[link.tail], planning.classes[link.head]
        if tail == head:
            costs[tail] = costs[tail] - np.diagonal(less)
        else:
            number = planning.edge_between[tail, head]
            edges[number] = replace(edges[number], cost=edges[number].cost - less)
    return replace(planning.assignment, costs=tuple(costs), edges=tuple(edges))


def _saved(planning: PlanningProblem, link: Link, price: BucketPrice) -> Floats:
    """Seconds that each reshard on a link takes less in a bucket."""
    space, prices = planning.space, planning.prices
    tail, head = space.sites[link.tail], space.sites[link.head]
    value, sources, targets = tail.results[link.result], specs_of(tail, link.result), needs_of(head, link)
    key = (_saved, value.shape, value.itemsize, sources, targets)
    if key not in prices.derived:
        alone = prices.reshard_table(value, sources, targets)
        within = reshard_costs(sources, targets, value.shape, space.mesh, value.itemsize, price)
        prices.derived[key] = np.where(np.isfinite(alone), alone - np.where(np.isfinite(alone), within, 0.0), 0.0)
    return prices.derived[key]


def bucketed_links(planning: PlanningProblem) -> frozenset[int]:
    """Indices of the links whose collectives come into buckets, found once and kept with the problem.

    Those of parameters to what is computed from others too, and those of gradients to their update.
    """
    if "bucketed_links" not in planning.derived:
        planning.derived["bucketed_links"] = frozenset(_bucketed(planning.space))
    return planning.derived["bucketed_links"]


def _bucketed(space: SearchSpace) -> Iterator[int]:
    parameters = {slot.node for slot in space.program.inputs_of(InputKind.PARAMETER)}
    ahead = _computed_from(parameters, space)
    behind = _only_updating(space)
    for index, link in enumerate(space.links):
        if link.tail in ahead or link.head in behind or link.operand < 0:
            yield index


def _computed_from(parameters: Collection[str], space: SearchSpace) -> set[str]:
    """The sites of parameters, and of what is computed from them alone."""
    operands: dict[str, list[str]] = {}
    for link in space.links:
        if link.operand >= 0:
            operands.setdefault(link.head, []).append(link.tail)
    found = set(parameters)
    for name in space.sites:
        if name in operands and found.issuperset(operands[name]):
            found.add(name)
    return found


def _only_updating(space: SearchSpace) -> set[str]:
    """The sites of the update, and of what nothing but these, and what leaves the program as a gradient, read."""
    readers: dict[str, list[Link]] = {}
    for link in space.links:
        readers.setdefault(link.tail, []).append(link)
    found: set[str] = set()
    for name, site in reversed(list(space.sites.items())):
        if site.node is None or site.node.op == "placeholder":
            continue
        links = readers.get(name, [])
        is_update = site.node.meta.get("phase") == "update"
        if is_update or (links and all(link.operand < 0 or link.head in found for link in links)):
            found.add(name)
    return found
