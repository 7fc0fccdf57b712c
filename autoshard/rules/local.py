"""The interface through which rewrites of sharding rules emit the calls of each rank.

Most operators run unchanged on their local operands. An operator whose arguments name shapes, or whose value depends on
global indices, needs a *rewrite*. This function *emits* the calls that each rank runs in place of the traced call: it
appends them to the ranks' program. Its operands are fx proxies of local values. Every call goes through `context.call`,
so that calls without tensor operands (`arange`) are also emitted instead of run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.proxy import Proxy, TracerBase

from autoshard.ir.local import axis_index
from autoshard.ir.mesh import Mesh
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


def call_itself(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tracer: TracerBase) -> Proxy:
    """Emit a call of the operator on local operands, made contiguous where its kernel needs contiguous memory."""
    given = list(args)
    for place in in_order(target):
        given[place] = tracer.create_proxy("call_function", _aten.contiguous.default, (given[place],), {})
    return tracer.create_proxy("call_function", stride_free(target), tuple(given), dict(kwargs))


@dataclass(frozen=True, slots=True)
class LocalContext:
    """Sizes and positions of the running rank's pieces of a call's factors, and methods to emit calls.

    All ranks run one program. So a number that differs between ranks is a value of the program, not a Python int.

    Args:
        target: the operator of the traced call.
        splits: from each split factor to its axes, major to minor.
        tracer: emitted calls are appended to its graph.
    """

    target: Any
    rule: BoundRule
    splits: Mapping[str, tuple[str, ...]]
    mesh: Mesh
    tracer: TracerBase
    _indices: dict[str, Any] = field(default_factory=dict)

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of the call that are larger than one."""
        return tuple(self.rule.sizes)

    def is_split(self, factor: str) -> bool:
        """Whether some axis splits `factor`."""
        return factor in self.splits

    def shards(self, factor: str) -> int:
        """Return the number of pieces of `factor`, 1 if it is not split."""
        return self.mesh.shards(self.splits.get(factor, ()))

    def index(self, factor: str) -> Any:
        """Return the index of the running rank's piece of `factor`: a value of the program, or 0 if it is not split."""
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
        """Return the global index of the first element of the running rank's piece of `factor`."""
        if not self.is_split(factor):
            return 0
        if self._is_even(factor):
            return self.index(factor) * self.local_size(factor)
        places = [self.call(axis_index, axis) * size for axis, size in self._levels(factor)]
        return sum(places[1:], start=places[0])

    def local_size(self, factor: str) -> int:
        """Return the number of elements of `factor` on each rank, padding included."""
        levels = self._levels(factor)
        return levels[-1][1] if levels else self.global_size(factor)

    def real_size(self, factor: str) -> Any:
        """Return the number of elements of `factor` on the running rank without padding, from 0 to `local_size`."""
        size: Any = self.global_size(factor)
        if self._is_even(factor):
            return self.local_size(factor)
        for axis, local in self._levels(factor):
            size = self.call(max, self.call(operator.sub, size, self.call(axis_index, axis) * local), 0)
            size = self.call(min, size, local)
        return size

    def global_size(self, factor: str) -> int:
        """Return the number of elements of `factor` over all ranks."""
        return self.rule.sizes.get(factor, 1)

    def pieces(self, factor: str) -> list[tuple[int, int]]:
        """Return, for each piece of `factor` in order, the global index of its first element, and its `real_size`."""
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

    def input_shape(self, operand: int) -> list[int]:
        """Return the local shape of a tensor operand, padding included."""
        return self._local_shape(self.rule.inputs[operand])

    def input_offset(self, operand: int) -> list[Any]:
        """Return the global index of the first element of the rank's piece of an operand, for each dim."""
        return [self._dim_offset(dim) for dim in self.rule.inputs[operand]]

    def output_shape(self, output: int = 0) -> list[int]:
        """Return the local shape of a result, padding included."""
        return self._local_shape(self.rule.outputs[output])

    def output_offset(self, output: int = 0) -> list[Any]:
        """Return the global index of the first element of the rank's piece of a result, for each dim."""
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
        """Emit an all-reduce of `value` over the ranks that split `factor`, and return the reduced value.

        `reduction` is "sum", "max" or "min".
        """
        for axis in self.splits.get(factor, ()):
            pending = self.call(_collectives.all_reduce.default, value, reduction, axis)
            value = self.call(_collectives.wait_tensor.default, pending)
        return value

    def all_gather(self, value: Any, factor: str) -> Any:
        """Emit an all-gather of `value` over the ranks that split `factor`.

        Return the ranks' values stacked on a new dim 0, in the order of their pieces.
        """
        stacked = self.call(_aten.contiguous.default, self.call(_aten.unsqueeze.default, value, 0))
        for axis in reversed(self.splits.get(factor, ())):  # the minor axis first, so that pieces come in order
            size = self.mesh.axis_size(axis)
            pending = self.call(_collectives.all_gather_into_tensor.default, stacked, size, axis)
            stacked = self.call(_collectives.wait_tensor.default, pending)
        return stacked

    def group(self, *factors: str) -> str | None:
        """Return the axes that each split every one of `factors`, joined as in "data,model"; None without such an axis.

        In ring attention, for example, the axes split both the queries and the keys.
        """
        axes = [
            axis for axis in self.splits.get(factors[0], ()) if all(axis in self.splits.get(f, ()) for f in factors)
        ]
        return ",".join(axes) if axes else None

    def fill(self, value: Any, operand: int, factor: str, number: bool | int | float) -> Any:
        """Emit calls that write `number` into the padding of `factor` in `value`, and return the result.

        `value` has the dims of operand number `operand`.
        """
        dims = self.rule.inputs[operand]
        dim, real = dims.index((factor,)), self.real_size(factor)
        kept = self.call(_aten.narrow.default, value, dim, 0, real)
        missing = self.call(operator.sub, self.local_size(factor), real)
        pads = [0, 0] * (len(dims) - 1 - dim) + [0, missing]
        return self.call(_aten.constant_pad_nd.default, kept, pads, number)

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit a call of any operator or function on local values, and return its result."""
        return self.tracer.create_proxy("call_function", operator, args, kwargs)

    def default(self, *args: Any, **kwargs: Any) -> Any:
        """Emit a call of the traced call's own operator on local operands, and return its result."""
        return call_itself(self.target, args, kwargs, self.tracer)


def whole_to_piece(context: LocalContext, factors: Iterable[str]) -> float:
    """Return the number of elements along `factors` in the whole tensor, divided by the number in a padded piece."""
    sizes = [(context.global_size(factor), context.local_size(factor)) for factor in factors]
    return math.prod(size / local for size, local in sizes if size != local)


def shifted(offset: Sequence[Any], shift: Sequence[Any]) -> list[Any]:
    """Return the global index, by dim, of the first element of a piece within a tensor.

    `shift` is the element's index in the tensor, and `offset` is the global index of the tensor's first element.
    """
    return [by if start == 0 else start + by for start, by in zip(offset, shift, strict=True)]
