"""The tracer that builds local programs. Each node gets the fake value of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from autoshard.tracing.local_fakes import LOCAL_FAKES
from passes.preparation.number_values import call_key

EMITTED_AT = "emitted_at"
"""Metadata key of a local node: the name of the traced node at whose place it stands."""

IS_RESHARD = "is_reshard"
"""Metadata key of local nodes that belong to a reshard."""

TIMES_AS_LARGE = "times_as_large"
"""Metadata key of a bucket's nodes: the size of the bucket in the whole program, divided by its size here.

A bucket is larger in the whole program if it also has members of left-out blocks.
"""

KERNEL, PART_LEFT = "kernel", "part_left"
"""Metadata keys of nodes that are priced as parts of a kernel, without writing the kernel.

`KERNEL` is the `KernelUse`, on the kernel's last node. `PART_LEFT` is the remaining fraction of a node's own time.
"""


class LocalTracer(GraphAppendingTracer):
    """Append nodes with local fake values, and with the metadata of the traced nodes that they belong to.

    `like` is the traced node that is being lowered. `moving` is the node whose value is being resharded for it. Calls
    of one form share a fake value across programs (`LocalFakes`).
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.like: fx.Node | None = None
        self.moving: fx.Node | None = None

    def placeholder(
        self, name: str, value: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> fx.Proxy:
        """Add a placeholder for a rank's piece of a global value.

        `shape` is the shape of the piece. `strides` give the order of its dims in memory; the piece is expanded along
        dims of stride 0. None: the dims lie in their order.
        """
        proxy = self.create_proxy("placeholder", name, (), {}, name=name)
        strides = range(len(shape), 0, -1) if strides is None else strides
        order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
        held = [size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True)]
        form = ("placeholder", value.dtype, value.device, tuple(held), tuple(order), tuple(shape))
        proxy.node.meta["val"] = LOCAL_FAKES.piece(form, value, lambda: _lying(value.dtype, held, order, shape))
        return proxy

    def constant(self, name: str, value: torch.Tensor) -> fx.Proxy:
        """Add a constant of the program's module, the same on all ranks, with the form of `value`."""
        proxy = self.create_proxy("get_attr", name, (), {})
        proxy.node.meta["val"] = LOCAL_FAKES.piece(("constant", form_of(value)), value, lambda: _alike(value))
        return proxy

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        """Create a node, see `fx.proxy.TracerBase`."""
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
    """Return the properties of an operand that decide an operator's fake value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device, value.layout
    if isinstance(value, (tuple, list)):
        return tuple(map(form_of, value))
    return type(value), value
