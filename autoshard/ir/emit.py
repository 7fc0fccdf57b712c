"""Emits the steps of a reshard into an fx graph, as local ATen operators and functional collectives.

A dim whose size is no multiple of the axis size is padded at its end. A split pads before it cuts, and a gather cuts
the padding off. A reduction combines elements of one index, which are all real or all padding. So padding never reaches
a real element.

Collectives are `torch.ops._c10d_functional`, each followed by `wait_tensor`; their group name is the mesh axis. They
work on dim 0 of contiguous tensors. Element types that process groups do not support are sent as other types (`_Wire`).
Axes of size one and empty tensors need no collective.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import fx

from autoshard.ir.local import axis_index
from autoshard.ir.mesh import Mesh
from autoshard.ir.reduction import REDUCIBLE, identity_of
from autoshard.ir.reshard import ReshardKind, ReshardStep
from autoshard.ir.spec import PartitionSpec, Reduction

_T = TypeVar("_T")

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

OnNode = Callable[[fx.Node, PartitionSpec | None], None]
"""Callback for each emitted node. Its second argument is the node's spec if the node completes a step, else None."""


def emit_reshard(
    value: Any,
    steps: Sequence[ReshardStep],
    shape: Sequence[int],
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    on_node: OnNode | None = None,
) -> Any:
    """Emit the steps of a reshard on `value`, and return the resulting local tensor.

    New nodes are inserted at the tracer's present insertion point. If the node of `value` has a tensor `meta["val"]`,
    new nodes with tensor values get one too. Nodes with integer values, such as a rank's offset, get none.

    Args:
        value: the local tensor: a proxy in the graph to extend, or a real tensor, on which the steps run at once.
        shape: the global shape.
        dtype: the element type; by default the type of `value` or of its node's `meta["val"]`.
        on_node: called with each new node, and with its spec if the node completes a step, else with None.

    Returns:
        The local tensor under the last step's target spec, padded and contiguous. Without steps, `value` itself.

    Raises:
        ValueError: `dtype` is neither given nor known, or does not support a reduction in `steps`.
    """
    emitter = _Emitter(mesh, tuple(shape), dtype or _dtype_of(value), on_node, [])
    real = [index for index, step in enumerate(steps) if step.axis_size > 1]
    for index, following in pairwise([*real, len(steps)]):
        reached = steps[following - 1].target
        value = emitter.step(value, steps[index], reached, is_last=following == len(steps))
    return value


def _dtype_of(value: Any) -> torch.dtype:
    known = value.node.meta.get("val") if isinstance(value, fx.Proxy) else value
    if not isinstance(known, torch.Tensor):
        raise ValueError(f"emit_reshard does not know the dtype of {value!r}; pass dtype=, or set meta['val'].")
    return known.dtype


@dataclass(frozen=True, slots=True)
class _Wire:
    """Form in which a collective sends values of one dtype.

    Before a collective, the bits are viewed as type `view`, or the values are converted to type `cast`. None skips the
    view or the conversion. Complex numbers are sent as pairs of reals. `reduction` applies to the sent values; None if
    they are only moved.
    """

    view: torch.dtype | None = None
    cast: torch.dtype | None = None
    is_complex: bool = False
    reduction: Reduction | None = None

    @property
    def extra_dims(self) -> tuple[int, ...]:
        """Dims of the sent tensor behind the dims of the value: (2,) for complex numbers."""
        return (2,) if self.is_complex else ()


_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_BOOL_REDUCTION = {Reduction.SUM: Reduction.MAX, Reduction.PRODUCT: Reduction.MIN}


def _wire_to_move(dtype: torch.dtype) -> _Wire:
    if dtype.is_complex:
        return _Wire(is_complex=True)
    return _Wire() if dtype in REDUCIBLE else _Wire(view=_BITS[dtype.itemsize])


def _wire_to_reduce(dtype: torch.dtype, reduction: Reduction) -> _Wire:
    if dtype.is_complex:
        if reduction is not Reduction.SUM:
            raise ValueError(f"values of dtype={dtype} have no reduction={reduction.value!r}.")
        return _Wire(is_complex=True, reduction=reduction)
    if dtype is torch.bool:
        return _Wire(view=torch.uint8, reduction=_BOOL_REDUCTION.get(reduction, reduction))
    if dtype in REDUCIBLE:
        return _Wire(reduction=reduction)
    return _Wire(cast=torch.float32 if dtype.is_floating_point else torch.int64, reduction=reduction)


@dataclass(frozen=True, slots=True)
class _Emitter:
    """Emits the steps of one reshard, one step at a time. `nodes` has the nodes of the present step."""

    mesh: Mesh
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_node: OnNode | None
    nodes: list[fx.Node]

    def step(self, value: Any, step: ReshardStep, reached: PartitionSpec, *, is_last: bool) -> Any:
        """Emit one step, and pass its nodes to `on_node`; return the local tensor after the step.

        `reached` is the spec after this step and the following steps over axes of size one, which emit nothing.
        `is_last` says whether no further step emits anything.
        """
        self.nodes.clear()
        value = self._local_value(value, step, is_last=is_last)
        if self.on_node is not None:
            for node in self.nodes:
                self.on_node(node, reached if node is self.nodes[-1] else None)
        return value

    def _local_value(self, value: Any, step: ReshardStep, *, is_last: bool) -> Any:
        if 0 in self.shape:
            return self._call(_aten.new_empty.default, value, self._shape_under(step.target))
        match step.kind:
            case ReshardKind.ALL_GATHER:
                return self._all_gather(value, step)
            case ReshardKind.ALL_REDUCE:
                return self._all_reduce(value, step)
            case ReshardKind.ALL_TO_ALL:
                return self._all_to_all(value, step)
            case ReshardKind.MAKE_PARTIAL:
                return self._make_partial(value, step)
            case ReshardKind.REDUCE_SCATTER:
                return self._reduce_scatter(value, step)
            case ReshardKind.SLICE:
                return self._slice(value, step, is_last=is_last)

    def _all_gather(self, value: Any, step: ReshardStep) -> Any:
        dim = _known(step.dim)
        wire = _wire_to_move(self.dtype)
        value = self._to_wire(self._contiguous(value), wire)
        gathered = self._wait(_c10d.all_gather_into_tensor.default, value, step.axis_size, step.axis)
        local = self._shape_under(step.source)
        pieces = self._call(_aten.view.default, gathered, [step.axis_size, *local, *wire.extra_dims])
        return self._from_wire(self._join(pieces, dim, step, wire), wire)

    def _all_reduce(self, value: Any, step: ReshardStep) -> Any:
        wire = _wire_to_reduce(self.dtype, _known(step.reduction))
        value = self._to_wire(self._contiguous(value), wire)
        reduced = self._wait(_c10d.all_reduce.default, value, _known(wire.reduction).value, step.axis)
        return self._from_wire(reduced, wire)

    def _reduce_scatter(self, value: Any, step: ReshardStep) -> Any:
        wire = _wire_to_reduce(self.dtype, _known(step.reduction))
        pieces = self._to_wire(self._split(value, step), wire)
        reduction = _known(wire.reduction).value
        piece = self._wait(_c10d.reduce_scatter_tensor.default, pieces, reduction, step.axis_size, step.axis)
        local = [*self._shape_under(step.target), *wire.extra_dims]
        return self._from_wire(self._call(_aten.view.default, piece, local), wire)

    def _all_to_all(self, value: Any, step: ReshardStep) -> Any:
        wire = _wire_to_move(self.dtype)
        pieces = self._to_wire(self._split(value, step), wire)
        ones = [1] * step.axis_size
        pieces = self._wait(_c10d.all_to_all_single.default, pieces, ones, ones, step.axis)
        return self._from_wire(self._join(pieces, _known(step.dim), step, wire), wire)

    def _make_partial(self, value: Any, step: ReshardStep) -> Any:
        is_first = self._integer(operator.eq, self._axis_index(value, step.axis), 0)
        condition = self._call(_aten.new_full.default, value, [], is_first, dtype=torch.bool)
        identity = identity_of(_known(step.reduction), self.dtype)
        return self._contiguous(self._call(_aten.where.ScalarOther, condition, value, identity))

    def _slice(self, value: Any, step: ReshardStep, *, is_last: bool) -> Any:
        """Return the rank's piece of `value`: a view, or a copy in the last step.

        A view would keep the memory of the whole tensor.
        """
        dim = _known(step.to_dim)
        value = self._pad(value, step)
        size = self._shape_under(step.target)[dim]
        start = self._integer(operator.mul, self._axis_index(value, step.axis), size)
        piece = self._call(_aten.narrow.default, value, dim, start, size)
        if not is_last:
            return piece
        return self._call(_aten.clone.default, piece, memory_format=torch.contiguous_format)

    def _split(self, value: Any, step: ReshardStep) -> Any:
        """Cut `step.to_dim` into pieces, and stack the pieces on a new dim 0: [axis_size, *shape of a piece]."""
        dim = _known(step.to_dim)
        value = self._contiguous(self._pad(value, step))
        local = list(self._shape_under(step.source))
        local[dim : dim + 1] = [step.axis_size, self._shape_under(step.target)[dim]]
        pieces = self._call(_aten.view.default, value, local)
        if dim == 0:
            return pieces
        order = [dim, *(other for other in range(len(local)) if other != dim)]
        return self._contiguous(self._call(_aten.permute.default, pieces, order))

    def _join(self, pieces: Any, dim: int, step: ReshardStep, wire: _Wire) -> Any:
        """Undo `_split`: concatenate the pieces of dim 0 along `dim`, and cut `dim` to its padded size after `step`."""
        local = [*self._shape_under(step.target), *wire.extra_dims]
        size = self._shape_under(step.source)[dim]
        if math.prod(local[:dim]) != 1:
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(local) + 1)]
            pieces = self._contiguous(self._call(_aten.permute.default, pieces, order))
        whole = [*local[:dim], step.axis_size * size, *local[dim + 1 :]]
        value = self._call(_aten.view.default, pieces, whole)
        if whole == local:
            return value
        return self._contiguous(self._call(_aten.narrow.default, value, dim, 0, local[dim]))

    def _pad(self, value: Any, step: ReshardStep) -> Any:
        dim = _known(step.to_dim)
        before, after = self._shape_under(step.source)[dim], self._shape_under(step.target)[dim]
        missing = after * step.axis_size - before
        if missing == 0:
            return value
        pads = [0, 0] * (len(self.shape) - 1 - dim) + [0, missing]
        return self._call(_aten.constant_pad_nd.default, value, pads, 0)

    def _to_wire(self, value: Any, wire: _Wire) -> Any:
        if wire.is_complex:
            return self._call(_aten.view_as_real.default, value)
        if wire.view is not None:
            return self._call(_aten.view.dtype, value, wire.view)
        return value if wire.cast is None else self._call(_aten._to_copy.default, value, dtype=wire.cast)

    def _from_wire(self, value: Any, wire: _Wire) -> Any:
        if wire.is_complex:
            return self._call(_aten.view_as_complex.default, value)
        if wire.view is not None:
            return self._call(_aten.view.dtype, value, self.dtype)
        return value if wire.cast is None else self._call(_aten._to_copy.default, value, dtype=self.dtype)

    def _wait(self, collective: Any, *args: Any) -> Any:
        return self._call(_c10d.wait_tensor.default, self._call(collective, *args))

    def _contiguous(self, value: Any) -> Any:
        return self._call(_aten.contiguous.default, value)

    def _shape_under(self, spec: PartitionSpec) -> tuple[int, ...]:
        return spec.local_shape(self.shape, self.mesh)

    def _axis_index(self, value: Any, axis: str) -> Any:
        """Return the rank's index along `axis`: a node if `value` is a proxy, a number if `value` is a tensor."""
        if not isinstance(value, fx.Proxy):
            return axis_index(axis)
        return self._record(value.tracer.create_proxy("call_function", axis_index, (axis,), {}))

    def _integer(self, function: Callable[[Any, int], Any], left: Any, right: int) -> Any:
        if not isinstance(left, fx.Proxy):
            return function(left, right)
        return self._record(left.tracer.create_proxy("call_function", function, (left, right), {}))

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an operator whose first argument is a tensor: emit a node for a proxy, or run it on a real tensor."""
        if not isinstance(args[0], fx.Proxy):
            return function(*args, **kwargs)
        proxy = args[0].tracer.create_proxy("call_function", function, args, kwargs)
        _set_val(proxy.node)
        return self._record(proxy)

    def _record(self, proxy: fx.Proxy) -> fx.Proxy:
        self.nodes.append(proxy.node)
        return proxy


def _set_val(node: fx.Node) -> None:
    """Infer a node's `meta["val"]` from its operands, unless the tracer set it or the first operand has none."""
    first = node.args[0]
    if "val" in node.meta or not isinstance(first, fx.Node) or "val" not in first.meta:
        return
    # Integers of the rank have no val; any will do for shapes, and 0 is in range.
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val", 0))
    with torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _known(value: _T | None) -> _T:
    assert value is not None, "the kind of a step says which of its fields are set"
    return value
