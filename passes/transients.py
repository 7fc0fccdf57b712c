"""What is in memory only while a value is resharded, or while a call runs: found by emitting it and walking through it.

A reshard of several steps holds two values at a time, and some steps put pieces in order in a copy of their own. A call
that is rewritten for a split factor (masks, offsets, filled padding) makes values that nobody else sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import ReshardKind, ReshardStep, StepCost, plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from passes.enumerate_strategies import Site
from passes.price import local_bytes
from passes.scratch import emitted_call, emitted_reshard
from passes.storages import Storages


class _Growth(NamedTuple):
    """Of some steps: most bytes beside the operand if it stays, most with it if it goes, bytes of the result."""

    beside: int
    with_operand: int
    after: int


@dataclass(frozen=True, slots=True)
class Transients:
    """Bytes that reshards and calls need for a moment, found once each.

    Args:
        mesh: of the program.
        cost: decides between reshards of equal effect, as in `plan_reshard`; None goes by bytes sent.
    """

    mesh: Mesh
    cost: StepCost | None = None
    _growths: dict[Any, _Growth] = field(default_factory=dict, repr=False)
    _calls: dict[Any, int] = field(default_factory=dict, repr=False)

    def of_reshard(self, value: torch.Tensor, source: PartitionSpec, target: PartitionSpec, *, freed: bool) -> int:
        """The most bytes beside a reshard's operand while it is made.

        Args:
            value: the value as the trace has it, of global shape.
            source, target: specs before and after.
            freed: the operand goes once it is read, and what it took may be used again.
        """
        shape = tuple(value.shape)
        steps = plan_reshard(source, target, shape, self.mesh, itemsize=value.dtype.itemsize, cost=self.cost)
        parts = list(_parts([step for step in steps if step.axis_size > 1]))
        if not parts:
            return 0
        growths = [self._growth(value, part) for part in parts]
        gone = parts[0][0].bytes_before if freed else 0
        first = growths[0].with_operand - gone if freed else growths[0].beside
        return max(first, *(growth.with_operand - gone for growth in growths[1:]), growths[-1].after - gone)

    def of_call(self, site: Site, strategy: Strategy) -> int:
        """The most bytes beside a call's operands and results while it runs."""
        if site.rule is None or not (site.rule.local or site.rule.padding) or not strategy.splits(self.mesh):
            return 0
        key = (site.call, strategy)
        if key not in self._calls:
            self._calls[key] = _call_bytes(site, strategy, self.mesh)
        return self._calls[key]

    def _growth(self, value: torch.Tensor, steps: tuple[ReshardStep, ...]) -> _Growth:
        key = (steps, tuple(value.shape), value.dtype)
        if key not in self._growths:
            graph = emitted_reshard(value, steps, self.mesh)
            before = steps[0].bytes_before
            staying, going = Storages(), Storages()
            operand = staying.new(before)
            staying.run(graph, [operand], [operand])
            after = going.run(graph, [going.new(before)])
            self._growths[key] = _Growth(staying.peak - before, going.peak, going.bytes_of(after))
        return self._growths[key]


def _parts(steps: Sequence[ReshardStep]) -> Iterator[tuple[ReshardStep, ...]]:
    """Steps that are counted together: a slice that is not the last step is a view, for the step behind it."""
    part: list[ReshardStep] = []
    for step in steps:
        part.append(step)
        if step.kind is not ReshardKind.SLICE:
            yield tuple(part)
            part = []
    if part:
        yield tuple(part)


def _call_bytes(site: Site, strategy: Strategy, mesh: Mesh) -> int:
    graph = emitted_call(site, strategy, mesh)
    storages = Storages()
    values = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    operands = [storages.new(value.numel() * value.element_size()) for value in values]
    storages.run(graph, operands, operands)
    results = sum(local_bytes(*result, mesh) for result in zip(site.results, strategy.outputs, strict=True))
    return max(0, storages.peak - storages.bytes_of(operands) - (0 if site.is_alias else results))
