"""The table of operator costs (`TABLE`), a decorator that adds to the table, and functions that count bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from cost_models.work import Kind, TensorInfo, Work

Counter = Callable[[Sequence[TensorInfo], Sequence[TensorInfo], tuple[object, ...]], Work]

TABLE: dict[str, Counter] = {}
FREE = Work(0, 0, 0, Kind.VIEW, "f32")
_PARTS = {"c128": "f64", "c64": "f32", "c32": "f16"}
_FLOATS = frozenset({"f64", "f32", "bf16", "f16", "f8"})


def operator_cost(*names: str) -> Callable[[Counter], Counter]:
    """Return a decorator that registers a counter for operators of these names.

    A counter takes (inputs, outputs, arguments) and returns `Work`. A second counter for a name raises ValueError.
    """

    def register(counter: Counter) -> Counter:
        for name in names:
            if name in TABLE:
                raise ValueError(f"Operator {name!r} already has a cost formula: {TABLE[name].__name__}.")
            TABLE[name] = counter
        return counter

    return register


def size_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Return the bytes of all tensors together, each counted by its local shape."""
    return sum(prod(shape) * itemsize for shape, itemsize, _ in tensors)


def numel(tensor: TensorInfo) -> int:
    """Return the number of elements of a tensor's local shape."""
    return prod(tensor.shape)


def compute_dtype(tensors: Sequence[TensorInfo]) -> str:
    """Return the dtype name of an operator's arithmetic: that of the first floating tensor, "f32" without one.

    Complex numbers are computed in the dtype of their parts ("c128" in "f64"). Any float8 format counts as "f8".
    """
    for tensor in tensors:
        if tensor.dtype in _FLOATS:
            return tensor.dtype
        if tensor.dtype in _PARTS:
            return _PARTS[tensor.dtype]
        if "float8" in tensor.dtype:
            return "f8"
    return "f32"


def is_complex(tensors: Sequence[TensorInfo]) -> bool:
    """Whether an operand is complex. A multiply-add of complex numbers takes four multiply-adds of real numbers."""
    return any(tensor.dtype in _PARTS for tensor in tensors)


def memory_bound(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], _: tuple[object, ...] = ()) -> Work:
    """Return the work of an operator that reads each operand once and writes each result once.

    It has one FLOP for each element of its largest tensor. Without results, the work is `FREE`.
    """
    if not outputs:
        return FREE
    elements = max(prod(tensor.shape) for tensor in (*inputs, *outputs))
    results = sum(prod(tensor.shape) for tensor in outputs)
    kind = Kind.POINTWISE if results >= elements else Kind.REDUCTION
    return Work(elements, size_bytes(inputs), size_bytes(outputs), kind, compute_dtype((*inputs, *outputs)))
