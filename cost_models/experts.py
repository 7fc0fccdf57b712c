"""FLOPs and bytes of layers of experts (entries of `counting.TABLE`), and their exchanges between ranks.

Shapes: T tokens, k experts for each token, H hidden size, I intermediate size; g is 2 with a gate, else 1. A row is one
token at one of its experts (an assignment), so there are R = T k rows. The first product of an expert is [H, g I], the
second is [I, H].

The tokens' choice of experts is unknown in advance, so all experts are assumed to be equally likely. If ranks have
different experts, all ranks wait for the busiest rank, which gets more rows than the mean even then (`busiest_rows`).
"""

from __future__ import annotations

from math import ceil, log, sqrt

from cost_models.counting import compute_dtype, operator_cost, size_bytes
from cost_models.exchanges import EXCHANGES, WORKSPACE_BYTES, Arguments, Exchanged, Tensors
from cost_models.work import Kind, MatmulShape, TensorInfo, Work

_CLAMPED_SILU = "clamped_silu"
_ALIGNED = 8
"""Rows of an expert are counted in multiples of 8, which are 16 bytes of 16-bit numbers."""


def busiest_rows(rows: float, ranks: int) -> float:
    """Expected rows at the busiest of `ranks`, if each of `rows` goes to each rank with the same probability.

    The number is rows / n + sqrt(2 rows / n ln n), at most all rows, for n ranks. It is the largest load of n bins
    (Raab, Steger, "Balls into bins", 1998, theorem 1). An unbalanced router sends more rows to the busiest rank.

    Example:
        >>> busiest_rows(20_000, 1), round(busiest_rows(20_000, 8))
        (20000, 2602)
    """
    mean = rows / ranks
    return rows if ranks == 1 else min(rows, mean + sqrt(2 * mean * log(ranks)))


def _forward(inputs: Tensors, outputs: Tensors, rows: float) -> Work:
    """Return the work of a forward: both products of the layer.

    inputs: (x [T, H], index [T, k], weights, gate_up, its optional bias, down).
    """
    first, second = _products(inputs, rows)
    return _work(inputs, outputs, (first, second), rows, 1)


def _backward(inputs: Tensors, outputs: Tensors, rows: float) -> Work:
    """Return the work of a backward: the first product again, and the products of all gradients.

    inputs: the gradient of the result, then the inputs of the forward.
    """
    first, second = _products(inputs[1:], rows)
    found = _work(inputs, outputs, (first, *_gradients(first, second)), rows, 2)
    return found._replace(recomputed_flops=first.flops)


def _gradients(first: MatmulShape, second: MatmulShape) -> tuple[MatmulShape, ...]:
    """Return the matrix products of the backward: for the gradients of the layer's rows, then of its two matrices."""
    shapes = (first, second)
    return (*map(_turned, shapes), *(MatmulShape(s.k, s.n, s.m, s.batch) for s in shapes))


def _turned(shape: MatmulShape) -> MatmulShape:
    return MatmulShape(shape.m, shape.k, shape.n, shape.batch)


def _products(inputs: Tensors, rows: float) -> tuple[MatmulShape, MatmulShape]:
    """Return the forward's two products, with an equal number of rows for each expert, rounded up to `_ALIGNED`.

    Without rounding, `compute` would price the products for gradients of matrices as misaligned. But a grouped kernel
    is fast for any number of rows, because the elements within each row stay aligned.
    """
    hidden, intermediate, gated = _widths(inputs)
    experts = inputs[-1].shape[0]
    mean = _ALIGNED * max(1, ceil(rows / experts / _ALIGNED))
    return MatmulShape(mean, gated, hidden, experts), MatmulShape(mean, hidden, intermediate, experts)


def _widths(inputs: Tensors) -> tuple[int, int, int]:
    """Return H, I and g I of a layer."""
    hidden = inputs[0].shape[1]
    down, gate_up = inputs[-1].shape, inputs[3].shape
    elements = gate_up[1] * gate_up[2] * gate_up[3]
    return hidden, down[1] * down[2] // hidden, elements // hidden


def _work(inputs: Tensors, outputs: Tensors, products: tuple[MatmulShape, ...], rows: float, passes: int) -> Work:
    """Return the work of `products`, and of the copies of rows to experts and back.

    rows: the expected number of rows R on this rank. Each copy reads and writes R rows of H elements.
    passes: the number of copies to the experts. One more copy brings rows back.
    """
    dtype, itemsize = compute_dtype(inputs), inputs[0].itemsize
    hidden = inputs[0].shape[1]
    inner = sum(shape.m * shape.batch * (shape.n + shape.k) for shape in products) * itemsize
    copied = (passes + 1) * rows * hidden * itemsize
    read, written = size_bytes(inputs) + inner + copied, size_bytes(outputs) + copied
    return Work(sum(shape.flops for shape in products), read, written, Kind.MATMUL, dtype, products)


def _own_rows(x: Tensors, held: int, experts: int) -> float:
    """Return the expected number of rows on the busiest rank, if each rank holds `held` of the `experts` experts.

    x: a rank's operands (tokens, index, ...).
    """
    return busiest_rows(_assignments(x), max(1, experts // held))


def _assignments(x: Tensors) -> int:
    """Return T k, the number of rows that a rank's own tokens make.

    x: a rank's operands (tokens, index, ...).
    """
    return x[1].shape[0] * x[1].shape[1]


@operator_cost("autoshard.experts.default")
def experts(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a layer on the busiest rank. A rank computes the rows of the experts that it holds.

    arguments: (x, index, weights, gate_up, gate_up_bias, down, experts, ...).
    """
    return _forward(inputs, outputs, _own_rows(inputs, inputs[-1].shape[0], _count(arguments[6])))


@operator_cost("autoshard.experts_backward.default")
def experts_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the backward of `experts`. arguments: the gradient of the result, then those of `experts`."""
    return _backward(inputs, outputs, _own_rows(inputs[1:], inputs[-1].shape[0], _count(arguments[7])))


@operator_cost("autoshard.exchanged_experts.default")
def exchanged_experts(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a layer that exchanges rows between ranks, on the rank that receives most rows."""
    return _forward(inputs, outputs, _arriving(inputs, _count(arguments[6])))


@operator_cost("autoshard.exchanged_experts_backward.default")
def exchanged_experts_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the backward of `exchanged_experts`, on the rank that receives most rows."""
    return _backward(inputs, outputs, _arriving(inputs[1:], _count(arguments[7])))


@operator_cost("autoshard.exchanged_experts_keeping.default")
def exchanged_experts_keeping(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of `exchanged_experts` that saves values for the backward. Saving adds no work."""
    return exchanged_experts(inputs, outputs[:1], arguments)


@operator_cost("autoshard.exchanged_experts_kept_backward.default")
def exchanged_experts_kept_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a backward with saved rows and saved first products: the products of all gradients.

    arguments: (grad_out, index, weights, gate_up, gate_up_bias, down, rows, u, counts, experts, ...).
    """
    operands = _operands_of_kept(inputs)
    rows = _arriving(operands, _count(arguments[9]))
    return _work(operands, outputs, _gradients(*_products(operands, rows)), rows, 1)


def _operands_of_kept(inputs: Tensors) -> Tensors:
    """Return operands in the order of the forward, with the result's gradient in the place of x (of equal shape)."""
    return inputs[:-3]


def _arriving(x: Tensors, experts: int) -> float:
    """Return the expected number of rows that the busiest rank receives.

    x: a rank's own operands (tokens, index, ..., down).
    """
    ranks = experts // x[-1].shape[0]
    return busiest_rows(ranks * _assignments(x), ranks)


def _count(experts: object) -> int:
    assert isinstance(experts, int), "how many experts there are is a number of the call"
    return experts


def _sent_forward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Return the exchanges of a forward, on the rank that receives most rows.

    Each expert's number of rows, and then the rows, go to the experts' ranks. Results come back.
    """
    experts = _count(arguments[6])
    rows = _arriving(inputs, experts) * _row_bytes(inputs[0])
    return [Exchanged(size) for size in (_counts_bytes(experts), rows, rows)]


def _sent_backward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Return the exchanges of a backward, on the rank that receives most rows.

    Each expert's number of rows, then rows, gradients and router weights go to the experts' ranks. Gradients of rows
    and of weights come back.

    The first product overlaps with the arrival of gradients. The gradients of matrices overlap with the gradients of
    rows on their way back.
    """
    operands, experts = inputs[1:], _count(arguments[7])
    arriving = _arriving(operands, experts)
    row, weight = arriving * _row_bytes(operands[0]), arriving * operands[2].itemsize
    first, second = (shape.flops for shape in _products(operands, arriving))
    whole = 3 * first + 2 * second
    there, back = (Exchanged(row, overlapped_share=flops / whole) for flops in (first, first + second))
    return [Exchanged(_counts_bytes(experts)), Exchanged(row), there, Exchanged(weight), back, Exchanged(weight)]


def _sent_kept_backward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Return the exchanges of a backward with saved rows, on the rank that receives most rows.

    Gradients of results and router weights go to the experts. Gradients of rows and of weights come back.

    The gradients of rows overlap with half of the call's computation.
    """
    operands = _operands_of_kept(inputs)
    arriving = _arriving(operands, _count(arguments[9]))
    row, weight = arriving * _row_bytes(operands[0]), Exchanged(arriving * operands[2].itemsize)
    return [Exchanged(row), weight, Exchanged(row, overlapped_share=0.5), weight]


def _row_bytes(x: TensorInfo) -> int:
    return x.shape[1] * x.itemsize


def _counts_bytes(experts: int) -> float:
    """Return the bytes of one eight-byte number for each expert of all ranks."""
    return 8.0 * experts


def _workspace_forward(inputs: Tensors, rows: float, activation: object) -> float:
    """Return the bytes of a forward's workspace, if the first product's result is not saved for the backward."""
    _, _, gated = _widths(inputs)
    return _workspace_keeping(inputs, rows, activation, also=gated)


def _workspace_keeping(inputs: Tensors, rows: float, activation: object, also: int = 0) -> float:
    """Return the bytes of a forward's workspace, for `rows` rows on a rank: the larger of two peaks.

    `also` is a further number of values for each row, such as those of the first product's result.

    * Around the second product, a row needs `also` values and the larger of two numbers of values. The gate needs I
      values (five I if its activation is clamped). The second product's operand and result are I + H values.
    * At the end, a row needs its result and its weighed result, and weighed results are copied into the tokens' order.

    The order of the rows is in memory at both peaks.
    """
    hidden, intermediate, _ = _widths(inputs)
    halves = 5 if activation == _CLAMPED_SILU else 1
    made = rows * (also + max(halves * intermediate, hidden + intermediate)) * inputs[0].itemsize
    weighed = rows * hidden * (inputs[0].itemsize + inputs[2].itemsize)
    apart = _assignments(inputs) * hidden * inputs[2].itemsize
    return _order_bytes(inputs) + max(made, weighed + apart)


def _workspace_backward(inputs: Tensors, rows: float, activation: object) -> float:
    """Return the bytes of a backward's workspace, if the rows and the first product's result are not saved."""
    hidden, _, gated = _widths(inputs[1:])
    return _workspace_kept_backward(inputs[1:], rows, activation, also=hidden + gated)


def _workspace_kept_backward(operands: Tensors, rows: float, activation: object, also: int = 0) -> float:
    """Return the bytes of a backward's workspace, for `rows` rows on a rank, if the forward saved values.

    A row needs `also` values, such as those of its copy, and the larger of two numbers of values. At the gate it needs
    a gradient and five I values (nine I if the activation is clamped). Behind the gate it needs the operands and
    results of the last products.
    """
    hidden, intermediate, gated = _widths(operands)
    at_gate = hidden + (9 if activation == _CLAMPED_SILU else 5) * intermediate
    behind = 3 * hidden + gated + 2 * intermediate
    return _order_bytes(operands) + rows * (also + max(at_gate, behind)) * operands[0].itemsize


def _order_bytes(inputs: Tensors) -> int:
    """Return the bytes of two eight-byte numbers for each row: its expert, and its place before sorting."""
    return 2 * 8 * _assignments(inputs)


WORKSPACE_BYTES.update(
    {
        "autoshard.experts.default": lambda inputs, arguments: _workspace_forward(
            inputs, _assignments(inputs), arguments[7]
        ),
        "autoshard.experts_backward.default": lambda inputs, arguments: _workspace_backward(
            inputs, _assignments(inputs[1:]), arguments[8]
        ),
        "autoshard.exchanged_experts.default": lambda inputs, arguments: _workspace_forward(
            inputs, _arriving(inputs, _count(arguments[6])), arguments[7]
        ),
        "autoshard.exchanged_experts_backward.default": lambda inputs, arguments: _workspace_backward(
            inputs, _arriving(inputs[1:], _count(arguments[7])), arguments[8]
        ),
        "autoshard.exchanged_experts_keeping.default": lambda inputs, arguments: _workspace_keeping(
            inputs, _arriving(inputs, _count(arguments[6])), arguments[7]
        ),
        "autoshard.exchanged_experts_kept_backward.default": lambda inputs, arguments: _workspace_kept_backward(
            _operands_of_kept(inputs), _arriving(_operands_of_kept(inputs), _count(arguments[9])), arguments[10]
        ),
    }
)
# These functions return 1.0 to 1.3 times the measured bytes of operators on one rank.

EXCHANGES.update(
    {
        "autoshard.exchanged_experts.default": _sent_forward,
        "autoshard.exchanged_experts_backward.default": _sent_backward,
        "autoshard.exchanged_experts_keeping.default": _sent_forward,
        "autoshard.exchanged_experts_kept_backward.default": _sent_kept_backward,
    }
)
