"""Search again with collectives of parameters and gradients priced as parts of buckets, for one more candidate plan.

The first search adds up the seconds of single collectives, each with its latency (*single prices*). But the lowered
program gathers parameters and reduces gradients in buckets (`passes/lowering/bucket_collectives.py`), whose members
share a latency. On GPUs most buckets also run beside computation, while computation waits for collectives of
activations. So a layout that gathers many parameters and sends few activations runs faster than the first search
expects. The time of its lowered program decides.

At bucket prices, a collective takes its share, by bytes, of the seconds of the smallest bucket. `bucketed_links` finds
the links with bucket prices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.program import InputKind
from autoshard.ir.reshard import ReshardKind, ReshardStep, reshard_costs
from autoshard.ir.spec import PartitionSpec
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.solver.assignment import Assignment, Floats, Solution
from passes.strategies.enumerate_strategies import Link, SearchSpace, ValueInfo, needs_of, specs_of
from passes.strategies.price import StepPrice

_Specs = tuple[PartitionSpec, ...]


@dataclass(frozen=True, slots=True)
class BucketPrice:
    """A function from a reshard step to its seconds if the step's collective is a part of a bucket.

    Args:
        alone: function from a reshard step to its seconds if the step's collective runs alone.
        piece_bytes: bytes of one rank's piece of the bucket.
    """

    alone: StepPrice
    piece_bytes: int

    def __call__(self, step: ReshardStep) -> float:
        sent_s, copied_s = self.alone.parts(step)
        piece = piece_bytes(step)
        if sent_s == 0.0 or not 0 < piece < self.piece_bytes:
            return sent_s + copied_s
        times = self.piece_bytes / piece
        bucket = replace(
            step, bytes_before=round(times * step.bytes_before), bytes_after=round(times * step.bytes_after)
        )
        return min(sent_s, self.alone.parts(bucket)[0] / times) + copied_s


def piece_bytes(step: ReshardStep) -> int:
    """Return the bytes of one rank's piece in the collective of a reshard step, an all-gather or a reduction."""
    return step.bytes_before if step.kind is ReshardKind.ALL_GATHER else step.bytes_before // step.axis_size


def solve_in_buckets(
    planning: PlanningProblem,
    priced: Assignment,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution] = (),
) -> Solution | None:
    """Return the best choice at bucket prices (`priced`), with its cost in seconds at single prices (`planning`).

    None means that no choice fits, or that the search was stopped. Progress is not shown, because costs at bucket
    prices cannot be compared with those of the first search.

    Args:
        planning: the planning problem at single prices.
        priced: the result of `in_buckets` for the problem.
        allowed: index of a variable → a boolean mask of its allowed options.
        start: solutions that fit. The result is no worse at bucket prices.
    """
    if search.control.is_stopped:
        return None
    with suppress(DoesNotFitError), search.control.unseen():
        choice = search(replace(planning, assignment=priced), allowed, start).choice
        return Solution(choice, planning.assignment.cost_of(choice), -math.inf)
    return None


_MOST_HIDDEN = 0.8
"""Fraction of the traffic of parameters and gradients that a GPU's step hides beside computation.

It is fitted to 82 choices of six models on 8 to 64 A100s and H100s (ZeRO-3, HSDP, Megatron, searches). Their lowered
programs take 0.94 to 1.04 times the seconds of this price. ZeRO-1 takes 1.0 to 1.17 times, because it gathers after its
update. At single prices with nothing hidden, all take 0.49 to 0.87 times (2026-11-28).
"""


def hidden_part(planning: PlanningProblem, choice: Sequence[int]) -> float:
    """Return the fraction of the time of parameters' and gradients' collectives that computation likely hides, 0 to 1.

    These collectives hide beside the other work of the step, up to `_MOST_HIDDEN`. On CPUs the fraction is 0: on one
    machine communication takes cores from computation, and over a network of CPUs hiding was not measured.
    """
    if not planning.prices.cluster.device.dispatch_s:
        return 0.0
    runs, sent_s = planning.link_runs(), 0.0
    for index in bucketed_links(planning):
        link = planning.space.links[index]
        tail, head = planning.classes[link.tail], planning.classes[link.head]
        sent_s += runs[index] * float(_single_prices(planning, link)[choice[tail], choice[head]])
    return min(_MOST_HIDDEN, max(0.0, planning.assignment.cost_of(choice) - sent_s) / sent_s) if sent_s else 0.0


def rough_step_s(planning: PlanningProblem, choice: Sequence[int], piece_bytes: int) -> float:
    """Return the approximate seconds of a step under a choice, without lowering it.

    Collectives of parameters and gradients are priced in buckets, and hidden beside computation where possible.
    `piece_bytes` are the bytes of one rank's piece of a bucket. A model with fewer bytes of parameters has one bucket.
    """
    price = BucketPrice(planning.prices.step_price, min(piece_bytes, _parameter_bytes(planning)))
    runs, alone_s, sent_s, last_s = planning.link_runs(), 0.0, 0.0, 0.0
    for index in bucketed_links(planning):
        link = planning.space.links[index]
        tail, head = choice[planning.classes[link.tail]], choice[planning.classes[link.head]]
        alone_s += runs[index] * float(_single_prices(planning, link)[tail, head])
        seconds = runs[index] * float(_in_buckets_s(planning, link, price)[tail, head])
        is_last = planning.space.sites[link.tail].phase == "update"  # no computation follows
        sent_s, last_s = (sent_s, last_s + seconds) if is_last else (sent_s + seconds, last_s)
    others_s = max(0.0, planning.assignment.cost_of(choice) - alone_s)
    hidden_s = min(_MOST_HIDDEN * sent_s, others_s) if planning.prices.cluster.device.dispatch_s else 0.0
    return others_s + sent_s + last_s - hidden_s


def _parameter_bytes(planning: PlanningProblem) -> int:
    """Return the bytes of all parameters of the whole model, divided by the number of ranks."""
    counts, found = planning.counts(), 0
    for slot in planning.space.program.inputs_of(InputKind.PARAMETER):
        (value,) = planning.space.sites[slot.node].results
        found += counts.get(slot.node, 1) * math.prod(value.shape) * value.itemsize
    return found // planning.space.mesh.size


def in_buckets(planning: PlanningProblem, piece_bytes: int, hidden: float = 0.0) -> Assignment:
    """Return the assignment of a planning problem with collectives of parameters and gradients at bucket prices.

    Args:
        planning: the planning problem at single prices.
        piece_bytes: bytes of one rank's piece of the smallest bucket.
        hidden: fraction of the seconds of these collectives that is not counted (`hidden_part`).
    """
    price = BucketPrice(planning.prices.step_price, piece_bytes)
    costs, edges = list(planning.assignment.costs), list(planning.assignment.edges)
    runs = planning.link_runs()
    for index in bucketed_links(planning):
        link = planning.space.links[index]
        alone, within = _single_prices(planning, link), _in_buckets_s(planning, link, price)
        is_allowed = np.isfinite(alone)
        less = runs[index] * np.where(is_allowed, alone - (1 - hidden) * np.where(is_allowed, within, 0.0), 0.0)
        tail, head = planning.classes[link.tail], planning.classes[link.head]
        if tail == head:
            costs[tail] = costs[tail] - np.diagonal(less)
        else:
            number = planning.edge_between[tail, head]
            edges[number] = replace(edges[number], cost=edges[number].cost - less)
    return replace(planning.assignment, costs=tuple(costs), edges=tuple(edges))


def _in_buckets_s(planning: PlanningProblem, link: Link, price: BucketPrice) -> Floats:
    """Return the seconds of each reshard on a link at bucket prices, [tail's options, head's options]."""
    value, sources, targets = _value_and_specs(planning, link)
    key = (_in_buckets_s, price.piece_bytes, value.shape, value.itemsize, sources, targets)
    if key not in planning.prices.derived:
        costs = reshard_costs(sources, targets, value.shape, planning.space.mesh, value.itemsize, price)
        planning.prices.derived[key] = costs
    return planning.prices.derived[key]


def _single_prices(planning: PlanningProblem, link: Link) -> Floats:
    """Return the seconds of each reshard on a link at single prices, [tail's options, head's options]."""
    return planning.prices.reshard_table(*_value_and_specs(planning, link))


def _value_and_specs(planning: PlanningProblem, link: Link) -> tuple[ValueInfo, _Specs, _Specs]:
    """Return the value on a link, its spec under each of the tail's options, and under each of the head's options."""
    tail, head = planning.space.sites[link.tail], planning.space.sites[link.head]
    return tail.results[link.result], specs_of(tail, link.result), needs_of(head, link)


def bucketed_links(planning: PlanningProblem) -> frozenset[int]:
    """Return the indices of the links whose collectives join buckets, cached with the problem.

    A collective joins a bucket if its value is computed from parameters alone. Values that lead only to the update, or
    leave the program, join buckets too.
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
    """Return the names of the sites of parameters, and of the calls that are computed from parameters alone."""
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
    """Return the names of the update's calls, and of all calls that serve only the update or the program's results."""
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
