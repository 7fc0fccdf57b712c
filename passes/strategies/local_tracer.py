"""The tracer that builds the graphs of lowered programs. Each node gets a fake tensor with the shape on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from autoshard.tracing.local_fakes import LOCAL_FAKES
from passes.preparation.number_values import call_key

EMITTED_AT = "emitted_at"
"""Key of `node.meta` in a lowered program: the name of the traced node for whose lowering the node was emitted."""

IS_RESHARD = "is_reshard"
"""Key of `node.meta` in a lowered program: True on the nodes of a reshard."""

TIMES_AS_LARGE = "times_as_large"
"""Key of `node.meta` of a bucket: the bucket's bytes in the whole program, divided by its bytes in this program.

The ratio is above 1 if this program leaves out repeated blocks whose gradients or parameters belong to the bucket.
"""

KERNEL, PART_LEFT = "kernel", "part_left"
"""Keys of `node.meta` on nodes that a fused kernel would replace, in a program that is only priced.

`KERNEL` is on the last node that a generated kernel replaces, and on the call of a hand-written kernel. Its value is
the `KernelUse`. `PART_LEFT` is on each replaced node: the fraction of the node's own time that still counts.
"""


class LocalTracer(GraphAppendingTracer):
    """A tracer that gives each node a fake tensor with the shape on one rank, and metadata of a traced node.

    The lowering sets two attributes. `like` is the traced node that is being lowered. Its phase, module and source line
    are copied. `moving` is the traced node whose value is being resharded for `like`, or None outside of reshards.
    Calls with equal operators and operands of equal shape, dtype and strides share one fake tensor across programs
    (`LocalFakes`).
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.like: fx.Node | None = None
        self.moving: fx.Node | None = None

    def placeholder(
        self, name: str, value: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> fx.Proxy:
        """Add a placeholder for a rank's piece of the global tensor `value`, with the dtype and device of `value`.

        Args:
            shape: shape of the piece on one rank.
            strides: strides of the global value. They give the order of the piece's dims in memory. Along dims of
                stride 0 the piece is expanded from one element. None: the piece is contiguous.
        """
        proxy = self.create_proxy("placeholder", name, (), {}, name=name)
        strides = range(len(shape), 0, -1) if strides is None else strides
        order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
        held = [size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True)]
        form = ("placeholder", value.dtype, value.device, tuple(held), tuple(order), tuple(shape))
        proxy.node.meta["val"] = LOCAL_FAKES.piece(form, value, lambda: _lying(value.dtype, held, order, shape))
        return proxy

    def constant(self, name: str, value: torch.Tensor) -> fx.Proxy:
        """Add a `get_attr` node for the constant `name` of the program's module, which every rank has whole."""
        proxy = self.create_proxy("get_attr", name, (), {})
        proxy.node.meta["val"] = LOCAL_FAKES.piece(("constant", form_of(value)), value, lambda: _alike(value))
        return proxy

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        """Create a node with the metadata of `like`. For a call, `meta["val"]` is its fake result on one rank."""
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        if self.like is not None:
            inherited = ("phase", "module", "source")
            node.meta = {key: self.like.meta[key] for key in inherited if key in self.like.meta}
            node.meta |= {"global": (self.moving or self.like).name, EMITTED_AT: self.like.name}
            if self.moving is not None:
                node.meta[IS_RESHARD] = True
        if kind == "call_function":
            node.meta["val"] = self._evaluate(node)
        return node

    def _evaluate(self, node: fx.Node) -> Any:
        if getattr(node.target, "__name__", "") == "axis_index":
            return 0
        form = call_key(node.op, node.target, node.args, node.kwargs, lambda operand: form_of(operand.meta["val"]))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        return LOCAL_FAKES.result(form, node.target, args, kwargs)  # pyright: ignore[reportArgumentType]


def _lying(dtype: torch.dtype, held: list[int], order: list[int], shape: Sequence[int]) -> torch.Tensor:
    lying = torch.empty_permuted(held, order, dtype=dtype, device="meta")
    return lying if held == list(shape) else lying.expand(shape)


def _alike(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def form_of(value: Any) -> Any:
    """Return a hashable key of an operand: a tensor's dtype, shape and strides, or the value itself.

    Calls of one operator whose operands have equal keys have the same fake result.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device, value.layout
    if isinstance(value, (tuple, list)):
        return tuple(map(form_of, value))
    return type(value), value
