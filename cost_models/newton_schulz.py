"""FLOPs, bytes and temporary memory of Muon's orthogonalisation (an entry of `counting.TABLE`).

A Newton-Schulz step on a matrix [m, n] with m <= n has three products: X X^T, [m, n] by [n, m]; A A, [m, m] by [m, m];
and B X, [m, m] by [m, n] (Jordan et al., "Muon", 2024). That is 4 m^2 n + 2 m^3 FLOPs a step.
"""

from __future__ import annotations

from math import prod

from cost_models.counting import compute_dtype, operator_cost, size_bytes
from cost_models.exchanges import WORKSPACE_BYTES, Arguments, Tensors
from cost_models.work import Kind, MatmulShape, Work

_NAME = "autoshard.orthogonalise.default"


@operator_cost(_NAME)
def orthogonalise(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of all steps on a batch of matrices [..., m, n], one matrix after the other.

    arguments: (xs, coefficients, steps, eps).
    """
    batch, low, high = _sizes(inputs)
    steps = arguments[2]
    assert isinstance(steps, int), "the number of steps is a literal"
    shapes = (MatmulShape(low, low, high), MatmulShape(low, low, low), MatmulShape(low, high, low)) * steps * batch
    flops = sum(shape.flops for shape in shapes)
    read = steps * batch * (2 * low * high + 3 * low * low)  # by each step: X twice, A three times
    written = steps * batch * (low * high + 2 * low * low)
    itemsize = inputs[0].itemsize
    read_bytes, written_bytes = size_bytes(inputs) + read * itemsize, size_bytes(outputs) + written * itemsize
    return Work(flops, read_bytes, written_bytes, Kind.MATMUL, compute_dtype(inputs), shapes, steps=max(1, len(shapes)))


def _workspace(inputs: Tensors, arguments: Arguments) -> float:
    """Return the bytes of all results, and of one matrix X, A and b A + c A A."""
    batch, low, high = _sizes(inputs)
    return ((batch + 1) * low * high + 2 * low * low) * inputs[0].itemsize


def _sizes(inputs: Tensors) -> tuple[int, int, int]:
    """Return the number of matrices, and the smaller and the larger dim of each."""
    *batch, rows, columns = inputs[0].shape
    return prod(batch), min(rows, columns), max(rows, columns)


WORKSPACE_BYTES[_NAME] = _workspace
