"""FLOPs and bytes of matrix products, convolutions and attention (entries of `counting.TABLE`).

A multiply-add is two FLOPs. Attention's FLOPs follow Dao 2023 (see `work.AttentionShape`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, prod

from cost_models.counting import compute_dtype, is_complex, memory_bound, operator_cost, size_bytes
from cost_models.errors import UnknownOperatorError
from cost_models.work import AttentionShape, Kind, MatmulShape, TensorInfo, Work

Tensors = Sequence[TensorInfo]
Arguments = tuple[object, ...]


def _products(inputs: Tensors, outputs: Tensors, products: tuple[MatmulShape, ...]) -> Work:
    if is_complex(inputs):
        products = 4 * products
    flops = sum(shape.flops for shape in products)
    return Work(flops, size_bytes(inputs), size_bytes(outputs), Kind.MATMUL, compute_dtype(inputs), products)


@operator_cost(
    *("aten.mm.default", "aten.matmul.default", "aten.linear.default", "aten.dot.default", "aten.vdot.default"),
    *("aten.mv.default", "aten._scaled_mm.default", "aten._int_mm.default", "aten.inner.default"),
)
def matmul(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of [..., m, k] @ [k, n] (or a weight [n, k]): 2 * m * n * k FLOPs; leading dims count as rows."""
    left, result = inputs[0].shape, outputs[0].shape
    k = left[-1]
    rows = prod(left[:-1])
    columns = prod(result) // rows if rows else 0
    return _products(inputs, outputs, (MatmulShape(rows, columns, k),))


@operator_cost("aten.addmm.default", "aten.addmv.default")
def addmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of bias + [m, k] @ [k, n]: that of the product alone."""
    (m, k), n = inputs[1].shape, outputs[0].shape[-1] if len(outputs[0].shape) > 1 else 1
    return _products(inputs, outputs, (MatmulShape(m, n, k),))


@operator_cost("aten.bmm.default")
def bmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of [b, m, k] @ [b, k, n]: b products."""
    batch, m, k = inputs[0].shape
    return _products(inputs, outputs, (MatmulShape(m, inputs[1].shape[2], k, batch),))


@operator_cost("aten.addbmm.default")
def addbmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of bias [m, n] + the sum over b of [b, m, k] @ [b, k, n]: one product that contracts b * k."""
    batch, m, k = inputs[1].shape
    return _products(inputs, outputs, (MatmulShape(m, inputs[2].shape[2], batch * k),))


@operator_cost("aten.ger.default", "aten.outer.default", "aten.addr.default", "aten.kron.default")
def outer(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of an outer product: one FLOP for each element of the result, in a time bound by memory."""
    return memory_bound(inputs, outputs)


@operator_cost("aten.baddbmm.default")
def baddbmm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of bias + [b, m, k] @ [b, k, n]: that of b products."""
    batch, m, k = inputs[1].shape
    return _products(inputs, outputs, (MatmulShape(m, inputs[2].shape[2], k, batch),))


@operator_cost("aten.einsum.default")
def einsum(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of an einsum (equation, tensors): products of two operands at a time, from left to right.

    Raises `UnknownOperatorError` for an equation with an ellipsis.
    """
    equation = str(arguments[0]).replace(" ", "")
    terms, _, result = equation.partition("->")
    if "." in equation:
        raise UnknownOperatorError(f"aten.einsum with an ellipsis ({equation!r}) has no cost formula; name its dims.")
    parts = terms.split(",")
    extents = {index: size for part, tensor in zip(parts, inputs, strict=True) for index, size in _named(part, tensor)}
    done, products = parts[0], []
    for place, part in enumerate(parts[1:], start=2):
        needed = set(result if "->" in equation else terms) | set("".join(parts[place:]))
        products.append(_pair_product(done, part, needed, extents))
        done = "".join(dict.fromkeys(index for index in done + part if index in needed))
    return _products(inputs, outputs, tuple(products)) if products else memory_bound(inputs, outputs)


def _named(part: str, tensor: TensorInfo) -> list[tuple[str, int]]:
    return list(zip(part, tensor.shape, strict=True))


def _pair_product(left: str, right: str, needed: set[str], extents: Mapping[str, int]) -> MatmulShape:
    """Return the product of two operands of an einsum, given the letters of their indices.

    An index of both operands is a batch if it is in `needed`, the indices of later operands and the result. Otherwise
    it is contracted. An index of one operand is a row or a column.
    """
    both = set(left) & set(right)

    def size(indices: set[str]) -> int:
        return prod(extents[index] for index in indices)

    rows, columns = size(set(left) - both), size(set(right) - both)
    return MatmulShape(rows, columns, size(both - needed), size(both & needed))


@operator_cost("aten.tensordot.default")
def tensordot(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a tensordot, which is one product.

    arguments: (left, right, dims of left, dims of right).
    """
    dims = tuple(arguments[2])  # type: ignore[arg-type]
    contracted = prod(inputs[0].shape[dim] for dim in dims)
    rows, columns = prod(inputs[0].shape) // contracted, prod(inputs[1].shape) // contracted
    return _products(inputs, outputs, (MatmulShape(rows, columns, contracted),))


@operator_cost("aten.chain_matmul.default", "aten.linalg_multi_dot.default")
def chain(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a chain of products in the cheapest order (Cormen et al., Introduction to Algorithms)."""
    shapes = [tensor.shape if len(tensor.shape) == 2 else (1, *tensor.shape) for tensor in inputs[:1]]
    shapes += [tensor.shape if len(tensor.shape) == 2 else (*tensor.shape, 1) for tensor in inputs[1:]]
    return _products(inputs, outputs, _cheapest_chain((shapes[0][0], *(shape[1] for shape in shapes))))


@lru_cache(maxsize=1024)
def _cheapest_chain(extents: tuple[int, ...]) -> tuple[MatmulShape, ...]:
    """Choose the cheapest products of the matrices [extents[i], extents[i + 1]] for all i, in order."""
    if len(extents) <= 2:
        return ()
    choices = [
        (
            *_cheapest_chain(extents[: cut + 1]),
            *_cheapest_chain(extents[cut:]),
            MatmulShape(extents[0], extents[-1], extents[cut]),
        )
        for cut in range(1, len(extents) - 1)
    ]
    return min(choices, key=lambda products: sum(product.flops for product in products))


@operator_cost("aten.bilinear.default")
def bilinear(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a bilinear layer: two products.

    Weights [o, i, j] are multiplied by x1 [..., i], and the resulting rows by rows of x2 [..., j].
    """
    rows = prod(inputs[0].shape[:-1])
    out, left, right = inputs[2].shape
    return _products(inputs, outputs, (MatmulShape(rows, out * right, left), MatmulShape(out, 1, right, rows)))


@operator_cost("aten._cdist_forward.default", "aten._euclidean_dist.default")
def cdist(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the distances from [..., p, m] to [..., r, m]: a product of 2 * p * r * m FLOPs.

    The number is exact for Euclidean distances of many points, which torch computes by a product.
    """
    batch, points, depth = _rows_of(inputs[0])
    return _products(inputs, outputs, (MatmulShape(points, inputs[1].shape[-2], depth, batch),))


@operator_cost("aten._cdist_backward.default")
def cdist_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of the gradient of distances: two products, because each distance's m terms count twice.

    inputs: (grad [..., p, r], x1 [..., p, m], x2 [..., r, m], distances).
    """
    batch, points, depth = _rows_of(inputs[1])
    others = inputs[2].shape[-2]
    return _products(inputs, outputs, 2 * (MatmulShape(points, depth, others, batch),))


def _rows_of(tensor: TensorInfo) -> tuple[int, int, int]:
    *batch, rows, columns = tensor.shape
    return prod(batch), rows, columns


@operator_cost(
    *("aten._grouped_mm.default", "aten._scaled_grouped_mm.default", "transformers.grouped_mm_fallback.default")
)
def grouped_mm(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a grouped product, one product for each group.

    The grouped dim (rows, columns or the contracted dim) is assumed to be cut evenly.
    """
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
    """Return the work of the gradients of x [s, k] and weight [e, k, n], the first arguments.

    Each gradient is a grouped product.
    """
    (rows, contracted), (groups, _, columns) = inputs[0].shape, inputs[1].shape
    mean = ceil(rows / groups)
    products = (MatmulShape(mean, contracted, columns, groups), MatmulShape(contracted, columns, mean, groups))
    return _products(inputs, outputs, products)


def _convolution_product(pixels: int, weight: tuple[int, ...], groups: int) -> MatmulShape:
    """Return one product per group: pixels by output channels, over input channels times kernel size."""
    return MatmulShape(pixels, max(1, weight[0] // groups), prod(weight[1:]), groups)


def _pixels(tensor: TensorInfo) -> int:
    return prod(tensor.shape[:1]) * prod(tensor.shape[2:])


@operator_cost("aten.convolution.default", "aten._convolution.default")
def convolution(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a convolution: that of its implicit matrix product.

    arguments: (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups).
    """
    transposed, groups = bool(arguments[6]), int(arguments[8])  # type: ignore[call-overload]
    pixels = _pixels(inputs[0] if transposed else outputs[0])
    return _products(inputs, outputs, (_convolution_product(pixels, inputs[1].shape, groups),))


@operator_cost("aten.convolution_backward.default")
def convolution_backward(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
    """Return the work of a convolution's gradients: one product of the forward's size for each requested gradient.

    The gradients of the input and of the weight count, that of the bias does not.

    arguments: (grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask).
    """
    transposed, groups = bool(arguments[7]), int(arguments[9])  # type: ignore[call-overload]
    wanted = sum(bool(flag) for flag in tuple(arguments[10])[:2])  # type: ignore[arg-type]
    product = _convolution_product(_pixels(inputs[1] if transposed else inputs[0]), inputs[2].shape, groups)
    return _products(inputs, outputs, (product,) * wanted)


def _attention(
    inputs: Tensors, outputs: Tensors, operands: Tensors, causal: bool, backward: bool, arguments: tuple[object, ...]
) -> Work:
    """Return the work of an attention call on one rank.

    If causal queries are split over ranks, the work is that of the slowest rank, which has the last piece. With K keys
    and Q queries, each query of this rank attends to K - Q / 2 keys on average.
    """
    q, k, v = operands
    *batch, queries, depth = q.shape
    keys = k.shape[-2]
    if causal and _is_placed_by_rank(arguments):
        keys, causal = keys - queries // 2, False
    shape = AttentionShape(prod(batch), queries, keys, depth, v.shape[-1], causal, backward)
    read, written = size_bytes(inputs), size_bytes(outputs)
    return Work(shape.flops, read, written, Kind.ATTENTION, compute_dtype(inputs), attention=shape)


def _is_placed_by_rank(arguments: tuple[object, ...]) -> bool:
    """Whether the queries of an `autoshard::attention` call begin at another index on each rank.

    The call's `offset` then has None for the dim of the queries.
    """
    offset = arguments[-2] if len(arguments) > 2 else None
    return isinstance(offset, Sequence) and len(offset) == 4 and offset[2] is None


FORWARD = {  # operator: position of is_causal among the arguments
    "autoshard.attention.default": 6,
    "aten._scaled_dot_product_flash_attention.default": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 4,
    "aten._scaled_dot_product_efficient_attention.default": 6,
    "aten._scaled_dot_product_cudnn_attention.default": 6,
    "aten._scaled_dot_product_fused_attention_overrideable.default": 5,
    "aten._scaled_dot_product_attention_math.default": 5,
    "aten.scaled_dot_product_attention.default": 5,
}
BACKWARD = {
    "autoshard.attention_backward.default": 9,
    "aten._scaled_dot_product_flash_attention_backward.default": 11,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 7,
    "aten._scaled_dot_product_efficient_attention_backward.default": 11,
    "aten._scaled_dot_product_cudnn_attention_backward.default": 14,
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default": 13,
}


def _register_attention(name: str, position: int, *, backward: bool) -> None:
    def count(inputs: Tensors, outputs: Tensors, arguments: Arguments) -> Work:
        causal = bool(arguments[position]) if len(arguments) > position else False
        return _attention(inputs, outputs, inputs[backward : backward + 3], causal, backward, arguments)

    operator_cost(name)(count)


for _name, _position in FORWARD.items():
    _register_attention(_name, _position, backward=False)
for _name, _position in BACKWARD.items():
    _register_attention(_name, _position, backward=True)
