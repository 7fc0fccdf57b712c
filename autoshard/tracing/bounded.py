"""Replaces symbolic numbers of rows by upper bounds after a trace.

`places = mask.nonzero()` has a row for each nonzero element. During the trace, the number of rows is a symbol, which
appears in all derived shapes (`symbolic_counts`). Python code that compares the number gets the answer for the example,
and the comparison is guarded: later calls must give the same answer. Afterwards `bound_sizes` replaces each symbol `u`
by its upper bound N, the number of elements of the mask:

1. `nonzero(mask)` becomes `nonzero_static(mask, size=N)`. The program also computes the number, `sum(mask)`, and the
   mask of padding rows, `arange(N) >= sum(mask)`. A dim of size `u` becomes a dim of size N, whose first `u` elements
   count. The rest is padding with arbitrary content.
2. A call on padded operands is right if its sharding rule allows padding (`rules.padding`). Padding stays padding along
   a parallel factor, and has a neutral value along a reduced factor. Operands are filled like unevenly split dims.
3. A number that depends on `u` (the divisor of a mean) is computed from `sum(mask)`.

`UnboundedSizeError` means that a program uses such a tensor in another way. The model is then traced with the example's
number of rows, which is guarded (`counted`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import autoshard.rules  # noqa: F401  (fills the table of rules)
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.program import tensor_values
from autoshard.rules.notation import BoundRule, Fill
from autoshard.rules.registry import bound_rule, tensor_operands
from autoshard.tracing.symbolic_counts import UnboundedSizeError

aten = torch.ops.aten
_own = torch.ops.autoshard

CREATIONS: Mapping[Any, int] = {
    **dict.fromkeys((aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format), 0),
    **dict.fromkeys((aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default), 1),
    aten.arange.default: 0,
    aten.arange.start: 1,
}
"""Operator that creates a tensor → position of its size (or end) argument.

The result for fewer rows is a prefix of the result for more rows.
"""

_SIZED: Mapping[Any, int] = {
    **CREATIONS,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default), 1),
    _own.dropout.default: 5,
}
"""Operator with a size argument → position of this argument."""

_LOOKUPS = frozenset(
    {aten.embedding.default, aten.embedding_dense_backward.default, aten.index_select.default, aten.gather.default}
)
"""Operators that look up rows by index. They run unchanged on a part of the indices."""

ROWWISE = _LOOKUPS | frozenset(
    {
        *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default),
        *(aten.squeeze.dim, aten.squeeze.dims),
        *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        *(aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default),
        *(aten._softmax.default, aten._softmax_backward_data.default),
        *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
        *(_own.dropout.default, _own.cross_entropy.default, _own.cross_entropy_backward.default),
    }
)
"""Operators that run unchanged on a part of the rows.

Their sharding rules change a rank's call only to adapt shapes, or only if another dim than the rows is split.
"""

_WRITES = (aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default)
"""Operators that write at indices. Indices point into the first operand and into the result, which has its shape."""

_SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
_MEANS = frozenset({aten.mean.default, aten.mean.dim})
_BY_NUMBER: Mapping[Any, Any] = {
    aten.div.Scalar: aten.div.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
}
"""Operator that takes a number → its variant that takes a tensor instead."""

Padded = dict[int, Any]
"""The padded dims of one tensor: dim → the symbol of its size without padding."""


def bound_sizes(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with bounds in place of symbolic sizes. Raises UnboundedSizeError if results might change."""
    if not any(map(_symbolic_sizes, graph_module.graph.nodes)):
        return graph_module
    return _Bounding(graph_module).run()


@dataclass(frozen=True, slots=True)
class _SymbolStandIn:
    """The nodes that replace a symbol, which stands for a number of rows of at most `bound`.

    `number` computes this number as a scalar, and `is_padding` a bool mask [bound] of the rows behind it.
    """

    number: fx.Node
    is_padding: fx.Node
    bound: int


@dataclass(slots=True)
class _Bounding:
    """A rewrite of one graph, node by node, with bounds in place of symbols.

    Args:
        copies: node of `source` → its copy.
        counts: symbol → its replacement.
        padded: copy → the padded dims of each of its results.
        places: mask → node of the indices of its ones, and the symbol of their number.
        filled: operand, fill value and dims → the operand with filled padding, for reuse.
        of: the node of `source` that is being copied.
    """

    source: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    copies: dict[fx.Node, Any] = field(default_factory=dict)
    counts: dict[Any, _SymbolStandIn] = field(default_factory=dict)
    padded: dict[Any, tuple[Padded, ...]] = field(default_factory=dict)
    places: dict[fx.Node, tuple[fx.Node, Any]] = field(default_factory=dict)
    filled: dict[tuple[fx.Node, Any, tuple[int, ...]], fx.Node] = field(default_factory=dict)
    of: fx.Node | None = None

    def run(self) -> fx.GraphModule:
        for node in self.source.graph.nodes:
            self.of = node
            self.copies[node] = self._copy(node)
        self.graph.lint()
        return lazy_module(self.source, self.graph)

    def _copy(self, node: Any) -> Any:
        if node.op in ("placeholder", "get_attr"):
            copy = self.graph.node_copy(node)
            copy.meta = {**node.meta, "val": self._fake(node)}
            return copy
        if node.op == "output":
            return self._copy_output(node)
        if _is_number(node):
            return None  # its users take the expression from the original
        if node.target is aten.nonzero.default:
            return self._places_of(self.copies[node.args[0]], _expression(node.meta["val"].shape[0]))
        if node.target is operator.getitem:
            return self._result(node)
        return self._call_of(node)

    def _fake(self, node: Any) -> Any:
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), self.source)
            return self.mode.from_tensor(value) if isinstance(value, Tensor) else value
        value = node.meta["val"]
        with self.mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _copy_output(self, node: Any) -> fx.Node:
        for operand in node.all_input_nodes:
            if any(self.padded.get(self.copies[operand], ())):
                raise UnboundedSizeError("a result has it")
        copy = self.graph.output(fx.map_arg(node.args[0], self.copies.__getitem__))
        copy.meta = dict(node.meta)
        return copy

    def _result(self, node: Any) -> fx.Node:
        call, index = self.copies[node.args[0]], node.args[1]
        copy, padded = self._call(operator.getitem, (call, index)), self.padded.get(call)
        self.padded[copy] = ({},) if padded is None else (padded[index],)
        return copy

    # Numbers of rows.

    def _places_of(self, mask: Any, symbol: Any = None) -> fx.Node:
        """Return the node with the indices of the ones of `mask`, then padding; `symbol` stands for their number.

        The node is emitted at the mask's first use, and found again later. Only then may `symbol` be None.
        """
        if mask in self.places:
            places, known = self.places[mask]
            if symbol is not None and symbol != known:
                self.counts[symbol] = self.counts[known]
                self._mark(places, symbol)
            return places
        if symbol is None:
            raise UnboundedSizeError("a mask is read in the backward alone")
        is_one = self._call(aten.ne.Scalar, (mask, 0))
        for dim, other in self._of(mask).items():
            is_one = self._fill(is_one, False, {dim: other})
        if symbol.is_Integer:  # Python used the number's value, which is guarded
            return self._call(aten.nonzero_static.default, (is_one,), {"size": int(symbol)})
        bound = is_one.meta["val"].numel()
        if bound < 2:
            raise UnboundedSizeError("a mask has a single element")
        number = self._call(aten.sum.default, (is_one,))
        options = {"device": is_one.meta["val"].device, "pin_memory": False}
        rows = self._call(aten.arange.start_step, (0, bound, 1), options)
        self.counts[symbol] = _SymbolStandIn(number, self._call(aten.ge.Tensor, (rows, number)), bound)
        places = self._call(aten.nonzero_static.default, (is_one,), {"size": bound, "fill_value": 0})
        self.places[mask] = (places, symbol)
        self._mark(places, symbol)
        return places

    def _mark(self, places: fx.Node, symbol: Any) -> None:
        self.padded[places] = ({0: symbol},)

    def _number(self, expression: Any) -> Any:
        """Return the value of an expression of symbols: a Python number, or a node that computes a scalar."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            if expression not in self.counts:
                raise UnboundedSizeError(f"{expression} is the size of something else")
            return self.counts[expression].number
        if not expression.is_Mul and not expression.is_Add:
            raise UnboundedSizeError(f"a number is {expression} of it")
        (product, by_number) = (
            (aten.mul.Tensor, aten.mul.Scalar) if expression.is_Mul else (aten.add.Tensor, aten.add.Scalar)
        )
        parts = [self._number(part) for part in expression.args]
        result, *others = sorted(parts, key=lambda part: isinstance(part, int))
        for other in others:
            result = self._call(by_number if isinstance(other, int) else product, (result, other))
        return result

    def _bounded(self, expression: Any) -> int:
        """Return the value of a size in which each symbol has its upper bound."""
        if not expression.free_symbols <= self.counts.keys():
            raise UnboundedSizeError(f"{expression} is the size of something else")
        return int(expression.subs({symbol: count.bound for symbol, count in self.counts.items()}))

    # Calls.

    def _call_of(self, node: Any) -> fx.Node:
        target = node.target
        if not any(map(_is_symbolic, (node, *node.all_input_nodes))):
            return self._call(target, *self._arguments(node))
        if target in _SQUEEZES:
            self._check_squeezed(node)
        if target in _BY_NUMBER and isinstance(node.args[1], fx.Node) and _is_number(node.args[1]):
            return self._call_by_number(node)
        if target in _MEANS and not node.kwargs:
            return self._mean(node)
        if target is aten.masked_scatter.default:
            return self._write_places(node)
        args, kwargs = self._arguments(node)
        if target in (aten.index_put.default, aten.index.Tensor):
            args = (args[0], self._indices(args[1]), *args[2:])
        return self._checked_call(node, target, args, kwargs)

    def _arguments(self, node: Any) -> Any:
        arguments = fx.map_arg((node.args, node.kwargs), lambda operand: self._argument(node, operand))
        return pytree.tree_map_only(SymInt, lambda size: self._bounded(_expression(size)), arguments)

    def _argument(self, node: Any, operand: Any) -> Any:
        if not _is_number(operand):
            return self.copies[operand]
        expression = _expression(operand.meta["val"])
        if expression.free_symbols and not _is_size_of(node, operand):
            raise UnboundedSizeError(f"{node.target} computes with it")
        return self._bounded(expression)

    def _check_squeezed(self, node: Any) -> None:
        """Raise UnboundedSizeError if a call squeezes a padded dim: with one row, the original would remove it."""
        padded, rank = self._of(self.copies[node.args[0]]), node.args[0].meta["val"].dim()
        dims = node.args[1] if len(node.args) > 1 else list(range(rank))
        if any(dim % rank in padded for dim in (dims if isinstance(dims, (list, tuple)) else [dims])):
            raise UnboundedSizeError("a dim goes if there is one row")

    def _indices(self, indices: Sequence[Any]) -> list[Any]:
        """Return `indices` with each mask replaced by the indices of its ones: one node for each dim of the mask."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.meta["val"].dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            places, symbol = self._places_of(index), self.places[index][1]
            for column in range(index.meta["val"].dim()):
                found.append(self._call(aten.select.int, (places, 1, column)))
                self.padded[found[-1]] = ({0: symbol},)
        return found

    def _call_by_number(self, node: Any) -> fx.Node:
        operand, number = self.copies[node.args[0]], self._number(_expression(node.args[1].meta["val"]))
        return self._checked_call(node, _BY_NUMBER[node.target], (operand, self._like(number, operand)), {})

    def _like(self, number: Any, operand: Any) -> Any:
        """Return `number` as an operand beside `operand`: if it is a node, cast to the operand's floating dtype."""
        dtype = operand.meta["val"].dtype
        if not isinstance(number, fx.Node) or not dtype.is_floating_point:
            return number
        return self._call(aten._to_copy.default, (number,), {"dtype": dtype})

    def _write_places(self, node: Any) -> fx.Node:
        """Copy a `masked_scatter`, which writes the rows of its source at the ones of a mask, each at another place."""
        x, mask, source = (self.copies[operand] for operand in node.args)
        size = [self._bounded(_expression(entry)) for entry in node.args[0].meta["val"].shape]
        spread = next((known for known in self.places if _is_spread(known, mask, size)), None)
        places = None if spread is None else self.places[spread]
        if places is None or self._of(source) != {0: places[1]} or any(self.padded.get(x, ({},))):
            raise UnboundedSizeError(f"{node.target} writes it elsewhere")
        indices = [self._call(aten.select.int, (places[0], 1, column)) for column in range(len(size))]
        for index in indices:
            self.padded[index] = ({0: places[1]},)
        empty = self._call(aten.new_zeros.default, (x, size))
        written = self._checked_call(node, aten.index_put.default, (empty, indices, source, True), {})
        return self._call(aten.where.self, (spread, written, x))

    def _mean(self, node: Any) -> fx.Node:
        x = self.copies[node.args[0]]
        of, dim = node.args[0].meta["val"], node.args[1] if len(node.args) > 1 else None
        dims = range(of.dim()) if not dim else [entry % of.dim() for entry in dim]
        keepdim = len(node.args) > 2 and bool(node.args[2])
        size = sympy.Mul(*(_expression(of.shape[entry]) for entry in dims))
        total = self._checked_call(node, aten.sum.dim_IntList, (x, list(dims), keepdim), {})
        number = self._number(size)
        if isinstance(number, int):
            return self._checked_call(node, aten.div.Scalar, (total, number), {})
        return self._checked_call(node, aten.div.Tensor, (total, self._like(number, total)), {})

    def _checked_call(self, node: Any, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Emit a call, after filling the padding of its operands as the sharding rule demands.

        Dims of its results whose size was symbolic count as padded. Raises UnboundedSizeError if padding could change
        the results.
        """
        expected = [self._padded_dims(value) for value in tensor_values(node)]
        if target in CREATIONS:
            copy = self._call(target, args, kwargs)
        else:
            values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
            trial = self._call(target, args, kwargs)
            fills = self._fills(target, args, kwargs, values, trial, expected)
            if any(fills):
                self.graph.erase_node(trial)
                args, kwargs = self._filled_arguments((args, kwargs), values, fills)
                trial = self._call(target, args, kwargs)
            copy = trial
        for value, dims in zip(tensor_values(copy), expected, strict=True):
            if value is not None and any(value.shape[dim] != self.counts[symbol].bound for dim, symbol in dims.items()):
                raise UnboundedSizeError(f"{target} makes another size of it")
        self.padded[copy] = tuple(expected)
        return copy

    def _padded_dims(self, value: Tensor | None) -> Padded:
        if value is None:
            return {}
        sizes = {dim: _expression(size) for dim, size in enumerate(value.shape) if isinstance(size, SymInt)}
        sizes = {dim: size for dim, size in sizes.items() if size.free_symbols}
        if not all(size in self.counts for size in sizes.values()):
            raise UnboundedSizeError(f"a size is {next(iter(sizes.values()))}")
        return sizes

    def _fills(
        self, target: Any, args: Any, kwargs: Any, operands: list[fx.Node], call: fx.Node, results: list[Padded]
    ) -> list[dict[int, Fill]]:
        """Return, for each operand, a dict from each dim whose padding must be filled to the fill value."""
        values = fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        outputs = tensor_values(call)
        bound = bound_rule(target, *values, outputs)
        if bound is None or len(tensor_operands(*values)) != len(operands):
            raise UnboundedSizeError(f"{target} has no sharding rule for it")
        inside = _indexed_dims(target, args)
        symbols = [_besides(self._of(x), inside if place == 0 else frozenset()) for place, x in enumerate(operands)]
        inside = inside if target in _WRITES else frozenset()
        kept = [_besides(dims, inside) for dims, x in zip(results, outputs, strict=True) if x is not None]
        factors = _factors(target, bound, symbols, kept)
        fills: list[dict[int, Fill]] = [{} for _ in operands]
        for index, dims in enumerate(symbols):
            for dim in dims:
                (factor,) = bound.inputs[index][dim]
                fill = bound.padding[factor][index]
                if factor in factors and fill is not None:
                    fills[index][dim] = fill
        return fills

    def _filled_arguments(self, arguments: Any, operands: list[fx.Node], fills: list[dict[int, Fill]]) -> Any:
        queue = list(zip(operands, fills, strict=True))

        def fill(operand: Any) -> fx.Node:
            found, by_dim = queue.pop(0)
            assert found is operand
            for dim, value in by_dim.items():
                operand = self._fill(operand, value, {dim: self._of(found)[dim]})
            return operand

        return fx.map_arg(arguments, fill)

    def _fill(self, operand: Any, value: Any, dims: Padded) -> fx.Node:
        key = (operand, value, tuple(dims))
        if key not in self.filled:
            ((dim, symbol),) = dims.items()
            shape = [1] * operand.meta["val"].dim()
            shape[dim] = self.counts[symbol].bound
            mask = self._call(aten.view.default, (self.counts[symbol].is_padding, shape))
            self.filled[key] = self._call(aten.masked_fill.Scalar, (operand, mask, value))
            self.padded[self.filled[key]] = self.padded.get(operand, ({},))
        return self.filled[key]

    def _of(self, operand: Any) -> Padded:
        return self.padded.get(operand, ({},))[0]

    def _call(self, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """Emit a call with the fake value of its result. All other metadata is that of the source node `of`."""
        copy = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        assert self.of is not None
        values, options = fx.map_arg((copy.args, copy.kwargs), lambda operand: operand.meta["val"])
        with self.mode:
            copy.meta = {**self.of.meta, "val": target(*values, **options)}
        return copy


def _factors(target: Any, bound: BoundRule, operands: list[Padded], results: list[Padded]) -> frozenset[str]:
    """Return the factors of a sharding rule that stand for padded dims.

    Raises UnboundedSizeError if a factor has dims of several sizes, or if the operator needs every element of a dim.
    """
    sides = [*zip(bound.inputs, operands, strict=True), *zip(bound.outputs, results, strict=True)]
    found: dict[str, Any] = {}
    for dims, padded in sides:
        for dim, symbol in padded.items():
            if len(dims[dim]) != 1 or found.setdefault(dims[dim][0], symbol) != symbol:
                raise UnboundedSizeError(f"{target} merges it with another dim")
    for dims, padded in sides:
        if any(factor in found and dim not in padded for dim, factors in enumerate(dims) for factor in factors):
            raise UnboundedSizeError(f"{target} takes it for another size")
    for factor in found:
        if factor not in bound.padding or not runs_without_rewrite(target, bound, factor):
            raise UnboundedSizeError(f"{target} needs all of it")
    return frozenset(found)


def runs_without_rewrite(target: Any, bound: BoundRule, factor: str) -> bool:
    """Whether the operator, run unchanged on a part of the dims of `factor`, computes this part of its result."""
    if bound.local is None or target in _LOOKUPS:
        return True
    return target in ROWWISE and not bound.may_communicate(factor)


def _is_spread(known: Any, mask: Any, size: list[int]) -> bool:
    """Whether the node `known` is `mask`, or `mask` expanded to the shape `size`."""
    source = known.args[0] if known.target is aten.expand.default else known
    return list(known.meta["val"].shape) == size and (known is mask or source is mask)


def _indexed_dims(target: Any, args: Sequence[Any]) -> frozenset[int]:
    """Return the dims of the first operand into which indices point. Padding there is not read, so it needs no fill."""
    if target in (aten.index.Tensor, aten._unsafe_index.Tensor, *_WRITES[:2]):
        return frozenset(dim for dim, index in enumerate(args[1]) if index is not None)
    return frozenset({args[1] % args[0].meta["val"].dim()}) if target in _WRITES else frozenset()


def _besides(padded: Padded, dims: frozenset[int]) -> Padded:
    return {dim: symbol for dim, symbol in padded.items() if dim not in dims}


def _is_number(node: Any) -> bool:
    return isinstance(node.meta.get("val"), (SymInt, torch.SymFloat, torch.SymBool))


def _is_size_of(node: Any, number: Any) -> bool:
    """Whether the call `node` uses `number` only as its size argument."""
    place = _SIZED.get(node.target)
    leaves = pytree.tree_leaves((*node.args[:place], *node.args[place + 1 :], node.kwargs)) if place is not None else []
    return place is not None and number not in leaves


def _is_symbolic(node: Any) -> bool:
    """Whether a node's value is an expression of symbols, or a tensor with such a size."""
    return any(_expression(size).free_symbols for size in _symbolic_sizes(node))


def _symbolic_sizes(node: Any) -> list[Any]:
    """Return the symbolic sizes of a node's tensors; for a node that is itself a symbolic number, this number."""
    if _is_number(node):
        return [node.meta["val"]]
    sizes = [size for value in tensor_values(node) if value is not None for size in value.shape]
    return [size for size in sizes if isinstance(size, SymInt)]


def _expression(size: Any) -> Any:
    if isinstance(size, int):
        return sympy.Integer(size)
    if not isinstance(size, SymInt):
        raise UnboundedSizeError(f"{size} is no whole number")
    return size.node.expr
