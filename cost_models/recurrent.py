"""FLOPs and bytes of whole recurrent layers and fused transformer blocks (entries of `counting.TABLE`).

A recurrent layer multiplies the whole sequence with its input weights at once. At each of the T time steps it
multiplies the state with its hidden weights. The time steps run one after the other. A cell such as
`_thnn_fused_lstm_cell` gets the products as operands, so it is pointwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cost_models.counting import compute_dtype, operator_cost, size_bytes
from cost_models.work import AttentionShape, Kind, MatmulShape, TensorInfo, Work

Tensors = Sequence[TensorInfo]
Arguments = tuple[object, ...]


@operator_cost(
    *("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
    *("aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default", "aten.miopen_rnn.default"),
)
def recurrent_layers(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of whole recurrent layers.

    Each weight is multiplied with all T * B tokens once, hidden weights [gates * H, H] step by step. Time may be the
    first or the second dim of the sequence. The FLOPs are equal in both cases, so the longer dim counts as time.

    inputs: the sequence [T, B, I] or [B, T, I], states, weights [gates * H, in].
    """
    first, second, _ = inputs[0].shape
    steps, rows = max(first, second), min(first, second)
    weights = [tensor for tensor in inputs[1:] if len(tensor.shape) == 2]
    products = tuple(MatmulShape(rows, weight.shape[0], weight.shape[1], steps) for weight in weights)
    flops = sum(product.flops for product in products)
    layers = max(1, len(weights) // 2)
    read, written = size_bytes(inputs), size_bytes(outputs)
    return Work(flops, read, written, Kind.MATMUL, compute_dtype(inputs), products, steps=steps * layers)


@operator_cost("aten.mkldnn_rnn_layer_backward.default", "aten._cudnn_rnn_backward.default")
def recurrent_layers_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the backward: twice the forward, because both inputs and weights have gradients."""
    forward = recurrent_layers(inputs, outputs, arguments)
    return forward._replace(flops=2 * forward.flops, products=2 * forward.products)


LAUNCHES = {  # kernels of one time step, forward and backward: `autoshard.kernels.recurrent` in float32
    "lstm": (8, 6),
    "gru": (8, 4),
    "rnn": (2, 3),
}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def _register_recurrent(name: str) -> None:
    forward_launches, backward_launches = LAUNCHES[name]

    def forward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        """Return the work of a forward.

        Each time step multiplies the state [B, P] by [gates H, P], and by [P, H] if P < H.
        """
        batch, steps, gates = inputs[0].shape
        fed_back, hidden = inputs[1].shape[1], gates // GATES[name]
        weights = [(gates, fed_back)] + [(fed_back, hidden)] * (fed_back != hidden)
        products = tuple(MatmulShape(batch, rows, columns) for rows, columns in weights) * steps
        return _step_by_step(inputs, outputs, products, weights, steps, forward_launches)

    def backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        """Return the work of a backward.

        It has a product for the state per weight and time step, and one product for each weight's gradient.
        """
        batch, steps, gates = outputs[0].shape
        fed_back, hidden = outputs[1].shape[1], gates // GATES[name]
        weights = [(gates, fed_back)] + [(fed_back, hidden)] * (fed_back != hidden)
        products = tuple(MatmulShape(batch, columns, rows) for rows, columns in weights) * steps
        products += tuple(MatmulShape(rows, columns, batch * steps) for rows, columns in weights)
        return _step_by_step(inputs, outputs, products, weights, steps, backward_launches)

    operator_cost(f"autoshard.{name}.default")(forward)
    operator_cost(f"autoshard.{name}_backward.default")(backward)


def _step_by_step(
    inputs: Tensors,
    outputs: Tensors,
    products: tuple[MatmulShape, ...],
    weights: Sequence[tuple[int, int]],
    steps: int,
    launches: int,
) -> Work:
    """Return the work of sequential time steps, each of which makes `launches` launches, and reads all weights again.

    `weights` has the shape of each weight.
    """
    flops = sum(product.flops for product in products)
    reread = (steps - 1) * sum(map(prod, weights)) * inputs[0].itemsize
    read, written = size_bytes(inputs) + reread, size_bytes(outputs)
    return Work(flops, read, written, Kind.MATMUL, compute_dtype(inputs), products, steps=steps * launches)


for _name in LAUNCHES:
    _register_recurrent(_name)


@operator_cost("aten._native_multi_head_attention.default")
def native_multi_head_attention(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of attention with its four projections: 4 E^2 multiplications for each token, and attention.

    arguments: (query [B, T, E], key, value, E, heads).
    """
    batch, length, width = inputs[0].shape
    products = (MatmulShape(batch * length, 3 * width, width), MatmulShape(batch * length, width, width))
    return _block(inputs, outputs, products, batch, length, width, int(arguments[4]))  # type: ignore[call-overload]


@operator_cost("aten._transformer_encoder_layer_fwd.default")
def transformer_encoder_layer(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of attention, and of the products of all tokens with each matrix operand.

    arguments: (src [B, T, E], E, heads, ...).
    """
    batch, length, width = inputs[0].shape
    weights = [tensor.shape for tensor in inputs[1:] if len(tensor.shape) == 2]
    products = tuple(MatmulShape(batch * length, *weight) for weight in weights)
    return _block(inputs, outputs, products, batch, length, width, int(arguments[2]))  # type: ignore[call-overload]


def _block(
    inputs: Tensors,
    outputs: Tensors,
    products: tuple[MatmulShape, ...],
    batch: int,
    length: int,
    width: int,
    heads: int,
) -> Work:
    """Return the work of `products` and of attention's two batched products, whose scores are not moved to memory."""
    shape = AttentionShape(batch * heads, length, length, width // heads, width // heads)
    inner = MatmulShape(length, length, width // heads, batch * heads)
    outer = MatmulShape(length, width // heads, length, batch * heads)
    flops = sum(product.flops for product in products) + shape.flops
    read, written = size_bytes(inputs), size_bytes(outputs)
    return Work(flops, read, written, Kind.MATMUL, compute_dtype(inputs), (*products, inner, outer))
