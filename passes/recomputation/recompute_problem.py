"""The planning problem with recomputation: an option of a variable is a strategy together with a policy.

A variable is one decision for all nodes that are alike. The problem differs from the problem without recomputation in
these points (`recompute_options` explains policies):

* Time: a recomputed call runs twice, and so do the reshards of its operands (`_Building.costs`, `edges`).
* Operands: a recomputation needs each operand held from the forward, recomputed before, or as an input or a constant of
  the program. Other pairs of policies cost infinity (`_fits_together`).
* Copies: an offloaded value costs the time of its two copies, which nothing hides. Its fetch needs no operands.
* Memory depends on policies too (`recompute_memory`).

So there still is one option for each variable, costs join at most two variables, and memory is linear in items. The
last use of a value counts every recomputation that might read it, chosen or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from autoshard.ir.offload import OffloadedNode
from autoshard.ir.recompute import RecomputedNode
from passes.memory.liveness import Liveness
from passes.memory.memory_rows import row_at
from passes.memory.memory_usage import MemoryUsage, with_standing
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.forward_calls import is_late
from passes.recomputation.recompute_memory import RecomputeMemory
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, RESTORED, RecomputeOptions, ValuePolicy
from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow
from passes.solver.search_control import SearchControl, SearchStopped
from passes.strategies.enumerate_strategies import Link, SearchSpace, specs_of
from passes.strategies.price import local_bytes_of


@dataclass(frozen=True, slots=True)
class RecomputeProblem:
    """The planning problem with recomputation and offload.

    Args:
        planning: the problem without recomputation. This problem has each of its options once for each policy.
        assignment: the costs of options and pairs of options, without rows for memory.
        usage: the bytes in use on each rank at each program point under a choice.
    """

    planning: PlanningProblem
    options: RecomputeOptions
    assignment: Assignment
    usage: MemoryUsage = field(repr=False)

    @property
    def space(self) -> SearchSpace:
        """The sites and links of the program without recomputation."""
        return self.planning.space

    @property
    def liveness(self) -> Liveness:
        """The lifetimes of values in the program without recomputation."""
        return self.planning.liveness

    def memory_row(self, point: int) -> MemoryRow:
        """Return the bytes in use on each rank at one program point, as a function of the choice."""
        return row_at(self.usage, point, self.planning.edge_between)

    def widen(self, allowed: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return boolean masks of this problem's options, by variable, from masks of options without recomputation.

        All policies of an allowed option are allowed.
        """
        return {variable: np.tile(mask, len(self.options.of(variable))) for variable, mask in allowed.items()}

    def without_policies(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the strategies of a choice, as a choice of the problem without recomputation."""
        sizes = (len(cost) for cost in self.planning.assignment.costs)
        return tuple(option % size for option, size in zip(choice, sizes, strict=True))

    def restored(self, choice: Sequence[int]) -> Restored:
        """Return the nodes that a choice recomputes and offloads, in program order.

        A node is left out if no call reads its restored value.
        """
        made = self.policies_of_restored(choice)
        readers: dict[str, list[Link]] = defaultdict(list)
        for link in self.space.links:
            readers[link.tail].append(link)
        recomputed: dict[str, RecomputedNode] = {}
        offloaded: list[OffloadedNode] = []
        for name in reversed(made):
            if any(link.head in recomputed or is_late(self.space, link) for link in readers[name]):
                node, policy = self.space.sites[name].node, made[name]
                assert node is not None, "calls have nodes"
                place = (name, self.options.anchors[name][policy], node.meta.get("module", ""))
                if policy in RECOMPUTED:
                    recomputed[name] = RecomputedNode(*place)
                else:
                    offloaded.append(OffloadedNode(*place))
        return Restored(tuple(reversed(recomputed.values())), tuple(reversed(offloaded)))

    def policies_of_restored(self, choice: Sequence[int]) -> dict[str, ValuePolicy]:
        """Return the policy of each value that a choice recomputes or offloads, by the name of the value's site.

        A recomputed view of a held value is absent if it needs no reshard. The held value keeps its memory, so nothing
        runs again.
        """
        viewed = {link.head: link for link in self.space.links if link.operand == 0}
        found: dict[str, ValuePolicy] = {}
        for name in self.options.anchors:
            policy = self.policy(name, choice)
            is_held = (
                policy in RECOMPUTED
                and self.space.sites[name].is_alias
                and viewed[name].tail not in found
                and not self._is_moved(viewed[name], choice)
            )
            if policy in RESTORED and not is_held:
                found[name] = policy
        return found

    def _is_moved(self, link: Link, choice: Sequence[int]) -> bool:
        base = self.without_policies(choice)
        source = self.planning.strategy(link.tail, base).outputs[link.result]
        return source != self.planning.strategy(link.head, base).inputs[link.operand]

    def policy(self, name: str, choice: Sequence[int]) -> ValuePolicy:
        """Return the policy of a site's value under a choice."""
        variable = self.planning.classes[name]
        return self.policies(variable)[choice[variable] // len(self.planning.assignment.costs[variable])]

    def policies(self, variable: int) -> tuple[ValuePolicy, ...]:
        """Return the policies (keep, recompute, offload) that a variable's values may have."""
        return self.options.of(variable)


@dataclass(frozen=True, slots=True)
class Restored:
    """The nodes that a program recomputes and offloads, in program order."""

    recomputed: tuple[RecomputedNode, ...] = ()
    offloaded: tuple[OffloadedNode, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.recomputed or self.offloaded)


NOTHING_RESTORED = Restored()


def build_recompute_problem(
    planning: PlanningProblem,
    options: RecomputeOptions,
    *,
    with_memory: bool = True,
    control: SearchControl | None = None,
) -> RecomputeProblem:
    """Return the problem with recomputation over the strategies of `planning`, which has no recomputation.

    Args:
        with_memory: whether to count memory. Only a search needs the memory.
        control: stops the building when time is up; None: building is never stopped.

    Raises:
        SearchStopped: `control` was over before the problem was built.
    """
    memory = RecomputeMemory(planning, options)
    building = _Building(planning, options, memory)
    assignment = Assignment(tuple(_in_time(control, building.costs())), tuple(_in_time(control, building.edges())))
    items = with_standing(_in_time(control, memory.items()), memory.liveness) if with_memory else ()
    usage = MemoryUsage.of(memory.liveness.points, list(items))
    return RecomputeProblem(planning, options, assignment, usage)


_Part = TypeVar("_Part")


def _in_time(control: SearchControl | None, parts: Iterator[_Part]) -> Iterator[_Part]:
    """Yield the elements of `parts`.

    Raises:
        SearchStopped: `control` is over before all elements are yielded.
    """
    for part in parts:
        if control is not None and control.is_over():
            raise SearchStopped("time was up before the problem with recomputation was built")
        yield part


@dataclass
class _Building:
    planning: PlanningProblem
    options: RecomputeOptions
    memory: RecomputeMemory
    tables: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def costs(self) -> Iterator[Floats]:
        for variable, cost in enumerate(self.planning.assignment.costs):
            runs = [cost * _runs(policy) for policy in self.options.of(variable)]
            if any(policy in OFFLOADED for policy in self.options.of(variable)):
                copies = self._copy_times(variable)
                runs = [
                    run + copies if policy in OFFLOADED else run
                    for run, policy in zip(runs, self.options.of(variable), strict=True)
                ]
            fits = np.diagonal(self.allowed.get((variable, variable), np.ones((len(runs), len(runs)), dtype=bool)))
            yield np.concatenate([np.where(fit, run, np.inf) for run, fit in zip(runs, fits, strict=True)])

    def _copy_times(self, variable: int) -> Floats:
        """Return the seconds of copying all values of a variable to the host and back in a step, [options]."""
        total = np.zeros(len(self.planning.assignment.costs[variable]))
        for name in self.planning.members[variable]:
            site = self.planning.space.sites[name]
            for result in self.read_back[name]:
                sizes = local_bytes_of(site.results[result], specs_of(site, result), self.planning.space.mesh)
                total += self.site_runs[name] * self.planning.prices.host_times(sizes)
        return total

    @cached_property
    def site_runs(self) -> Mapping[str, int]:
        return self.planning.site_runs()

    @cached_property
    def read_back(self) -> dict[str, set[int]]:
        """The indices of a site's results that the backward or a possible recomputation reads, by the site's name."""
        found: dict[str, set[int]] = defaultdict(set)
        for link in self.planning.space.links:
            is_recomputed = any(policy in RECOMPUTED for policy in self.memory.policies_of(link.head))
            if is_late(self.planning.space, link) or is_recomputed:
                found[link.tail].add(link.result)
        return found

    def edges(self) -> Iterator[Edge]:
        for edge in self.planning.assignment.edges:
            yield Edge(edge.tail, edge.head, self._edge_table(edge, self.allowed[edge.tail, edge.head]))

    def _edge_table(self, edge: Edge, allowed: np.ndarray) -> Floats:
        """Return the seconds of an edge, [options of the tail, options of the head].

        Pairs of policies outside `allowed`, [tail policies, head policies], cost infinity. Edges with equal cost tables
        share the result.
        """
        heads = self.options.of(edge.head)
        key = (id(edge.cost), heads, allowed.tobytes(), allowed.shape)
        if key not in self.tables:
            blocks = [
                [np.where(fits, edge.cost * _runs(head), np.inf) for head, fits in zip(heads, row, strict=True)]
                for row in allowed
            ]
            self.tables[key] = np.block(blocks)
        return self.tables[key]

    @cached_property
    def allowed(self) -> dict[tuple[int, int], np.ndarray]:
        """For each pair of linked variables (tail, head), a boolean matrix [tail policies, head policies].

        An entry is True if the two variables may have these two policies together.
        """
        found: dict[tuple[int, int], np.ndarray] = {}
        for link in self.planning.space.links:
            tails, heads = self.memory.policies_of(link.tail), self.memory.policies_of(link.head)
            pairs = np.array([[self._fits_together(link, tail, head) for head in heads] for tail in tails])
            key = (self.planning.classes[link.tail], self.planning.classes[link.head])
            found[key] = found[key] & pairs if key in found else pairs
        return found

    def _fits_together(self, link: Link, tail: ValuePolicy, head: ValuePolicy) -> bool:
        source = self.planning.space.sites[link.tail]
        if head not in RECOMPUTED or source.is_input or source.is_constant:
            return True
        if tail in RESTORED:
            before, after = self.memory.split.restored[link.tail, tail], self.memory.split.restored[link.head, head]
            return self.memory.liveness.calls[before] < self.memory.liveness.calls[after]
        return self.options.holds(link.tail, tail)


def _runs(policy: ValuePolicy) -> int:
    """Return the runs of a call in a step of one micro-batch: 2 if its value is recomputed, else 1."""
    return 2 if policy in RECOMPUTED else 1
