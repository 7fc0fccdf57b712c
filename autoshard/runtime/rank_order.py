"""Rewrite reductions to add in the order of ranks: for Gloo, for gradients sent in 16 bits, and for maxima of floats.

Reduce-scatter: Gloo runs an all-reduce and slices its result. Instead, an all-to-all and a local sum send half as many
bytes.

All-reduce: with three ranks or more, Gloo's result for an element depends on the element's position in the tensor, and
so on its bucket. Instead, an all-to-all, a local sum and an all-gather send as many bytes. The local sum adds in the
order of ranks, narrow dtypes in float32, so the result equals the simulator's bit by bit.

Other backends round each partial sum to the dtype that they send. So gradients that the user sends in 16 bits
(`passes/lowering/narrow_reductions.py`) are reduced in this way on all backends. So are maxima and minima of floats,
because Gloo and NCCL drop a NaN, and one device returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.communicators import Purpose, group_axes
from autoshard.ir.mesh import Mesh
from autoshard.ir.reduction import combine
from autoshard.ir.spec import Reduction

_c10d = torch.ops._c10d_functional
_EXTREMES = (Reduction.MAX, Reduction.MIN)

SMALL_BYTES = 2**12
"""An all-reduce of at most this many bytes becomes an all-gather of all addends and a local sum.

Each pair of ranks then exchanges one message instead of two.
"""


def reduce_in_rank_order(graph_module: fx.GraphModule, mesh: Mesh, *, of_gloo: bool = True) -> fx.GraphModule:
    """Return a copy of a lowered graph whose reductions add in the order of ranks.

    Before → after, with any nodes between a start and its wait:

    * `wait(reduce_scatter(x))` → `_reduce(wait(all_to_all(_rows(x))))`;
    * `wait(all_reduce(x))` on three ranks or more → `_joined(wait(all_gather(_reduce(wait(all_to_all(_rows(x)))))))`,
      with the all-gather issued midway; a small `x` is gathered whole and reduced at once.

    If `of_gloo` is false, another backend runs the collectives. Then only reductions of gradients in 16 bits are
    rewritten, and maxima and minima of floats.
    """
    rewriter = _Rewriter(mesh, graph_module.graph, of_gloo)
    return lazy_module(graph_module, rewriter.rewritten())


class _Rewriter:
    """Copies a graph node by node, and rewrites reductions on the way.

    `_midway` maps a node of the old graph to functions that add nodes after the node's copy. `_finish` maps the old
    wait of a rewritten reduction to a function that adds a node in place of the wait.
    """

    def __init__(self, mesh: Mesh, old: fx.Graph, of_gloo: bool) -> None:
        self._mesh = mesh
        self._of_gloo = of_gloo
        self._nodes = list(old.nodes)
        self._places = {node: place for place, node in enumerate(self._nodes)}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, Any] = {}
        self._finish: dict[fx.Node, Callable[[], fx.Node]] = {}
        self._midway: dict[fx.Node, list[Callable[[], None]]] = {}

    def rewritten(self) -> fx.Graph:
        for node in self._nodes:
            self._copies[node] = self._copy(node)
            for issue in self._midway.get(node, ()):
                issue()
        return self._graph

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self._finish:
            made = self._finish[node]()
            made.meta = dict(node.meta) | _origin_of(node.all_input_nodes[0])
            return made
        if node.target is _c10d.reduce_scatter_tensor.default and self._is_ours(node):
            return _noted(self._start_reduce_scatter(node), node)
        if node.target is _c10d.all_reduce.default and self._is_ours(node) and self._depends_on_order(node):
            return _noted(self._start_all_reduce(node), node)
        return copy_node(self._graph, node, self._copies.__getitem__)

    def _is_ours(self, node: fx.Node) -> bool:
        is_narrow = str(node.args[-1]).endswith(f"/{Purpose.NARROW_GRADIENTS}")
        return self._of_gloo or is_narrow or _may_lose_nan(node)

    def _depends_on_order(self, node: fx.Node) -> bool:
        return _may_lose_nan(node) or (node.args[1] not in _EXTREMES and self._size_of(node) > 2)

    def _start_reduce_scatter(self, node: fx.Node) -> fx.Node:
        value, reduction, size, group = cast(tuple[fx.Node, str, int, str], node.args)
        shape = self._call(_shape_of_piece, self._copies[value], size)
        started = self._all_to_all(self._copies[value], size, group)
        self._finish[_wait_of(node)] = lambda: self._call(_reduce, self._wait(started), reduction, size, shape)
        return started

    def _start_all_reduce(self, node: fx.Node) -> fx.Node:
        value, reduction, group = cast(tuple[fx.Node, str, str], node.args)
        wait, size, operand = _wait_of(node), self._size_of(node), self._copies[value]
        shape = self._call(_shape_of, operand)
        if _is_small(value):
            started = self._all_gather(self._call(_flat, operand), size, group)
            self._finish[wait] = lambda: self._call(_reduce, self._wait(started), reduction, size, shape)
            return started
        started = self._all_to_all(operand, size, group)
        gathered: list[fx.Node] = []

        def gather() -> None:
            mine = self._call(_reduce, self._wait(started), reduction, size, (-1,))
            gathered.append(_noted(self._all_gather(mine, size, group), node))

        middle = self._nodes[(self._places[node] + self._places[wait]) // 2]
        self._midway.setdefault(middle, []).append(gather)
        self._finish[wait] = lambda: self._call(_joined, self._wait(gathered[0]), shape)
        return started

    def _size_of(self, node: fx.Node) -> int:
        return self._mesh.shards(group_axes(str(node.args[-1])))

    def _all_to_all(self, value: fx.Node, size: int, group: Any) -> fx.Node:
        ones = [1] * size
        return self._call(_c10d.all_to_all_single.default, self._call(_rows, value, size), ones, ones, group)

    def _all_gather(self, value: fx.Node, size: int, group: Any) -> fx.Node:
        return self._call(_c10d.all_gather_into_tensor.default, value, size, group)

    def _wait(self, started: fx.Node) -> fx.Node:
        return self._call(_c10d.wait_tensor.default, started)

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return self._graph.call_function(function, args)


def _noted(made: fx.Node, replaced: fx.Node) -> fx.Node:
    """Add the collective that `made` replaces to the metadata of `made`, for errors and profiles. Return `made`."""
    made.meta |= _origin_of(replaced)
    return made


def _origin_of(replaced: fx.Node) -> dict[str, str]:
    """Return metadata of a collective for the nodes that replace it: its name, group, module and line."""
    found = {key: replaced.meta[key] for key in ("phase", "module", "source") if key in replaced.meta}
    return found | {"collective": str(replaced.target).split(".")[1], "group": str(replaced.args[-1])}


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    assert wait.target is _c10d.wait_tensor.default, f"{start} must be waited for before it is read"
    return wait


def _may_lose_nan(reduction: fx.Node) -> bool:
    """Whether a reduction takes maxima or minima of floats. Backends drop the NaN of some ranks."""
    value = cast(fx.Node, reduction.args[0]).meta.get("val")
    is_known_integer = isinstance(value, Tensor) and not value.is_floating_point()
    return reduction.args[1] in _EXTREMES and not is_known_integer


def _is_small(value: fx.Node) -> bool:
    found = value.meta.get("val")
    return isinstance(found, Tensor) and found.numel() * found.element_size() <= SMALL_BYTES


def _shape_of(value: Tensor) -> torch.Size:
    return value.shape


def _shape_of_piece(value: Tensor, size: int) -> torch.Size:
    return torch.Size((value.shape[0] // size, *value.shape[1:]))


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1)


def _rows(value: Tensor, size: int) -> Tensor:
    """Return the elements of a tensor as `size` rows of equal length. Zeros fill up the last row."""
    flat = value.reshape(-1)
    missing = -flat.numel() % size
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(size, -1)


def _reduce(received: Tensor, reduction: str, size: int, shape: Sequence[int]) -> Tensor:
    """Return the reduction, in rank order, of the `size` pieces of `received`, one from each rank."""
    pieces = received.view(size, -1).unbind(0)
    return combine(Reduction(reduction), pieces).view(shape)


def _joined(gathered: Tensor, shape: torch.Size) -> Tensor:
    """Return the first elements of `gathered` as a tensor of `shape`. The other elements are padding."""
    count = shape.numel()
    return (gathered if gathered.numel() == count else gathered[:count].contiguous()).view(shape)
