"""FLOPs and bytes of layers of experts (entries of `counting.TABLE`), and their exchanges between ranks.

The tokens' choice of experts is unknown in advance, so experts are assumed equally likely. If ranks have different
experts, all ranks wait for the busiest one, which gets more than the mean even then (`busiest_rows`).
"""

from __future__ import annotations

from math import ceil, log, sqrt

from cost_models.counting import compute_dtype, operator_cost, size_bytes
from cost_models.exchanges import EXCHANGES, WORKSPACE_BYTES, Arguments, Exchanged, Tensors
from cost_models.work import Kind, MatmulShape, TensorInfo, Work

_CLAMPED_SILU = "clamped_silu"
_ALIGNED = 8
"""Rows of an expert are counted in multiples of 8, of 16 bytes in 16 bits."""


def busiest_rows(rows: float, ranks: int) -> float:
    """Expected rows at the busiest of `ranks`, if each of `rows` goes to each rank with the same probability.

    rows / n + sqrt(2 rows / n ln n), and no more than all: the largest load of n bins (Raab, Steger, "Balls into bins",
    1998, theorem 1). An unbalanced router sends more rows there.

    Example:
        >>> busiest_rows(20_000, 1), round(busiest_rows(20_000, 8))
        (20000, 2602)
    """
    mean = rows / ranks
    return rows if ranks == 1 else min(rows, mean + sqrt(2 * mean * log(ranks)))


def _forward(inputs: Tensors, outputs: Tensors, rows: float) -> Work:
    """inputs: (x [T, H], index [T, k], weights, gate_up, its optional bias, down)."""
    first, second = _products(inputs, rows)
    return _work(inputs, outputs, (first, second), rows, 1)


def _backward(inputs: Tensors, outputs: Tensors, rows: float) -> Work:
    """inputs: the gradient of the result, then those of the forward. The first product is made again."""
    first, second = _products(inputs[1:], rows)
    found = _work(inputs, outputs, (first, *_gradients(first, second)), rows, 2)
    return found._replace(recomputed_flops=first.flops)


def _gradients(first: MatmulShape, second: MatmulShape) -> tuple[MatmulShape, ...]:
    """The products for gradients of rows and of matrices."""
    shapes = (first, second)
    return (*map(_turned, shapes), *(MatmulShape(s.k, s.n, s.m, s.batch) for s in shapes))


def _turned(shape: MatmulShape) -> MatmulShape:
    """The product for the gradient of rows."""
    return MatmulShape(shape.m, shape.k, shape.n, shape.batch)


def _products(inputs: Tensors, rows: float) -> tuple[MatmulShape, MatmulShape]:
    """Both products of the forward, with as many rows for each expert.

    A grouped kernel takes any number of rows as fast as an aligned number, since its operands' rows stay aligned.
    """
    hidden, intermediate, gated = _widths(inputs)
    experts = inputs[-1].shape[0]
    mean = _ALIGNED * max(1, ceil(rows / experts / _ALIGNED))
    return MatmulShape(mean, gated, hidden, experts), MatmulShape(mean, hidden, intermediate, experts)


def _widths(inputs: Tensors) -> tuple[int, int, int]:
    """H, I and g I."""
    hidden = inputs[0].shape[1]
    down, gate_up = inputs[-1].shape, inputs[3].shape
    elements = gate_up[1] * gate_up[2] * gate_up[3]
    return hidden, down[1] * down[2] // hidden, elements // hidden


def _work(inputs: Tensors, outputs: Tensors, products: tuple[MatmulShape, ...], rows: float, passes: int) -> Work:
    """Rows are copied to their experts and back, and each product's operands and results are moved once.

    `passes`: how many operands of [R, H] are sorted by expert.
    """
    dtype, itemsize = compute_dtype(inputs), inputs[0].itemsize
    hidden = inputs[0].shape[1]
    inner = sum(shape.m * shape.batch * (shape.n + shape.k) for shape in products) * itemsize
    copied = (passes + 1) * rows * hidden * itemsize
    read, written = size_bytes(inputs) + inner + copied, size_bytes(outputs) + copied
    return Work(sum(shape.flops for shape in products), read, written, Kind.MATMUL, dtype, products)


def _own_rows(x: Tensors, held: int, experts: int) -> float:
    """Assignments to `held` of `experts`, of all that a rank has: x = (tokens, index, ...)."""
    return busiest_rows(_assignments(x), max(1, experts // held))


def _assignments(x: Tensors) -> int:
    """T k, of x = (tokens, index, ...)."""
    return x[1].shape[0] * x[1].shape[1]


@operator_cost("autoshard.experts.default")
def experts(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (x, index, weights, gate_up, gate_up_bias, down, experts, ...)."""
    return _forward(inputs, outputs, _own_rows(inputs, inputs[-1].shape[0], _count(arguments[6])))


@operator_cost("autoshard.experts_backward.default")
def experts_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (grad_out, x, index, weights, gate_up, gate_up_bias, down, experts, ...)."""
    return _backward(inputs, outputs, _own_rows(inputs[1:], inputs[-1].shape[0], _count(arguments[7])))


@operator_cost("autoshard.exchanged_experts.default")
def exchanged_experts(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Each rank receives as many rows as it sends, and the busiest rank more."""
    return _forward(inputs, outputs, _arriving(inputs, _count(arguments[6])))


@operator_cost("autoshard.exchanged_experts_backward.default")
def exchanged_experts_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Rows arrive as in `exchanged_experts`."""
    return _backward(inputs, outputs, _arriving(inputs[1:], _count(arguments[7])))


@operator_cost("autoshard.exchanged_experts_keeping.default")
def exchanged_experts_keeping(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """`exchanged_experts` also writes the saved values, so the work is equal."""
    return exchanged_experts(inputs, outputs[:1], arguments)


@operator_cost("autoshard.exchanged_experts_kept_backward.default")
def exchanged_experts_kept_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (grad_out, index, weights, gate_up, gate_up_bias, down, rows, u, counts, experts, ...)."""
    operands = _operands_of_kept(inputs)
    rows = _arriving(operands, _count(arguments[9]))
    return _work(operands, outputs, _gradients(*_products(operands, rows)), rows, 1)


def _operands_of_kept(inputs: Tensors) -> Tensors:
    """Operands of the forward as the kept backward has them: the gradient is like x."""
    return inputs[:-3]


def _arriving(x: Tensors, experts: int) -> float:
    """Assignments that reach a rank, if each rank has x = (tokens, index, ..., down) of its own."""
    ranks = experts // x[-1].shape[0]
    return busiest_rows(ranks * _assignments(x), ranks)


def _count(experts: object) -> int:
    assert isinstance(experts, int), "how many experts there are is a number of the call"
    return experts


def _sent_forward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """All-to-alls: how many rows go where, rows there, and back; as many as the rank has that gets most."""
    experts = _count(arguments[6])
    rows = _arriving(inputs, experts) * _row_bytes(inputs[0])
    return [Exchanged(size) for size in (_counts_bytes(experts), rows, rows)]


def _sent_backward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Rows, and gradients with their weights, to the experts; gradients of rows and of weights back.

    The first product overlaps with incoming gradients, the gradients of matrices with outgoing gradients.
    """
    operands, experts = inputs[1:], _count(arguments[7])
    arriving = _arriving(operands, experts)
    row, weight = arriving * _row_bytes(operands[0]), arriving * operands[2].itemsize
    first, second = (shape.flops for shape in _products(operands, arriving))
    whole = 3 * first + 2 * second
    there, back = Exchanged(row, beside=first / whole), Exchanged(row, beside=(first + second) / whole)
    return [Exchanged(_counts_bytes(experts)), Exchanged(row), there, Exchanged(weight), back, Exchanged(weight)]


def _sent_kept_backward(inputs: Tensors, arguments: Arguments) -> list[Exchanged]:
    """Gradients of results with their weights to the experts; gradients of rows back, overlapped, and weights."""
    operands = _operands_of_kept(inputs)
    arriving = _arriving(operands, _count(arguments[9]))
    row, weight = arriving * _row_bytes(operands[0]), Exchanged(arriving * operands[2].itemsize)
    return [Exchanged(row), weight, Exchanged(row, beside=0.5), weight]


def _row_bytes(x: TensorInfo) -> int:
    return x.shape[1] * x.itemsize


def _counts_bytes(experts: int) -> float:
    """A number of eight bytes for each expert of all ranks."""
    return 8.0 * experts


def _workspace_forward(inputs: Tensors, rows: float, activation: object) -> float:
    """The first product's result, beside `_workspace_keeping`."""
    _, _, gated = _widths(inputs)
    return _workspace_keeping(inputs, rows, activation, also=gated)


def _workspace_keeping(inputs: Tensors, rows: float, activation: object, also: int = 0) -> float:
    """Per row, the `also` values, and the largest of:

    * at the gate: one half of the first product's result, or five halves;
    * between both products: intermediate values, and results;
    * results, weighed and not, and separately for each token.
    """
    hidden, intermediate, _ = _widths(inputs)
    halves = 5 if activation == _CLAMPED_SILU else 1
    made = rows * (also + max(halves * intermediate, hidden + intermediate)) * inputs[0].itemsize
    weighed = rows * hidden * (inputs[0].itemsize + inputs[2].itemsize)
    apart = _assignments(inputs) * hidden * inputs[2].itemsize
    return _order_bytes(inputs) + max(made, weighed + apart)


def _workspace_backward(inputs: Tensors, rows: float, activation: object) -> float:
    """Rows and the first product's result, beside `_workspace_kept_backward`."""
    hidden, _, gated = _widths(inputs[1:])
    return _workspace_kept_backward(inputs[1:], rows, activation, also=hidden + gated)


def _workspace_kept_backward(operands: Tensors, rows: float, activation: object, also: int = 0) -> float:
    """Per row, the `also` values; and gradients with five (or nine) halves at the gate, or the last products."""
    hidden, intermediate, gated = _widths(operands)
    at_gate = hidden + (9 if activation == _CLAMPED_SILU else 5) * intermediate
    behind = 3 * hidden + gated + 2 * intermediate
    return _order_bytes(operands) + rows * (also + max(at_gate, behind)) * operands[0].itemsize


def _order_bytes(inputs: Tensors) -> int:
    """The expert of each row and its origin."""
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
# These are 1.0 to 1.3 times the measured bytes of operators on one rank.

EXCHANGES.update(
    {
        "autoshard.exchanged_experts.default": _sent_forward,
        "autoshard.exchanged_experts_backward.default": _sent_backward,
        "autoshard.exchanged_experts_keeping.default": _sent_forward,
        "autoshard.exchanged_experts_kept_backward.default": _sent_kept_backward,
    }
)
