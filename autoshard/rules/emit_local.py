"""Emits the local form of one call: the calls that each rank runs in its place under a strategy.

If the rule has no rewrite, or if no factor is split, the call itself is emitted. Otherwise the rule's rewrite emits
calls, with a `LocalContext` for the piece of the running rank. Before the call, padding of operands is filled if the
rule needs it (`BoundRule.padding`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.proxy import Proxy, TracerBase
from torch.utils import _pytree as pytree

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
"""From an operator that may fail on the strides of a local piece to an equal operator that takes any strides."""

_READ_IN_ORDER: dict[Any, tuple[int, ...]] = {
    _aten.native_group_norm.default: (0,),
    _aten.native_group_norm_backward.default: (0, 1),
    _aten._pdist_forward.default: (0,),
    _aten._pdist_backward.default: (1,),
    _aten.nll_loss2d_backward.default: (1,),
    _aten.view.dtype: (0,),
    _aten.view_as_complex.default: (0,),
}
"""From an operator to the indices of operands that its kernel reads as if they were contiguous.

With other strides the kernel raises an error, or reads wrong elements. On one device torch's caller makes the operands
contiguous, and a trace does not always show it. On ranks the operands may have other strides, because a reshard keeps
the order of dims in memory. The table was found by running the samples of torch's own tests (`op_db` of torch 2.13, on
CPUs) on permuted memory.
"""


def stride_free(target: Any) -> Any:
    """Return an operator equal to `target` that accepts any strides, such as `reshape` for `view`."""
    return _STRIDE_FREE.get(target, target)


def in_order(target: Any) -> tuple[int, ...]:
    """Return the operand indices of `target` that must be made contiguous before a call on a rank."""
    return _READ_IN_ORDER.get(target, ())


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
    """Emit the local form of one call into the graph of `tracer`, and return the call's result.

    Args:
        args, kwargs: the arguments of the traced call, with a local value, a `fx.Proxy` of `tracer`, in place of each
            tensor.
        rule: the call's rule, or None to emit the call itself.
        strategy: one of `enumerate_strategies(rule, mesh)`, or None to emit the call itself.
        output_shapes: global shapes of the results, without None entries of a tuple result.

    Returns:
        A proxy. For an operator with several results it is a proxy of the tuple, or a tuple of proxies. `result[i]`
        works on both.
    """
    if rule is None or strategy is None or not strategy.splits(mesh):
        return _call_itself(target, args, kwargs, tracer)
    assert len(output_shapes) == len(rule.outputs), f"{target}: {len(rule.outputs)} results in the rule"
    context = FxLocalContext(target, rule, strategy.splits(mesh), mesh, tracer)
    args, kwargs = _fill_padding(context, args, kwargs)
    if rule.local is None:
        return _call_itself(target, args, kwargs, tracer)
    return rule.local(context, *args, **kwargs)


def _call_itself(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tracer: TracerBase) -> Proxy:
    """Emit a call of the operator on local operands, made contiguous where its kernel needs contiguous memory."""
    given = list(args)
    for place in in_order(target):
        given[place] = tracer.create_proxy("call_function", _aten.contiguous.default, (given[place],), {})
    return tracer.create_proxy("call_function", stride_free(target), tuple(given), dict(kwargs))


def fills(rule: BoundRule, splits: Mapping[str, Sequence[str]], mesh: Mesh) -> dict[int, dict[str, Any]]:
    """Return the values to write into padding of operands, by operand index, then by factor.

    `splits` maps each split factor to its axes. Only factors that are split unevenly have padding.
    """
    found: dict[int, dict[str, Any]] = {}
    for factor, axes in splits.items():
        if rule.sizes[factor] % mesh.shards(axes) == 0:
            continue
        for operand, fill in enumerate(rule.padding[factor]):
            if fill is not None:
                found.setdefault(operand, {})[factor] = fill
    return found


def _fill_padding(
    context: FxLocalContext, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    wanted = fills(context.rule, context.splits, context.mesh)
    if not wanted:
        return args, kwargs
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Proxy)]
    assert len(places) == len(context.rule.inputs), f"{context.target}: operands are the proxies among its arguments"
    for operand, factors in wanted.items():
        for factor, number in factors.items():
            leaves[places[operand]] = context.fill(leaves[places[operand]], operand, factor, number)
    return pytree.tree_unflatten(leaves, structure)


@dataclass(frozen=True, slots=True)
class FxLocalContext:
    """A `LocalContext` that appends nodes to the graph of `tracer`.

    `splits` maps each split factor to its axes, major to minor.
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
        if not self.is_split(factor):
            return 0
        if self._is_even(factor):
            return self.index(factor) * self.local_size(factor)
        places = [self.call(axis_index, axis) * size for axis, size in self._levels(factor)]
        return sum(places[1:], start=places[0])

    def local_size(self, factor: str) -> int:
        levels = self._levels(factor)
        return levels[-1][1] if levels else self.global_size(factor)

    def real_size(self, factor: str) -> Any:
        size: Any = self.global_size(factor)
        if self._is_even(factor):
            return self.local_size(factor)
        for axis, local in self._levels(factor):
            size = self.call(max, self.call(operator.sub, size, self.call(axis_index, axis) * local), 0)
            size = self.call(min, size, local)
        return size

    def pieces(self, factor: str) -> list[tuple[int, int]]:
        found = [(0, self.global_size(factor))]
        for axis, size in self._levels(factor):
            places = range(self.mesh.axis_size(axis))
            found = [(start + p * size, max(0, min(size, held - p * size))) for start, held in found for p in places]
        return found

    def _is_even(self, factor: str) -> bool:
        return self.global_size(factor) % self.shards(factor) == 0

    def _levels(self, factor: str) -> list[tuple[str, int]]:
        """Return the axes that split `factor`, major to minor, each with the size of a piece after its split.

        The sizes are numbers of elements of the factor, and include padding.
        """
        found, size = [], self.global_size(factor)
        for axis in self.splits.get(factor, ()):
            size = -(-size // self.mesh.axis_size(axis))
            found.append((axis, size))
        return found

    def group(self, *factors: str) -> str | None:
        axes = [
            axis for axis in self.splits.get(factors[0], ()) if all(axis in self.splits.get(f, ()) for f in factors)
        ]
        return ",".join(axes) if axes else None

    def fill(self, value: Any, operand: int, factor: str, number: bool | int | float) -> Any:
        dims = self.rule.inputs[operand]
        dim, real = dims.index((factor,)), self.real_size(factor)
        kept = self.call(_aten.narrow.default, value, dim, 0, real)
        missing = self.call(operator.sub, self.local_size(factor), real)
        pads = [0, 0] * (len(dims) - 1 - dim) + [0, missing]
        return self.call(_aten.constant_pad_nd.default, kept, pads, number)

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

    def all_gather(self, value: Any, factor: str) -> Any:
        stacked = self.call(_aten.contiguous.default, self.call(_aten.unsqueeze.default, value, 0))
        for axis in reversed(self.splits.get(factor, ())):  # the minor axis first, so that pieces come in order
            size = self.mesh.axis_size(axis)
            pending = self.call(_collectives.all_gather_into_tensor.default, stacked, size, axis)
            stacked = self.call(_collectives.wait_tensor.default, pending)
        return stacked

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator, args, kwargs)

    def default(self, *args: Any, **kwargs: Any) -> Any:
        return _call_itself(self.target, args, kwargs, self.tracer)
