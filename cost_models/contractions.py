"""FLOPs and bytes of matrix products, convolutions and attention (entries of `counting.TABLE`).

A multiply-add is two FLOPs. Attention's FLOPs follow Dao 2023 (see `work.AttentionShape`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from cost_models.counting import compute_dtype, operator_cost, size_bytes
from cost_models.work import AttentionShape, Kind, MatmulShape, TensorInfo, Work

Tensors = Sequence[TensorInfo]
Arguments = tuple[object, ...]


def _products(inputs: Tensors, outputs: Tensors, products: tuple[MatmulShape, ...]) -> Work:
    flops = sum(shape.flops for shape in products)
    return Work(flops, size_bytes(inputs), size_bytes(outputs), Kind.MATMUL, compute_dtype(inputs), products)


@operator_cost("aten.mm.default", "aten.matmul.default", "aten.linear.default", "aten.dot.default", "aten.mv.default")
def matmul(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """[..., m, k] @ [k, n] (or a weight [n, k]): 2 * m * n * k; leading dims count as rows."""
    left, result = inputs[0].shape, outputs[0].shape
    k = left[-1]
    rows = prod(left[:-1])
    columns = prod(result) // rows if rows else 0
    return _products(inputs, outputs, (MatmulShape(rows, columns, k),))


@operator_cost("aten.addmm.default", "aten.addmv.default")
def addmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """bias + [m, k] @ [k, n]."""
    (m, k), n = inputs[1].shape, outputs[0].shape[-1] if len(outputs[0].shape) > 1 else 1
    return _products(inputs, outputs, (MatmulShape(m, n, k),))


@operator_cost("aten.bmm.default")
def bmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """[b, m, k] @ [b, k, n]."""
    batch, m, k = inputs[0].shape
    return _products(inputs, outputs, (MatmulShape(m, inputs[1].shape[2], k, batch),))


@operator_cost("aten.baddbmm.default")
def baddbmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """bias + [b, m, k] @ [b, k, n]."""
    batch, m, k = inputs[1].shape
    return _products(inputs, outputs, (MatmulShape(m, inputs[2].shape[2], k, batch),))


@operator_cost("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """A product for each group; the dim that is grouped (rows, columns or contracted) is taken as cut evenly."""
    left, right = inputs[0].shape, inputs[1].shape
    rows, contracted, columns = left[-2], left[-1], right[-1]
    match len(left), len(right):
        case 2, 3:
            product = MatmulShape(ceil(rows / right[0]), columns, contracted, right[0])
        case 3, 2:
            product = MatmulShape(rows, ceil(columns / left[0]), contracted, left[0])
        case 2, 2:
            groups = outputs[0].shape[0]
            product = MatmulShape(rows, columns, ceil(contracted / groups), groups)
        case _:
            product = MatmulShape(rows, columns, contracted, left[0])
    return _products(inputs, outputs, (product,))


@operator_cost("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (x [s, k], weight [e, k, n], offsets, grad [s, n]); one product for each gradient."""
    (rows, contracted), (groups, _, columns) = inputs[0].shape, inputs[1].shape
    mean = ceil(rows / groups)
    products = (MatmulShape(mean, contracted, columns, groups), MatmulShape(contracted, columns, mean, groups))
    return _products(inputs, outputs, products)


def _convolution_product(pixels: int, weight: tuple[int, ...], groups: int) -> MatmulShape:
    """Implicit GEMM: pixels x (channels out per group) x (channels in per group * kernel), for each group."""
    return MatmulShape(pixels, max(1, weight[0] // groups), prod(weight[1:]), groups)


def _pixels(tensor: TensorInfo) -> int:
    return prod(tensor.shape[:1]) * prod(tensor.shape[2:])


@operator_cost("aten.convolution.default", "aten._convolution.default")
def convolution(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    transposed = bool(arguments[6]) if len(arguments) > 6 else False
    groups = int(arguments[8]) if len(arguments) > 8 else 1  # type: ignore[call-overload]
    pixels = _pixels(inputs[0] if transposed else outputs[0])
    return _products(inputs, outputs, (_convolution_product(pixels, inputs[1].shape, groups),))


@operator_cost("aten.convolution_backward.default")
def convolution_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """arguments: (grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask).

    One product the size of the forward for each of grad_input and grad_weight that is asked for.
    """
    transposed = bool(arguments[7]) if len(arguments) > 7 else False
    groups = int(arguments[9]) if len(arguments) > 9 else 1  # type: ignore[call-overload]
    mask = arguments[10] if len(arguments) > 10 else (True, True, True)
    wanted = sum(bool(flag) for flag in tuple(mask)[:2])  # type: ignore[arg-type]
    product = _convolution_product(_pixels(inputs[1] if transposed else inputs[0]), inputs[2].shape, groups)
    return _products(inputs, outputs, (product,) * wanted)


def _attention(inputs: Tensors, outputs: Tensors, operands: Tensors, causal: bool, backward: bool) -> Work:
    q, k, v = operands
    *batch, queries, depth = q.shape
    shape = AttentionShape(prod(batch), queries, k.shape[-2], depth, v.shape[-1], causal, backward)
    read, written = size_bytes(inputs), size_bytes(outputs)
    return Work(shape.flops, read, written, Kind.ATTENTION, compute_dtype(inputs), attention=shape)


FORWARD = {  # operator: position of is_causal among the arguments
    "autoshard.attention.default": 6,
    "aten._scaled_dot_product_flash_attention.default": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 4,
    "aten._scaled_dot_product_efficient_attention.default": 6,
    "aten._scaled_dot_product_cudnn_attention.default": 6,
    "aten._scaled_dot_product_fused_attention_overrideable.default": 5,
    "aten._scaled_dot_product_attention_math.default": 5,
}
BACKWARD = {
    "autoshard.attention_backward.default": 9,
    "aten._scaled_dot_product_flash_attention_backward.default": 11,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 7,
    "aten._scaled_dot_product_efficient_attention_backward.default": 11,
    "aten._scaled_dot_product_cudnn_attention_backward.default": 14,
}


def _register_attention(name: str, position: int, *, backward: bool) -> None:
    def count(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        causal = bool(arguments[position]) if len(arguments) > position else False
        return _attention(inputs, outputs, inputs[backward : backward + 3], causal, backward)

    operator_cost(name)(count)


for _name, _position in FORWARD.items():
    _register_attention(_name, _position, backward=False)
for _name, _position in BACKWARD.items():
    _register_attention(_name, _position, backward=True)
