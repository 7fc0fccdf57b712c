"""The table of operator costs, how to add to it, and how bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from cost_models.work import Kind, TensorInfo, Work

Counter = Callable[[Sequence[TensorInfo], Sequence[TensorInfo], tuple[object, ...]], Work]

TABLE: dict[str, Counter] = {}
FREE = Work(0, 0, 0, Kind.VIEW, "f32")
_FLOATS = frozenset({"f64", "f32", "bf16", "f16", "f8"})


def operator_cost(*names: str) -> Callable[[Counter], Counter]:
    """Register a counter (inputs, outputs, arguments) -> Work. A second entry for a name raises ValueError."""

    def register(counter: Counter) -> Counter:
        for name in names:
            if name in TABLE:
                raise ValueError(f"Operator {name!r} already has a cost formula: {TABLE[name].__name__}.")
            TABLE[name] = counter
        return counter

    return register


def size_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of all tensors together."""
    return sum(prod(shape) * itemsize for shape, itemsize, _ in tensors)


def numel(tensor: TensorInfo) -> int:
    """Number of elements."""
    return prod(tensor.shape)


def compute_dtype(tensors: Sequence[TensorInfo]) -> str:
    """Dtype name that arithmetic runs in: that of the first floating operand; "f32" if there is none."""
    for tensor in tensors:
        if tensor.dtype in _FLOATS:
            return tensor.dtype
    return "f32"


def memory_bound(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], _: tuple[object, ...] = ()) -> Work:
    """Operands read once, results written once, one FLOP per element of the largest."""
    if not outputs:
        return FREE
    elements = max(prod(tensor.shape) for tensor in (*inputs, *outputs))
    results = sum(prod(tensor.shape) for tensor in outputs)
    kind = Kind.POINTWISE if results >= elements else Kind.REDUCTION
    return Work(elements, size_bytes(inputs), size_bytes(outputs), kind, compute_dtype((*inputs, *outputs)))
