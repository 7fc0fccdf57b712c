"""The local form of one call: what each rank runs for it under a strategy.

`emit_local` appends nodes to the graph of an fx tracer. A call whose rule has no rewrite, or none of whose
factors is split, is emitted as it is; others through the rule's rewrite, which sees its place on the mesh
through a `LocalContext`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.proxy import TracerBase

from autoshard.ir.local import axis_index
from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Strategy
from autoshard.rules.notation import BoundRule, Dims

_aten = torch.ops.aten
_collectives = torch.ops._c10d_functional

_STRIDE_FREE: dict[Any, Any] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
}
"""A view that was legal on the traced strides need not be on those of a local piece."""


def emit_local(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: BoundRule | None,
    strategy: Strategy | None,
    mesh: Mesh,
    output_shapes: Sequence[Sequence[int]],
    *,
    tracer: TracerBase,
) -> Any:
    """Emit the local form of one call and return its result.

    Args:
        target: the operator of the traced call.
        args, kwargs: its arguments, with local values as `fx.Proxy` of `tracer` where the trace has tensors.
        rule: the call's rule; None emits the call as it is.
        strategy: one of `enumerate_strategies(rule, mesh)`; None emits the call as it is.
        mesh: the mesh that the strategy is for.
        output_shapes: global shapes of the results (None entries of a tuple result left out).
        tracer: owner of the graph that nodes are appended to, e.g. `GraphAppendingTracer(graph)`.

    Returns:
        A proxy of what `target` returns; for an operator with several results a proxy of the tuple or a
        tuple of proxies (`result[i]` works on both).
    """
    if rule is None or rule.local is None or strategy is None or not strategy.splits(mesh):
        return tracer.create_proxy("call_function", _STRIDE_FREE.get(target, target), tuple(args), dict(kwargs))
    assert len(output_shapes) == len(rule.outputs), f"{target}: {len(rule.outputs)} results in the rule"
    context = FxLocalContext(target, rule, strategy.splits(mesh), mesh, tracer)
    return rule.local(context, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class FxLocalContext:
    """A `LocalContext` that appends nodes to an fx graph.

    Args:
        target: the operator of the call.
        rule: its rule.
        splits: factor to the axes that split it, major to minor.
        mesh: the mesh of the axes.
        tracer: owner of the graph.
    """

    target: Any
    rule: BoundRule
    splits: Mapping[str, tuple[str, ...]]
    mesh: Mesh
    tracer: TracerBase
    _indices: dict[str, Any] = field(default_factory=dict)

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(self.rule.sizes)

    def is_split(self, factor: str) -> bool:
        return factor in self.splits

    def shards(self, factor: str) -> int:
        return self.mesh.shards(self.splits.get(factor, ()))

    def index(self, factor: str) -> Any:
        if factor not in self._indices:
            self._indices[factor] = self._emit_index(self.splits.get(factor, ()))
        return self._indices[factor]

    def _emit_index(self, axes: Sequence[str]) -> Any:
        if not axes:
            return 0
        index = self.call(axis_index, axes[0])
        for axis in axes[1:]:
            index = index * self.mesh.axis_size(axis) + self.call(axis_index, axis)
        return index

    def offset(self, factor: str) -> Any:
        return self.index(factor) * self.local_size(factor) if self.is_split(factor) else 0

    def local_size(self, factor: str) -> int:
        return self.global_size(factor) // self.shards(factor)

    def global_size(self, factor: str) -> int:
        return self.rule.sizes.get(factor, 1)

    def input_shape(self, operand: int) -> list[int]:
        return self._local_shape(self.rule.inputs[operand])

    def input_offset(self, operand: int) -> list[Any]:
        return [self._dim_offset(dim) for dim in self.rule.inputs[operand]]

    def output_shape(self, output: int = 0) -> list[int]:
        return self._local_shape(self.rule.outputs[output])

    def output_offset(self, output: int = 0) -> list[Any]:
        return [self._dim_offset(dim) for dim in self.rule.outputs[output]]

    def _local_shape(self, dims: Dims) -> list[int]:
        return [math.prod(map(self.local_size, dim)) for dim in dims]

    def _dim_offset(self, dim: tuple[str, ...]) -> Any:
        offset: Any = 0
        for position, factor in enumerate(dim):
            if self.is_split(factor):
                offset = self.offset(factor) * math.prod(map(self.global_size, dim[position + 1 :])) + offset
        return offset

    def all_reduce(self, value: Any, reduction: str, factor: str) -> Any:
        for axis in self.splits.get(factor, ()):
            pending = self.call(_collectives.all_reduce.default, value, reduction, axis)
            value = self.call(_collectives.wait_tensor.default, pending)
        return value

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator, args, kwargs)

    def default(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.target, *args, **kwargs)
