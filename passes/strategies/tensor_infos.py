"""Describe the values of fx nodes as `TensorInfo` (shape, bytes per element, dtype), which the cost models take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from cost_models.work import TensorInfo
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.operator_names import dtype_name


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a node's value: a tensor, or a tuple or list of values. Anything else has none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def bytes_in(value: Any) -> int:
    """Return the bytes of all tensors of a node's value."""
    return sum(item.numel() * item.itemsize for item in tensors_in(value))


def tensor_info(value: Tensor) -> TensorInfo:
    """Return shape, bytes per element and dtype of one tensor, as the cost models take them."""
    return TensorInfo(tuple(value.shape), value.itemsize, dtype_name(value.dtype))


def operand_infos(node: fx.Node) -> list[TensorInfo]:
    """Return shape, bytes per element and dtype of each of a call's tensor operands, in order."""
    return [tensor_info(operand.meta["val"]) for operand in operands_of(node)]


def tensor_infos(node: fx.Node) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """Return shape, bytes per element and dtype of a call's tensor operands, and of its tensor results, in order."""
    return operand_infos(node), list(map(tensor_info, tensors_in(node.meta.get("val"))))
