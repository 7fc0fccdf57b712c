"""Shapes and types of nodes' values, for the cost models."""

from __future__ import annotations

from torch import Tensor, fx

from cost_models.work import TensorInfo
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.operator_names import dtype_name


def tensor_info(value: Tensor) -> TensorInfo:
    """Shape and type of a value."""
    return TensorInfo(tuple(value.shape), value.itemsize, dtype_name(value.dtype))


def operand_infos(node: fx.Node) -> list[TensorInfo]:
    """Shapes and types of a call's operands."""
    return [tensor_info(operand.meta["val"]) for operand in operands_of(node)]


def tensor_infos(node: fx.Node) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """Shapes and types of a call's operands, and of its results."""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return operand_infos(node), [tensor_info(item) for item in values if isinstance(item, Tensor)]
