"""FLOPs and bytes of whole recurrent layers and fused transformer blocks (entries of `counting.TABLE`).

A recurrent layer multiplies the whole sequence with its input weights at once, and each step with its hidden weights.
The T steps are sequential. Cells with the products outside (`_thnn_fused_lstm_cell`) are pointwise.
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
    """inputs: the sequence [T, B, I] or [B, T, I], states, weights. Matrices among the weights are [gates * H, in].

    Each weight meets all T * B tokens once. Hidden weights are [gates * H, H] and meet the tokens step by step. Either
    of the first two dims may be time. The FLOPs are equal, and the longer dim gives the number of steps.
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
    """Twice the products of the forward: gradients of the inputs and of the weights."""
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
        """inputs: ([B, T, gates H], state [B, P], ...). Each step has a product with [gates H, P], and with [P, H]."""
        batch, steps, gates = inputs[0].shape
        fed_back, hidden = inputs[1].shape[1], gates // GATES[name]
        weights = [(gates, fed_back)] + [(fed_back, hidden)] * (fed_back != hidden)
        products = tuple(MatmulShape(batch, rows, columns) for rows, columns in weights) * steps
        return _step_by_step(inputs, outputs, products, weights, steps, forward_launches)

    def backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        """outputs: ([B, T, gates H], state [B, P], ...).

        Each step has a product, and each weight one over all steps.
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
    """Steps are sequential, so each product runs alone on the device, and reads the weights anew."""
    flops = sum(product.flops for product in products)
    reread = (steps - 1) * sum(map(prod, weights)) * inputs[0].itemsize
    read, written = size_bytes(inputs) + reread, size_bytes(outputs)
    return Work(flops, read, written, Kind.MATMUL, compute_dtype(inputs), products, steps=steps * launches)


for _name in LAUNCHES:
    _register_recurrent(_name)


@operator_cost("aten._native_multi_head_attention.default")
def native_multi_head_attention(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (query [B, T, E], key, value, embed_dim, num_head, ...): 4 E^2 a token, and attention."""
    batch, length, width = inputs[0].shape
    products = (MatmulShape(batch * length, 3 * width, width), MatmulShape(batch * length, width, width))
    return _block(inputs, outputs, products, batch, length, width, int(arguments[4]))  # type: ignore[call-overload]


@operator_cost("aten._transformer_encoder_layer_fwd.default")
def transformer_encoder_layer(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (src [B, T, E], embed_dim, num_heads, ...); the weights are the matrices among the operands."""
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
    """The products, with those of attention as batched products, whose scores stay on the chip."""
    shape = AttentionShape(batch * heads, length, length, width // heads, width // heads)
    inner = MatmulShape(length, length, width // heads, batch * heads)
    outer = MatmulShape(length, width // heads, length, batch * heads)
    flops = sum(product.flops for product in products) + shape.flops
    read, written = size_bytes(inputs), size_bytes(outputs)
    return Work(flops, read, written, Kind.MATMUL, compute_dtype(inputs), (*products, inner, outer))
