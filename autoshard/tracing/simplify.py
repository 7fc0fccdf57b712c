"""Copies a graph without redundant nodes. Uniform constants become `full` calls, and nodes get stable names.

detach(x), alias(x), lift_fresh_copy(x), expand or view to the shape it has, t(t(x))   ->   x
cat([x, an empty tensor])                                                             ->   x
a constant tensor whose elements are all equal, a number that becomes a tensor         ->   full(...)
new_zeros(x, size), new_ones, new_full, new_empty                                      ->   zeros(size), ...
as_strided(x, ...)                                       ->   as_strided(x as one dim, in the order of its memory, ...)

`new_zeros(x, size)` reads no element of `x`, so no rank has to hold `x` for it. The last rewrite is needed because a
value that moves between devices keeps its elements but not its strides.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.errors import TraceError
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.fingerprint import bytes_of
from autoshard.ir.program import InputKind, InputSlot
from autoshard.tracing.number_nodes import number_nodes

_ATEN = torch.ops.aten
_IDENTITIES = frozenset({_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh_copy.default, _ATEN.lift.default})
_RESHAPES = frozenset(
    {
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN.expand.default,
        _ATEN.slice.Tensor,
        _ATEN.reshape.default,
    }
)
_WITHOUT_OPERAND: Mapping[Any, Any] = {
    _ATEN.new_zeros.default: _ATEN.zeros.default,
    _ATEN.new_ones.default: _ATEN.ones.default,
    _ATEN.new_full.default: _ATEN.full.default,
    _ATEN.new_empty.default: _ATEN.empty.memory_format,
}
"""Operator that reads only dtype and device of its operand → the operator that takes dtype and device as options."""
_PREFIXES = {
    InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.INPUT: "", InputKind.TANGENT: "", InputKind.SEED: "",
}  # fmt: skip


def input_name(kind: InputKind, name: str) -> str:
    """Return the name of the placeholder of an input, such as "p_layers_0_weight" for the parameter layers.0.weight."""
    return "_".join(part for part in (_PREFIXES[kind], re.sub(r"\W", "_", name)) if part)


class Copier:
    """Builds a simplified copy of a graph, node by node. Copies keep the metadata under the keys `kept_meta`."""

    def __init__(self, source: fx.GraphModule, kept_meta: tuple[str, ...]) -> None:
        self._source = source
        self._kept_meta = kept_meta
        self._copies: dict[fx.Node, fx.Node] = {}
        self._results = frozenset(source.graph.output_node().all_input_nodes)
        self.graph = fx.Graph()
        self.graph_module = lazy_module(torch.nn.Module(), self.graph)
        self.graph = self.graph_module.graph

    def node(self, original: fx.Node) -> fx.Node:
        """Return the node of the new graph that is the copy of `original`, or replaces it."""
        return self._copies[original]

    def copy_placeholder(self, node: fx.Node, slot: InputSlot) -> fx.Node:
        """Copy a placeholder under a name made from its slot's kind and name, and return the copy."""
        name = input_name(slot.kind, slot.name)
        copy = self.graph.create_node("placeholder", name, (), {}, name=name)
        return self._remember(node, copy)

    def copy(self, node: fx.Node) -> fx.Node:
        """Copy a node, or find the node of the new graph that replaces it. Return the copy or the replacement."""
        if node.op == "get_attr":
            return self._remember(node, self._copy_constant(node))
        same = self._same_as(node)
        if same is not None:
            self._copies[node] = same
            return same
        if node.target is _ATEN._to_copy.default and not node.all_input_nodes:
            return self._remember(node, self._full(node.meta["val"], node.args[0], _base_name(node)))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.node)
        if node.target is _ATEN.cat.default:
            args = (self._of_one_type(_without_empty(args[0]), node), *args[1:])
        if node.target is _ATEN.native_batch_norm_backward.default:
            args = _with_input_gradient(args)
        target = _WITHOUT_OPERAND.get(node.target)
        if target is not None:
            options = _options_of(node.meta["val"])
            copy = self.graph.create_node("call_function", target, tuple(args[1:]), options, name=_base_name(node))
            return self._remember(node, copy)
        order = _memory_order(node)
        if order is not None:
            return self._copy_strided(node, order, args, kwargs)
        copy = self.graph.create_node(node.op, node.target, tuple(args), dict(kwargs), name=_base_name(node))
        return self._remember(node, copy)

    def _copy_strided(self, node: fx.Node, order: list[int], args: Any, kwargs: Any) -> fx.Node:
        """Copy a call that reads memory by strides, with its operand flattened in the order of its memory.

        `order` has the operand's dims, the largest stride first.
        """
        shape = list(args[0].meta["val"].shape)
        permuted = self._call(_ATEN.permute.default, (args[0], order), node)
        flat = self._call(_ATEN.reshape.default, (permuted, [-1]), node)
        result = self._call(node.target, (flat, *args[1:]), node, kwargs)
        if node.target is _ATEN.as_strided_scatter.default:
            result = self._call(_ATEN.reshape.default, (result, [shape[dim] for dim in order]), node)
            inverse = [order.index(dim) for dim in range(len(order))]
            result = self._call(_ATEN.permute.default, (result, inverse), node)
        self._copies[node] = result
        return result

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: Any = None) -> fx.Node:
        """Emit a call that the original graph does not have, with the metadata of `like`, a node of that graph."""
        copy = self.graph.call_function(target, args, dict(kwargs or {}))
        copy.meta = {key: like.meta[key] for key in self._kept_meta if key in like.meta}
        values, options = fx.map_arg((args, copy.kwargs), lambda operand: operand.meta["val"])
        copy.meta["val"] = target(*values, **options)
        return copy

    def finish(self, results: tuple[fx.Node, ...]) -> None:
        """Add the graph's output `results`, and remove unused nodes."""
        self.graph.output(results)
        used = set(results)
        for node in reversed(self.graph.nodes):
            if node in used or node.op in ("placeholder", "output"):
                used.update(node.all_input_nodes)
            else:
                self.graph.erase_node(node)
        number_nodes(self.graph)
        self.graph.output_node().meta.update(phase="backward", module="", source="")
        self.graph.lint()
        self.graph_module.recompile()

    def _remember(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        copy.meta = {key: node.meta[key] for key in self._kept_meta if key in node.meta}
        self._copies[node] = copy
        return copy

    def _same_as(self, node: fx.Node) -> fx.Node | None:
        args: Any = node.args
        if node.target in _IDENTITIES or (node.target is _ATEN.clone.default and self._only_returned(node)):
            return self.node(args[0])
        if node.target in _RESHAPES:
            operand = self.node(args[0])
            return operand if operand.meta["val"].shape == node.meta["val"].shape else None
        if node.target is _ATEN.t.default:
            operand = self.node(args[0])
            return operand.all_input_nodes[0] if operand.target is _ATEN.t.default else None
        if node.target is _ATEN.copy.default:
            written = self.node(args[1])
            return written if _is_alike(written.meta["val"], node.meta["val"]) else None
        if node.target is _ATEN.cat.default:
            kept = _without_empty([self.node(operand) for operand in args[0]])
            return kept[0] if len(kept) == 1 and kept[0].meta["val"].dtype == node.meta["val"].dtype else None
        return None

    def _of_one_type(self, operands: list[fx.Node], node: fx.Node) -> list[fx.Node]:
        """Return the operands of a concatenation, `node`, after its empty operands are left out.

        If these operands alone would give a result of another dtype, they are cast to the dtype of `node`.
        """
        dtype = node.meta["val"].dtype
        kinds = [operand.meta["val"].dtype for operand in operands]
        if functools.reduce(torch.promote_types, kinds) == dtype:
            return operands
        return [self._call(_ATEN._to_copy.default, (operand,), node, {"dtype": dtype}) for operand in operands]

    def _only_returned(self, node: fx.Node) -> bool:
        return node in self._results and all(user.op == "output" for user in node.users)

    def _copy_constant(self, node: fx.Node) -> fx.Node:
        value = operator.attrgetter(str(node.target))(self._source)
        if not isinstance(value, Tensor):
            return self._hold(f"constant_{node.target}", value)
        if value.layout is not torch.strided:
            raise TraceError(
                f"The model computes with a constant tensor of layout={value.layout}, shape={tuple(value.shape)}, but "
                "programs keep dense tensors. Register its indices and values as buffers, and make it in forward: "
                "torch.sparse_coo_tensor(self.indices, self.values, size). Or use the dense one."
            )
        node.meta.setdefault("val", torch.empty_like(value, device="meta"))
        if _is_uniform(value):
            return self._full(node.meta["val"], value.flatten()[0].item() if value.numel() else 0, "constant")
        return self._hold(f"constant_{_digest(value)}", value)

    def _full(self, like: Tensor, number: Any, name: str) -> fx.Node:
        args = (list(like.shape), number)
        return self.graph.create_node("call_function", _ATEN.full.default, args, _options_of(like), name=name)

    def _hold(self, name: str, value: Any) -> fx.Node:
        if isinstance(value, Tensor):
            self.graph_module.register_buffer(name, value.detach(), persistent=False)
        else:
            setattr(self.graph_module, name, value)
        return self.graph.create_node("get_attr", name, (), {}, name=name)


def _options_of(like: Tensor) -> dict[str, Any]:
    return {"dtype": like.dtype, "device": like.device, "pin_memory": False}


def _is_alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.device == second.device


def _memory_order(node: fx.Node) -> list[int] | None:
    """Return the dims of the operand of an `as_strided`, largest stride first.

    Return None for other operators, and if the operand is not contiguous in this order.
    """
    if node.target not in (_ATEN.as_strided.default, _ATEN.as_strided_scatter.default):
        return None
    operand: Any = node.args[0]
    value = operand.meta["val"]
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    return order if value.dim() != 1 and value.permute(order).is_contiguous() else None


def _base_name(node: fx.Node) -> str:
    """Return the name of a node's operator: "add" for the node "add_3"."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", target))


def _with_input_gradient(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a batch norm's backward, changed to ask for the input's gradient.

    The traced result contains this gradient in any case.
    """
    *operands, asked = args
    return (*operands, [True, *asked[1:]])


def _without_empty(operands: Any) -> list[fx.Node]:
    """Return the operands of a concatenation except those of shape (0,), which torch skips."""
    kept = [operand for operand in operands if tuple(operand.meta["val"].shape) != (0,)]
    return kept or list(operands)


def _is_uniform(value: Tensor) -> bool:
    if value.is_meta or value.dtype.is_complex:
        return False
    return value.numel() == 0 or bool((value == value.flatten()[0]).all())


def _digest(value: Tensor) -> str:
    """Return a short text that differs between constants of different dtype, shape or content."""
    content = bytes_of(value)
    form = f"{value.dtype}{tuple(value.shape)}".encode()
    return hashlib.sha256(form + content).hexdigest()[:8]
