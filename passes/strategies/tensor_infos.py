"""Describe the values of fx nodes as `TensorInfo` (shape, bytes per element, dtype), which the cost models take."""

from __future__ import annotations

from torch import Tensor, fx

from cost_models.work import TensorInfo
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.operator_names import dtype_name


def tensor_info(value: Tensor) -> TensorInfo:
    """Return the description of one tensor."""
    return TensorInfo(tuple(value.shape), value.itemsize, dtype_name(value.dtype))


def operand_infos(node: fx.Node) -> list[TensorInfo]:
    """Return the descriptions of a call's tensor operands, in order."""
    return [tensor_info(operand.meta["val"]) for operand in operands_of(node)]


def tensor_infos(node: fx.Node) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """Return the descriptions of a call's tensor operands, and of its tensor results, each in order."""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return operand_infos(node), [tensor_info(item) for item in values if isinstance(item, Tensor)]
